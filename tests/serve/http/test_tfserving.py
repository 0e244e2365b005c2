"""TensorFlow Serving's REST API, by the examples of its documentation, and what is wrong with requests."""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import keras
import numpy as np
import pytest

import streamtrain as stm
from streamtrain._core import hash_bytes
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.store.publication import Weights
from tests import models
from tests.serve.published import TIME, counted, origin_of, publish
from tests.serve.running import serving

URL = "/v1/models/model"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    model = counted()
    origin = origin_of(model)
    for number in (1, 2):
        publish(origin, number)
        origin.keep(f"of {number}")
    publish(origin, 3)
    registry = Registry(model, origin)
    registry.promote(1)
    registry.promote(HEAD)
    for version in registry.refresh_labels().values():
        registry.keep(version)
    with serving(registry, offset_timeout=0.2) as one:
        yield one


def test_rows(client: httpx.Client) -> None:
    body = {"signature_name": "serving_default", "instances": [{"user": "u1"}, {"user": ["u1", "u2"], "more": {}}]}
    answer = client.post(f"{URL}:predict", json=body)
    assert (answer.status_code, answer.json()) == (200, {"predictions": [[3003.0], [3006.0]]})
    assert answer.headers["x-model-version"] == "head"
    assert answer.headers["x-publication"] == "3"
    assert datetime.fromisoformat(answer.headers["x-trained-through"]).timestamp() == TIME + 3
    assert int(answer.headers["x-freshness-ms"]) > 0
    assert answer.headers["content-type"] == "application/json"


def test_columns(client: httpx.Client) -> None:
    answer = client.post(f"{URL}:predict", json={"inputs": {"user": ["u1", ["u1", "u2"], 7], "other": [1]}})
    assert answer.json() == {"outputs": [[3003.0], [3006.0], [3000.0]]}


def test_a_model_with_one_input_takes_values(client: httpx.Client) -> None:
    assert client.post(f"{URL}:predict", json={"instances": ["u1", "u2"]}).json() == {"predictions": [[3003.0]] * 2}
    assert client.post(f"{URL}:predict", json={"inputs": ["u1", ["u2"]]}).json() == {"outputs": [[3003.0]] * 2}


def test_no_instances(client: httpx.Client) -> None:
    assert client.post(f"{URL}:predict", json={"instances": []}).json() == {"predictions": []}


@pytest.mark.parametrize(("path", "version"), [("/versions/1", 1), ("/labels/of 2", 2), ("/versions/0", 3)])
def test_versions_and_labels(client: httpx.Client, path: str, version: int) -> None:
    answer = client.post(f"{URL}{path}:predict", json={"instances": [{"user": "none"}]})
    assert answer.json() == {"predictions": [[1000.0 * version]]}
    assert answer.headers["x-model-version"] == ("head" if version == 3 else str(version))
    state = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    number = "0" if version == 3 else str(version)
    assert client.get(f"{URL}{path}").json() == {"model_version_status": [{"version": number, **state}]}


def test_status_and_metadata(client: httpx.Client) -> None:
    answer = client.get(URL).json()
    states = answer["model_version_status"]
    assert sorted(one["version"] for one in states) == ["0", "1", "2"]
    metadata = client.get(f"{URL}/metadata").json()
    assert metadata["model_spec"] == {"name": "model", "signature_name": "", "version": "0"}
    signature = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["user"]["dtype"] == "DT_STRING"
    assert [dim["size"] for dim in signature["outputs"]["label"]["tensor_shape"]["dim"]] == ["-1", "1"]
    assert client.get(f"{URL}/versions/1/metadata").json()["model_spec"]["version"] == "1"
    assert client.get(f"{URL}/labels/of 2/metadata").json()["model_spec"]["version"] == "2"


def test_health_by_the_first_protocol_of_kserve(client: httpx.Client) -> None:
    """What kserve's InferenceRESTClient reads: `status`, and `ready` or 503."""
    assert client.get("/").json() == {"status": "alive"}
    assert client.get("/", headers={"accept": "text/html,*/*"}).headers["content-type"].startswith("text/html")
    assert client.get("/v1/models").json() == {"models": ["model"]}
    answer = client.get(URL).json()
    assert (answer["name"], answer["ready"]) == ("model", True)


