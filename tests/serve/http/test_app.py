"""Control, health, metrics, limits and the OpenAPI page of a running server."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest

import streamtrain as stm
from streamtrain.errors import ConfigError
from streamtrain.model.spec import Spec
from streamtrain.processes.server import configure, serve
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.http.app import make_app
from streamtrain.serve.http.responses import instance_schema
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.service.served import input_fields
from streamtrain.serve.service.service import ServingConfig
from streamtrain.testing.store import MemoryOrigin
from tests.metrics_page import on_the_page
from tests.patience import PATIENCE, until
from tests.serve.published import counted, origin_of, publish
from tests.serve.running import TOKEN, client_of, running, serving

MODEL = counted()
URL = "/v1/models/model"
BEARER = {"authorization": f"Bearer {TOKEN}"}
INSTANCE = {"instances": [{"user": "u1"}]}


class Served(NamedTuple):
    """A server and what it serves."""

    client: httpx.Client
    origin: MemoryOrigin
    registry: Registry


@pytest.fixture
def server() -> Iterator[Served]:
    origin = origin_of(MODEL)
    for number in (1, 2):
        publish(origin, number)
        origin.keep("stable" if number == 2 else None)
    registry = Registry(MODEL, origin)
    registry.promote(HEAD)
    with serving(registry, RegistryUpdater(registry, every=0.05)) as client:
        yield Served(client, origin, registry)


def predicted(client: httpx.Client, path: str = URL) -> float:
    """The number of the publication that predicts."""
    answer = client.post(f"{path}:predict", json=INSTANCE)
    assert answer.status_code == 200, answer.text
    return float(answer.json()["predictions"][0][0]) / 1001


# Control.


def test_promote_and_roll_back(server: Served) -> None:
    client = server.client
    answer = client.post(f"{URL}:promote", json={"version": 1}, headers=BEARER)
    assert answer.status_code == 200
    assert answer.json()["served"] == "1"
    assert answer.json()["publication"]["clock"] == {"0": 1}
    assert predicted(client) == 1
    assert client.post(f"{URL}:rollback", headers=BEARER).json()["served"] == "head"
    assert predicted(client) == 2
    assert client.post(f"{URL}:promote", json={"version": "head"}, headers=BEARER).json()["served"] == "head"
    listed = client.get(f"{URL}/versions", headers=BEARER).json()
    assert listed["served"] == "head"
    assert [one["version"] for one in listed["versions"]] == [1, 2]
    assert listed["versions"][0]["resident"] is True
    assert listed["versions"][1]["labels"] == ["stable"]
    assert listed["head"]["number"] == 2


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"authorization": "Bearer \xfc"}],
)
@pytest.mark.parametrize(("method", "path"), [("POST", ":promote"), ("POST", ":rollback"), ("GET", "/versions")])
def test_control_needs_the_token(server: Served, headers: dict[str, str], method: str, path: str) -> None:
    raw = [(name, value.encode("latin-1")) for name, value in headers.items()]
    answer = server.client.request(method, URL + path, headers=raw)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "admin token" in answer.json()["error"]


def test_control_can_be_off() -> None:
    app = make_app(Registry(MODEL, origin_of(MODEL)))
    with running(app) as url, client_of(url) as client:
        answer = client.post(f"{URL}:promote", json={"version": 1}, headers={"authorization": "Bearer x"})
        assert (answer.status_code, "control is disabled" in answer.json()["error"]) == (403, True)
    with pytest.raises(ConfigError, match="the admin token is empty"):
        make_app(Registry(MODEL, origin_of(MODEL)), config=ServingConfig(admin_token=" "))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"version": 9}', 404, "there is no version 9 in memory"),
        (b'{"version": "tail"}', 400, "the body must be"),
        (b'{"version": 0}', 400, "the body must be"),
        (b"{}", 400, "the body must be"),
        (b"\xff", 400, "the body must be"),
        (b'{"version": 3}', 400, "version 3 is of another model: different seed"),
    ],
)
def test_promotions_that_cannot_be(server: Served, body: bytes, status: int, message: str) -> None:
    server.origin.spec = Spec.of(stm.Model(MODEL.schema, MODEL.graph, loss="mean_squared_error", seed=9)).to_json()
    publish(server.origin, 3)
    server.origin.keep()
    answer = server.client.post(f"{URL}:promote", content=body, headers=BEARER)
    assert (answer.status_code, answer.json()["error"][: len(message)]) == (status, message)
    assert predicted(server.client) == 2


def test_another_model(server: Served) -> None:
    answer = server.client.post("/v1/models/other:promote", json={"version": 1}, headers=BEARER)
    assert answer.status_code == 404


# Health and freshness.


def test_health(server: Served) -> None:
    assert server.client.get("/healthz/live").status_code == 200
    answer = server.client.get("/healthz/ready")
    about = {"status": "ready", "model": "model", "version": "head", "wanted": "head", "publication": 2, "origin": "ok"}
    assert answer.json() == about


def test_not_ready_until_something_is_published() -> None:
    origin = origin_of(MODEL)
    registry = Registry(MODEL, origin)
    with serving(registry, RegistryUpdater(registry, every=0.02)) as client:
        assert client.get("/healthz/live").status_code == 200
        assert client.get("/metrics").status_code == 200
        for method, path in (("GET", "/healthz/ready"), ("GET", "/v2/health/ready"), ("POST", f"{URL}:predict")):
            answer = client.request(method, path, json=INSTANCE)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert "nothing is loaded yet" in answer.json()["error"]
        state = client.get(URL).json()["model_version_status"]
        assert [(one["version"], one["state"]) for one in state] == [("0", "LOADING")]
        loaded = threading.Event()
        registry.listen(loaded.set)
        publish(origin, 1)
        assert loaded.wait(PATIENCE)
        assert predicted(client) == 1


def test_a_request_waits_for_what_it_wants_learned(server: Served) -> None:
    """The sample at offset 2 is learned with the publication 3, which comes while the request waits."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(server.client.post(f"{URL}:predict", json=INSTANCE, headers={"x-min-offset": "0:2"}))

    thread = threading.Thread(target=ask)
    thread.start()
    publish(server.origin, 3)
    thread.join(PATIENCE)
    assert answers[0].json() == {"predictions": [[3003.0]]}
    assert answers[0].headers["x-publication"] == "3"


