r"""What real time buys: how good predictions are if the model is published every so often, and learns all the while.

    python benchmarks/realtime.py flights
    python benchmarks/realtime.py flights movielens --label-delay 0 10800 --stream movielens-100k.jsonl.gz \
        --plot real-time.svg

One learner takes a stream in order of event time. Beside it stand replicas as servers have them, one for each interval:
each gets the rows that have changed, and the weights, at every multiple of its interval, and then has learned all that
was known before that moment. Every sample is predicted once by each, by what was published last when it happened.
"never" is the model as of the first part of the stream (--first), which it does not leave; figures are of all samples
after that part, the same ones for all intervals. "progressive" is what the learner itself predicted just before
learning from a sample.

A batch ends with its second of event time, so that publishing is all that a prediction waits for. Where a model's loss
is a mean over a batch, it is made the sum at that share of the rate: a sample moves weights as far as in a full batch.
With --label-delay, the flights are learned from so many seconds after they were to leave, once for each that is given;
without, at that moment, when nobody knows yet how they end. A rate that follows the hour is not the best for a model
that has to last for a day, so try others with --rate. The streams are those of benchmarks/quality.py.

Prints a table and a line of JSON for each stream; --plot draws them.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from heapq import merge
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from quality import EXAMPLES, read
from realtime_plot import draw

import streamtrain as st
from streamtrain._core import Plan
from streamtrain.demo.stream import flights
from streamtrain.model.spec import Spec
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.replica import Replica
from streamtrain.store.origin import Publication, RowChange, Step, Weights

NEVER = "never"
INTERVALS = {"1 s": 1, "10 s": 10, "1 min": 60, "10 min": 600, "1 h": 3600, "1 day": 86400, NEVER: math.inf}
BATCH_SIZES = {"flights": 64, "movielens": 2}  # as the models' own figures are measured
_NONE = np.empty(0, np.uint64)


class Learner(st.Learner):
    """Learns, and tells what servers need to follow."""

    def weights(self) -> Weights:
        """Those of the graph, as they are now."""
        (shard,) = self._shards
        return Weights(shard.dense.pull(), shard.statistics.pull())

    def changes(self, plans: list[Plan]) -> Iterator[RowChange]:
        """The rows, as they are now, of all ids of some batches."""
        (shard,) = self._shards
        for t, (spec, table) in enumerate(zip(self.model.schema.tables, shard.tables, strict=True)):
            keys = np.unique(np.concatenate([_NONE, *(plan.keys(t) for plan in plans)]))
            yield RowChange(spec.name, keys, table.pull(keys), _NONE)


class Served:
    """A predictor as servers have it, which goes from one publication to the next.

    Args:
        graph: of the learner's model.
        learner: that is followed.

    Attributes:
        learned: plans of the batches that were learned since the last publication.
    """

    def __init__(self, graph: Graph, learner: Learner) -> None:
        model = learner.model
        self._name = model.name
        self._learner = learner
        self.learned: list[Plan] = []
        self._number = 0
        self._spec = Spec.of(model).to_json()
        empty = self._publication(0.0)
        replica = Replica(empty, [table.name for table in model.schema.tables], graph.tensors)
        replica.complete(empty, learner.weights())
        self._predictor = Predictor(model, graph, replica, "head")

    def _publication(self, at: float) -> Publication:
        self._number += 1
        return Publication(self._number, None, self._name, "run", self._spec, {}, at, at, "float32", {})

    def publish(self, at: float) -> None:
        """Takes what the learner has learned so far."""
        changes = list(self._learner.changes(self.learned))
        self.learned.clear()
        self._predictor.apply(Step(self._publication(at), self._learner.weights(), changes))

    def predict(self, messages: list[bytes]) -> NDArray[np.float32]:
        """Predicts: float32 [n, 1]."""
        return self._predictor.predict_messages(messages).predictions


class Stretch(NamedTuple):
    """Samples that one publication predicts.

    Attributes:
        at: event time of the publication, seconds since the epoch.
        interval: its name.
        start: position of the first.
        end: position after the last.
    """

    at: float
    interval: str
    start: int
    end: int


def stretches(times: NDArray[np.float64], first: int, interval: str) -> list[Stretch]:
    """Those of the samples from position `first` on, in order of time."""
    seconds = INTERVALS[interval]
    if interval == NEVER:
        return [Stretch(times[first], interval, first, len(times))]
    at = times // seconds * seconds
    starts = [first, *(first + 1 + np.flatnonzero(np.diff(at[first:])))]
    ends = [*starts[1:], len(times)]
    return [Stretch(at[start], interval, int(start), int(end)) for start, end in zip(starts, ends, strict=True)]


@dataclass
class Stream:
    """Samples in order of event time, and where a learner is in them.

    Args:
        messages: as JSON.
        times: float64 [n], seconds since the epoch.
        label_delay: seconds from a sample to its label.
        learner: that takes them.

    Attributes:
        learned: number of samples.
        predictions: float32 [n, 1], those of the learner just before it learned.
    """

    messages: list[bytes]
    times: NDArray[np.float64]
    label_delay: float
    learner: Learner

    def __post_init__(self) -> None:
        self.learned = 0
        self.predictions = np.empty((len(self.messages), 1), np.float32)
        self._planner = self.learner.model.planner(1)

    def learn_until(self, at: float, served: list[Served]) -> None:
        """Learns from what was known before a moment, second by second, and notes for servers what has changed."""
        end = int(np.searchsorted(self.times, at - self.label_delay))
        while self.learned < end:
            start = self.learned
            second = int(np.searchsorted(self.times, self.times[start], "right"))
            stop = min(second, start + self.learner.batch_size)
            for batch, bad in self.learner.read(self.messages[start:stop]):
                assert not bad, bad
                plan = self._planner.plan(batch.keys, batch.starts, batch.offsets, batch.times)
                for one in served:
                    one.learned.append(plan)
                self.predictions[start:stop] = self.learner.learn(batch).predictions
            self.learned = stop


def samples_of(path: str | None) -> list[bytes]:
    """Those of a file, or the flights."""
    return list(read(path)) if path else [one for piece in flights() for one in piece]


def model_of(name: str, rate: float) -> st.Model:
    """The example's model, with the sum for its loss, and the rate of flights times a factor."""
    model = st.load_model(str(EXAMPLES / f"{name}.py"))
    if model.reduction == "sum":
        return model
    optimizer: Any = model.embedding_optimizer
    return st.Model(
        model.schema,
        model.graph,
        loss=model.losses,
        embedding_optimizer=replace(optimizer, rate=rate * optimizer.rate / BATCH_SIZES[name]),
        dense_optimizer=model.dense_optimizer,
        reduction="sum",
        name=model.name,
        seed=model.seed,
    )


