"""How long does recovery take after kill -9 of a shard, with and without a backup, of a worker, of a server?

    python benchmarks/recovery.py --what shard --rows 1000000
    python benchmarks/recovery.py --what backup --rows 1000000 --rounds 3
    python benchmarks/recovery.py --what worker
    python benchmarks/recovery.py --what serving --rows 1000000
    python benchmarks/recovery.py --what cost --rounds 3

Real processes on this machine; two shards. What is killed is restarted at once, as by a supervisor.

shard    from the kill to the next push that both shards have applied: process, checkpoint, session.
backup   the same for a shard with a backup, which takes over; also how long the next backup takes to be in step.
worker   one of two workers of four partitions on Kafka: until all partitions have progressed.
serving  until the server is ready again, with all published rows loaded.
cost     samples per second of a worker on W1 with backups and without, in turns.
Prints a line of JSON: seconds by round in "s", for `cost` the rates and their ratio.
"""

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import grpc
import numpy as np
from harness.client import is_ready, learned_samples
from harness.figures import median_ratio
from harness.models import USERS, WIDTH, location, versioned
from harness.processes import Processes, exit_on_sigterm, free_addresses, free_ports
from harness.training import WARMUP_SECONDS, Run, start_workers

from streamtrain._core import Planner, hash_integers
from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ShardError
from streamtrain.model.spec import Spec
from streamtrain.ps.client import any_rejected
from streamtrain.ps.clock import Span
from streamtrain.ps.nodes.shards import RunTemplate, Shards
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl, Retry, patiently
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.train.step import Step

FILL, BATCH = 1 << 16, 1024
SHARDS, PARTITIONS = 2, 4
SESSION_SECONDS = 6
RATE = 400
RETRY = Retry(timeout=3.0)
NEVER = threading.Event()


