"""Impressions and outcomes of a running server, on a real Kafka and a real Redis."""

import itertools
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import pytest
import streamtrain.serve.grpc.tensorflow_serving_pb2 as pb

from streamtrain.embedded.kafka import Broker
from streamtrain.errors import ConfigError
from streamtrain.processes.server import PredictionServer, configure
from streamtrain.processes.serving import check_serving
from streamtrain.serve.feedback.feedback import Feedback, make_feedback
from streamtrain.serve.feedback.impressions import Answered, FieldNames, OwnFields, impressions
from streamtrain.serve.feedback.outcomes import BadOutcome, Outcome
from streamtrain.serve.http.app import make_app
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.service.service import ServingConfig
from streamtrain.settings.groups import Settings
from streamtrain.settings.load import load_settings
from streamtrain.store.redis.layout import RedisKeys
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.traffic import Arm, Traffic
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.source import Record
from streamtrain.testing.store import MemoryOrigin
from tests.patience import PATIENCE, until
from tests.serve.published import counted, origin_of, publish
from tests.serve.running import client_of, running_server
from tests.stream.servers import kafka

__all__ = ["kafka"]

MODEL = counted()
URL = "/v1/models/model"
PARTITIONS = 3
_names = itertools.count()


class Place(NamedTuple):
    """A server with topics of its own."""

    client: httpx.Client
    grpc: str
    impressions: KafkaStream
    outcomes: KafkaStream
    origin: MemoryOrigin
    redis: RedisServer
    join: str
    feedback: Feedback

    def counts(self, of: str = "impressions", label: str = "outcome") -> dict[str, int]:
        """As its metrics say."""
        found = re.findall(
            rf'^streamtrain_serving_{of}_total{{{label}="(\w+)"}} (\S+)$', self.client.get("/metrics").text, re.M
        )
        return {name: int(float(value)) for name, value in found}

    def written(self, count: int) -> list[Record]:
        """All impressions, once so many are."""
        until(lambda: self.counts()["written"] >= count, PATIENCE)
        records = read(self.impressions)
        assert len(records) == count
        return records


def read(stream: KafkaStream) -> list[Record]:
    return [*stream.records(stream.bounds())]


def stream_of(kafka: Broker, topic: str, partitions: int = PARTITIONS) -> KafkaStream:
    stream = KafkaStream(kafka.servers, topic, {})
    stream.create(partitions)
    return stream


def settings_of(kafka: Broker, redis: str, name: str, **serve: Any) -> Settings:
    address = f"kafka://{kafka.servers}"
    chosen = {"log": f"{name}.impressions", "outcomes": f"{address}/{name}.outcomes", **serve}
    return Settings.model_validate(
        {"stream": {"url": address}, "publish": {"url": redis, "model": name}, "serve": chosen}
    )