def metrics_of(model: st.Model, predictions: NDArray[np.float32], labels: NDArray[np.float32]) -> dict[str, float]:
    """AUC and log loss of predictions float32 [n, 1]."""
    validation = st.ProgressiveValidation(model.labels)
    validation.update(predictions, labels, np.ones(len(labels), np.float32))
    total = validation.total()[model.labels[0].name]
    return {"auc": round(total.auc, 4), "log_loss": round(total.log_loss, 4)}


def alike(intervals: list[str], unit: int) -> dict[str, str]:
    """By interval the one to measure: those that divide the unit of all time stamps are the same."""
    dividing = [one for one in intervals if unit % INTERVALS[one] == 0]
    return {one: dividing[-1] if one in dividing else one for one in intervals}


def measure(name: str, args: argparse.Namespace, label_delay: float, rate: float) -> dict[str, Any]:
    """All intervals, in one pass."""
    messages = samples_of(args.stream if name == "movielens" else None)[: args.samples]
    began = time.monotonic()
    samples = [json.loads(one) for one in messages]
    times = np.array([one["ts"] for one in samples], np.float64)
    labels = np.array([[one["label"]] for one in samples], np.float32)
    assert (np.diff(times) >= 0).all(), "samples are not in order of time"
    first, unit = int(args.first * len(times)), int(np.gcd.reduce(times.astype(np.int64)))
    learner = Learner(model_of(name, rate), batch_size=BATCH_SIZES[name])
    stream, graph = Stream(messages, times, label_delay, learner), Graph(learner.model)
    measured = alike(args.every, unit)
    served = {one: Served(graph, learner) for one in measured.values()}
    predictions = {one: np.empty_like(stream.predictions) for one in served}
    publications = dict.fromkeys(served, 0)
    for at, interval, start, end in merge(*(stretches(times, first, one) for one in served)):
        stream.learn_until(at, [*served.values()])
        served[interval].publish(at)
        predictions[interval][start:end] = served[interval].predict(messages[start:end])
        publications[interval] += 1
        if interval == NEVER:
            del served[interval]  # it needs no changes any more
    stream.learn_until(math.inf, [])
    figures = {
        one: {"publications": publications[of], **metrics_of(learner.model, predictions[of][first:], labels[first:])}
        for one, of in measured.items()
    }
    if not label_delay:  # else the learner predicts when it knows more than there was to know
        figures["progressive"] = metrics_of(learner.model, stream.predictions[first:], labels[first:])
    return {
        "stream": name,
        "label_delay_s": label_delay,
        "rate": rate,
        "unit_s": unit,
        "from": datetime.fromtimestamp(times[first], UTC).isoformat(),
        "to": datetime.fromtimestamp(times[-1], UTC).isoformat(),
        "samples_before": first,
        "samples": len(times) - first,
        "published": figures,
        "seconds": round(time.monotonic() - began),
    }


def table(done: dict[str, Any]) -> str:
    """The figures, for people."""
    options = f"labels {done['label_delay_s']:g} s late, rate times {done['rate']:g}"
    lines = [
        f"{done['stream']}, {options}: {done['samples']:,} samples, after {done['samples_before']:,} before",
        "",
        "| published every | publications | AUC | log loss |",
        "|---|---|---|---|",
    ]
    for one, of in done["published"].items():
        lines.append(f"| {one} | {of.get('publications', '')} | {of['auc']:.4f} | {of['log_loss']:.4f} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("streams", choices=[*BATCH_SIZES], nargs="+")
    parser.add_argument("--stream", help="JSON lines of movielens")
    parser.add_argument("--samples", type=int, help="only so many")
    parser.add_argument("--first", type=float, default=0.1, help="share of a stream that all models have learned")
    parser.add_argument(
        "--label-delay", type=float, default=[0.0], nargs="+", help="seconds from a sample to its label"
    )
    parser.add_argument("--rate", type=float, default=[1.0], nargs="+", help="factor of the flights' learning rate")
    parser.add_argument("--every", choices=INTERVALS, default=[*INTERVALS], nargs="+", help="to publish")
    parser.add_argument("--plot", type=Path, help="an SVG file to draw into")
    args = parser.parse_args()
    if "movielens" in args.streams and not args.stream:
        parser.error("movielens needs --stream")
    results = []
    for name in args.streams:
        given = product(args.label_delay, args.rate) if name == "flights" else [(0.0, 1.0)]
        for label_delay, rate in given:
            results.append(measure(name, args, label_delay, rate))
            print(f"{table(results[-1])}\n\n{json.dumps(results[-1])}\n", flush=True)
    if args.plot:
        args.plot.write_text(draw(results))


if __name__ == "__main__":
    main()
