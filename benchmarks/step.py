"""How fast is the whole training step compared with plain TensorFlow, in one process? make bench-step, bench-micro.

    python benchmarks/step.py --workload w1
    python benchmarks/step.py --workload w2 --batch 64
    python benchmarks/step.py --workload w1 --only dense --processes 2
    python benchmarks/step.py --workload readme --micro 8 64 --rounds 5

The contestants take turns on ready arrays: plain TensorFlow gets row numbers as tensors and holds the whole vocabulary
from the start; a Learner, whose table is empty and grows, gets hashed ids ("batch") or columns of a user's ids, hashing
included ("columns"). "dense" is the dense part of the peer alone, a limit: what training would be if embeddings cost
nothing. Prints a line of JSON with samples/s by contestant and round, and medians of ours / peer of the same round.

With --processes that limit is measured in so many independent processes at the same time, and nothing else; prints
samples_per_s of all of them together.

With --micro the contestants are a Learner with batches of 1,024 that are one step each, the same in micro-batches of
these sizes, one with batches of the first size, and plain TensorFlow with batches of all sizes: what do micro-batches
cost, compared with batches of their size? Those whose steps have the same size reach the same accuracy. Prints a table
(samples/s, and the ratio to batches of 1,024), ours / plain TensorFlow by size of a step, and a line of JSON. "readme"
is the model of the README.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from typing import Any

from harness.figures import WARMUP, Contestant, in_turns, median_ratio, numbered, table
from harness.models import WORKLOADS, Workload, columns
from harness.processes import SLOWEST_START, exit_on_sigterm

from streamtrain.service.start_tensorflow import load_tensorflow

CONTESTANTS = ("plain_tf", "batch", "columns")
LIMIT = "dense"
LARGE = 1024  # samples of a batch that is divided into micro-batches


class Network:
    """The dense layers of a workload, and their Adam optimizer."""

    def __init__(self, workload: Workload) -> None:
        import tensorflow as tf

        sizes = [workload.ids * workload.dim + workload.numbers, *workload.hidden, 1]
        self.weights: list[Any] = []
        for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            scale = (2.0 / fan_in) ** 0.5
            self.weights.append(tf.Variable(tf.random.stateless_normal([fan_in, fan_out], seed=[3, i]) * scale))
            self.weights.append(tf.Variable(tf.zeros([fan_out])))
        self._moments = [(tf.Variable(tf.zeros_like(w)), tf.Variable(tf.zeros_like(w))) for w in self.weights]
        self._powers = tf.Variable(1.0), tf.Variable(1.0)

    def gradients(self, rows: Any, flat: Callable[[Any], Any], numbers: Any, labels: Any) -> tuple[Any, Any, list[Any]]:
        """The loss, its gradient by rows and those by weights; `flat` turns rows into the first layer's input."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(rows)
            x = tf.concat([flat(rows), numbers], 1)
            for i in range(0, len(self.weights), 2):
                x = tf.nn.bias_add(tf.matmul(x, self.weights[i]), self.weights[i + 1])
                x = tf.nn.relu(x) if i < len(self.weights) - 2 else x
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, x))
        gradient, *gradients = tape.gradient(loss, [rows, *self.weights])
        return loss, gradient, gradients

    def learn(self, gradients: list[Any]) -> None:
        """One step of Adam."""
        import tensorflow as tf

        power1, power2 = self._powers
        power1.assign(power1 * 0.9)
        power2.assign(power2 * 0.999)
        for weight, (m, v), g in zip(self.weights, self._moments, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=power1,
                beta2_power=power2,
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-7,
                grad=g,
            )