@pytest.fixture
def place(kafka: Broker, valkey: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    name = f"feedback{next(_names)}"
    impressions, outcomes = (stream_of(kafka, f"{name}.{of}") for of in ("impressions", "outcomes"))
    feedback = make_feedback(settings_of(kafka, valkey, name, **getattr(request, "param", {})))
    origin = origin_of(MODEL)
    publish(origin, 1)
    origin.keep("canary")
    publish(origin, 2)
    registry = Registry(MODEL, origin)
    registry.promote(1)
    registry.promote(HEAD)
    traffic = Traffic(((Arm("prod", origin.name, "prod"), 50.0), (Arm("canary", origin.name, "1"), 50.0)))
    config = ServingConfig(grpc_listen="127.0.0.1:0", offset_timeout=PATIENCE, traffic=traffic, max_instances=100)
    server = PredictionServer(configure(make_app(registry, config=config, feedback=feedback), "127.0.0.1:0"))
    redis = RedisServer(valkey, timeout=20)
    with running_server(server) as url, client_of(url) as client:
        until(lambda: server.grpc_port != 0, PATIENCE)
        address = f"127.0.0.1:{server.grpc_port}"
        yield Place(client, address, impressions, outcomes, origin, redis, RedisKeys(name).join, feedback)
    redis.close()


def test_what_was_answered_is_written(place: Place) -> None:
    answered: dict[str, tuple[dict[str, Any], httpx.Response, int]] = {}
    for i in range(20):
        instances = [{"user": f"u{(i + j) % 20}", "page": f"p {j}"} for j in range(1 + i % 3)]
        given = {"x-request-id": f"r{i}", "x-routing-key": f"k{i}"}
        response = place.client.post(f"{URL}:predict", json={"instances": instances}, headers=given)
        assert response.status_code == 200, response.text
        answered |= {f"r{i}-{j}": (one, response, j) for j, one in enumerate(instances)}
    assert place.client.post(f"{URL}:explain", json={"instances": [{"user": "u1"}]}).status_code == 200
    assert place.client.post(f"{URL}:predict", json={"instances": [{"user": 1.5}]}).status_code == 400
    records = place.written(len(answered))
    arms = set()
    for record in records:
        one = json.loads(record.value)
        instance, response, index = answered.pop(one["id"])
        assert record.key == one["id"].encode()
        serving = one.pop("serving")
        assert serving.pop("prediction")["label"] == pytest.approx(response.json()["predictions"][index][0], rel=1e-6)
        headers = response.headers
        assert serving == {
            "model": "model",
            "version": headers["x-model-version"],
            "publication": int(headers["x-publication"]),
            "arm": headers["x-arm"],
            "propensity": float(headers["x-propensity"]),
        }
        assert one["time"] == one.pop("ts")  # the model's
        assert abs(one.pop("time") - record.time) < PATIENCE
        assert one == instance | {"id": (record.key or b"").decode()}
        arms.add(serving["arm"])
    assert not answered
    assert arms == {"prod", "canary"}


def test_all_protocols_write(place: Place) -> None:
    client, tensor = place.client, {"name": "user", "shape": [2], "datatype": "BYTES", "data": ["u1", "u2"]}
    client.post(f"{URL}:predict", json={"inputs": {"user": ["u1"]}}, headers={"x-request-id": "columns"})
    client.post(f"{URL}/versions/1:predict", json={"instances": ["u1"]}, headers={"x-request-id": "version"})
    client.post(f"{URL}:classify", json={"examples": [{"user": "u3"}]}, headers={"x-request-id": "classify"})
    client.post("/v2/models/model/infer", json={"inputs": [tensor]}, headers={"x-request-id": "infer"})
    request = pb.PredictRequest(model_spec=pb.ModelSpec(name="model"))
    request.inputs["user"].tensor_shape.dim.add(size=1)
    request.inputs["user"].dtype = pb.DT_STRING
    request.inputs["user"].string_val.append(b"u4")
    with grpc.insecure_channel(place.grpc) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        call(request.SerializeToString(), PATIENCE, metadata=[("x-request-id", "grpc")])
    found = {one["id"]: one["user"] for one in (json.loads(record.value) for record in place.written(6))}
    assert found == {
        "columns-0": "u1",
        "version-0": "u1",
        "classify-0": "u3",
        "infer-0": "u1",
        "infer-1": "u2",
        "grpc-0": "u4",
    }


@pytest.mark.parametrize("place", [{"log_sample": 0.3, "log_own_ids": True}], indirect=True)
def test_a_sample_is_drawn_by_id(place: Place) -> None:
    ids = [f"s{i}" for i in range(200)]
    for _ in range(2):
        instances = [{"user": "u1", "id": one} for one in ids]
        for part in (instances[:100], instances[100:]):
            assert place.client.post(f"{URL}:predict", json={"instances": part}).status_code == 200
    until(lambda: place.counts()["written"] + place.counts()["skipped"] == 400, PATIENCE)
    times = Counter(json.loads(record.value)["id"] for record in read(place.impressions))
    assert set(times.values()) == {2}
    assert 30 < len(times) < 90
    assert place.counts() == {
        "written": 2 * len(times),
        "skipped": 400 - 2 * len(times),
        "dropped": 0,
        "failed": 0,
    }


def one_impression(message: bytes, *, own_ids: bool = False, **fields: str) -> tuple[bytes, dict[str, Any]]:
    answered = Answered(
        "r",
        1_700_000_000.25,
        "model",
        ["label"],
        OwnFields("at", "importance"),
        [message],
        np.array([[0.5]], np.float32),
        {"x-model-version": "head", "x-publication": "2"},
    )
    ((key, value),) = impressions(answered, FieldNames(**fields), own_ids=own_ids)
    assert len(dict(json.loads(value))) == len(json.loads(value, object_pairs_hook=list))  # no field twice
    return key, json.loads(value)


ABOUT = {
    "serving": {"model": "model", "version": "head", "publication": 2, "prediction": {"label": 0.5}},
}
TIME = {"time": 1_700_000_000.25, "at": 1_700_000_000.25}


@pytest.mark.parametrize(
    ("message", "own", "expected"),
    [
        (b"{}", "", {}),
        (b' {"a": [1, 2.50]} ', "", {"a": [1, 2.5]}),
        (b'{"id": "mine", "a": "\\u00e9"}', "mine", {"a": "é"}),
        (b'{"id": 17}', "17", {}),
        (b'{"\\u0069d": "hidden"}', "hidden", {}),
        (b'{"time": 5, "at": 6, "a": 1}', "", {"a": 1}),
        (b'{"importance": 1e30, "b": 1}', "", {"b": 1}),
        (b'{"\\u0069mportance": 1e6, "n": %s}' % (b"9" * 30), "", {"n": int("9" * 30)}),
        (b'{"importance": 1e30, "importance": 2, "w": 3}', "", {}),
        (b'{"label": 1, "serving": {"prediction": 9}, "a": 1}', "", {"a": 1}),
        (b'{"id": ["x"], "time": true}', "", {}),
        (b'{"id": "%s"}' % (b"x" * 1_000_000), "", {}),
        (b'{"id": ""}', "", {}),
    ],
    ids=lambda given: str(given)[:30],
)
def test_fields_of_an_instance(message: bytes, own: str, expected: dict[str, Any]) -> None:
    """What a caller may not say is left out: the id, unless that is set, times, and weights, also that of a join."""
    for own_ids in (False, True):
        key = own if own_ids and own else "r-0"
        wanted = {"id": key} | TIME | ABOUT | expected
        assert one_impression(message, own_ids=own_ids, weight="w") == (key.encode(), wanted)


def test_names_of_fields() -> None:
    message = b'{"id": 1, "session": "s", "when": "2023-11-14"}'
    key, one = one_impression(message, own_ids=True, id="session", time="when")
    assert (key, one["session"], one["when"], one["id"]) == (b"s", "s", 1_700_000_000.25, 1)


def test_a_feature_with_the_name_of_a_field_is_refused(kafka: Broker, valkey: str) -> None:
    log = make_feedback(settings_of(kafka, valkey, "fields")).impressions
    own_ids = make_feedback(settings_of(kafka, valkey, "fields", log_own_ids=True)).impressions
    assert log is not None
    assert own_ids is not None
    for name, words in {"id": r"'id'.*set join\.id", "time": r"'time'.*set join\.time", "serving": "'serving'"}.items():
        with pytest.raises(ConfigError, match=words):
            log.check_fields("model", {"user", name})
    own_ids.check_fields("model", {"user", "id"})


def test_outcomes_are_where_the_answer_says(place: Place) -> None:
    one = {"id": "r0-0", "kind": "click"}
    until(lambda: place.client.post(f"{URL}/outcomes", json=one).status_code == 200, PATIENCE)
    batch = [{"id": f"r{i}-0", "kind": "buy", "value": i / 4, "time": 1_700_000_000 + i} for i in range(100)]
    answer = place.client.post(f"{URL}/outcomes", json={"outcomes": batch})
    assert answer.status_code == 200, answer.text
    stored = {f"outcomes:{record.partition}:{record.offset}": record for record in read(place.outcomes)}
    assert len(stored) == 101
    offsets = answer.json()["offsets"]
    for given, offset in zip(batch, offsets, strict=True):
        assert json.loads(stored[offset].value) == given
        assert stored[offset].key == str(given["id"]).encode()
    (first,) = set(stored) - set(offsets)
    assert abs(json.loads(stored[first].value).pop("time") - stored[first].time) < PATIENCE
    assert place.counts("outcomes", "result")["written"] == 101


def test_an_outcome_is_in_the_partition_of_its_impression(place: Place) -> None:
    for i in range(10):
        place.client.post(f"{URL}:predict", json={"instances": ["u1"] * 3}, headers={"x-request-id": f"r{i}"})
    at = {record.key: record.partition for record in place.written(30)}
    assert set(at.values()) == {0, 1, 2}
    batch = [{"id": key.decode(), "kind": "click"} for key in at if key]
    until(lambda: place.client.post(f"{URL}/outcomes", json={"outcomes": batch}).status_code == 200, PATIENCE)
    assert {record.key: record.partition for record in read(place.outcomes)} == at


GOOD = {"id": "a", "kind": "click"}


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"", 400, "the body is neither"),
        (b"[]", 400, "Expected `object`"),
        (b'{"id": "a"}', 400, "missing required field `kind`"),
        (b'{"kind": "click"}', 400, "missing required field `id`"),
        (b'{"id": "a", "kind": "click", "valeu": 1}', 400, "unknown field `valeu`"),
        (b'{"id": "a", "kind": "click", "value": NaN}', 400, "JSON is malformed"),
        (b'{"id": "a", "kind": "click", "value": 1e999}', 400, "$.value"),
        (b'{"id": "a", "kind": "click", "value": "1"}', 400, "$.value"),
        (b'{"id": "a", "kind": "click", "time": -1}', 400, "time must be in seconds since the epoch, not -1"),
        (b'{"id": "a", "kind": "click", "time": 1e12}', 400, "ahead of the server's clock"),
        (b'{"id": "", "kind": "click"}', 400, "id must have from 1 to 256 bytes, not 0"),
        (b'{"id": true, "kind": "click"}', 400, "$.id"),
        (b'{"id": "a", "kind": ""}', 400, "kind must have from 1 to 64 bytes, not 0"),
        (b'{"id": "\\ud800", "kind": "click"}', 400, "JSON is malformed"),
        (b'{"id": "\xff", "kind": "click"}', 400, "the body is neither"),
        (b'{"id": "%s", "kind": "click"}' % (b"x" * 1_000_000), 400, "not 1000000"),
        (b'{"id": %s, "kind": "click"}' % (b"9" * 1_000_000), 400, ""),
        (b'{"id": "a", "kind": ' + b"[" * 100_000, 400, "the body is neither"),
        (json.dumps({"outcomes": [GOOD, {"id": "b", "kind": "k" * 65}]}).encode(), 400, "outcomes[1]: kind must have"),
        (json.dumps({"outcomes": [GOOD] * 10_000}).encode(), 413, "at most 100 outcomes, not 10000"),
        (b'{"id": "%s"' % (b"x" * (9 << 20)), 413, "the body is larger than"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_bad_outcomes(shared: httpx.Client, body: bytes, status: int, why: str) -> None:
    answer = shared.post(f"{URL}/outcomes", content=body)
    assert (answer.status_code, why in answer.json()["error"]) == (status, True), answer.text[:300]


@pytest.fixture(scope="module")
def shared(kafka: Broker, valkey: str) -> Iterator[httpx.Client]:
    """A server that no bad outcome passes."""
    outcomes = stream_of(kafka, f"bad{next(_names)}.outcomes")
    settings = settings_of(kafka, valkey, outcomes.topic.removesuffix(".outcomes"))
    app = make_app(
        Registry(MODEL, origin_of(MODEL)), config=ServingConfig(max_instances=100), feedback=make_feedback(settings)
    )
    with running_server(PredictionServer(configure(app, "127.0.0.1:0"))) as url, client_of(url) as client:
        yield client
    assert read(outcomes) == []


def test_unknown_models_and_servers_without_a_topic(shared: httpx.Client) -> None:
    assert shared.post("/v1/models/other/outcomes", json=GOOD).status_code == 404
    with running_server(PredictionServer(configure(make_app(Registry(MODEL, origin_of(MODEL))), "127.0.0.1:0"))) as url:
        answer = httpx.post(f"{url}{URL}/outcomes", json=GOOD, trust_env=False, verify=False)
        assert (answer.status_code, "set serve.outcomes" in answer.text) == (409, True)
        answer = httpx.post(
            f"{url}{URL}:predict", json={"instances": ["u1"]}, headers={"x-min-offset": "outcomes:0:1"}, trust_env=False
        )
        assert answer.status_code in (400, 503)


def test_a_request_waits_for_what_came_of_an_outcome(place: Place) -> None:
    until(lambda: place.client.post(f"{URL}/outcomes", json=GOOD).status_code == 200, PATIENCE)
    (offset,) = place.client.post(f"{URL}/outcomes", json=GOOD).json()["offsets"]
    _, partition, outcome = offset.split(":")
    entry = {"outcome": int(outcome), "sample": 9}  # joined up to, but without this outcome
    place.redis.call("HSET", place.join, partition, json.dumps(entry))
    answers: list[httpx.Response] = []

    def ask() -> None:
        body, headers = {"instances": ["u1"]}, {"x-min-offset": offset, "x-routing-key": "k0"}
        answers.append(place.client.post(f"{URL}/versions/head:predict", json=body, headers=headers))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: "streamtrain_serving_under_way_requests 1.0" in place.client.get("/metrics").text, PATIENCE)
    last = 2 if partition == "0" else 0  # the head has learned two samples of partition 0, and none of the others
    place.redis.call("HSET", place.join, partition, json.dumps({"outcome": int(outcome) + 1, "sample": last}))
    asking.join(PATIENCE)
    assert [answer.status_code for answer in answers] == [200], answers[0].text


