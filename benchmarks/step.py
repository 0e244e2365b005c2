"""The whole training step of a Learner beside plain TensorFlow, in one process, in turn: make bench-step.

    python benchmarks/step.py --workload w1
    python benchmarks/step.py --workload w2 --batch 64

Both get ready arrays: the peer row numbers as tensors, the Learner ids already hashed (`batch`) or the columns of a
user's ids (`columns`, hashing included). The peer's table holds the whole vocabulary from the start;
ours is empty and grows. Prints a line of JSON with all runs; ratios are medians over rounds of ours / peer in the same
round. With --only some of them run, or one alone, to take turns with other processes; "dense" is the dense part of
the peer alone, a limit.
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from plain_tf import DenseOnly, PlainTensorFlow
from workloads import WORKLOADS, Workload, columns, model

WARMUP = 20
CONTESTANTS = ("plain_tf", "batch", "columns")
LIMIT = "dense"  # its dense part alone


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=0, help="distinct batches; default: 400 at 1024, 3000 at 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contestant in each round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, help="of each id; default: the workload's")
    parser.add_argument("--only", choices=(*CONTESTANTS, LIMIT), nargs="+", default=CONTESTANTS)
    args = parser.parse_args()

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    contestants = made(args)
    done = dict.fromkeys(contestants, 0)
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for name, step in contestants.items():
        for _ in range(WARMUP):
            step(done[name])
            done[name] += 1
    for _ in range(args.rounds):
        for name, step in contestants.items():
            started, first = time.perf_counter(), done[name]
            while time.perf_counter() - started < args.seconds:
                step(done[name])
                done[name] += 1
            step(None)
            rates[name].append((done[name] - first) * args.batch / (time.perf_counter() - started))
    figures = {
        **{name: getattr(args, name) for name in ("workload", "batch", "threads", "rounds")},
        "samples_per_s": {name: round(statistics.median(rate)) for name, rate in rates.items()},
        "runs": {name: [round(one) for one in rate] for name, rate in rates.items()},
        **{f"ratio_to_{peer}": ratios(rates, peer) for peer in ("plain_tf", LIMIT) if peer in rates},
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(json.dumps(figures))


def ratios(rates: dict[str, list[float]], peer: str) -> dict[str, float]:
    """Of all others to a peer: medians over rounds."""
    return {
        name: round(statistics.median(a / b for a, b in zip(rate, rates[peer], strict=True)), 3)
        for name, rate in rates.items()
        if name != peer
    }


def made(args: argparse.Namespace) -> dict[str, Callable[[int | None], object]]:
    """What trains on the batch of a number, by name; with None it waits for its last step."""
    workload = WORKLOADS[args.workload]
    workload = replace(workload, vocabulary=args.vocabulary or workload.vocabulary)
    data = workload.data(args.batch, args.batches or (400 if args.batch >= 1024 else 3000))
    contestants: dict[str, Callable[[int | None], object]] = {}
    if "plain_tf" in args.only:
        peer = PlainTensorFlow(workload, data)
        contestants["plain_tf"] = lambda k: peer.finish() if k is None else peer.step(k)
    if LIMIT in args.only:
        limit = DenseOnly(workload, args.batch)
        contestants[LIMIT] = lambda k: limit.finish() if k is None else limit.step()
    ready = [columns(batch) for batch in data]
    for name in ("batch", "columns"):
        if name in args.only:
            contestants[name] = learning(workload, args.batch, ready, hashed=name == "batch")
    return contestants


def learning(workload: Workload, size: int, ready: list[Any], hashed: bool) -> Callable[[int | None], object]:
    """A Learner on ready columns, or on batches that are made of them before."""
    import streamtrain as st

    learner = st.Learner(model(workload), batch_size=size)
    taken = [batch for one in ready for batch, _ in learner.read(one)] if hashed else ready

    def step(k: int | None) -> None:
        if k is not None:
            learner.learn(taken[k % len(taken)])
        elif learner.metrics()["label"].non_finite:
            raise SystemExit("what was learned is not finite")

    return step


if __name__ == "__main__":
    main()
