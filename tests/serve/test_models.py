"""Several models in one serving process: each under its name, none in the way of another."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from streamtrain.embedded.valkey import Valkey
from tests import commands
from tests.metrics_page import on_the_page
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.serve.in_redis import InRedis
from tests.serve.published import counted
from tests.serve.running import TOKEN, client_of

MODELS = {
    "ads.py": "from tests.serve.published import counted\nmodel = counted()\n",
    "feed.py": "from tests.serve.published import counted\nmodel = counted('item')\n",
    "broken.py": "raise ValueError('no such column')\n",
}
BEARER = {"authorization": f"Bearer {TOKEN}"}


class Serving:
    """`streamtrain serve` as a process, with settings as environment variables are written."""

    def __init__(self, folder: Path, url: str, models: str, **settings: object) -> None:
        for name, text in MODELS.items():
            (folder / name).write_text(text)
        self.port, self.grpc = free_ports(2)
        self.log = folder / "serve.log"
        given = {"publish.url": url, "publish.every": "50ms", "serve.models": models, "serve.admin_token": TOKEN}
        given |= {"serve.listen": f"127.0.0.1:{self.port}", "serve.grpc_listen": f"127.0.0.1:{self.grpc}"}
        given |= {name.replace("__", "."): str(value) for name, value in settings.items()}
        command = [*commands.COMMAND, "serve", "--model", "ads.py:model"]
        with self.log.open("wb") as log:
            self.process = commands.start(
                [*command, *(word for key, value in given.items() for word in ("--set", f"{key}={value}"))],
                cwd=folder,
                env=os.environ,
                stdout=log,
                stderr=log,
            )
        self.client = client_of(f"http://127.0.0.1:{self.port}")

    def get(self, path: str) -> httpx.Response | None:
        """What it answers; None: it does not listen yet."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.client.get(path)
        except httpx.TransportError:
            return None

    def is_ready(self, model: str) -> bool:
        answer = self.get(f"/v2/models/{model}/ready")
        return answer is not None and answer.status_code == 200

    def predict(self, model: str, field: str, path: str = "") -> httpx.Response:
        return self.client.post(f"/v1/models/{model}{path}:predict", json={"instances": [{field: "u1"}]})

    def end(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def own_url() -> Iterator[str]:
    """A server of these tests alone, as the names of their models are fixed."""
    with Valkey() as server:
        yield server.url


@pytest.fixture
def ads(own_url: str) -> Iterator[InRedis]:
    one = InRedis(own_url, "ads")
    one.server.call("FLUSHALL")
    one.publish(1)
    yield one
    one.server.close()


@pytest.fixture
def feed(own_url: str, ads: InRedis) -> Iterator[InRedis]:
    one = InRedis(own_url, "feed")
    for number in (1, 2, 3):
        one.publish(number, counted("item"))
    yield one
    one.server.close()


def test_two_models_with_different_features(ads: InRedis, feed: InRedis, tmp_path: Path) -> None:
    feed.versions.make("ann")
    server = Serving(tmp_path, ads.url, '{"ads": "", "feed": "feed.py:model"}')
    try:
        until(lambda: server.is_ready("ads") and server.is_ready("feed"), PATIENCE)
        assert server.client.get("/v1/models").json() == {"models": ["ads", "feed"]}
        for model, field, expected in (("ads", "user", 1001.0), ("feed", "item", 3003.0)):
            assert server.predict(model, field).json() == {"predictions": [[expected]]}
            assert server.client.get(f"/v1/models/{model}").json()["ready"]
            metadata = server.client.get(f"/v2/models/{model}").json()
            assert (metadata["name"], metadata["inputs"][0]["name"]) == (model, field)
            tensors = {"inputs": [{"name": field, "shape": [1], "datatype": "BYTES", "data": ["u1"]}]}
            answer = server.client.post(f"/v2/models/{model}/infer", json=tensors).json()
            assert (answer["model_name"], answer["outputs"][0]["data"]) == (model, [expected])
            process = server.client.get(f"/v1/models/{model}/process").json()
            assert (process["model"], process["models"]) == (model, ["ads", "feed"])
        assert "missing_field" in server.predict("ads", "item").json()["error"]
        unknown = server.predict("other", "user")
        assert (unknown.status_code, unknown.json()["error"]) == (
            404,
            "there is no model 'other'; the models are ads, feed",
        )

        client = commands.run(
            [
                sys.executable,
                str(Path(__file__).parent / "grpc" / "several_models_client.py"),
                f"127.0.0.1:{server.grpc}",
            ],
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "no_proxy": "*"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (client.returncode, client.stdout.split()) == (0, ["ads", "feed", "unknown"]), client.stderr

        feed.publish(4, counted("item"))
        promoted = server.client.post("/v1/models/feed:promote", json={"version": 1}, headers=BEARER)
        assert promoted.json()["served"] == "1"
        assert server.predict("feed", "item").json() == {"predictions": [[3003.0]]}
        until(lambda: server.predict("feed", "item", "/versions/head").json() == {"predictions": [[4004.0]]}, PATIENCE)
        assert server.predict("ads", "user").headers["x-model-version"] == "head"  # another model's promotion

        exported = server.client.get("/metrics").text
        assert 'streamtrain_serving_publication{model="ads",version="head"} 1.0' in exported
        assert 'streamtrain_serving_publication{model="feed",version="head"} 4.0' in exported
        for one in on_the_page("serving"):
            assert exported.count(f"# TYPE {one.name} ") == 1
    finally:
        server.end()


def test_one_that_cannot_be_loaded_leaves_the_others(ads: InRedis, tmp_path: Path) -> None:
    models = '{"ads": "", "broken": "broken.py:model", "unpublished": "feed.py:model"}'
    server = Serving(tmp_path, ads.url, models, serve__processes=2)
    try:
        until(lambda: server.is_ready("ads"), PATIENCE)
        assert server.predict("ads", "user").json() == {"predictions": [[1001.0]]}

        broken = server.predict("broken", "user")
        assert broken.status_code == 503
        assert "model 'broken' could not be loaded: model file 'broken.py'" in broken.json()["error"]
        assert "no such column" in broken.json()["error"]
        unpublished = server.predict("unpublished", "item")
        assert (unpublished.status_code, unpublished.json()["error"][:21]) == (503, "nothing is loaded yet")
        assert not server.client.get("/v1/models/unpublished").json()["ready"]

        ready = server.client.get("/healthz/ready")  # of all
        assert (ready.status_code, ready.json()["error"][:14]) == (503, "model 'broken'")
    finally:
        server.end()


def test_names_alone_are_versions_of_the_same_file(ads: InRedis, tmp_path: Path) -> None:
    fork = InRedis(ads.url, "ads-fork")
    fork.publish(1, row=5)
    server = Serving(tmp_path, ads.url, "ads, ads-fork")
    try:
        until(lambda: server.is_ready("ads") and server.is_ready("ads-fork"), PATIENCE)
        assert server.predict("ads", "user").json() == {"predictions": [[1001.0]]}
        assert server.predict("ads-fork", "user").json() == {"predictions": [[1005.0]]}
        ready = server.client.get("/healthz/ready").json()
        assert (ready["model"], [one["model"] for one in ready["models"]]) == ("ads", ["ads", "ads-fork"])
    finally:
        server.end()
        fork.server.close()