class PlainTensorFlow:
    """The peer: trains a workload on batches that `Workload.data` makes, with the whole vocabulary in a variable.

    It is the fastest plain form: unique ids before the gather, one sparse Adagrad kernel on the table, one Adam kernel
    per weight, all in one tf.function over ready tensors.
    """

    def __init__(self, workload: Workload, data: list[Any]) -> None:
        import tensorflow as tf

        self._tensors = [tuple(tf.constant(column) for column in batch) for batch in data]
        rows, dim = workload.ids * workload.vocabulary, workload.dim
        table = tf.Variable(tf.random.stateless_uniform([rows, dim], seed=[1, 2], minval=-0.05, maxval=0.05))
        accumulator = tf.Variable(tf.fill([rows, dim], 0.1))
        network = Network(workload)

        def train(ids: Any, numbers: Any, labels: Any) -> Any:
            unique, inverse = tf.unique(tf.reshape(ids, [-1]))

            def flat(pulled: Any) -> Any:
                return tf.reshape(tf.gather(pulled, inverse), [-1, workload.ids * dim])

            loss, gradient, gradients = network.gradients(tf.gather(table, unique), flat, numbers, labels)
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, tf.shape(unique)[0])
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=table.handle, accum=accumulator.handle, lr=0.05, epsilon=1e-7, grad=gradient, indices=unique
            )
            network.learn(gradients)
            return loss

        self._train = tf.function(train)
        self._loss: Any = 0.0

    def step(self, k: int) -> None:
        """Trains on batch k."""
        self._loss = self._train(*self._tensors[k % len(self._tensors)])

    def finish(self) -> None:
        """Waits for the last step."""
        float(self._loss)


class DenseOnly:
    """The limit: training if embeddings cost nothing. They are given, and their gradients are discarded."""

    def __init__(self, workload: Workload, batch: int) -> None:
        import tensorflow as tf

        (given,) = workload.data(batch, 1)
        _, numbers, labels = (tf.constant(column) for column in given)
        rows = tf.random.stateless_normal([batch, workload.ids * workload.dim], seed=[1, 2]) * 0.05
        network = Network(workload)

        def train(rows: Any, numbers: Any, labels: Any) -> Any:
            loss, gradient, gradients = network.gradients(rows, lambda given: given, numbers, labels)
            network.learn(gradients)
            return loss, gradient

        self._train, self._given, self._done = tf.function(train), (rows, numbers, labels), (0.0, None)

    def step(self) -> None:
        """Trains once more."""
        self._done = self._train(*self._given)

    def finish(self) -> None:
        """Waits for the last step."""
        float(self._done[0])


def contestants(args: argparse.Namespace) -> dict[str, Contestant]:
    """Those that are wanted, by name."""
    workload = WORKLOADS[args.workload]
    workload = replace(workload, vocabulary=args.vocabulary or workload.vocabulary)
    data = workload.data(args.batch, args.batches or (400 if args.batch >= 1024 else 3000))
    made: dict[str, Contestant] = {}
    if "plain_tf" in args.only:
        peer = PlainTensorFlow(workload, data)
        made["plain_tf"] = Contestant(args.batch, numbered(peer.step, len(data)), peer.finish)
    if LIMIT in args.only:
        limit = DenseOnly(workload, args.batch)
        made[LIMIT] = Contestant(args.batch, limit.step, limit.finish)
    ready = [columns(batch) for batch in data]
    for name in ("batch", "columns"):
        if name in args.only:
            made[name] = learner(workload, args.batch, ready, hashed=name == "batch")
    return made


def learner(
    workload: Workload, size: int, ready: list[Any], *, hashed: bool = True, micro: int | None = None
) -> Contestant:
    """A Learner on ready columns, or on batches that were made of them beforehand."""
    import streamtrain as st

    one = st.Learner(workload.model(micro), batch_size=size)
    batches = [batch for given in ready for batch, _ in one.read(given)] if hashed else ready

    def finish() -> None:
        if one.metrics()["label"].non_finite:
            raise SystemExit("the loss is not finite")

    return Contestant(size, numbered(lambda k: one.learn(batches[k]), len(batches)), finish)


