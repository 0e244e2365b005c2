"""Two models that learn from one topic, as processes: what `streamtrain compare` says after kills and restores."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import StreamtrainError
from streamtrain.quality.comparison import StoredBlocks, read_blocks
from streamtrain.settings.load import load_settings
from streamtrain.store.redis.server import RedisServer
from streamtrain.stream.opening import open_stream
from tests import commands
from tests.patience import PATIENCE, until
from tests.ports import free_ports

SAMPLES = 20_000
BLOCK = 250
MODEL = """
import keras, streamtrain as st
schema = st.Schema(label="label", time="ts", features=[st.Categorical("user", dim=4), st.Categorical("item", dim=4)])
def graph(inputs):
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(list(inputs.values())))
model = st.Model(schema, graph, embedding_optimizer=st.Adagrad(%s))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with Valkey() as one:
        yield one


class Cluster:
    """A shard, which also coordinates, and a worker, both processes that can be killed."""

    def __init__(self, name: str, folder: Path, url: str, rate: float = 0.05) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        (self.folder / "model.py").write_text(MODEL % rate)
        port = free_ports(1)[0]
        (self.folder / "streamtrain.toml").write_text(
            f"""
model = "model.py:model"
stream = {{ url = "{url}", topic = "clicks", group = "{name}" }}
ps.addresses = ["127.0.0.1:{port}"]
worker = {{ batch_size = 96, batch_min = 96, batch_age = "10m", ahead = 0 }}
checkpoint = {{ url = "{self.folder}/checkpoints", every = "300ms" }}
publish = {{ url = "{url}", model = "{name}" }}
compare = {{ block = {BLOCK}, slices = ["user=3"] }}
"""
        )
        self.name = name
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *kinds: str) -> None:
        for kind in kinds:
            options = ["--index", "0"] if kind == "ps" else []
            with (self.folder / f"{kind}.log").open("ab") as log:
                self.processes[kind] = commands.start(
                    [*commands.COMMAND, kind, *options],
                    cwd=self.folder,
                    stderr=log,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )

    def kill(self, kind: str) -> None:
        self.processes[kind].kill()
        self.processes[kind].wait()

    def log(self, kind: str) -> str:
        return (self.folder / f"{kind}.log").read_text()


def fill(url: str) -> None:
    stream = open_stream(load_settings(overrides={"stream.url": url, "stream.topic": "clicks"}).stream)
    stream.create(1)
    random = np.random.default_rng(3)
    users, items = random.integers(0, 50, SAMPLES), random.integers(0, 200, SAMPLES)
    labels = random.random(SAMPLES) < 1 / (1 + np.exp(-np.sin(users) - np.sin(3 * items)))
    with closing(stream.writer()) as writer:
        for i, (user, item, label) in enumerate(zip(users, items, labels, strict=True)):
            text = f'{{"ts": {1700000000 + i}, "label": {int(label)}, "user": {user}, "item": {item}}}'
            writer.write(text.encode(), partition=0)
        assert writer.flush(PATIENCE) == 0


def stored(server: RedisServer, name: str) -> StoredBlocks | None:
    try:
        return read_blocks(server, name)
    except StreamtrainError:  # none yet
        return None


def count(server: RedisServer, name: str) -> int:
    found = stored(server, name)
    return len(found.blocks) if found else 0


def compared(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*commands.COMMAND, "compare", *arguments]
    return commands.run(command, cwd=cluster.folder, capture_output=True, text=True, check=False, timeout=PATIENCE)


def test_figures_are_the_same_after_kills_and_a_restore(server: Valkey, tmp_path: Path) -> None:
    fill(server.url)
    redis = RedisServer(server.url)
    most = (SAMPLES - 96) // BLOCK  # the last batch may be waiting for more samples
    calm, disturbed = (Cluster(name, tmp_path, server.url) for name in ("calm", "disturbed"))
    try:
        for cluster in (calm, disturbed):
            cluster.start("ps", "worker")
        # What is resumed is past the first samples, after which the outputs have found the labels' log-odds: how far
        # they had come is known to the worker alone.
        until(lambda: count(redis, "disturbed") >= 2, PATIENCE)
        saved = disturbed.log("ps").count(" committed (")
        until(lambda: disturbed.log("ps").count(" committed (") > saved + 1 or count(redis, "disturbed") >= most)
        for kind, blocks in (("ps", 5), ("worker", 20)):
            until(lambda blocks=blocks: count(redis, "disturbed") >= blocks, PATIENCE)  # type: ignore[misc]
            disturbed.kill(kind)
            disturbed.start(kind)
        for cluster in (calm, disturbed):
            until(lambda name=cluster.name: count(redis, name) >= most, PATIENCE)  # type: ignore[misc]
        # What was killed may have finished everything before, and what was started then is only beginning.
        until(lambda: "resuming from offsets {0: " in disturbed.log("worker").replace("{0: 0}", ""), PATIENCE)
        until(lambda: "restoring shard 0 of 1 from epoch" in disturbed.log("ps"), PATIENCE)
    finally:
        for cluster in (calm, disturbed):
            for kind in cluster.processes:
                cluster.kill(kind)
    ours, theirs = read_blocks(redis, "calm"), read_blocks(redis, "disturbed")
    assert set(ours.blocks) >= {(0, number) for number in range(most)}
    assert theirs.blocks == ours.blocks
    said = compared(calm, "calm", "disturbed", "--slice", "user")
    assert said.returncode == 0, said.stderr
    assert "label: no difference: the losses of both are the same in every block" in said.stdout
    assert "label, user=3: no difference" in said.stdout
    refused = compared(calm, "calm", "other")
    assert refused.returncode == 2
    assert "model other at" in refused.stderr
    assert "models that have some: calm, disturbed" in refused.stderr
    redis.close()
