"""The process of a parameter server as an operator runs it: real processes, signals, ports and files."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from streamtrain.processes.ps import PsProcess
from streamtrain.ps.clock import Cursor, Ends, PushOutcome, Span
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl, Retry, patiently
from streamtrain.settings.load import load_settings
from streamtrain.store.checkpoint.epochs import Epochs
from tests import commands
from tests.checkpoint.saved import assert_each_exact, restored, some_log, until
from tests.patience import PATIENCE
from tests.patience import until as wait_until
from tests.ports import free_ports
from tests.probes import probe
from tests.ps.counting import Log, assert_exact, plan_of
from tests.ps.served import COUNTING

ROOT = Path(__file__).parent.parent.parent
COMMAND = (sys.executable, "-m", "streamtrain", "ps")
SERVICE = (sys.executable, str(ROOT / "services" / "ps.py"))
LOG = some_log(2, 2_000)


def free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


class Process:
    """A parameter server; its words on stderr are kept.

    Args:
        arguments: of the command.
        command: another one.
        begin: how it is started; by default it is forked, as `up` does it.
        environment: more of it.
    """

    def __init__(
        self,
        *arguments: str,
        command: tuple[str, ...] = COMMAND,
        begin: Callable[..., "subprocess.Popen[str]"] = commands.start,
        **environment: str,
    ) -> None:
        kept = {name: value for name, value in os.environ.items() if not re.match("STREAMTRAIN_|TF_CONFIG", name)}
        self.process = begin(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=kept | environment,
        )
        self.said: list[str] = []
        self._serves = threading.Event()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.said.append(line.rstrip("\n"))
            if " serves at " in line:
                self._serves.set()
        self._serves.set()

    def serving(self) -> "Process":
        """Itself, once it serves."""
        assert self._serves.wait(PATIENCE)
        assert self.process.poll() is None, self.said
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal; the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._listener.join(PATIENCE)
        return code

    def loaded(self) -> str:
        """Names of what is mapped into its memory."""
        return Path(f"/proc/{self.process.pid}/maps").read_text()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts parameter servers, which end with the test."""
    processes: list[Process] = []

    def begin(*arguments: str, **options: Any) -> Process:
        processes.append(Process(*arguments, **options))
        return processes[-1]

    yield begin
    for one in processes:
        if one.process.poll() is None:
            one.process.kill()
        one.wait()
        assert one.process.stdout
        one.process.stdout.close()
        assert one.process.stderr
        one.process.stderr.close()


class Worker:
    """Learns the log by a client, and goes back when it must, as a real one does."""

    def __init__(self, addresses: list[str], name: str = "w", channels: Any = None, log: Log = LOG) -> None:
        self._log = log
        self.channels: Any = channels or [
            (grpc.insecure_channel(address, options=CHANNEL_OPTIONS), address) for address in addresses
        ]
        self.shards = Shards(self.channels, COUNTING)
        run = patiently(self.shards.agree, Retry(give_up=PATIENCE), threading.Event())
        self._client = self.shards.client(name, run)
        self._client.join()
        self._cursor = Cursor()
        self.rewind()

    def rewind(self) -> None:
        self._cursor.rewind(self._log, patiently(self.shards.clocks, Retry(give_up=PATIENCE), threading.Event()))

    def learn(self, most: int, batch: int = 50) -> None:
        """All partitions, up to an offset."""
        while spans := self._cursor.next(Ends(dict.fromkeys(self._log, most)), batch):
            if not self._push(spans):
                self.rewind()

    def _push(self, spans: list[Span]) -> bool:
        plan = plan_of(self._log, spans, len(self.channels))
        ones = np.full(7, plan.samples, np.float32)
        gradients = -plan.counts(0).astype(np.float32)
        pushing = self._client.push(plan, gradients, -ones[:5], ones[:2], spans=spans, watermark=0)
        return all(one.outcome is not PushOutcome.REJECTED for one in pushing.wait())

    def close(self) -> None:
        self._client.close()
        for channel, _ in self.channels:
            channel.close()


