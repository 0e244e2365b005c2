"""Real processes on a real stream, killed with kill -9 at random moments, and a count of what they learned.

    python -m tests.chaos.killing --stream kafka --kills 24 --every 4 --restarts 2 --tensorflow

Shards are `streamtrain ps`, with a checkpoint every second. Workers are processes of this module, which learn a model
that counts from a topic that fills meanwhile, one message in 97 bad. Workers and shards are killed and started again,
the broker is killed and started again, a worker joins and one leaves. At the end every id must have been counted
exactly as often as it is in the log, on every shard, the dense weights must count the samples, and the dead letters
must be the bad messages. Prints a line of JSON; the exit code is 0 only if all is exact.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ShardUnavailable
from streamtrain.processes.worker import WorkerProcess
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS
from streamtrain.settings.groups import Settings
from streamtrain.settings.load import load_settings
from streamtrain.stream.opening import open_stream
from streamtrain.stream.source import Stream
from tests.chaos.letters import wrong_letters
from tests.cluster.counted import beginning, differences, is_bad, messages_of, stepping
from tests.patience import until
from tests.ports import free_ports

PARTITIONS = 4
TOPIC = "counted"
BATCH = 50
PAUSE = threading.Event()


def settings_of(url: str, ps: str) -> Settings:
    """Of every process."""
    overrides: dict[str, object] = {
        "stream.url": url,
        "stream.topic": TOPIC,
        "stream.commit_every": "0.5s",
        "worker.batch_size": BATCH,
        "worker.batch_age": "50ms",
        "ps.addresses": ps,
        "ps.timeout": "3s",
    }
    if url.startswith("kafka:"):
        overrides["stream.kafka"] = json.dumps({"session.timeout.ms": 6000, "heartbeat.interval.ms": 500})
    return load_settings(overrides=overrides)


def work(args: argparse.Namespace) -> None:
    """A worker process, until SIGTERM."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    made, step, spec = stepping(args.tensorflow)
    WorkerProcess(made, step, spec, args.ps.split(","), settings_of(args.url, args.ps)).run(stopped)


@dataclass
class Process:
    """One that is killed and started again."""

    name: str
    command: list[str]
    running: subprocess.Popen[bytes]
    log: Path


class Brokers:
    """Several brokers, each its own controller; every partition is on all of them. One is killed at a time."""

    def __init__(self, count: int, folder: Path, chosen: random.Random) -> None:
        plain, control = free_ports(count), free_ports(count)
        voters = ",".join(f"{i}@127.0.0.1:{port}" for i, port in enumerate(control))
        self.servers = ",".join(f"127.0.0.1:{port}" for port in plain)
        self._brokers = [
            Broker(
                resolve(),
                data=folder / f"broker{i}",
                port=plain[i],
                properties={
                    "node.id": f"{i}",
                    "controller.quorum.voters": voters,
                    "listeners": f"PLAINTEXT://127.0.0.1:{plain[i]},CONTROLLER://127.0.0.1:{control[i]}",
                    "default.replication.factor": f"{count}",
                    "offsets.topic.replication.factor": f"{count}",
                    "transaction.state.log.replication.factor": f"{count}",
                    "min.insync.replicas": f"{count // 2 + 1}",
                },
            )
            for i in range(count)
        ]
        self._chosen, self._killed = chosen, self._brokers[0]

    def start_all(self) -> None:
        """Starts all: none answers before most of them are there."""
        with ThreadPoolExecutor(len(self._brokers)) as threads:
            list(threads.map(Broker.start, self._brokers))

    def kill(self) -> None:
        """Kills one."""
        self._killed = self._chosen.choice(self._brokers)
        self._killed.kill()

    def start(self) -> None:
        """Starts it again."""
        self._killed.start()

    def close(self) -> None:
        """Ends all."""
        for one in self._brokers:
            one.kill()
            one.close()


