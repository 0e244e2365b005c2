"""What does a model lose that is changed while it learns? Everyday changes on real streams, by AUC and log loss.

    python benchmarks/evolve.py                         # flights, ratings
    python benchmarks/evolve.py flights --before 100000 --after 20000
    python benchmarks/evolve.py --compare flights       # when does `streamtrain compare` notice a halved rate of rows?

A model of README's shape learns the first part of a stream and is saved. Each change is then made to it, and the next
part is predicted and learned by the changed model (`Learner.load(..., evolve=True)`), by the same changed model that
starts anew, and by the model that was never changed: every sample is predicted before it is learned. "jump" is the
largest difference of a prediction of the next part between both models before they learn it: 0 where a change is said
not to change any.

With --compare, a model and one whose rows learn at half the rate learn a stream side by side, from its beginning and
from where the first part ends. Their predictions are compared as by `streamtrain compare`, after each block of 1,024
samples: "told apart" is the number of samples after which the interval first excludes 0. "cost" is the CPU time of
sorting predictions into blocks and of their figures, as a share of that of learning.
"""

import argparse
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from harness.figures import table
from streams import CATEGORICAL, NUMERIC, STREAMS, Sample

import streamtrain as st
from streamtrain.model.samples import SampleReader
from streamtrain.ps.clock import Progress, Span
from streamtrain.quality.blocks import Block, Slices, figures_of
from streamtrain.quality.comparison import confidence_sequence
from streamtrain.train.blocks import BlockTracker
from streamtrain.train.intake import DecodedBatch, Origins
from streamtrain.train.trainer import BatchResult

BLOCK = 1024
NAMES = ("flights", "ratings")


def model(stream: str, *, without: str = "", dim: int = 16, units: tuple[int, ...] = (64,), **options: Any) -> st.Model:
    """README's model for a stream."""

    def graph(inputs: dict[str, Any]) -> Any:
        import keras

        x = keras.layers.Concatenate()(list(inputs.values()))
        for width in units:
            x = keras.layers.Dense(width, "relu")(x)
        return keras.layers.Dense(1, "sigmoid")(x)

    ids = [st.Categorical(name, dim, default="none") for name in CATEGORICAL[stream] if name != without]
    numbers = [st.Numeric(name, default=0.0) for name in NUMERIC[stream]]
    return st.Model(st.Schema(features=[*ids, *numbers], time="ts"), graph, **options)