# Limits.


def test_limits() -> None:
    origin = origin_of(MODEL)
    publish(origin, 1)
    registry = Registry(MODEL, origin)
    registry.promote(HEAD)
    with serving(registry, max_body=1000, max_instances=3) as client:
        for body, message in ((b" " * 1001, "1000 bytes"), (b'{"instances": [1, 2, 3, 4]}', "3 instances, not 4")):
            answer = client.post(f"{URL}:predict", content=body)
            assert (answer.status_code, message in answer.json()["error"]) == (413, True)
            answer = client.post(f"{URL}:predict", content=iter([body]))  # without a content-length
            assert answer.status_code == 413
        assert predicted(client) == 1


def test_idle_connections_outlive_those_of_clients() -> None:
    """Load balancers keep theirs for 60 s."""
    assert configure(make_app(Registry(MODEL, origin_of(MODEL))), "127.0.0.1:0").timeout_keep_alive > 60


# Metrics.


def test_metrics(server: Served) -> None:
    client = server.client
    for path in (URL, f"{URL}/labels/stable", f"{URL}/versions/9"):
        client.post(f"{path}:predict", json=INSTANCE)
    client.post(f"{URL}:promote", json={"version": 1}, headers=BEARER)
    lines = (
        'streamtrain_serving_requests_total{code="404",protocol="tensorflow"} 1.0',
        'streamtrain_serving_info{model="model",version="1"} 1.0',
        'streamtrain_serving_publication{version="head"} 2.0',
        'streamtrain_serving_table_rows{table="user",version="1"} 20.0',
        'streamtrain_serving_swaps_total{kind="promote"} 2.0',
        'streamtrain_serving_request_seconds_count{model="model",version="head"} 1.0',
        "streamtrain_serving_ready 1.0",
        "streamtrain_serving_stale_seconds 0.0",
        "streamtrain_serving_waiting_instances 0.0",
    )
    until(lambda: not [line for line in lines if line not in client.get("/metrics").text], PATIENCE)
    text = client.get("/metrics").text
    for metric in on_the_page("serving", "build"):
        assert f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n" in text, metric.name
    assert re.search(r'streamtrain_serving_ids_total{outcome="found",table="user",version="head"} \d', text)