def take_turns(args: argparse.Namespace) -> dict[str, Any]:
    """The contestants in this process."""
    load_tensorflow(args.threads)
    rates = in_turns(contestants(args), args.rounds, args.seconds)
    return {
        **{name: getattr(args, name) for name in ("workload", "batch", "threads", "rounds")},
        "samples_per_s": {name: round(statistics.median(rate)) for name, rate in rates.items()},
        "runs": {name: [round(one) for one in rate] for name, rate in rates.items()},
        **{f"ratio_to_{peer}": _ratios(rates, peer) for peer in ("plain_tf", LIMIT) if peer in rates},
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def _ratios(rates: dict[str, list[float]], peer: str) -> dict[str, float]:
    return {name: round(median_ratio(rate, rates[peer]), 3) for name, rate in rates.items() if name != peer}


def micro_batches(args: argparse.Namespace) -> dict[str, Any]:
    """Micro-batches next to batches of their size, in this process."""
    load_tensorflow(args.threads)
    sizes, workload = args.micro, WORKLOADS[args.workload]
    large = [columns(batch) for batch in workload.data(LARGE, 200)]
    small = [columns(batch) for batch in workload.data(sizes[0], 2000)]
    base = f"batches of {LARGE}"
    made = {base: learner(workload, LARGE, large)}
    made |= {f"micro-batches of {size}": learner(workload, LARGE, large, micro=size) for size in sizes}
    made[f"batches of {sizes[0]}"] = learner(workload, sizes[0], small)
    for size in (*sizes, LARGE):
        count = 200 if size == LARGE else 2000
        peer = PlainTensorFlow(workload, workload.data(size, count))
        made[f"plain TensorFlow, batches of {size}"] = Contestant(size, numbered(peer.step, count), peer.finish)
    rates = in_turns(made, args.rounds, args.seconds)
    rows = [
        (name, f"{statistics.median(runs):,.0f}", f"{median_ratio(runs, rates[base]):.2f}")
        for name, runs in rates.items()
    ]
    print(table((args.workload, "samples/s", f"/ {base}"), rows))
    ratios = {
        f"ratio_to_{name}": {
            str(size): round(median_ratio(rates[f"micro-batches of {size}"], rates[peer.format(size)]), 3)
            for size in sizes
        }
        for name, peer in (("large", base), ("plain_tf", "plain TensorFlow, batches of {}"))
    }
    for size, ratio in ratios["ratio_to_plain_tf"].items():
        print(f"steps of {size}: {ratio:.2f} x plain TensorFlow")
    given = {name: getattr(args, name) for name in ("workload", "rounds", "seconds", "threads")}
    runs = {name: [round(one) for one in runs] for name, runs in rates.items()}
    return given | ratios | {"sizes": sizes, "runs": runs}


def side_by_side(args: argparse.Namespace) -> dict[str, Any]:
    """The dense part alone in several processes, which start to count at the same moment."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(args.processes), context.Queue()
    processes = [
        context.Process(target=_dense, args=(args, barrier, queue), daemon=True) for _ in range(args.processes)
    ]
    for process in processes:
        process.start()
    rates = [queue.get(timeout=SLOWEST_START + args.seconds) for _ in processes]
    for process in processes:
        process.join()
    figures = {name: getattr(args, name) for name in ("workload", "batch", "processes", "threads")}
    return figures | {"samples_per_s": round(sum(rates)), "of_each": [round(rate) for rate in rates]}


def _dense(args: argparse.Namespace, barrier: Barrier, queue: Any) -> None:
    load_tensorflow(args.threads)
    dense = DenseOnly(WORKLOADS[args.workload], args.batch)
    for _ in range(WARMUP):
        dense.step()
    dense.finish()
    barrier.wait(SLOWEST_START)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < args.seconds:
        dense.step()
        steps += 1
    dense.finish()
    queue.put(steps * args.batch / (time.perf_counter() - began))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=0, help="distinct batches; default: 400 of 1024, 3000 of 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contestant in each round")
    parser.add_argument("--threads", type=int, help="of TensorFlow; default: 2, or 1 with --processes or --micro")
    parser.add_argument("--vocabulary", type=int, help="of each id; default: that of the workload")
    parser.add_argument("--only", choices=(*CONTESTANTS, LIMIT), nargs="+", default=CONTESTANTS)
    parser.add_argument("--processes", type=int, default=0, help="run only the limit, in so many processes at once")
    parser.add_argument("--micro", type=int, nargs="+", metavar="SIZE", help="compare micro-batches of these sizes")
    args = parser.parse_args()
    args.threads = args.threads or (1 if args.processes or args.micro else 2)
    exit_on_sigterm()
    print(json.dumps((micro_batches if args.micro else side_by_side if args.processes else take_turns)(args)))


if __name__ == "__main__":
    main()