@pytest.mark.parametrize("offsets", ["outcomes:0", "outcomes:a:1", "outcome:0:1", "outcomes:0:1;1"])
def test_malformed_offsets(place: Place, offsets: str) -> None:
    answer = place.client.post(f"{URL}:predict", json={"instances": ["u1"]}, headers={"x-min-offset": offsets})
    assert (answer.status_code, '"outcomes:partition:offset"' in answer.json()["error"]) == (400, True)


def test_predictions_do_not_wait_for_kafka(valkey: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "kafka://{}:{}".format(*free.getsockname()[:2])
    settings = Settings.model_validate(
        {"publish": {"url": valkey}, "serve": {"log": f"{address}/i", "outcomes": f"{address}/o"}}
    )
    feedback = make_feedback(settings)
    assert feedback.impressions is not None
    feedback.impressions._room = 1000  # of three instances
    origin = origin_of(MODEL)
    publish(origin, 1)
    registry = Registry(MODEL, origin)
    registry.promote(HEAD)
    app = make_app(registry, feedback=feedback)
    with running_server(PredictionServer(configure(app, "127.0.0.1:0"))) as url, client_of(url) as client:
        for _ in range(10):
            assert client.post(f"{URL}:predict", json={"instances": ["u1"]}).status_code == 200
        answer = client.post(f"{URL}/outcomes", json=GOOD)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert feedback.impressions.counts["dropped"] == 7
        assert feedback.impressions.waiting == pytest.approx(3 * 313, abs=60)
    assert feedback.impressions.counts == {"written": 0, "skipped": 0, "dropped": 10, "failed": 0}
    assert len([line for line in caplog.messages if "impressions were not written" in line]) == 1


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        ({"log": "redis://h/impressions"}, 'serve.log must be "kafka://host:port/topic"'),
        ({"outcomes": "kafka://h"}, 'serve.outcomes must be "kafka://host:port/topic"'),
        ({"log": "impressions"}, 'serve.log = "impressions" needs Kafka'),
    ],
)
def test_topics_that_cannot_be(serve: dict[str, Any], why: str) -> None:
    given = {"stream": {"url": "redis://h"}, "publish": {"url": "redis://h"}, "serve": serve}
    with pytest.raises(ConfigError, match=re.escape(why)):
        check_serving(Settings.model_validate(given))