class Service:
    """The broker, or several, or the server of Redis Streams; its data outlive it."""

    def __init__(self, kind: str, brokers: int, folder: Path, chosen: random.Random) -> None:
        self.kill: Callable[[], object]
        self.start: Callable[[], object]
        self.stop: Callable[[], object]
        if kind == "kafka" and brokers > 1:
            several = Brokers(brokers, folder, chosen)
            several.start_all()
            self.url = f"kafka://{several.servers}"
            self.kill, self.start, self.stop = several.kill, several.start, several.close
        elif kind == "kafka":
            self._broker = Broker(resolve(), data=folder / "broker")
            self._broker.start()
            self.url = f"kafka://{self._broker.servers}"
            self.kill, self.start, self.stop = self._broker.kill, self._broker.start, self._broker.close
        else:
            server = Valkey(folder / "valkey", appendonly=True)
            server.start()
            self.url = server.url
            self.kill, self.start, self.stop = server.kill, server.start, server.stop


class Chaos:
    """Two shards and two workers, and the hand that kills them."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self.random = random.Random(args.seed)
        self._ps = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
        self.service = Service(args.stream, args.brokers, folder, self.random)
        self.settings = settings_of(self.service.url, self._ps)
        self.stream = open_stream(self.settings.stream)
        self.stream.create(PARTITIONS)
        self.began = time.time()
        self.kills: Counter[str] = Counter()
        self._workers = 0
        self.processes = [self._start(f"ps{i}", self._shard(i)) for i in range(2)]
        for _ in range(2):
            self.join()

    def _shard(self, index: int) -> list[str]:
        settings = {"checkpoint.url": str(self._folder / "checkpoints")}
        settings["checkpoint.every"] = self._args.checkpoint_every
        options = [f"--set={key}={value}" for key, value in settings.items()]
        return ["-m", "streamtrain", "ps", "--index", str(index), "--ps", self._ps, *options]

    def join(self) -> None:
        """One more worker."""
        command = ["-m", "tests.chaos.killing", "--url", self.service.url, "--ps", self._ps]
        command += ["--tensorflow"] if self._args.tensorflow else []
        self.processes.append(self._start(f"worker{self._workers}", command))
        self._workers += 1

    def leave(self) -> None:
        """A worker goes, in good order."""
        leaving = next(one for one in self.processes if one.name.startswith("worker"))
        self.processes.remove(leaving)
        until(leaving.log.read_text, 180)  # what has just been started knows no signals yet
        leaving.running.terminate()
        if leaving.running.wait(180) != 0:
            raise SystemExit(
                f"{leaving.name} left with {leaving.running.returncode}:\n{leaving.log.read_text()[-3000:]}"
            )

    def _start(self, name: str, command: list[str]) -> Process:
        log = self._folder / f"{name}.log"
        with log.open("ab") as output:
            running = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output)
        return Process(name, command, running, log)

    def kill_one(self) -> None:
        """Kills a process at random and starts it again."""
        at = self.random.randrange(len(self.processes))
        process = self.processes[at]
        if self._args.terminate and process.log.stat().st_size:  # what has just been started knows no signals yet
            process.running.terminate()
        else:
            process.running.kill()
        process.running.wait()
        self.kills[process.name.rstrip("0123456789")] += 1
        self.processes[at] = self._start(process.name, process.command)

    def restart_service(self) -> None:
        """Kills the broker, and starts it again after a while."""
        self.service.kill()
        self.kills["broker"] += 1
        PAUSE.wait(self._args.outage)
        self.service.start()

    def check_alive(self) -> None:
        """Nobody may end by itself."""
        for process in self.processes:
            if process.running.poll() is not None:
                said = process.log.read_text()[-3000:]
                raise SystemExit(f"{process.name} ended by itself with {process.running.returncode}:\n{said}")

    def wait_for_the_end(self, shards: Shards, timeout: float) -> None:
        """Until all shards have learned the whole log."""
        expected = dict.fromkeys(range(PARTITIONS), self._args.samples)
        deadline, clocks = time.monotonic() + timeout, []
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                clocks = shards.clocks()
            except ShardUnavailable:
                clocks = []
            if clocks == [expected, expected]:
                return
            PAUSE.wait(0.2)
        said = "\n".join(f"{one.name}: {one.log.read_text()[-1500:]}" for one in self.processes)
        raise SystemExit(f"it does not come to rest: clocks are {clocks}, the log ends at {expected}\n{said}")

    def shards(self) -> Shards:
        """To ask them."""
        places = [(grpc.insecure_channel(a, options=CHANNEL_OPTIONS), a) for a in self._ps.split(",")]
        return Shards(places, beginning(self._args.tensorflow))

    def stop(self) -> None:
        """Ends all."""
        for process in self.processes:
            process.running.kill()
            process.running.wait()
        self.service.stop()


def fill(stream: Stream, samples: int, rate: float, ended: threading.Event) -> None:
    """Writes the log, at so many messages a second and partition, whatever happens to the broker meanwhile."""
    writer = stream.writer()
    logs = [messages_of(p, samples) for p in range(PARTITIONS)]
    began = time.monotonic()
    for offset in range(samples):
        if (ahead := offset / rate - (time.monotonic() - began)) > 0:
            writer.flush(ahead) if ahead > 0.05 else ended.wait(ahead)
        for partition, messages in enumerate(logs):
            writer.write(messages[offset], partition=partition)
        if ended.is_set():
            break
    while writer.flush(1.0) and not ended.is_set():
        continue
    writer.close()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One run; raises SystemExit if anything is not exact."""
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(args, Path(folder))
        ended = threading.Event()
        filling = threading.Thread(target=fill, args=(chaos.stream, args.samples, args.rate, ended))
        try:
            filling.start()
            steps: list[Callable[[], None]] = [chaos.kill_one] * args.kills + [chaos.restart_service] * args.restarts
            chaos.random.shuffle(steps)
            steps.insert(len(steps) // 3, chaos.join)
            steps.insert(2 * len(steps) // 3, chaos.leave)
            for step in steps:
                PAUSE.wait(args.every * chaos.random.uniform(0.5, 1.5))
                chaos.check_alive()
                step()
            shards = chaos.shards()
            chaos.wait_for_the_end(shards, args.timeout)
            wrong = differences(shards, PARTITIONS, args.samples)
            bad = np.flatnonzero(is_bad(np.arange(args.samples))).tolist()
            wrong += wrong_letters(chaos.settings.stream, {(p, offset) for p in range(PARTITIONS) for offset in bad})
            if wrong:
                raise SystemExit(f"{len(wrong)} counts are wrong: {wrong[:10]}")
            lines = {one.name: one.log.read_text().count("\n") for one in chaos.processes}
            statuses = [control.status().counters for control in shards.controls]
        finally:
            ended.set()
            chaos.stop()
            filling.join()
    return {
        "stream": args.stream,
        "kills": dict(chaos.kills),
        "samples": args.samples * PARTITIONS,
        "dead_letters": len(bad) * PARTITIONS,
        "counts": "exact",
        "lines_of_log": lines,
        "seconds": round(time.time() - chaos.began, 1),
        "pushes": [{k: n for k, n in one.items() if k.startswith("pushes")} for one in statuses],
    }


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stream", choices=["kafka", "redis"], default="kafka")
    parser.add_argument("--brokers", type=int, default=1, help="of Kafka; with several, one is killed at a time")
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--terminate", action="store_true", help="processes get SIGTERM instead")
    parser.add_argument("--checkpoint-every", default="1s")
    parser.add_argument("--restarts", type=int, default=2, help="of the broker")
    parser.add_argument("--outage", type=float, default=0.0, help="seconds for which the broker is away each time")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two faults, on average")
    parser.add_argument("--samples", type=int, default=60_000, help="of each of 4 partitions")
    parser.add_argument("--rate", type=float, default=1000.0, help="samples per second that a partition gets")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for coming to rest after the last fault")
    parser.add_argument("--tensorflow", action="store_true", help="workers run the model's graph")
    parser.add_argument("--seed", type=int, default=0)
    for worker_only in ("ps", "url"):
        parser.add_argument(f"--{worker_only}")
    return parser.parse_args(given)


def main() -> None:
    """Runs it, or one of its workers."""
    args = parse()
    if args.url:
        work(args)
    else:
        sys.stdout.write(json.dumps(run(args)) + "\n")


if __name__ == "__main__":
    main()