def wait_for_epoch(place: str, worker: Worker, offset: int) -> int:
    """The number of the first epoch that holds all up to an offset."""
    clock, checked, found = {str(p): offset for p in LOG}, set[int](), list[int]()

    def is_there() -> bool:
        for number in sorted({*Epochs(place).numbers()} - checked):
            checked.add(number)
            if all(one["clock"] == clock for one in Epochs(place).open(number).shards):
                found.append(number)
                break
        return bool(found)

    wait_until(is_there, told=lambda: f"no epoch holds offset {offset}: {worker.shards.controls[0].status()}")
    return found[0]


def saving(place: Path, every: str = "50ms") -> tuple[str, ...]:
    settings = {"url": str(place), "every": every, "keep": "1000"}
    return tuple(part for name, value in settings.items() for part in ("--set", f"checkpoint.{name}={value}"))


def test_life_of_two_shards(tmp_path: Path, start: Callable[..., Process]) -> None:
    """They serve, save themselves, come back from kill -9, and end when told, without TensorFlow."""
    addresses = free_addresses(2)
    place = str(tmp_path)

    def begin(index: int) -> Process:
        words = ("--index", str(index), "--ps", ",".join(addresses), *saving(tmp_path))
        return start(*words, begin=subprocess.Popen)

    processes = [begin(i) for i in range(2)]
    for process in processes:
        maps = process.serving().loaded()
        assert "_core" in maps
        assert "tensorflow" not in maps
    worker = Worker(addresses)
    worker.learn(500)
    first = wait_for_epoch(place, worker, 500)
    assert_exact(restored(place, first, 2), until(LOG, dict.fromkeys(LOG, 500)))

    assert processes[1].end(signal.SIGKILL) == -signal.SIGKILL
    processes[1] = begin(1)
    worker.learn(1_000)
    second = wait_for_epoch(place, worker, 1_000)
    assert_exact(restored(place, second, 3), until(LOG, dict.fromkeys(LOG, 1_000)))
    assert any("shard 1 of 2 restored from epoch " in line for line in processes[1].said)

    for process in processes:
        process.process.kill()
    for process in processes:
        process.wait()
    processes = [begin(i) for i in range(2)]
    worker.learn(2_000)
    wait_for_epoch(place, worker, 2_000)
    status = RemoteControl(*worker.channels[0]).status()
    assert status.counters["pushes_rejected"] + status.counters["samples"] >= 4_000
    worker.close()
    began = time.monotonic()
    assert [process.end() for process in processes] == [0, 0]
    assert time.monotonic() - began < PATIENCE / 2
    assert_each_exact(restored(place, max(Epochs(place).numbers()), 2), LOG)
    assert not any("Traceback" in line for process in processes for line in process.said)


@pytest.mark.parametrize("environment", [{}, {"STREAMTRAIN_NO_IO_URING": "1"}], ids=["io_uring", "threads"])
def test_more_rows_than_memory(tmp_path: Path, start: Callable[..., Process], environment: dict[str, str]) -> None:
    """Those that have no room are on disk, also after kill -9, and nobody cleans up after it."""
    addresses, log = free_addresses(1), some_log(2, 50_000, ids=200_000)
    disk = tmp_path / "disk"
    disk.mkdir()

    def begin() -> Process:
        settings = ("--set", "ps.memory=1MB", "--set", f"ps.disk={disk}")
        place = saving(tmp_path / "epochs")
        return start("--index", "0", "--ps", addresses[0], *settings, *place, **environment).serving()

    process = begin()
    worker = Worker(addresses, log=log)
    worker.learn(40_000, batch=5_000)
    wait_for_epoch(str(tmp_path / "epochs"), worker, 40_000)
    process.end(signal.SIGKILL)
    begin()
    worker.learn(50_000, batch=5_000)
    number = wait_for_epoch(str(tmp_path / "epochs"), worker, 50_000)
    (table,) = RemoteControl(*worker.channels[0]).status().tables
    assert table.rows == len({one for samples in log.values() for sample in samples for one in sample})
    assert table.rows_on_disk > table.rows / 2
    assert table.disk_bytes
    assert_exact(restored(str(tmp_path / "epochs"), number, 1), log)
    worker.close()
    assert not list(disk.iterdir())


