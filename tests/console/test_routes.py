"""What the console reads, over HTTP: the process, the cluster, single rows, and which rows an instance reads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

import httpx
import keras
import numpy as np
import pytest

import streamtrain as st
from streamtrain._core import hash_bytes
from streamtrain.model.spec import Spec
from streamtrain.serve.http.app import make_app
from streamtrain.serve.inspector import MAX_IDS
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.store.publication import Weights
from streamtrain.testing.store import MemoryOrigin
from tests.console.conftest import MODEL, Shown
from tests.console.shown import Told, origin_of, registry_of, told
from tests.patience import PATIENCE
from tests.serve.running import client_of, running, serving

URL = "/v1/models/shop"
INSTANCE: dict[str, Any] = {"user": "u7", "item": 7, "history": [1, 2, "999"], "tags": "news", "price": 2.5}


# The page and its files.

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("path", ["/", "/console/main.js", "/console/style.css", "/console/uplot/uPlot.iife.min.js"])
def test_the_page_may_load_nothing_from_elsewhere(shown: Shown, path: str) -> None:
    answer = shown.client.get(path, headers=BROWSER)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'self'", "frame-ancestors 'none'"} <= {*policy}
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in answer.headers
    again = shown.client.get(path, headers=BROWSER | {"if-none-match": answer.headers.get("etag", "none")})
    assert again.status_code == (304 if "etag" in answer.headers else 200)


def test_files_that_are_not_there(shown: Shown) -> None:
    for path in ("/console/none.js", "/console/../app.py", "/console/%2e%2e/app.py", "/console/"):
        assert shown.client.get(path).status_code == 404, path


def test_the_page_names_the_model(shown: Shown) -> None:
    page = shown.client.get("/", headers=BROWSER).text
    assert "<title>shop · streamtrain</title>" in page
    assert "{model}" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_files_of_the_package_are_what_is_served(shown: Shown) -> None:
    """The wheel has what the package has; its licence goes with the library."""
    static = files("streamtrain.serve") / "static"
    assert shown.client.get("/console/main.js").text == (static / "main.js").read_text("utf-8")
    assert "MIT" in (static / "uplot" / "LICENSE").read_text("utf-8")


# The process.


def test_what_the_process_serves(shown: Shown) -> None:
    said = shown.client.get(f"{URL}/process").json()
    assert (said["model"], said["outputs"], said["served"]) == ("shop", ["click", "buy"], "head")
    assert said["labels"] == {"first": 1, "prod": 2}
    assert (said["control"], said["cluster"], said["origin"]) == (True, True, "not followed")
    (head,) = (one for one in said["loaded"] if one["version"] == "head")
    assert head["rows"] == {"user": 40, "item": 60, "tags": 6, "user & tags": 0}
    assert head["publication"] == 3
    assert 0 < said["time"] - head["watermark"] < PATIENCE
    fields = {one["name"]: one for one in said["fields"]}
    assert [*fields] == ["user", "item", "history", "tags", "price", "age"]
    assert (fields["history"]["ids"], fields["history"]["max_ids"]) == (True, 5)
    assert (fields["tags"]["required"], fields["tags"]["default"]) == (False, "none")
    assert (fields["age"]["ids"], fields["age"]["default"]) == (False, 30.0)
    assert said["crosses"] == [{"name": "user & tags", "of": ["user", "tags"]}]


def test_nothing_is_loaded_yet() -> None:
    with running(make_app(Registry(MODEL, origin_of(MODEL)))) as url, client_of(url) as client:
        said = client.get(f"{URL}/process").json()
        assert (said["served"], said["loaded"], said["control"], said["cluster"]) == (None, [], False, False)
        assert client.get("/").status_code == 200
        assert client.get(f"{URL}/rows/user/u1").status_code == 503
        assert client.post(f"{URL}:explain", json={"instances": [INSTANCE]}).status_code == 503
        answer = client.get(f"{URL}/cluster")
        assert (answer.status_code, "no coordinator is configured" in answer.json()["error"]) == (404, True)


def test_another_model(shown: Shown) -> None:
    for method, path in (("GET", "/process"), ("GET", "/cluster"), ("GET", "/rows/user/u1"), ("POST", ":explain")):
        assert shown.client.request(method, f"/v1/models/other{path}").status_code == 404, path


# The cluster.


def test_the_status_is_asked_for_once_a_second(shown: Shown) -> None:
    before = shown.cluster.asked
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: shown.client.get(f"{URL}/cluster").json(), range(16))]
    assert answers[0]["shards"][2]["state"] == "away"
    assert len({one["time"] for one in answers}) == shown.cluster.asked - before < len(answers)


def test_a_coordinator_that_is_away() -> None:
    cluster = told()
    cluster.away = "10.0.0.2:7100 does not answer"
    registry = registry_of(MODEL, origin_of(MODEL))
    with serving(registry, cluster=cluster) as client:
        answer = client.get(f"{URL}/cluster")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"] == "the coordinator is unreachable: 10.0.0.2:7100 does not answer"
        row = client.get(f"{URL}/rows/user/u7").json()
        assert (row["found"], row["count"], row["cluster"]) == (True, None, "away: 10.0.0.2:7100 does not answer")


def test_keys_of_partitions_may_be_integers() -> None:
    cluster = told()
    cluster.said["shards"][0]["clock"] = {0: 17}
    cluster.said["lag"] = float("nan")
    with serving(registry_of(MODEL, origin_of(MODEL)), cluster=cluster) as client:
        said = client.get(f"{URL}/cluster").json()
    assert (said["shards"][0]["clock"], said["lag"]) == ({"0": 17}, None)


# Rows.


def test_a_row(shown: Shown) -> None:
    assert shown.registry.served is not None
    row = shown.client.get(f"{URL}/rows/user/u7").json()
    assert (row["table"], row["id"], row["key"]) == ("user", "u7", str(hash_bytes(b"u7")))
    assert (row["found"], row["count"], row["cluster"]) == (True, 1234, "ok")
    assert row["norm"] == pytest.approx(np.linalg.norm(row["values"]))
    assert len(row["values"]) == 8
    assert any(row["values"])


def test_an_id_without_a_row_reads_its_birth_value(shown: Shown) -> None:
    row = shown.client.get(f"{URL}/rows/user/nobody").json()
    assert (row["found"], row["count"], row["last_seen"], row["cluster"]) == (False, None, None, "ok")
    assert 0 < max(map(abs, row["values"])) <= 0.05


@pytest.mark.parametrize(
    ("table", "id"), [("tags", "été"), ("tags", "a,b"), ("tags", "x/y"), ("item", "59"), ("user & tags", "")]
)
def test_any_id_can_be_asked_for(shown: Shown, table: str, id: str) -> None:
    row = shown.client.get(httpx.URL(shown.client.base_url, path=f"{URL}/rows/{table}/{id}")).json()
    assert (row["id"], row["found"]) == (id, table != "user & tags")


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/rows/none/u1", 404, "unknown table 'none'; the tables are user, item, tags"),
        (f"/rows/user/{'x' * 257}", 400, "an id may have at most 256 bytes"),
    ],
)
def test_rows_that_cannot_be(shown: Shown, path: str, status: int, message: str) -> None:
    answer = shown.client.get(URL + path)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True)


def test_a_slow_coordinator_holds_no_prediction_back(shown: Shown) -> None:
    """Looks at rows wait in the cluster; predictions are answered meanwhile."""
    asked, go = threading.Event(), threading.Event()

    class Slow(Told):
        def inspect(self, table: str, key: int) -> dict[str, Any] | None:
            asked.set()
            assert go.wait(PATIENCE)
            return None

    with serving(shown.registry, cluster=Slow({})) as client, ThreadPoolExecutor(8) as pool:
        rows = [pool.submit(client.get, f"{URL}/rows/user/u{i}") for i in range(6)]
        assert asked.wait(PATIENCE)
        assert client.post(f"{URL}:predict", json={"instances": [INSTANCE]}).status_code == 200
        go.set()
        assert {one.result().status_code for one in rows} == {200}


# Explained instances.


def explained(client: httpx.Client, instance: dict[str, Any]) -> dict[str, list[tuple[str | None, bool]]]:
    answer = client.post(f"{URL}:explain", json={"instances": [instance]})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert (said["version"], said["publication"]) == ("head", 3)
    return {one["feature"]: [(hit["id"], hit["found"]) for hit in one["ids"]] for one in said["features"]}


def test_an_instance_explained(shown: Shown) -> None:
    assert explained(shown.client, INSTANCE) == {
        "user": [("u7", True)],
        "item": [("7", True)],
        "history": [("1", True), ("2", True), ("999", False)],
        "tags": [("news", True)],
        "user & tags": [(None, False)],
    }


def test_what_is_explained_is_what_is_read(shown: Shown) -> None:
    """Defaults, lists that are too long, and ids however they are written: the same keys as of training."""
    instance = INSTANCE | {"user": "nobody", "history": [*range(100, 90, -1)], "unread": 1.5}
    del instance["tags"]
    hits = explained(shown.client, instance)
    assert hits["user"] == [("nobody", False)]
    assert hits["history"] == [(str(i), False) for i in range(95, 90, -1)]
    assert hits["tags"] == [("none", False)]
    (row,) = shown.client.post(f"{URL}:explain", json={"inputs": {n: [v] for n, v in INSTANCE.items()}}).json()[
        "features"
    ][1]["ids"]
    looked_up = shown.client.get(f"{URL}/rows/item/7").json()
    assert (row["key"], row["norm"]) == (looked_up["key"], looked_up["norm"])


def test_cells_are_explained_by_their_numbers() -> None:
    def graph(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, "sigmoid")(inputs["price_cells"])

    price = st.Numeric("price", default=0.0, grid=st.Grid(2, bits=(0, 4)))
    model = st.Model(st.Schema(features=[price]), graph, name="shop")
    spec = Spec.of(model)
    origin = MemoryOrigin(spec.to_json(), model.name)
    weights = Weights(np.zeros(spec.dense_size, np.float32), np.zeros(spec.statistics_size, np.float32))
    origin.publish({}, weights, clock={0: 1}, watermark=1.0)
    registry = Registry(model, origin)
    registry.promote(HEAD)
    with serving(registry) as client:
        for given, expected in (
            ({"price": 3.1}, ["2 to 4", "3 to 3.125"]),
            ({"price": -3.1}, ["-2 to -4", "-3 to -3.125"]),
            ({"price": 0}, ["0 to 1.175494e-38", "0 to 7.34684e-40"]),
            ({"price": "NA"}, ["missing"]),
            ({}, ["missing"]),
        ):
            said = client.post(f"{URL}:explain", json={"instances": [given]}).json()
            [feature] = said["features"]
            assert [(one["id"], one["cell"]) for one in feature["ids"]] == [(None, cell) for cell in expected]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"instances": [INSTANCE, INSTANCE]}, 400, "one instance is explained at a time, not 2"),
        ({"instances": []}, 400, "one instance is explained at a time, not 0"),
        ({"instances": [{"user": "u1"}]}, 400, "instance 0: missing_field in field 'item'"),
        ({}, 400, "the body must have either"),
        ({"instances": [INSTANCE | {"tags": ["t"] * MAX_IDS}]}, 413, f"at most {MAX_IDS} ids, not "),
    ],
)
def test_instances_that_are_not_explained(shown: Shown, body: Any, status: int, message: str) -> None:
    answer = shown.client.post(f"{URL}:explain", json=body)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text
