"""Real processes, killed with kill -9 at random moments, and a count of what they learned: make chaos.

    python -m tests.cluster.chaos --kills 24 --every 4 --tensorflow

Shards are `streamtrain ps`, with a checkpoint every second. Workers are processes of this module, which learn a model
that counts from a log that everybody can make by itself; after a kill they come back with other partitions, which may
be another worker's as well. At the end every id must have been counted exactly as often as it is in the log, on every
shard, and the dense weights must count the samples. Prints a line of JSON; the exit code is 0 only if all is exact.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from streamtrain._core import Planner, hash_bytes
from streamtrain.errors import ShardUnavailable
from streamtrain.model.features import Categorical, Constant
from streamtrain.model.model import Model
from streamtrain.model.optimizers import SGD
from streamtrain.model.samples import SampleReader
from streamtrain.model.schema import Schema
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Span
from streamtrain.ps.control import CHANNEL_OPTIONS, Retry, patiently
from streamtrain.ps.shards import Beginning, Shards
from streamtrain.train.step import StepResult
from streamtrain.train.worker import Pace, Worker
from tests.cluster.ports import free_ports

PARTITIONS = 4
IDS = 2000
FEATURES = 3
DENSE = 7
BATCH = 50


def log_of(partition: int, samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids [samples, FEATURES] of a partition: the same in every process."""
    return np.random.default_rng(partition).zipf(1.3, (samples, FEATURES)) % IDS


class GrowingLog:
    """A source to which samples are added with time.

    Args:
        samples: of each partition in the end.
        began: when it was empty, seconds since the epoch.
        rate: samples that a partition gets per second.
    """

    def __init__(self, model: Model, samples: int, began: float, rate: float) -> None:
        self._log = [log_of(p, samples) for p in range(PARTITIONS)]
        self._samples, self._began, self._rate = samples, began, rate
        self._reader = SampleReader(model)
        self._tick = threading.Event()

    def ends(self) -> Mapping[int, int]:
        return dict.fromkeys(range(PARTITIONS), min(self._samples, int((time.time() - self._began) * self._rate)))

    def read(self, spans: Sequence[Span]) -> tuple[Any, list[Any]]:
        ids = np.concatenate([self._log[p][start:end] for p, start, end in spans])
        columns = {f"id{i}": ids[:, i] for i in range(FEATURES)} | {"label": np.zeros(len(ids))}
        return next(iter(self._reader.batches(columns, len(ids))))

    def wait(self, seconds: float) -> bool:
        self._tick.wait(seconds)
        return True


def counting(inputs: dict[str, Any]) -> Any:
    """Adds all ids' rows and a weight that counts samples."""
    import keras

    ones = keras.layers.Lambda(lambda x: x * 0 + 1, output_shape=(1,))(inputs["id0"])
    samples = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(ones)
    return keras.layers.Add()([*inputs.values(), samples])


def model() -> Model:
    return Model(
        Schema(
            features=[
                Categorical(f"id{i}", table="ids", dim=1, combiner="sum", init=Constant(0.0)) for i in range(FEATURES)
            ]
        ),
        counting,
        loss=lambda labels, predictions: -predictions,
        reduction="sum",
        embedding_optimizer=SGD(1.0),
        dense_optimizer=SGD(1.0),
    )


class CountingStep:
    """The training step of the model, by hand, so that a worker starts at once."""

    initial_dense = np.zeros(DENSE, np.float32)
    initial_statistics = np.zeros(0, np.float32)

    def train(self, parameters: Any, plan: Any, rows: Any, batch: Any) -> StepResult:
        n = len(batch)
        return StepResult(
            predictions=np.zeros((n, 1), np.float32),
            loss=0.0,
            row_gradient=np.full((n, plan.width), -1, np.float32),
            dense_gradient=np.full(DENSE, -n, np.float32),
            statistics_change=np.zeros(0, np.float32),
        )


def beginning(tensorflow: bool) -> tuple[Model, Any, Beginning]:
    made = model()
    if tensorflow:
        from streamtrain.train.step import Step

        step = Step(made)
        return made, step, Beginning(Spec.of(made), step.initial_dense, step.initial_statistics, {})
    table = {"name": "ids", **made.schema.tables[0].settings(made.embedding_optimizer, made.seed)}
    spec = Spec(
        made.schema.fingerprint(), made.seed, made.reduction, (table,), ((DENSE,),), (), made.dense_optimizer.settings()
    )
    return made, CountingStep(), Beginning(spec, CountingStep.initial_dense, CountingStep.initial_statistics, {})


def connect(ps: str, what: Beginning) -> Shards:
    return Shards([(grpc.insecure_channel(a, options=CHANNEL_OPTIONS), a) for a in ps.split(",")], what)