@pytest.mark.parametrize("named", ["", 'serve.outcomes = "happened"'])
def test_with_a_join_outcomes_are_those_that_it_reads(tmp_path: Path, named: str) -> None:
    file = tmp_path / "streamtrain.toml"
    file.write_text(
        f"{named}\n"
        + """
        [stream]
        url = "kafka://127.0.0.1:1"
        [join]
        impressions = "shown"
        outcomes = "happened"
        id = "request"
        kind = "what"
        labels = {click = {kinds = ["click"], cancelled_by = ["undo"]}, seconds = {kinds = ["watched"], value = true}}
    """
    )
    writer = make_feedback(load_settings(file)).outcomes
    assert writer is not None
    ((key, value),) = writer.encode([Outcome("r1-0", "watched", 1.5, 7.0)])
    assert (key, json.loads(value)) == (b"r1-0", {"request": "r1-0", "time": 7.0, "what": "watched", "value": 1.5})
    assert len(writer.encode([Outcome("r1-0", "undo"), Outcome("r1-0", "click")])) == 2
    with pytest.raises(BadOutcome, match="kind 'clik' makes no label; the kinds are click, undo, watched"):
        writer.encode([Outcome("r1-0", "clik")])
    with pytest.raises(BadOutcome, match="an outcome of kind 'watched' needs a value"):
        writer.encode([Outcome("r1-0", "watched")])
    writer.close()