def test_classify_and_regress(client: httpx.Client) -> None:
    body: dict[str, Any] = {"examples": [{"user": "u1"}, {"user": ["u1", "u2"], "more": {}}]}
    answer = client.post(f"{URL}:classify", json=body)
    assert answer.json() == {"results": [[["label", 3003.0]], [["label", 3006.0]]]}
    assert answer.headers["x-model-version"] == "head"
    assert client.post(f"{URL}/versions/1:classify", json=body).json()["results"][0] == [["label", 1001.0]]
    assert client.post(f"{URL}:regress", json=body).json() == {"results": [3003.0, 3006.0]}
    answer = client.post(f"{URL}/labels/of 2:regress", json={"examples": [{}, {}], "context": {"user": "u1"}})
    assert answer.json() == {"results": [2002.0, 2002.0]}
    assert client.post(f"{URL}:regress", json={"examples": []}).json() == {"results": []}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"examples": [{"user": "u1"}, {}]}, "instance 1: missing_field in field 'user'"),
        ({"instances": []}, "the body is not a request with examples: .*examples"),
        ({"examples": [1]}, "the body is not a request with examples"),
        (
            {"examples": [], "signature_name": "x"},
            r"unknown signature 'x'; the signatures are \['serving_default', 'label'",
        ),
    ],
)
def test_bad_examples(client: httpx.Client, body: object, message: str) -> None:
    for verb in ("classify", "regress"):
        answer = client.post(f"{URL}:{verb}", json=body)
        assert answer.status_code == 400
        assert re.match(message, answer.json()["error"]), answer.text


@pytest.mark.parametrize("verb", ["classify", "regress"])
def test_examples_that_are_too_many_with_their_context(client: httpx.Client, verb: str) -> None:
    context = {"user": "u1", "ids": ["x" * 20] * 1000}
    for count, said in (
        (200_000, "at most 4096 instances, not 200000"),
        (4096, r"a context of \d+ bytes for 4096 examples makes \d+ bytes, and a request may have at most 33554432"),
    ):
        answer = client.post(f"{URL}:{verb}", json={"context": {"user": context["ids"]}, "examples": [{}] * count})
        assert answer.status_code == 413
        assert re.search(said, answer.json()["error"]), answer.text
    answer = client.post(f"{URL}:{verb}", json={"context": context, "examples": [{}] * 4096})  # which is not read
    assert answer.status_code == 200
    assert len(answer.json()["results"]) == 4096


DEEP = b'{"instances": [{"user": "u1", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"instances": [{"user": "u1"}, {}]}', 400, "instance 1: missing_field in field 'user'"),
        (b'{"instances": [{"user": 1.5}]}', 400, "instance 0: wrong_type in field 'user'"),
        (b'{"instances": [{"user": [["u1"]]}, {}]}', 400, r"instance 0: wrong_type in field 'user' \(and 1 more\)"),
        (b'{"instances": [{"user": NaN}]}', 400, "the body is not a prediction request"),
        (b'{"instances": [{"user": "\xff"}]}', 400, "instance 0: not_utf8"),
        (b'{"instances": {"user": "u1"}}', 400, "the body is not a prediction request.*array"),
        (b'{"instances": [{"user": "u1"}]', 400, "the body is not a prediction request"),
        (b'{"instances": [{}], "inputs": {}}', 400, 'either "instances"'),
        (b'{"examples": []}', 400, 'either "instances"'),
        (b"[]", 400, "the body is not a prediction request"),
        (b"", 400, "the body is not a prediction request"),
        (b'{"instances": [], "signature_name": "other"}', 400, "unknown signature 'other'"),
        (b'{"inputs": {"user": "u1"}}', 400, "the body is not a prediction request.*array"),
        (b'{"inputs": {"item": ["u1"]}}', 400, "none of the model's inputs"),
        (DEEP, 400, "the body is not a prediction request|too_deep"),
        (json.dumps({"instances": [{"user": "u1"}] * 100_000}).encode(), 413, "at most 4096 instances, not 100000"),
        (b'{"instances": [{"user": "' + b"x" * (10 << 20) + b'"}]}', 413, "larger than 8388608 bytes"),
    ],
    ids=lambda value: value[:30] if isinstance(value, bytes) else None,
)
def test_bad_bodies(client: httpx.Client, body: bytes, status: int, message: str) -> None:
    answer = client.post(f"{URL}:predict", content=body)
    assert answer.status_code == status, answer.text[:200]
    assert [*answer.json()] == ["error"]
    assert re.search(message, answer.json()["error"]), answer.text[:300]
    assert client.post(f"{URL}:predict", json={"instances": [{"user": "u1"}]}).status_code == 200


