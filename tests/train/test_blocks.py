"""Blocks of predictions: the same whatever is rewound, and whoever goes on."""

import numpy as np
import pytest

from streamtrain.errors import ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.features import Categorical, Label
from streamtrain.model.model import Model
from streamtrain.model.schema import Schema
from streamtrain.ps.clock import Progress, Span
from streamtrain.quality.blocks import MOST_CARRIED, Block, BlockFigures, Slices, figures_of
from streamtrain.quality.progressive import Sums
from streamtrain.train.blocks import BlockTracker
from streamtrain.train.intake import DecodedBatch, Origins
from streamtrain.train.trainer import BatchResult

SIZE = 100
LENGTH = 1530  # of the log; offsets that are multiples of 7 hold no sample
LABELS = ("click", "buy")


def model() -> Model:
    labels = [Label("click"), Label("buy", optional=True)]
    schema = Schema(features=[Categorical("a", 2), Categorical("many", 2, max_length=5)], label=labels, time="ts")
    return Model(schema, lambda inputs: inputs["a"], loss=dict.fromkeys(LABELS, "binary_crossentropy"))


class Kept:
    """A sink that stores at once."""

    def __init__(self) -> None:
        self.figures: dict[tuple[int, int], BlockFigures] = {}
        self.stored: list[tuple[int, int]] = []
        self.works = True
        self.of, self.slices = model(), Slices(model(), ["many=x", "a=3"])

    def offer(self, block: Block) -> None:
        if self.works:
            self.figures[block.partition, block.number] = figures_of(block, self.of, self.slices)
            self.stored.append((block.partition, block.number))

    def take_stored(self) -> list[tuple[int, int]]:
        stored, self.stored = self.stored, []
        return stored


class Log:
    """A log whose samples and predictions are a function of where they stand."""

    def __init__(self) -> None:
        random = np.random.default_rng(5)
        self.predictions = random.random((2, LENGTH, 2)).astype(np.float32)
        self.labels = (random.random((2, LENGTH, 2)) < 0.3).astype(np.float32)
        self.labels[:, ::5, 1] = np.nan
        self.weights = random.choice([1.0, 2.0], (2, LENGTH)).astype(np.float32)
        self.a = random.integers(0, 5, (2, LENGTH))
        self.many = random.integers(0, 4, (2, LENGTH))

    def batch(self, spans: list[Span], wrong: bool = False) -> tuple[DecodedBatch, BatchResult]:
        at = [np.arange(start, end)[np.arange(start, end) % 7 > 0] for _, start, end in spans]
        partitions = np.concatenate([np.full(len(one), span.partition) for one, span in zip(at, spans, strict=True)])
        where = partitions, np.concatenate(at)
        n = len(partitions)
        keys = {i: Slices(model(), [f"a={i}"])._keys[0][1] for i in range(5)}
        x = Slices(model(), ["many=x"])._keys[0][1]
        lengths = self.many[where]
        batch = Batch(
            keys=np.array([*(keys[int(i)] for i in self.a[where]), *([1] * 0), *_ids(lengths, x)], np.uint64),
            starts=np.array([0, n, n + lengths.sum()]),
            offsets=np.array([np.arange(n + 1), np.concatenate([[0], np.cumsum(lengths)])], np.int32),
            numeric=np.empty((n, 0), np.float32),
            labels=self.labels[where],
            weights=self.weights[where],
            times=1e9 + where[1].astype(np.float64),
            kept=np.arange(n, dtype=np.int32),
        )
        predictions = np.full_like(self.predictions[where], 0.5) if wrong else self.predictions[where]
        none = np.empty(0, np.float32)
        decoded = DecodedBatch(batch, {}, origins=Origins(*where, np.zeros(n)))
        return decoded, BatchResult(predictions, 0.0, none, none, none)

    def expected(self, partition: int, number: int, label: int, slice_of: str) -> Sums:
        at = np.arange(number * SIZE, (number + 1) * SIZE)
        at = at[at % 7 > 0]
        if slice_of == "a=3":
            at = at[self.a[partition, at] == 3]
        elif slice_of == "many=x":
            at = at[self.many[partition, at] >= 2]
        sums = Sums(True, 1024)
        sums.add(self.predictions[partition, at, label], self.labels[partition, at, label], self.weights[partition, at])
        return sums


def _ids(lengths: np.ndarray, x: int) -> list[int]:
    """The ids of "many": "x" is the second one of a sample that has two or more."""
    return [x if i == 1 else 1000 + i for length in lengths for i in range(length)]


def tracker(sink: Kept, identity: str = "model", slices: tuple[str, ...] = ("many=x", "a=3")) -> BlockTracker:
    return BlockTracker(model(), SIZE, Slices(model(), slices), identity, sink)


