"""The whole path with real processes: a sample is produced, learned, published, and changes what is predicted."""

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.store.redis.versions import RedisVersions
from tests import commands
from tests.patience import PATIENCE, until
from tests.ports import free_ports

MODEL = """
import keras, streamtrain as st
schema = st.Schema(label="label", time="ts", features=[st.Categorical("user", dim=4)])
def graph(inputs):
    return keras.layers.Dense(1, "sigmoid")(inputs["user"])
model = st.Model(schema, graph, name="clicks", embedding_optimizer=st.Adagrad(0.5), dense_optimizer=st.Adam(0.05))
"""


class Processes:
    """Commands of streamtrain, in a folder with a model and settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> None:
        with (self.folder / f"{arguments[0]}.log").open("ab") as log:
            command = [*commands.COMMAND, *arguments]
            self.running.append(commands.start(command, cwd=self.folder, stdout=log, stderr=log))

    def produce(self, samples: Sequence[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(one) + "\n" for one in samples)
        command = [*commands.COMMAND, "produce", "-", "--create", "1"]
        commands.run(command, cwd=self.folder, input=lines.encode(), check=True, capture_output=True)

    def said(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))

    def stop(self) -> list[int]:
        for one in reversed(self.running):
            one.send_signal(signal.SIGTERM)
        return [one.wait(PATIENCE) for one in self.running]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    for one in started.running:
        one.kill()
        one.wait()


def ask(url: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, answer and headers; 0 where nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.loads(exc.read()), exc.headers
    except urllib.error.URLError:
        return 0, None, None


def published_figures(url: str) -> dict[str, Any]:
    """Those of the head."""
    with closing(RedisServer(url)) as server:
        head = RedisOrigin(RedisModel(server, "clicks")).find(None)
    assert head is not None
    return dict(head.metrics.get("label", {}))


def test_a_sample_changes_what_is_predicted(processes: Processes) -> None:
    shard, listen = (f"127.0.0.1:{port}" for port in free_ports(2))
    with Valkey() as server:
        settings = {
            "model": '"model.py:model"',
            "stream": {"url": f'"{server.url}"', "topic": '"clicks"'},
            "worker": {"batch_age": '"20ms"', "batch_size": "64"},
            "ps": {"addresses": f'["{shard}"]'},
            "publish": {"url": f'"{server.url}"', "every": '"100ms"', "model": '"clicks"', "version_every": '"1s"'},
            "serve": {"listen": f'"{listen}"'},
        }
        lines = [f"model = {settings.pop('model')}"]
        for group, of_group in settings.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in of_group.items())]  # type: ignore[attr-defined]
        (processes.folder / "streamtrain.toml").write_text("\n".join(lines))
        (processes.folder / "model.py").write_text(MODEL)
        liked = [{"ts": 1_700_000_000 + i, "user": "ann" if i % 2 else "bob", "label": i % 2} for i in range(2000)]
        processes.produce(liked)
        for command in (["ps", "--index", "0"], ["worker"], ["serve"]):
            processes.start(*command)
        predict = f"http://{listen}/v1/models/clicks:predict"
        users = {"instances": [{"user": "ann"}, {"user": "bob"}, {"user": "nobody knows"}]}
        until(lambda: ask(f"http://{listen}/healthz/ready")[0] == 200, PATIENCE)
        until(lambda: ask(predict, users, x_min_offset="0:1999")[0] == 200, PATIENCE)
        status, answer, headers = ask(predict, users)
        assert status == 200, (answer, processes.said())
        (ann,), (bob,), (unknown,) = answer["predictions"]
        assert ann > 0.7 > unknown > 0.3 > bob
        assert headers["x-model-version"]
        assert headers["x-trained-through"].startswith("2023-11-14T22:46:39")
        assert float(headers["x-freshness-ms"]) >= 0

        processes.produce([{"ts": 1_700_003_000, "user": "nobody knows", "label": 1}] * 64)
        until(lambda: ask(predict, users, x_min_offset="0:2063")[0] == 200, PATIENCE)  # a busy machine may refuse one
        status, answer, _ = ask(predict, users, x_min_offset="0:2063")
        assert status == 200, (answer, processes.said())
        assert answer["predictions"][2][0] > unknown
        assert ask(predict, users, x_min_offset="0:9999")[0] == 412

        def told() -> bool:
            """A worker tells of its window about once a second, and what is published after that has it."""
            processes.produce([{"ts": 1_700_003_001, "user": "ann", "label": 1}])
            return bool(published_figures(server.url).get("samples", 0) >= 2000)

        until(told, PATIENCE)
        figures = published_figures(server.url)
        assert figures["auc"] > 0.7
        assert figures["log_loss"] < 0.7
        assert figures["non_finite"] == 0

        def tried() -> bool:
            """The watchdog of the server tries what it serves with samples that the worker has learned."""
            with urllib.request.urlopen(f"http://{listen}/metrics", timeout=PATIENCE) as metrics:
                found = re.search(rb"watchdog_samples ([0-9.]+)", metrics.read())
            return found is not None and float(found[1]) > 0

        until(tried, PATIENCE)
        with closing(RedisServer(server.url)) as redis:
            versions = RedisVersions(RedisModel(redis, "clicks"))
            until(versions.all, PATIENCE)
            assert versions.history()[-1].who == "schedule"
        assert processes.stop() == [0, 0, 0], processes.said()
    assert os.path.exists(processes.folder / "serve.log")