def test_texts_in_base64(client: httpx.Client) -> None:
    """As TensorFlow Serving's clients send values of DT_STRING, in rows, in columns and in examples."""
    wanted = client.post(f"{URL}:predict", json={"instances": [{"user": "u1"}, {"user": ["u1", "u2"]}]}).json()
    one, two = {"b64": "dTE="}, {"b64": "dTI="}
    for body in (
        {"instances": [{"user": one}, {"user": [one, "u2"]}]},
        {"instances": [{"user": one}, {"user": ["u1", two], "more": {"b64": 1, "x": 2}}]},
    ):
        assert client.post(f"{URL}:predict", json=body).json() == wanted
    answer = client.post(f"{URL}:predict", json={"inputs": {"user": [one, two]}}).json()
    assert answer == client.post(f"{URL}:predict", json={"inputs": {"user": ["u1", "u2"]}}).json()
    answer = client.post(f"{URL}:regress", json={"examples": [{"user": two}], "context": {"user": one}}).json()
    assert answer == client.post(f"{URL}:regress", json={"examples": [{"user": "u2"}]}).json()


@pytest.mark.parametrize(
    ("instance", "said"),
    [
        ({"b64": "CgA="}, "is a serialized tf.train.Example"),
        ({"user": {"b64": "!"}}, "'user' has a b64 that is not base64 of UTF-8"),
        ({"user": {"b64": "/w=="}}, "'user' has a b64 that is not base64 of UTF-8"),
        ({"user": [{"b64": 7}]}, "'user' has a b64 that is not base64 of UTF-8"),
        ({"user": {"b64": "dTE=", "more": 1}}, "wrong_type in field 'user'"),
    ],
)
def test_base64_that_is_none(client: httpx.Client, instance: object, said: str) -> None:
    answer = client.post(f"{URL}:predict", json={"instances": [instance]})
    assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text


def test_a_slash_at_the_end_leads_to_the_same_scheme_and_prefix(client: httpx.Client) -> None:
    for path, place in ((f"{URL}/", "../model"), ("/v1/models/?x=1", "../models?x=1")):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, place)
        assert client.get(path, follow_redirects=True).status_code == 200


@pytest.mark.parametrize("path", ["/healthz/live", "/healthz/ready", "/v2/health/live", "/metrics", URL])
def test_head_and_options(client: httpx.Client, path: str) -> None:
    """As load balancers and browsers send them."""
    got, asked = client.get(path), client.head(path)
    assert (asked.status_code, asked.content) == (got.status_code, b"")
    assert asked.headers.get("content-type") == got.headers.get("content-type")
    answer = client.options(path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert {"GET", "HEAD", "OPTIONS"} <= {one.strip() for one in answer.headers["allow"].split(",")}
    assert client.get(path).status_code == got.status_code  # the connection is in order


def test_head_and_options_where_there_is_no_get(client: httpx.Client) -> None:
    assert client.head(f"{URL}:predict").status_code == 405
    answer = client.options(f"{URL}:predict")
    assert (answer.status_code, answer.headers["allow"]) == (204, "POST, OPTIONS")
    assert client.options("/nowhere").status_code == client.head("/nowhere").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/v1/models/other:predict", 404, "there is no model 'other'; the model is 'model'"),
        ("POST", f"{URL}/versions/9:predict", 404, "version 9 is not loaded; loaded versions: 1, head, 2"),
        ("POST", f"{URL}/versions/x:predict", 404, "there is no version 'x'"),
        ("POST", f"{URL}/versions/{'9' * 99}:predict", 404, "there is no version"),
        ("POST", f"{URL}/labels/beta:predict", 404, "label 'beta' is not loaded"),
        ("GET", "/v1/models/other", 404, "there is no model 'other'"),
        ("GET", f"{URL}/versions/9", 404, "version 9 is not loaded"),
        ("GET", "/nowhere", 404, "GET /nowhere: Not Found"),
        ("PUT", f"{URL}:predict", 405, "PUT .*: Method Not Allowed"),
        ("GET", f"{URL}:predict", 405, ":predict requires POST"),
        ("GET", f"{URL}/versions/1:classify", 405, ":classify requires POST"),
        ("GET", f"{URL}/labels/of 2:regress", 405, ":regress requires POST"),
        ("GET", f"{URL}:other", 404, "there is no model 'model:other'"),
    ],
)
def test_bad_paths(client: httpx.Client, method: str, path: str, status: int, message: str) -> None:
    answer = client.request(method, path, json={"instances": []} if method == "POST" else None)
    assert answer.status_code == status
    assert re.fullmatch(f"{message}.*", answer.json()["error"]), answer.text
    assert ("allow" in answer.headers) == (status == 405)


