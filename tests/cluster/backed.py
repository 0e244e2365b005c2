"""Shards with backups, all real processes, and a worker that learns a real stream which counts, for tests."""

import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from streamtrain.errors import ShardError
from streamtrain.processes.worker import WorkerProcess
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl
from streamtrain.settings.load import load_settings
from streamtrain.stream.opening import open_stream
from tests.cluster.counted import beginning, differences, is_bad, messages_of, stepping
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.probes import is_ready
from tests.processes.test_ps import Process

PARTITIONS = 2
SAMPLES = 12_000  # of each partition


class Backed:
    """Two shards, each of which may be at two places: 0 is that of ps.addresses, 1 that of ps.backups.

    Args:
        url: of the stream.
        topic: its name.
        place: of checkpoints, which are taken all the time; None: there are none, and nothing is published.

    Attributes:
        settings: of the worker.
    """

    def __init__(self, url: str, topic: str, place: Path | None = None) -> None:
        ports = free_ports(8)
        addresses = [f"127.0.0.1:{port}" for port in ports[:4]]
        self._metrics = ports[4:]
        self._options = ["--ps", ",".join(addresses[:2]), f"--set=ps.backups={','.join(addresses[2:])}"]
        self._options += ["--set=ps.backup_patience=2s"]
        if place is not None:
            self._options += [f"--set=checkpoint.url={place}", "--set=checkpoint.every=300ms"]
            self._options += [f"--set=publish.url={url}", "--set=publish.every=1h"]
        self.channels = [(grpc.insecure_channel(one, options=CHANNEL_OPTIONS), one) for one in addresses]
        self.processes: dict[tuple[int, int], Process] = {}
        self._ended: list[Process] = []
        overrides: dict[str, object] = {"stream.url": url, "stream.topic": topic, "worker.batch_size": 20}
        overrides |= {"ps.addresses": ",".join(addresses[:2]), "ps.backups": ",".join(addresses[2:])}
        overrides |= {"ps.timeout": "3s", "stream.dead_letters": False, "worker.batch_age": "10ms"}
        self.settings = load_settings(overrides=overrides)
        self._stopped = threading.Event()
        self._failures: list[BaseException] = []
        self._learner: threading.Thread | None = None

    def start(self, index: int, place: int) -> None:
        """Starts a process of a shard."""
        options = ["--index", str(index), *self._options, *(["--backup"] if place else [])]
        options += ["--set", f"ps.metrics=127.0.0.1:{self._metrics[2 * place + index]}"]
        self.processes[index, place] = Process(*options)

    def start_all(self) -> None:
        """Starts both shards with their backups, and a worker; returns when the backups are in step."""
        for place in (1, 0):
            for index in (0, 1):
                self.start(index, place)
        made, step, spec = stepping(tensorflow=False)
        self.worker = WorkerProcess(made, step, spec, self.settings.ps.addresses, self.settings)
        self._stream = open_stream(self.settings.stream)
        self._stream.create(PARTITIONS)
        self._learner = threading.Thread(target=self._learn)
        self._learner.start()
        for index in (0, 1):
            self.wait_in_step(index, 0)

    def _learn(self) -> None:
        try:
            self.worker.run(self._stopped)
        except BaseException as exc:
            self._failures.append(exc)

    def fill(self, start: int, end: int) -> None:
        """Writes samples of all partitions into the stream."""
        writer = self._stream.writer()
        for partition in range(PARTITIONS):
            for message in messages_of(partition, end)[start:]:
                writer.write(message, partition=partition)
        assert writer.flush(PATIENCE) == 0
        writer.close()

    def is_ready(self, index: int, place: int) -> bool:
        """What a process tells probes."""
        return is_ready(self._metrics[2 * place + index])

    def wait_ready(self, index: int, place: int) -> None:
        """Until it tells them that it is."""
        until(lambda: self.is_ready(index, place), PATIENCE)

    def status(self, index: int, place: int) -> Any:
        """What a process says of itself; None: nothing."""
        try:
            return RemoteControl(*self.channels[2 * place + index], timeout=2.0).status()
        except ShardError:
            return None

    def wait_in_step(self, index: int, place: int) -> None:
        """Until a place is primary, with a backup in step."""
        self._wait_for(index, place, lambda status: status.ready and status.standing.in_step)

    def wait_alone(self, index: int, place: int) -> None:
        """Until a place is primary, and has lost its backup."""
        self._wait_for(index, place, lambda status: status.counters["backup_lost"] > 0)

    def _wait_for(self, index: int, place: int, condition: Any) -> None:
        def is_so() -> bool:
            assert not self._failures
            status = self.status(index, place)
            return status is not None and condition(status)

        until(is_so, PATIENCE)

    def learned(self, offset: int) -> None:
        """Waits until all shards, wherever they are, have learned all partitions up to an offset."""
        shards = self.shards()

        def is_so() -> bool:
            assert not self._failures
            try:
                clocks = shards.clocks()
            except ShardError:
                return False
            return all(clock.get(partition, 0) >= offset for clock in clocks for partition in range(PARTITIONS))

        until(is_so, PATIENCE)

    def shards(self) -> Shards:
        """As a worker knows them."""
        pairs = [(self.channels[index], self.channels[2 + index]) for index in (0, 1)]
        return Shards(pairs, beginning(tensorflow=False))

    def send(self, index: int, place: int, number: int) -> None:
        """Sends a process a signal."""
        self.processes[index, place].process.send_signal(number)

    def ended(self, index: int, place: int) -> tuple[int, list[str]]:
        """The exit code of a process, once it has ended, and what it said."""
        process = self.processes.pop((index, place))
        self._ended.append(process)
        return process.wait(), process.said

    def kill(self, index: int, place: int) -> None:
        """Kills a process, kill -9."""
        self.send(index, place, signal.SIGKILL)
        self.ended(index, place)

    def assert_exact(self, samples: int) -> None:
        """Assert that each sample was learned once, by all shards, and that none was read again for it."""
        self.assert_counts(samples)
        good = int((~is_bad(np.arange(samples))).sum()) * PARTITIONS
        name = "streamtrain_worker_samples_total"
        until(lambda: (self.worker.metrics.registry.get_sample_value(name) or 0) >= good, PATIENCE)
        assert self.worker.metrics.registry.get_sample_value(name) == good

    def assert_counts(self, samples: int) -> None:
        """Assert that each sample was learned once by all shards, however often it was read."""
        assert differences(self.shards(), PARTITIONS, samples) == []

    def close(self) -> None:
        """Ends all."""
        self._stopped.set()
        for key in [*self.processes]:
            self.send(*key, signal.SIGCONT)
        if self._learner is not None:
            self._learner.join(PATIENCE)
        for key in [*self.processes]:
            self.kill(*key)
        for process in self._ended:
            for stream in (process.process.stdout, process.process.stderr):
                assert stream
                stream.close()
        for channel, _ in self.channels:
            channel.close()
