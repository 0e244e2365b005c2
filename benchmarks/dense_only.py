"""The limit of a training step: its dense part alone, as independent processes of TensorFlow: make bench.

    python benchmarks/dense_only.py --workload w1 --processes 2

Forward and backward through the layers, and Adam; embeddings are given, tables and shards there are none. Processes
start to count at the same moment. Prints a line of JSON: samples/s of all of them together.
"""

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from processes import SLOWEST_START, end_in_order
from workloads import WORKLOADS

WARMUP = 50


def work(args: argparse.Namespace, together: Barrier, told: Any) -> None:
    """One process: tells its samples per second."""
    import tensorflow as tf
    from plain_tf import DenseOnly

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    dense = DenseOnly(WORKLOADS[args.workload], args.batch)
    for _ in range(WARMUP):
        dense.step()
    dense.finish()
    together.wait(SLOWEST_START)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < args.seconds:
        dense.step()
        steps += 1
    dense.finish()
    told.put(steps * args.batch / (time.perf_counter() - began))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    end_in_order()
    context = multiprocessing.get_context("spawn")
    together, told = context.Barrier(args.processes), context.Queue()
    processes = [context.Process(target=work, args=(args, together, told), daemon=True) for _ in range(args.processes)]
    for process in processes:
        process.start()
    rates = [told.get(timeout=SLOWEST_START + args.seconds) for _ in processes]
    for process in processes:
        process.join()
    about = {name: getattr(args, name) for name in ("workload", "batch", "processes", "threads")}
    print(json.dumps(about | {"samples_per_s": round(sum(rates)), "of_each": [round(rate) for rate in rates]}))


if __name__ == "__main__":
    main()