def test_service_set_by_the_environment(tmp_path: Path, start: Callable[..., Process]) -> None:
    """As a scheduler runs it: TF_CONFIG says who it is, and variables how."""
    addresses = free_addresses(1)
    config = {"cluster": {"ps": addresses, "worker": ["10.0.0.1:2222"]}, "task": {"type": "ps", "index": 0}}
    process = start(
        command=SERVICE,
        TF_CONFIG=json.dumps(config),
        STREAMTRAIN_CHECKPOINT__URL=str(tmp_path),
        STREAMTRAIN_CHECKPOINT__EVERY="50ms",
    ).serving()
    worker = Worker(addresses)
    worker.learn(100)
    wait_for_epoch(str(tmp_path), worker, 100)
    worker.close()
    assert process.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--index", "2", "--ps", "127.0.0.1:1,127.0.0.1:2"),
            "shard 2 does not exist: ps.addresses has 2, counted from 0",
        ),
        (("--index", "0"), "ps.addresses"),
        (
            ("--ps", "127.0.0.1:1"),
            "--index is required: there is no TF_CONFIG, and no address has",
        ),
        (("--index", "0", "--ps", "127.0.0.1:1", "--set", "checkpoint.every=often"), "checkpoint.every"),
        (("--index", "0", "--ps", "127.0.0.1:1", "--set", "checkpoint.url=nowhere://x"), "cannot use nowhere://x"),
    ],
)
def test_bad_settings(start: Callable[..., Process], arguments: tuple[str, ...], message: str) -> None:
    process = start(*arguments)
    assert process.wait() == (1 if "nowhere" in message else 2)
    assert len(process.said) == 1
    assert process.said[0].startswith("streamtrain: ")
    assert message in process.said[0]


def test_port_that_is_taken(start: Callable[..., Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start("--index", "0", "--ps", address)
        assert process.wait() == 2
    assert process.said[-1].startswith(f"streamtrain: cannot listen on {address}: ")
    assert not any("Traceback" in line for line in process.said)


def test_it_is_ready_once_it_can_be_used(tmp_path: Path) -> None:
    """A primary once it has what there is; a backup once it is in step (see also the tests of backups)."""
    addresses, (port,) = free_addresses(2), free_ports(1)
    overrides: dict[str, object] = {"ps.metrics": f"127.0.0.1:{port}", "ps.backups": addresses[1]}
    settings = load_settings(overrides=overrides)
    for is_backup, before, after in (
        (False, "shard 0 is being restored", None),
        (True, "shard 0 is being restored", "this is the backup of shard 0"),
    ):
        process = PsProcess(0, addresses[:1], settings, backup=is_backup)
        try:
            assert before in probe(port)[1]
            process.start()
            assert probe(port)[0] == (503 if after else 200)
            assert after is None or after in probe(port)[1]
        finally:
            process.stop()


def test_nothing_good_to_restore(tmp_path: Path, start: Callable[..., Process]) -> None:
    """It does not start empty where something was learned."""
    epoch = tmp_path / "epoch-000000001"
    epoch.mkdir()
    (epoch / "manifest.json").write_text("{")
    process = start("--index", "0", "--ps", free_addresses(1)[0], *saving(tmp_path))
    assert process.wait() == 1
    assert process.said[-1].startswith(f"streamtrain: no usable checkpoint at {tmp_path}")
    assert not any("Traceback" in line for line in process.said)