class Feeder:
    """A worker that learns every id once, in large batches, then all of them again and again in small ones.

    Args:
        addresses: of shards, or of primaries and then of backups.
        rows: number of ids.
    """

    def __init__(self, addresses: list[str], rows: int) -> None:
        self.channels = [(grpc.insecure_channel(one, options=CHANNEL_OPTIONS), one) for one in addresses]
        pairs = list(zip(self.channels[:SHARDS], self.channels[SHARDS:], strict=False))
        step = Step(versioned)
        beginning = RunTemplate(Spec.of(versioned), step.initial_dense, step.initial_statistics, {})
        self.shards = Shards(pairs or self.channels, beginning)
        self._sizes = len(step.initial_dense), len(step.initial_statistics)
        self.rows = -(-rows // FILL) * FILL
        self._planner = Planner([(0, "sum", 0)], [WIDTH], SHARDS)
        self._client = self.shards.client("feeder", patiently(self.shards.agree, RETRY, NEVER), retry=RETRY)
        self._client.join()
        self.at = 0

    def push(self) -> bool:
        """Learns one batch; False: it was rejected, and the feeder continues from the clock of the shards."""
        end = self.at + (FILL if self.at < self.rows else BATCH)
        ids = np.arange(self.at, end) % self.rows
        n = len(ids)
        starts, every = np.array([0, n], np.int64), np.arange(n + 1, dtype=np.int32)[None, :]
        plan = self._planner.plan(hash_integers(ids), starts, every, np.zeros(n))
        self._client.pull(plan).wait()
        gradient = np.full(n * WIDTH, 0.01, np.float32)
        dense, statistics = (np.zeros(size, np.float32) for size in self._sizes)
        pushing = self._client.push(plan, gradient, dense, statistics, spans=[Span(0, self.at, end)], watermark=0)
        if any_rejected(pushing.wait()):
            clocks = patiently(self.shards.clocks, RETRY, NEVER)
            self.at = min(clock.get(0, 0) for clock in clocks)
            return False
        self.at = end
        return True

    def fill(self) -> float:
        """Learns every id; the seconds it took."""
        began = time.monotonic()
        while self.at < self.rows:
            self.push()
        return time.monotonic() - began

    def recover(self, began: float) -> tuple[float, int]:
        """Seconds from `began` until a new batch is applied, and the number of samples that were learned again."""
        before, back = self.at, 0
        while True:
            at = self.at
            if not self.push():
                back += at - self.at
            elif self.at > before:
                return time.monotonic() - began, back

    def in_step(self, channel: int) -> bool:
        """Whether a process is the primary and its backup in step."""
        try:
            status = RemoteControl(*self.channels[channel], timeout=2.0).status()
        except ShardError:
            return False
        return bool(status.ready and status.standing.in_step)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
        for channel, _ in self.channels:
            channel.close()


def kill(processes: Processes, name: str) -> float:
    """Kills a process with SIGKILL; when that was, monotonic seconds."""
    at = time.monotonic()
    os.kill(processes.pids[name], signal.SIGKILL)
    processes.stop(name)
    return at


def shard(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> dict[str, Any]:
    """A shard without a backup."""
    addresses, place = free_addresses(SHARDS), processes.folder / "checkpoints"
    kept = {"url": str(place), "every": "2s", "keep": 1}
    processes.settings({"ps": {"addresses": addresses}, "checkpoint": kept})
    processes.start_shards(SHARDS)
    feeder = Feeder(addresses, args.rows)
    stack.callback(feeder.close)
    filled = feeder.fill()
    epochs, found = Epochs(str(place)), []
    processes.wait_until(lambda: _is_saved(epochs, feeder.rows), "the rows were not saved", 600)
    for _ in range(args.rounds):
        feeder.push()
        began = kill(processes, "ps1")
        processes.start("ps1", "ps", "--index", "1")
        found.append(feeder.recover(began))
    return {"rows": feeder.rows, "filled_s": filled, "s": [s for s, _ in found], "learned_again": [n for _, n in found]}


def _is_saved(epochs: Epochs, rows: int) -> bool:
    newest = max(epochs.numbers(), default=None)
    return newest is not None and all(one["clock"].get("0", 0) >= rows for one in epochs.open(newest).shards)


def backup(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> dict[str, Any]:
    """A shard with a backup."""
    addresses = free_addresses(2 * SHARDS)
    processes.settings({"ps": {"addresses": addresses[:SHARDS], "backups": addresses[SHARDS:]}})
    for i in range(SHARDS):
        _start_pair(processes, i)
    feeder = Feeder(addresses, args.rows)
    stack.callback(feeder.close)
    filled, taken, again, copied = feeder.fill(), [], [], []
    at = 0
    processes.wait_until(lambda: feeder.in_step(0) and feeder.in_step(1), "backups were not in step", 600)
    for _ in range(args.rounds):
        feeder.push()
        seconds, back = feeder.recover(kill(processes, ("ps1", "ps1-backup")[at]))
        taken.append(seconds)
        again.append(back)
        processes.start(("ps1", "ps1-backup")[at], "ps", "--index", "1", *([["--backup"], []][at == 0]))
        at, began = 1 - at, time.monotonic()
        while not feeder.in_step(1 + SHARDS * at):
            feeder.push()
        copied.append(time.monotonic() - began)
    return {"rows": feeder.rows, "filled_s": filled, "s": taken, "learned_again": again, "next_in_step_s": copied}


def _start_pair(processes: Processes, index: int) -> None:
    processes.start(f"ps{index}-backup", "ps", "--index", str(index), "--backup")
    processes.start(f"ps{index}", "ps", "--index", str(index))


def worker(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> dict[str, Any]:
    """One of two workers."""
    addresses = free_addresses(SHARDS)
    data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    broker = stack.enter_context(Broker(resolve(), data=data))
    stream = {"url": f"kafka://{broker.servers}", "topic": "samples", "create": PARTITIONS}
    kafka = {"session.timeout.ms": SESSION_SECONDS * 1000, "heartbeat.interval.ms": 1000}
    processes.settings(
        {"stream": stream, "ps": {"addresses": addresses}},
        model=location("versioned"),
    )
    samples = [json.dumps({"user": user, "label": 1, "ts": 1.0}) for user in USERS]
    (processes.folder / "samples.jsonl").write_text("\n".join(samples))
    processes.start_shards(SHARDS)
    ports = free_ports(2)

    def start(i: int) -> None:
        metrics = ("--set", f"worker.metrics=127.0.0.1:{ports[i]}")
        processes.start(f"worker{i}", "worker", "--set", f"stream.kafka={json.dumps(kafka)}", *metrics)

    start(0)
    start(1)
    options = ("--rate", str(RATE), "--repeat", "--create", str(PARTITIONS))
    processes.start("produce", "produce", "samples.jsonl", *options)
    controls = [RemoteControl(grpc.insecure_channel(one, options=CHANNEL_OPTIONS), one) for one in addresses]

    def clock() -> dict[int, int]:
        try:
            clocks = [wire.decode_clock(control.status().clock) for control in controls]
        except ShardError:
            return {}
        return {p: min(one.get(p, 0) for one in clocks) for p in clocks[0]}

    def shared() -> bool:
        """Whether both workers learn, and all partitions are learned."""
        return all(map(learned_samples, ports)) and len(clock()) == PARTITIONS

    found = []
    processes.wait_until(shared, "the workers did not learn")
    for _ in range(args.rounds):
        processes.wait_until(partial(_is_past, clock, clock()), "not all partitions were learned")
        began, before = kill(processes, "worker1"), clock()
        processes.wait_until(partial(_is_past, clock, before, RATE // PARTITIONS), "no worker took over")
        found.append(time.monotonic() - began)
        start(1)
        processes.wait_until(shared, "the workers did not learn")
    return {"session_timeout_s": SESSION_SECONDS, "s": found}


def _is_past(clock: Callable[[], dict[int, int]], before: dict[int, int], by: int = 1) -> bool:
    """Whether all partitions have progressed by `by` samples: more than was in flight."""
    now = clock()
    return bool(now) and all(now[p] >= at + by for p, at in before.items())


def serving(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> dict[str, Any]:
    """A serving process, all of whose processes are killed."""
    store = stack.enter_context(Valkey())
    addresses, (port,) = free_addresses(SHARDS), free_ports(1)
    groups: dict[str, dict[str, Any]] = {
        "ps": {"addresses": addresses},
        "publish": {"url": store.url, "every": "1s", "model": "model"},
    }
    processes.settings(groups | {"serve": {"listen": f"127.0.0.1:{port}"}}, model=location("versioned"))
    processes.start_shards(SHARDS)
    feeder = Feeder(addresses, args.rows)
    stack.callback(feeder.close)
    feeder.fill()
    redis = RedisServer(store.url)
    stack.callback(redis.close)
    origin = RedisOrigin(RedisModel(redis, "model"))

    def published() -> bool:
        head = origin.find(None)
        return head is not None and sum(head.rows.values()) >= feeder.rows

    processes.wait_until(published, "the rows were not published", 600)
    found = []
    for round_ in range(args.rounds + 1):
        began = time.monotonic()
        processes.start("serve", "serve")
        processes.wait_until(lambda: is_ready(port), "serving was not ready", 600)
        if round_:
            found.append(time.monotonic() - began)
        kill(processes, "serve")
    return {"rows": feeder.rows, "s": found}


def cost(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> dict[str, Any]:
    """What backups cost a worker."""
    rates: dict[str, list[float]] = {"without": [], "with": []}
    training = argparse.Namespace(workload="w1", workers=1, warmup=WARMUP_SECONDS, seconds=args.seconds)
    for _ in range(args.rounds):
        for name, of_name in rates.items():
            addresses = free_addresses(2 * SHARDS)
            pair = {"backups": addresses[SHARDS:]} if name == "with" else {}
            processes.settings({"ps": {"addresses": addresses[:SHARDS], **pair}, "worker": {"batch_size": BATCH}})
            for i in range(SHARDS if name == "with" else 0):
                _start_pair(processes, i)
            processes.start_shards(SHARDS if name == "without" else 0)
            workers = start_workers(processes, training, "dedicated", batches=200)
            of_name.append(Run(processes, workers, training).samples_per_s)
            processes.stop(*processes.pids)
    return {**rates, "ratio": median_ratio(rates["with"], rates["without"])}


KINDS = {"shard": shard, "backup": backup, "worker": worker, "serving": serving, "cost": cost}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", choices=KINDS, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a run of `cost`")
    args = parser.parse_args()
    exit_on_sigterm()
    with ExitStack() as stack:
        processes = stack.enter_context(Processes())
        began = time.monotonic()
        done = KINDS[args.what](args, processes, stack)
        figures = {"what": args.what, **done, "load": round(os.getloadavg()[0], 1)}
        figures["took_s"] = time.monotonic() - began
        print(json.dumps(figures, default=float))


if __name__ == "__main__":
    main()