# OpenAPI.


def test_an_instance_is_described_by_the_schema() -> None:
    model = stm.Model(
        stm.Schema(
            features=[
                stm.Categorical("user", dim=1),
                stm.Categorical("the item", dim=1, field="item", default="none"),
                stm.Numeric("price", transform=None),
                stm.Numeric("log_price", field="price", transform="log1p", default=0.0),
                stm.Cross("both", 1, of=("user", "the item")),
            ]
        ),
        lambda inputs: inputs["price"],
    )
    assert [*input_fields(model.schema)] == ["user", "item", "price"]
    described = instance_schema(model)
    assert described["required"] == ["user", "price"]
    assert described["properties"]["price"]["type"] == "number"
    kinds = [one["type"] for one in described["properties"]["user"]["anyOf"]]
    assert kinds == ["string", "integer", "array"]


def test_the_page(server: Served) -> None:
    page = server.client.get("/openapi.json").json()
    predict = page["paths"]["/v1/models/{name}:predict"]["post"]
    body = predict["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["instances"]["items"]["required"] == ["user"]
    assert {"200", "400", "404", "412", "413", "503"} <= set(predict["responses"])
    assert page["paths"]["/v1/models/{name}:promote"]["post"]["security"] == [{"admin token": []}]
    assert server.client.get("/docs").status_code == 200


def test_schemathesis(server: Served, tmp_path: Path) -> None:
    """Requests made up from the page: none fails inside, and answers are as the page says."""
    program = Path(sys.executable).parent / "schemathesis"
    options = {
        "checks": "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        "max-examples": "8",
        "phases": "examples,fuzzing",
        "seed": "1",
        "header": f"Authorization: Bearer {TOKEN}",
        "generation-database": "none",
    }
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [str(program), "run", f"{server.client.base_url}/openapi.json", "--no-color", *given],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=tmp_path,
        env={"no_proxy": "*", "PATH": str(program.parent)},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


# The server.


def test_addresses_that_cannot_be(server: Served) -> None:
    app = make_app(server.registry)
    with pytest.raises(ConfigError, match="over TCP only"):
        configure(app, "unix:/tmp/x.sock")
    with pytest.raises(ConfigError, match="in use, or not an address of this machine"):
        serve(app, f"127.0.0.1:{server.client.base_url.port}")


def test_predictions_are_corrected_for_what_was_left_out() -> None:
    model = counted_clicks()
    origin = origin_of(model)
    publish(origin, 0)
    registry = Registry(model, origin)
    registry.promote(HEAD)
    assert registry.served is not None
    assert model.sampling is not None
    expected = model.sampling.correct(np.array([[0.5]], np.float32))
    assert registry.served.predict([{"user": "u1"}]).tolist() == expected.tolist() == [[np.float32(1 / 11)]]


def counted_clicks() -> stm.Model:
    import keras

    return stm.Model(
        MODEL.schema,
        lambda inputs: keras.layers.Dense(1, activation="sigmoid")(inputs["user"]),
        keep={0: 0.1},
    )


def test_nothing_waits_when_the_loop_has_ended(server: Served) -> None:
    """A registry outlives its application."""
    app = make_app(server.registry)

    async def run() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(run())
    server.registry.promote(1)
    assert predicted(server.client) == 1
