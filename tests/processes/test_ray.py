"""The service on a Ray cluster of three nodes, which are of this machine, each with an address of its own."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ShardError
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.nodes.topology import connect_shards
from streamtrain.ps.rpc import registry
from streamtrain.ps.rpc.security import Security
from streamtrain.settings.groups import PsSettings
from streamtrain.settings.load import load_settings
from streamtrain.store.redis.registry import RedisRegistry
from streamtrain.stream.opening import open_stream
from tests.cluster.counted import beginning, differences, messages_of
from tests.kubernetes.standalone import counting_file
from tests.patience import PATIENCE, until
from tests.ports import free_ports

ray = pytest.importorskip("ray")
HOSTS = [f"127.0.0.{n}" for n in (2, 3, 4)]
PARTITIONS, SAMPLES = 2, 3000


class Nodes:
    """A head that runs nothing, and three nodes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        small: dict[str, Any] = {"object_store_memory": 80_000_000, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=small | {"num_cpus": 0})
        self.nodes = {host: self.cluster.add_node(num_cpus=4, node_ip_address=host, **small) for host in HOSTS}
        self.cluster.wait_for_nodes()

    def remove(self, host: str) -> None:
        """As if it were gone: kill -9 of all that runs there."""
        self.cluster.remove_node(self.nodes.pop(host), allow_graceful=False)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Nodes()
    yield made
    made.cluster.shutdown()  # type: ignore[no-untyped-call]


class Client:
    """Asks for a prediction all the time, the next node where one does not answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.outcomes = Counter[str]()
        self.longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def ask(self) -> float | None:
        """What is predicted; None: no node answers."""
        body = json.dumps({"instances": [{f"id{i}": "nobody" for i in range(3)}]}).encode()
        for host in HOSTS:
            try:
                url = f"http://{host}:{self._port}/v1/models/counting:predict"
                with urllib.request.urlopen(urllib.request.Request(url, body), timeout=2) as answer:
                    self.outcomes["answered"] += 1
                    return float(json.load(answer)["predictions"][0][0])
            except urllib.error.HTTPError as exc:
                self.outcomes[f"{exc.code}: {exc.read().decode()}"] += 1
            except OSError:
                continue
        self.outcomes["nobody answers"] += 1
        return None

    def start(self) -> None:
        self.outcomes.clear()
        self._thread.start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(0.05):
            if self.ask() is not None:
                now = time.monotonic()
                self.longest, last = max(self.longest, now - last), now

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def test_a_node_is_lost_and_everything_is_counted_once(nodes: Nodes, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "counting.py").write_text(counting_file("counting"))
    with Valkey() as valkey:
        text = f"""
model = "counting.py:model"
[stream]
url = "{valkey.url}"
topic = "counting"
create = {PARTITIONS}
[publish]
url = "{valkey.url}"
model = "counting"
every = "200ms"
[checkpoint]
url = "{tmp_path / "checkpoints"}"
every = "2s"
[serve]
listen = "127.0.0.1:{port}"
[security]
insecure = true
"""
        (tmp_path / "streamtrain.toml").write_text(text)
        command = [sys.executable, "-m", "streamtrain", "ray", "up", "--address", nodes.cluster.address]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([*command, "--cpus", "0.5"], cwd=tmp_path, stdout=log, stderr=log)
        names = RedisRegistry(valkey.url, "counting")
        registry.use_registry(names)
        client = Client(port)
        try:
            fill(valkey.url, 0, SAMPLES // 2)
            until(lambda: client.ask() is not None, 4 * PATIENCE, told=(tmp_path / "log").read_text)
            until(lambda: learned(SAMPLES // 2), 2 * PATIENCE, told=(tmp_path / "log").read_text)
            client.start()
            victim = host_of(names, "shard-0")
            before = {name: names.lookup(name) for name in ("shard-0", "shard-1", "shard-0-backup", "shard-1-backup")}
            began = time.monotonic()
            nodes.remove(victim)
            fill(valkey.url, SAMPLES // 2, SAMPLES)
            until(lambda: learned(SAMPLES), 4 * PATIENCE, told=(tmp_path / "log").read_text)
            until(lambda: all(names.lookup(name) not in {None, at} for name, at in before.items() if victim in str(at)))
            print(f"back after {time.monotonic() - began:.1f} s")
            status = subprocess.run(
                [sys.executable, "-m", "streamtrain", "status", "--json"], cwd=tmp_path, capture_output=True, check=True
            )
            assert json.loads(status.stdout)["shards"]
            assert differences(shards(tensorflow=True), PARTITIONS, SAMPLES) == []
        finally:
            client.stop()
            process.send_signal(signal.SIGINT)
            assert process.wait(2 * PATIENCE) == 0, (tmp_path / "log").read_text()
            registry.use_registry(None)
            names.close()
        assert set(client.outcomes) == {"answered"}, client.outcomes


def host_of(names: RedisRegistry, name: str) -> str:
    return str(names.lookup(name)).rpartition(":")[0]


def shards(*, tensorflow: bool = False) -> Shards:
    """As a worker knows them."""
    addresses = [f"registry:shard-{i}" for i in range(2)]
    settings = PsSettings(addresses=tuple(addresses), backups=tuple(f"{one}-backup" for one in addresses))
    return Shards(
        connect_shards(addresses, settings.backups, Security(insecure=True), lambda channel: None),
        beginning(tensorflow=tensorflow),
    )


def learned(offset: int) -> bool:
    try:
        clocks = shards().clocks()
    except ShardError:
        return False
    return all(clock.get(partition, 0) >= offset for clock in clocks for partition in range(PARTITIONS))


def fill(url: str, start: int, end: int) -> None:
    """Writes samples of all partitions into the stream."""
    stream = open_stream(load_settings(overrides={"stream.url": url, "stream.topic": "counting"}).stream)
    stream.create(PARTITIONS)
    writer = stream.writer()
    for partition in range(PARTITIONS):
        for message in messages_of(partition, end)[start:]:
            writer.write(message, partition=partition)
    assert writer.flush(PATIENCE) == 0
    writer.close()