def test_compressed_bodies_are_refused(client: httpx.Client) -> None:
    answer = client.post(f"{URL}:predict", content=b"x", headers={"content-encoding": "gzip"})
    assert (answer.status_code, "'gzip' is not supported" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("offsets", "status", "message"),
    [
        ("0:2", 200, ""),
        ("0:3", 412, "x-min-offset: not learned within 0.2 s; the next offsets to be learned are 0:3"),
        ("0:1,1:0", 412, "not learned"),
        ("0", 400, "must be"),
        ("a:b", 400, "must be"),
        ("", 400, "must be"),
    ],
)
def test_min_offset(client: httpx.Client, offsets: str, status: int, message: str) -> None:
    answer = client.post(f"{URL}:predict", json={"instances": ["u1"]}, headers={"x-min-offset": offsets})
    assert answer.status_code == status
    assert message in answer.json().get("error", "")


def two_labels() -> stm.Model:
    """Predicts the price, and ten times it."""

    def graph(inputs: dict[str, Any]) -> Any:
        price = keras.layers.Dense(1, use_bias=False)(inputs["price"])
        return {"click": price, "buy": 10 * price + 0 * inputs["item"]}

    item = stm.Categorical("item", dim=1, default="none", init=stm.Constant(0.0))
    return models.make(
        [item, stm.Numeric("price", transform=None)], graph, loss="mean_squared_error", label=["click", "buy"]
    )


def test_several_labels() -> None:
    model = two_labels()
    origin = origin_of(model)
    rows = {"item": (np.array([hash_bytes(b"1")], np.uint64), np.ones((1, 1), np.float32))}
    origin.publish(rows, Weights(np.array([2], np.float32), np.empty(0, np.float32)))
    registry = Registry(model, origin)
    registry.promote(HEAD)
    with serving(registry) as client:
        answer = client.post(f"{URL}:predict", json={"instances": [{"price": 1.5}, {"price": 2, "item": 1}]})
        assert answer.json() == {"predictions": [{"click": [3.0], "buy": [30.0]}, {"click": [4.0], "buy": [40.0]}]}
        assert "x-trained-through" not in answer.headers
        boxed = {"instances": [{"price": [1.5], "id": "[1]"}, {"item": 1, "price": [2]}]}
        assert client.post(f"{URL}:predict", json=boxed).json() == answer.json()
        answer = client.post(f"{URL}:predict", json={"inputs": {"price": [[1.5], [2]], "item": [1, 2]}})
        assert answer.json() == {"outputs": {"click": [[3.0], [4.0]], "buy": [[30.0], [40.0]]}}
        body: dict[str, Any] = {"examples": [{"price": 1.5}, {"price": [2]}], "context": {"item": 9}}
        both = [[["click", 3.0], ["buy", 30.0]], [["click", 4.0], ["buy", 40.0]]]
        assert client.post(f"{URL}:classify", json=body).json() == {"results": both}
        answer = client.post(f"{URL}:regress", json=body)
        assert (answer.status_code, "set signature_name to one of" in answer.json()["error"]) == (400, True)
        body["signature_name"] = "buy"
        assert client.post(f"{URL}:regress", json=body).json() == {"results": [30.0, 40.0]}
        assert client.post(f"{URL}:classify", json=body).json() == {"results": [both[0][1:], both[1][1:]]}
        for column, message in (([1, 2, 3], "must be of the same length"), ([[1, 2], [3]], "wrong_type in field")):
            answer = client.post(f"{URL}:predict", json={"inputs": {"price": column, "item": [1, 2]}})
            assert (answer.status_code, message in answer.json()["error"]) == (400, True)
        for value in ([], [1, 2], [[1]], [None], ["a"]):
            answer = client.post(f"{URL}:predict", json={"instances": [{"price": 1}, {"price": value}]})
            assert answer.status_code == 400
            assert "instance 1: " in answer.json()["error"]
            assert " in field 'price'" in answer.json()["error"]
        answer = client.post(f"{URL}:predict", json={"instances": [{"price": 1}, {"price": 3e38}]})
        assert answer.status_code == 400
        assert "instance 1: the prediction is not finite" in answer.json()["error"]
