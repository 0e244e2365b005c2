r"""What does real time buy? How good predictions are by how often the model is published. make bench-realtime.

    python benchmarks/realtime.py flights
    python benchmarks/realtime.py flights movielens --label-delay 0 10800 --stream movielens-100k.jsonl.gz \
        --plot real-time.svg

One learner learns a stream in order of event time. For each interval there is a replica, like those of serving
processes, which gets the changed rows and the weights at every multiple of its interval and so has learned everything
that was known before. Every sample is predicted once by each replica, by the last publication before its event time.
"never" is the model after the first part of the stream (--first), which is never updated; figures are of all samples
after that part, the same ones for all intervals. "progressive" is what the learner itself predicts just before learning
a sample.

A batch ends with its second of event time, so that predictions wait for nothing but publications. If the loss of a
model is a mean over a batch, the sum is taken and the rate divided by the size of a batch: a sample moves weights as
far as in a full batch. With --label-delay, flights are learned from so many seconds after their departure, in a pass
for each delay; without, at departure, before their arrival is known. The rate that is best for the next hour is not the
best for a model that has to last for a day, so try others with --rate. The streams are those of example_models.py.

Prints a table and a line of JSON for each pass; --plot draws them.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from heapq import merge
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import charts
from harness.figures import table
from harness.models import EXAMPLES, metrics_of, samples_of
from numpy.typing import NDArray

import streamtrain as st
from streamtrain._core import Plan
from streamtrain.model.spec import Spec
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.rows.replica import Replica
from streamtrain.store.publication import Publication, PublicationStep, RowChange, Weights

NEVER = "never"
INTERVALS = {"1 s": 1, "10 s": 10, "1 min": 60, "10 min": 600, "1 h": 3600, "1 day": 86400, NEVER: math.inf}
BATCH_SIZES = {"flights": 64, "movielens": 2}  # as the models' own figures are measured
_NONE = np.empty(0, np.uint64)


class Learner(st.Learner):
    """A learner that publishes."""

    def weights(self) -> Weights:
        """The current weights of the graph."""
        (shard,) = self._shards
        return Weights(shard.dense.pull(), shard.statistics.pull())

    def changes(self, plans: list[Plan]) -> Iterator[RowChange]:
        """The current rows of all ids of some batches."""
        (shard,) = self._shards
        for t, (spec, rows) in enumerate(zip(self.model.schema.tables, shard.tables, strict=True)):
            keys = np.unique(np.concatenate([_NONE, *(plan.keys(t) for plan in plans)]))
            yield RowChange(spec.name, keys, rows.pull(keys), _NONE)


class Served:
    """A predictor like that of a serving process, which follows a learner.

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
        """Applies what the learner has learned so far."""
        changes = list(self._learner.changes(self.learned))
        self.learned.clear()
        self._predictor.apply(PublicationStep(self._publication(at), self._learner.weights(), changes))

    def predict(self, messages: list[bytes]) -> NDArray[np.float32]:
        """Predictions, float32 [n, 1]."""
        return self._predictor.predict_messages(messages).predictions


class Stretch(NamedTuple):
    """Samples that one publication predicts.

    Attributes:
        at: event time of the publication, seconds since the epoch.
        interval: name of the interval.
        start: index of the first sample.
        end: index after the last one.
    """

    at: float
    interval: str
    start: int
    end: int


def stretches(times: NDArray[np.float64], first: int, interval: str) -> list[Stretch]:
    """The stretches of the samples from index `first` on, in order of time."""
    seconds = INTERVALS[interval]
    if interval == NEVER:
        return [Stretch(times[first], interval, first, len(times))]
    at = times // seconds * seconds
    starts = [first, *(first + 1 + np.flatnonzero(np.diff(at[first:])))]
    ends = [*starts[1:], len(times)]
    return [Stretch(at[start], interval, int(start), int(end)) for start, end in zip(starts, ends, strict=True)]