def changes(stream: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Options of `model` before and after, by change."""
    one = CATEGORICAL[stream][1]
    rates: dict[str, Any] = {"embedding_optimizer": st.Adagrad(0.1), "dense_optimizer": st.Adam(0.0005, beta1=0.0)}
    return {
        "a feature more": ({"without": one}, {}),
        "a feature less": ({}, {"without": one}),
        "a layer more": ({}, {"units": (64, 32)}),
        "a wider layer": ({}, {"units": (128,)}),
        "dim 16 -> 24": ({}, {"dim": 24}),
        "Adagrad -> Adam": ({}, {"embedding_optimizer": st.Adam(0.01)}),
        "half the rates": ({}, rates),
    }


def learn(learner: st.Learner, samples: list[Sample]) -> tuple[float, float]:
    """AUC and log loss of predictions made before learning, over these samples alone."""
    learner._validation = type(learner._validation)(learner.model.labels, window=len(samples))
    learner.learn(samples)
    (found,) = learner.metrics().values()
    return float(found.auc or 0), float(found.log_loss or 0)


def measure(stream: str, before: int, after: int) -> list[list[str]]:
    """Rows of the table of a stream."""
    samples = list(islice(STREAMS[stream](), before + after))
    before = min(before, len(samples) * 4 // 5)
    first, rest = samples[:before], samples[before:]
    rows, saved = [], dict[str, tuple[str, list[float], tuple[float, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        for name, (old, new) in changes(stream).items():
            key = str(old)
            if key not in saved:
                saved[key] = _never_changed(stream, old, first, rest, Path(folder) / str(len(saved)))
            place, predicted, never = saved[key]
            changed = model(stream, **new)
            evolved = st.Learner.load(place, changed, evolve=True, allow=("drop",))
            jump = float(np.abs(evolved.predict(rest)[:, 0] - np.array(predicted)).max())
            anew = st.Learner(evolved.model)
            figures = [never, learn(evolved, rest), learn(anew, rest)]
            rows.append([stream, name, f"{jump:.2g}", *(f"{auc:.4f}, {loss:.4f}" for auc, loss in figures)])
            print(" | ".join(rows[-1]), flush=True)
    return rows


def _never_changed(
    stream: str, options: dict[str, Any], first: list[Sample], rest: list[Sample], place: Path
) -> tuple[str, list[float], tuple[float, float]]:
    learner = st.Learner(model(stream, **options))
    learner.learn(first)
    learner.save(place)
    predicted = learner.predict(rest)[:, 0].tolist()
    return str(place), predicted, learn(learner, rest)


def side_by_side(stream: str, before: int, after: int) -> list[list[str]]:
    """Rows of the table of a stream, with --compare."""
    samples = list(islice(STREAMS[stream](), before + after))
    rows = []
    for start in (0, min(before, len(samples) - after)):
        with tempfile.TemporaryDirectory() as folder:
            first = st.Learner(model(stream))
            first.learn(samples[:start])
            first.save(Path(folder) / "first")
            rates: dict[str, Any] = {"embedding_optimizer": st.Adagrad(0.1)}
            second = st.Learner.load(Path(folder) / "first", model(stream, **rates))
            rest = samples[start : start + after]
            both = _Learner(first), _Learner(second)
            for at in range(0, len(rest) // BLOCK * BLOCK, BLOCK):
                for one in both:
                    one.learn(rest[at : at + BLOCK])
        (ours, share), (theirs, _) = (one.losses() for one in both)
        means = ours - theirs
        intervals = [confidence_sequence(means[:t], np.ones(t)) for t in range(1, len(means) + 1)]
        told = next((t for t, one in enumerate(intervals, 1) if not one.low <= 0 <= one.high), None)
        last = intervals[-1]
        rows.append(
            [
                *(stream, f"{start:,}", f"{told * BLOCK:,}" if told else f"not in {len(means) * BLOCK:,}"),
                f"{last.mean:+.4f} ({last.low:+.4f} to {last.high:+.4f})",
                f"{share:.2%}",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


class _Sink:
    """Keeps complete blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def offer(self, block: Block) -> None:
        self.blocks.append(block)

    def take_stored(self) -> list[tuple[int, int]]:
        return [(block.partition, block.number) for block in self.blocks[-1:]]


class _Learner:
    """A learner with the blocks of its predictions and the CPU time of both."""

    def __init__(self, learner: st.Learner) -> None:
        self._learner, self._slices, self._sink, self._at = learner, Slices(learner.model, ()), _Sink(), 0
        self._tracker = BlockTracker(learner.model, BLOCK, self._slices, "", self._sink)
        self._tracker.restore({0: 0}, [Progress({}, {})])
        self._learning = self._sorting = 0.0

    def learn(self, samples: list[Sample]) -> None:
        began = time.process_time()
        predictions = self._learner.learn(samples).predictions
        self._learning += time.process_time() - began
        batch, _ = SampleReader(self._learner.model).decode([msgspec.json.encode(sample) for sample in samples])
        where = Origins(np.zeros(len(batch), np.int64), self._at + np.arange(len(batch)), np.zeros(len(batch)))
        span, none = Span(0, self._at, self._at + BLOCK), np.empty(0, np.float32)
        result = BatchResult(np.asarray(predictions, np.float32).reshape(len(batch), -1), 0.0, none, none, none)
        self._at = span.end
        began = time.process_time()
        self._tracker.add([span], DecodedBatch(batch, {}, origins=where), result)
        self._tracker.settle()
        self._sorting += time.process_time() - began

    def losses(self) -> tuple[np.ndarray[Any, Any], float]:
        """Mean log losses of the blocks, and the share of the CPU time that they took."""
        began = time.process_time()
        figures = [figures_of(block, self._learner.model, self._slices) for block in self._sink.blocks]
        contents = [one.encode() for one in figures]
        self._sorting += time.process_time() - began
        assert len(contents) == self._at // BLOCK
        groups = [one.groups[0] for one in figures]
        return np.array([group.loss / group.weight for group in groups]), self._sorting / self._learning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", nargs="*", default=NAMES, metavar="STREAM", help=f"of {', '.join(STREAMS)}")
    parser.add_argument("--before", type=int, default=80_000, help="samples learned before the change")
    parser.add_argument("--after", type=int, default=20_000, help="samples after it")
    parser.add_argument("--compare", action="store_true", help="when a halved rate of rows is noticed")
    given = parser.parse_args()
    if given.compare:
        found = [row for stream in given.streams for row in side_by_side(stream, given.before, given.after)]
        header = ["stream", "learned before", "told apart", "difference at the end", "cost"]
        print(table(header, found))
        return
    rows = [row for stream in given.streams for row in measure(stream, given.before, given.after)]
    header = ["stream", "change", "jump", "never changed: AUC, log loss", "evolved", "started anew"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