def work(args: argparse.Namespace) -> None:
    """A worker process, until SIGTERM."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    made, step, what = beginning(args.tensorflow)
    shards = connect(args.ps, what)
    count = len(args.ps.split(","))
    run = patiently(shards.agree, Retry(), stopped)
    client = shards.client(args.name, run, retry=Retry(timeout=3.0), stopped=stopped)
    worker = Worker(
        *(made, step, client, lambda: patiently(shards.clocks, Retry(), stopped)),
        source=GrowingLog(made, args.samples, args.began, args.rate),
        shards=count,
        pace=Pace(batch_size=BATCH, beat_seconds=0.5),
    )
    worker.run([int(p) for p in args.partitions.split(",")], stopped)


@dataclass
class Process:
    """One that is killed and started again."""

    name: str
    command: list[str]
    running: subprocess.Popen[bytes]
    log: Path


class Chaos:
    """Two shards and two workers, and the hand that kills them."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._random = random.Random(args.seed)
        self._ps = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
        self._began = time.time()
        self._generation = 0
        self.kills: Counter[str] = Counter()
        self.processes = [self._start(f"ps{i}", self._shard(i)) for i in range(2)]
        self.processes += [self._start(f"worker{i}", self._worker(i, [i, i + 2])) for i in range(2)]

    def _shard(self, index: int) -> list[str]:
        settings = {"checkpoint.url": str(self._folder / "checkpoints"), "checkpoint.every": "1s"}
        options = [f"--set={key}={value}" for key, value in settings.items()]
        return ["-m", "streamtrain", "ps", "--index", str(index), "--ps", self._ps, *options]

    def _worker(self, index: int, partitions: Sequence[int]) -> list[str]:
        self._generation += 1
        args = self._args
        options = {
            "ps": self._ps,
            "name": f"worker{index}-{self._generation}",
            "partitions": ",".join(map(str, partitions)),
            "samples": args.samples,
            "began": self._began,
            "rate": args.rate,
        }
        listed = [f"--{key}={value}" for key, value in options.items()]
        return ["-m", "tests.cluster.chaos", *listed, *(["--tensorflow"] if args.tensorflow else [])]

    def _start(self, name: str, command: list[str]) -> Process:
        log = self._folder / f"{name}.log"
        with log.open("ab") as output:
            running = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output)
        return Process(name, command, running, log)

    def kill_one(self) -> None:
        """Kills a process at random and starts it again; a worker takes over other partitions."""
        at = self._random.randrange(len(self.processes))
        process = self.processes[at]
        process.running.kill()
        process.running.wait()
        self.kills[process.name] += 1
        if process.name.startswith("worker"):
            other = self.processes[5 - at]  # of the two workers, which are the last two
            kept = next(one for one in other.command if one.startswith("--partitions")).partition("=")[2].split(",")
            missing = {p for p in range(PARTITIONS) if str(p) not in kept}
            also = {self._random.randrange(PARTITIONS)}  # maybe one that the other has, too
            process.command = self._worker(at - 2, sorted(missing | also))
        self.processes[at] = self._start(process.name, process.command)

    def check_alive(self) -> None:
        """Nobody may end by itself."""
        for process in self.processes:
            if process.running.poll() is not None:
                said = process.log.read_text()[-3000:]
                raise SystemExit(f"{process.name} ended by itself with {process.running.returncode}:\n{said}")

    def wait_for_the_end(self, what: Beginning, timeout: float) -> Shards:
        """Until all shards have learned the whole log."""
        shards = connect(self._ps, what)
        expected = dict.fromkeys(range(PARTITIONS), self._args.samples)
        deadline, tick, clocks = time.monotonic() + timeout, threading.Event(), []
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                clocks = shards.clocks()
            except ShardUnavailable:
                clocks = []
            if clocks == [expected, expected]:
                return shards
            tick.wait(0.2)
        raise SystemExit(f"it does not come to rest: clocks are {clocks}, the log ends at {expected}")

    def stop(self) -> None:
        for process in self.processes:
            process.running.kill()
            process.running.wait()


def differences(shards: Shards, samples: int) -> list[str]:
    """Ids whose count is not that of the log, and wrong counts of samples."""
    expected = Counter(np.concatenate([log_of(p, samples).ravel() for p in range(PARTITIONS)]).tolist())
    ids = sorted(expected)
    keys = np.array([hash_bytes(str(one).encode()) for one in ids], np.uint64)
    plan = Planner([(0, "sum", 0)], [1], 2).plan(
        keys, np.array([0, len(ids)]), np.arange(len(ids) + 1, dtype=np.int32)[None, :], np.zeros(len(ids))
    )
    client = shards.client("checker", shards.agree())
    client.join()
    pulled = client.pull(plan).wait()
    client.close()
    counted = plan.pool(pulled.rows)[:, 0]
    wrong = [
        f"id {one}: {n} instead of {expected[one]}" for one, n in zip(ids, counted, strict=True) if n != expected[one]
    ]
    total = samples * PARTITIONS
    return wrong + [f"a weight: {n} instead of {total}" for n in pulled.parameters if n != total]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One run; raises SystemExit if anything is not exact."""
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(args, Path(folder))
        tick = threading.Event()
        try:
            *_, what = beginning(args.tensorflow)
            while sum(chaos.kills.values()) < args.kills:
                tick.wait(args.every * chaos._random.uniform(0.5, 1.5))
                chaos.check_alive()
                chaos.kill_one()
            shards = chaos.wait_for_the_end(what, args.timeout)
            wrong = differences(shards, args.samples)
            if wrong:
                raise SystemExit(f"{len(wrong)} counts are wrong: {wrong[:10]}")
            statuses = [control.status().counters for control in shards.controls]
        finally:
            chaos.stop()
    return {
        "kills": dict(chaos.kills),
        "samples": args.samples * PARTITIONS,
        "counts": "exact",
        "seconds": round(time.time() - chaos._began, 1),
        "pushes": [{k: n for k, n in one.items() if k.startswith("pushes")} for one in statuses],
    }


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two kills, on average")
    parser.add_argument("--samples", type=int, default=60_000, help="of each of 4 partitions")
    parser.add_argument("--rate", type=float, default=1000.0, help="samples per second that a partition gets")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for coming to rest after the last kill")
    parser.add_argument("--tensorflow", action="store_true", help="workers run the model's graph")
    parser.add_argument("--seed", type=int, default=0)
    for worker_only in ("ps", "name", "partitions"):
        parser.add_argument(f"--{worker_only}")
    parser.add_argument("--began", type=float)
    return parser.parse_args(given)


def main() -> None:
    args = parse()
    if args.name:
        work(args)
    else:
        sys.stdout.write(json.dumps(run(args)) + "\n")


if __name__ == "__main__":
    main()
