"""Shards that change in number, a coordinator and workers that learn a real stream which counts, for tests."""

import random
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import redis

from streamtrain.cluster.client import CoordinatorClient
from streamtrain.errors import CheckpointError, ShardError
from streamtrain.processes.worker import WorkerProcess
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.ps.replication.failover import TargetPair
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl, Retry, ServerChannel, patiently
from streamtrain.ps.rpc.security import Security
from streamtrain.settings.load import load_settings
from streamtrain.store.redis.layout import RedisKeys
from streamtrain.stream.opening import open_stream
from tests.cluster.counted import beginning, differences, is_bad, messages_of, stepping
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.processes.test_ps import Process

PARTITIONS = 2
COORDINATOR = (sys.executable, "-m", "streamtrain", "coordinator")


class Scaled:
    """Real processes of shards and of the coordinator, and workers in threads; to be closed.

    Args:
        url: of Redis, for the stream and for what is published.
        topic: name of the stream.
        place: of checkpoints.
        most: how many shards there may be.
        shards: how many there are at first.
        backups: whether each has a backup; that of shard i is process `most` + i.

    Attributes:
        addresses: of all processes of shards that there may be.
        workers: those that learn.
    """

    def __init__(
        self, url: str, topic: str, place: Path, most: int = 4, shards: int = 2, *, backups: bool = False
    ) -> None:
        *ports, own = free_ports((2 if backups else 1) * most + 1)
        self._most, self._has_backups = most, backups
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self.channels = [(grpc.insecure_channel(one, options=CHANNEL_OPTIONS), one) for one in self.addresses]
        self.first = self.addresses[:shards]
        overrides: dict[str, object] = {
            "ps.addresses": ",".join(self.first),
            "coordinator.address": f"127.0.0.1:{own}",
            "checkpoint.url": str(place),
            "checkpoint.every": "1h",
            "stream.url": url,
            "stream.topic": topic,
            "stream.commit_every": "200ms",
            "publish.url": url,
            "publish.every": "300ms",
            "worker.batch_size": 20,
            "worker.batch_age": "10ms",
            "ps.timeout": "3s",
            "ps.backup_patience": "2s",
        }
        if backups:
            overrides["ps.backups"] = ",".join(self.backups(*range(shards)))
        self.settings = load_settings(overrides=overrides)
        self.options = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
        self.options += ["--set", "ps.sessions=16"]
        self.processes: dict[str, Process] = {}
        self._ended: list[Process] = []
        self.client = CoordinatorClient([f"127.0.0.1:{own}"], Security.from_settings(self.settings.security), PATIENCE)
        self._stopped = threading.Event()
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self.workers: list[WorkerProcess] = []
        self.stream = open_stream(self.settings.stream)
        self.stream.create(PARTITIONS)

    def of(self, *indices: int) -> list[str]:
        """Addresses of some processes."""
        return [self.addresses[index] for index in indices]

    def backups(self, *indices: int) -> list[str]:
        """Addresses of the backups of some shards; empty: they have none."""
        return [self.addresses[self._most + index] for index in indices] if self._has_backups else []

    def start_shard(self, index: int) -> None:
        """Starts a shard as the settings have it, or its backup."""
        place = ["--index", str(index % self._most), *(["--backup"] if index >= self._most else [])]
        self.processes[self.addresses[index]] = Process(*place, *self.options)

    def start_spare(self, index: int) -> None:
        """Starts one that waits for a place."""
        self.processes[self.addresses[index]] = Process("--spare", self.addresses[index], *self.options)

    def start_coordinator(self) -> None:
        self.processes["coordinator"] = Process(*self.options, command=COORDINATOR)

    def start(self, workers: int = 1) -> None:
        """Starts the shards of the beginning, the coordinator, which answers then, and workers."""
        for index in range(len(self.first)):
            self.start_shard(index)
            if self._has_backups:
                self.start_shard(self._most + index)
        self.start_coordinator()
        self.in_force()
        for _ in range(workers):
            self.start_worker()

    def start_worker(self) -> None:
        made, step, spec = stepping(tensorflow=False)
        worker = WorkerProcess(made, step, spec, self.first, self.settings)
        self.workers.append(worker)
        self._threads.append(threading.Thread(target=self._learn, args=(worker,)))
        self._threads[-1].start()

    def _learn(self, worker: WorkerProcess) -> None:
        try:
            worker.run(self._stopped)
        except BaseException as exc:
            self.failures.append(exc)

    def fill(self, start: int, end: int) -> None:
        """Writes samples of all partitions into the stream."""
        writer = self.stream.writer()
        for partition in range(PARTITIONS):
            for message in messages_of(partition, end)[start:]:
                writer.write(message, partition=partition)
        assert writer.flush(PATIENCE) == 0
        writer.close()

    def scale(self, *indices: int) -> ShardMap:
        """Has these shards hold the rows."""
        return self.client.scale([self.addresses[index] for index in indices], self.backups(*indices))

    def shards(self, *indices: int) -> Shards:
        """As a worker knows them."""
        places: list[ServerChannel | TargetPair] = [self.channels[index] for index in indices]
        if self._has_backups:
            places = [(self.channels[index], self.channels[self._most + index]) for index in indices]
        return Shards(places, beginning(tensorflow=False))

    def in_step(self, index: int) -> None:
        """Waits until a shard has a primary whose backup is in step."""
        controls = [RemoteControl(*self.channels[at], timeout=2.0) for at in (index, self._most + index)]

        def statuses() -> list[Any]:
            found = []
            for control in controls:
                with suppress(ShardError):
                    found.append(control.status())
            return found

        def is_so() -> bool:
            return any(one.ready and one.standing.in_step for one in statuses())

        until(is_so, PATIENCE, told=lambda: f"{statuses()}")

    def learned(self, offset: int, *indices: int) -> None:
        """Waits until these shards have learned all partitions up to an offset, in their places."""
        shards = self.shards(*indices)

        def is_so() -> bool:
            assert not self.failures, self.failures
            try:
                places = [(one.shard, one.shards) for one in (control.status() for control in shards.controls)]
                clocks = shards.clocks()
            except ShardError:
                return False
            if places != [(index, len(indices)) for index in range(len(indices))]:  # one was started again as it was
                return False
            return all(clock.get(partition, 0) >= offset for clock in clocks for partition in range(PARTITIONS))

        until(is_so, PATIENCE)

    def differences(self, samples: int, *indices: int) -> list[str]:
        """What is not learned exactly once by these shards."""
        return differences(self.shards(*indices), PARTITIONS, samples)

    def counted(self) -> float:
        """Samples that workers have learned, those that were read again among them."""
        name = "streamtrain_worker_samples_total"
        return sum(worker.metrics.registry.get_sample_value(name) or 0 for worker in self.workers)

    def dictionary(self) -> int:
        """The number of the dictionary in Redis."""
        url = str(self.settings.publish.url)
        with redis.Redis.from_url(url) as client:
            (found,) = client.hmget(RedisKeys(self.settings.publish.model).head, "dictionary")
        return int(found or 0)

    def rows(self, index: int) -> int:
        """How many rows a shard holds."""
        status = RemoteControl(*self.channels[index]).status()
        return sum(int(table.rows) for table in status.tables)

    def kill(self, name: str) -> None:
        """Kills a process, by its address, kill -9."""
        process = self.processes.pop(name)
        process.process.send_signal(signal.SIGKILL)
        self._ended.append(process)
        process.wait()

    def restart(self, index: int | None) -> None:
        """Kills a shard, or the coordinator, and starts it again as it was."""
        self.kill("coordinator" if index is None else self.addresses[index])
        if index is None:
            self.start_coordinator()
        elif index % self._most < len(self.first):
            self.start_shard(index)
        else:
            self.start_spare(index)

    def kill_while_moving(self, now: Sequence[int], maps: Sequence[list[int]], *, within: float, seed: int) -> None:
        """Moves six times from `now`, with 500 samples, to one of the maps; counts are exact each time.

        Somebody, or the coordinator, is killed at a random moment within so many seconds, and started again as it was.
        """
        rng, end = random.Random(seed), 500
        for attempt in range(6):
            for index in now if self._has_backups else ():
                self.in_step(index)
            self.fill(end, end + 500)
            end += 500
            to = rng.choice([one for one in maps if one != now])
            places = (0, self._most) if self._has_backups else (0,)
            victim = rng.choice([None, *(place + index for place in places for index in {*now, *to})])
            killer = threading.Timer(rng.random() * within, self.restart, (victim,))
            killer.start()
            try:
                self.scale(*to)
            except (ShardError, CheckpointError) as exc:
                print(f"{attempt}: {exc}")
            killer.join()
            now = self.in_force()
            print(f"{attempt}: {victim} killed on the way to {to}, now {now}")
            self.learned(end, *now)
            assert self.differences(end, *now) == []
        assert not self.failures

    def in_force(self) -> list[int]:
        """The shards that the coordinator says hold the rows, once it answers."""
        found = patiently(self.client.slots, Retry(give_up=PATIENCE), self._stopped)
        return [self.addresses.index(address) for address in found.shards]

    def close(self) -> None:
        """Ends all."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        for name in [*self.processes]:
            self.processes[name].process.send_signal(signal.SIGCONT)
            self.kill(name)
        for process in self._ended:
            for stream in (process.process.stdout, process.process.stderr):
                assert stream
                stream.close()
        self.client.close()
        for channel, _ in self.channels:
            channel.close()


def good(samples: int) -> int:
    """Good samples among as many messages of each partition."""
    return int((~is_bad(np.arange(samples))).sum()) * PARTITIONS