@dataclass
class Stream:
    """Samples in order of event time, and how far a learner is.

    Args:
        messages: samples as JSON.
        times: float64 [n], seconds since the epoch.
        label_delay: seconds from a sample to its label.
        learner: learns them.

    Attributes:
        learned: number of samples that have been learned.
        predictions: float32 [n, 1], those of the learner just before learning.
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
        """Learns what was known before a moment, second by second, and records what has changed for replicas."""
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


def model_of(name: str, rate: float) -> st.Model:
    """The example's model with the sum of losses, and the rate of flights times a factor."""
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


def _quality(model: st.Model, predictions: NDArray[np.float32], labels: NDArray[np.float32]) -> dict[str, float]:
    total = metrics_of(model, predictions, labels)
    return {"auc": round(total.auc, 4), "log_loss": round(total.log_loss, 4)}


def alike(intervals: list[str], unit: int) -> dict[str, str]:
    """The interval to measure for each: those that divide the unit of all time stamps are equivalent."""
    dividing = [one for one in intervals if unit % INTERVALS[one] == 0]
    return {one: dividing[-1] if one in dividing else one for one in intervals}


def measure(name: str, args: argparse.Namespace, label_delay: float, rate: float) -> dict[str, Any]:
    """One pass, with all intervals."""
    messages = list(islice(samples_of(args.stream if name == "movielens" else None), args.samples))
    began = time.monotonic()
    samples = [json.loads(one) for one in messages]
    times = np.array([one["ts"] for one in samples], np.float64)
    labels = np.array([[one["label"]] for one in samples], np.float32)
    assert (np.diff(times) >= 0).all(), "samples must be in order of time"
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
            del served[interval]  # it needs no more changes
    stream.learn_until(math.inf, [])
    figures = {
        one: {"publications": publications[of], **_quality(learner.model, predictions[of][first:], labels[first:])}
        for one, of in measured.items()
    }
    if not label_delay:  # else the learner predicts later than the sample's event time
        figures["progressive"] = _quality(learner.model, stream.predictions[first:], labels[first:])
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


def as_table(done: dict[str, Any]) -> str:
    """The figures of a pass."""
    options = f"labels {done['label_delay_s']:g} s late, rate times {done['rate']:g}"
    rows = [
        (one, of.get("publications", ""), f"{of['auc']:.4f}", f"{of['log_loss']:.4f}")
        for one, of in done["published"].items()
    ]
    title = f"{done['stream']}, {options}: {done['samples']:,} samples, after {done['samples_before']:,} before"
    return f"{title}\n\n{table(('published every', 'publications', 'AUC', 'log loss'), rows)}"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("streams", choices=[*BATCH_SIZES], nargs="+")
    parser.add_argument("--stream", help="JSON lines of movielens")
    parser.add_argument("--samples", type=int, help="only the first ones")
    parser.add_argument("--first", type=float, default=0.1, help="share of a stream that all models learn first")
    parser.add_argument(
        "--label-delay", type=float, default=[0.0], nargs="+", help="seconds from a sample to its label"
    )
    parser.add_argument("--rate", type=float, default=[1.0], nargs="+", help="factor of the flights' learning rate")
    parser.add_argument("--every", choices=INTERVALS, default=[*INTERVALS], nargs="+", help="intervals of publications")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    args = parser.parse_args()
    if "movielens" in args.streams and not args.stream:
        parser.error("movielens needs --stream")
    results = []
    for name in args.streams:
        given = product(args.label_delay, args.rate) if name == "flights" else [(0.0, 1.0)]
        for label_delay, rate in given:
            results.append(measure(name, args, label_delay, rate))
            print(f"{as_table(results[-1])}\n\n{json.dumps(results[-1])}\n", flush=True)
    if args.plot:
        args.plot.write_text(charts.lines(results))


if __name__ == "__main__":
    main()
