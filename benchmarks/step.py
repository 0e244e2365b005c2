"""The whole training step of a Learner beside plain TensorFlow, in one process, in turn: make bench-step.

    python benchmarks/step.py --workload w1
    python benchmarks/step.py --workload w2 --batch 64

Both get ready arrays: the peer row numbers as tensors, the Learner ids already hashed (`batch`) or the columns of a
user's ids (`columns`, hashing included). The peer's table holds the whole vocabulary from the start;
ours is empty and grows. Prints a line of JSON; ratios are medians over rounds of ours / peer in the same round.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from plain_tf import PlainTensorFlow
from workloads import WORKLOADS, columns, model

WARMUP = 20


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=0, help="distinct batches; default: 400 at 1024, 3000 at 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contestant in each round")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    import tensorflow as tf

    import streamtrain as st

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    workload = WORKLOADS[args.workload]
    data = workload.data(args.batch, args.batches or (400 if args.batch >= 1024 else 3000))
    peer = PlainTensorFlow(workload, data)
    as_columns = [columns(batch) for batch in data]
    by_batch = st.Learner(model(workload), batch_size=args.batch)
    by_columns = st.Learner(model(workload), batch_size=args.batch)
    as_batches = [batch for one in as_columns for batch, _ in by_batch.read(one)]

    contestants: dict[str, Callable[[int], object]] = {
        "plain_tf": peer.step,
        "batch": lambda k: by_batch.learn(as_batches[k % len(as_batches)]),
        "columns": lambda k: by_columns.learn(as_columns[k % len(as_columns)]),
    }
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
            if name == "plain_tf":
                peer.finish()
            rates[name].append((done[name] - first) * args.batch / (time.perf_counter() - started))
    figures = {
        "workload": args.workload,
        "batch": args.batch,
        "threads": args.threads,
        "rounds": args.rounds,
        "samples_per_s": {name: round(statistics.median(rate)) for name, rate in rates.items()},
        "ratio_to_plain_tf": {
            name: round(statistics.median(a / b for a, b in zip(rates[name], rates["plain_tf"], strict=True)), 3)
            for name in ("batch", "columns")
        },
        "rows": by_batch.rows,
        "loss_ok": bool(by_batch.metrics()["label"].non_finite == 0),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