def run(log: Log, seed: int, sink: Kept, *, disturbed: bool) -> None:
    """Learns all of the log on two shards, of which one at a time may be restored while the worker is replaced."""
    random = np.random.default_rng(seed)
    shards = [Progress({0: 0, 1: 0}, {}, {}, {}) for _ in range(2)]
    saved = list(shards)
    tracked = tracker(sink)
    tracked.restore({0: 0, 1: 0}, shards)
    while min(at for shard in shards for at in shard.clock.values()) < LENGTH:
        if disturbed and (fate := random.random()) < 0.3:
            if fate < 0.1:  # a shard is restored, or both are
                shards[0] = saved[0]
            elif fate < 0.13:
                shards = list(saved)
            if fate < 0.2:  # the worker is replaced
                tracked = tracker(sink)
            tracked.restore({p: min(shard.clock[p] for shard in shards) for p in (0, 1)}, shards)
        if random.random() < 0.1:
            saved = list(shards)
        spans = []
        for partition in (0, 1):
            clocks = sorted({shard.clock[partition] for shard in shards})
            end = min(clocks[0] + int(random.integers(1, 170)), LENGTH, *clocks[1:])
            if end > clocks[0]:
                spans.append(Span(partition, clocks[0], end))
        behind = [s for s in spans if any(shard.clock[s.partition] > s.start for shard in shards)]
        spans = behind[:1] or spans
        decoded, result = log.batch(spans, wrong=bool(behind))  # a shard knows these labels already
        carried = tracked.add(spans, decoded, result)
        dies_between = disturbed and random.random() < 0.1
        for i, shard in enumerate(shards):
            if all(shard.clock[p] == start for p, start, _ in spans) and not (dies_between and i):
                clock = {**shard.clock} | {p: end for p, _, end in spans}
                shards[i] = shard._replace(clock=clock, predictions={**shard.predictions, **carried})
        if dies_between:
            tracked = tracker(sink)
            tracked.restore({p: min(shard.clock[p] for shard in shards) for p in (0, 1)}, shards)
        else:
            tracked.settle()


def test_figures_are_those_of_the_samples_of_each_block() -> None:
    log, sink = Log(), Kept()
    run(log, 0, sink, disturbed=False)
    assert sorted(sink.figures) == [(p, number) for p in (0, 1) for number in range(LENGTH // SIZE)]
    for (partition, number), figures in sink.figures.items():
        assert figures.time == 1e9 + max(at for at in range(number * SIZE, (number + 1) * SIZE) if at % 7)
        found = {(group.label, group.slice): group for group in figures.groups}
        assert set(found) == {(label, of) for label in LABELS for of in ("", "a=3", "many=x")}
        for (label, of), group in found.items():
            expected, sums = log.expected(partition, number, LABELS.index(label), of), Sums(True, 1024)
            group.add_to(sums)
            assert vars(sums) | {"counts": None} == vars(expected) | {"counts": None}
            assert (sums.counts == expected.counts).all()
        assert BlockFigures.decode(figures.encode()) == figures


@pytest.mark.parametrize("seed", range(25))
def test_they_are_the_same_whatever_is_rewound_restored_or_killed(seed: int) -> None:
    log, calm, disturbed = Log(), Kept(), Kept()
    run(log, 1000 + seed, calm, disturbed=False)
    run(log, seed, disturbed, disturbed=True)
    assert disturbed.figures == calm.figures


def test_what_cannot_be_stored_is_carried_within_bounds() -> None:
    log, sink = Log(), Kept()
    sink.works = False
    tracked = tracker(sink)
    tracked.restore({0: 0}, [Progress({}, {})])
    carried: dict[int, bytes] = {}
    for start in range(0, LENGTH - 30, 50):
        span = Span(0, start, start + 50)
        carried = tracked.add([span], *log.batch([span]))
        tracked.settle()
    sink.works = True
    again = tracker(sink)
    again.restore({0: LENGTH - 30}, [Progress({0: LENGTH - 30}, {}, {}, carried)])
    again.settle()
    assert len(sink.figures) == min(MOST_CARRIED, LENGTH // SIZE)
    span = Span(0, LENGTH - 30, LENGTH)
    assert len(again.add([span], *log.batch([span]))[0]) < len(carried[0]) / 5  # all of it is stored


def test_a_block_whose_beginning_is_not_known_is_left_out() -> None:
    log, sink = Log(), Kept()
    tracked = tracker(sink)
    tracked.restore({0: 130}, [Progress({0: 130}, {}, {}, {})])
    span = Span(0, 130, 450)
    carried = tracked.add([span], *log.batch([span]))
    tracked.settle()
    assert sorted(sink.figures) == [(0, 2), (0, 3)]
    for other in (
        tracker(sink, identity="its fork"),
        tracker(sink, slices=()),
    ):
        other.restore({0: 450}, [Progress({0: 450}, {}, {}, carried)])
        span = Span(0, 450, 610)
        other.add([span], *log.batch([span]))
        sink.figures.clear()
        other.settle()
        assert sorted(sink.figures) == [(0, 5)]


@pytest.mark.parametrize("carried", [b"\xc1", b"\x90", b"\x97\x01\x02\x90\xc4\x00\xc4\x00\xc4\x00\xc4\x00"])
def test_damaged_bytes_are_as_if_there_were_none(carried: bytes) -> None:
    sink = Kept()
    tracked = tracker(sink)
    tracked.restore({0: 0}, [Progress({0: 0}, {}, {}, {0: carried})])
    assert tracked._of[0].through == 0
    assert not tracked._of[0].blocks


def test_slices_are_of_the_model() -> None:
    with pytest.raises(ConfigError, match=r"'city=B' must be .* of one of the categorical features: a, many"):
        Slices(model(), ["city=B"])
