"""Blocks of a model's predictions, and their figures."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamtrain._core import hash_bytes
from streamtrain.errors import ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.ps.push import Floats
from streamtrain.quality.progressive import Sums

BLOCK_BINS = 1024

"""Bins of the AUC over the log-odds from -16 to 16, as in progressive.py; each is 1/32 wide."""

MOST_SLICES = 32

MOST_CARRIED = 16

"""Complete blocks of a partition that travel with pushes while they cannot be stored."""


class BlockColumns(NamedTuple):
    """Samples of a block, in order of their offsets.

    Attributes:
        predictions: float32 [n, L], made before the samples were learned.
        labels: float32 [n, L]; NaN where one is missing.
        weights: float32 [n].
        slices: uint32 [n]; bit i: the sample is in slice i.
    """

    predictions: Floats
    labels: Floats
    weights: Floats
    slices: NDArray[np.uint32]

    def rows(self, of: slice) -> "BlockColumns":
        return BlockColumns(self.predictions[of], self.labels[of], self.weights[of], self.slices[of])


@dataclass
class Block:
    """A block, complete or not.

    Attributes:
        partition: of the log.
        number: offset of its first sample, divided by the size of blocks.
        time: latest event time of its samples, in seconds since the epoch; 0: they have none.
        parts: its samples.
    """

    partition: int
    number: int
    time: float = 0.0
    parts: list[BlockColumns] = field(default_factory=list)

    def columns(self) -> BlockColumns:
        """All samples; at least one part must be there."""
        if len(self.parts) > 1:
            self.parts = [BlockColumns(*map(np.concatenate, zip(*self.parts, strict=True)))]
        return self.parts[0]


class BlockSink(Protocol):
    """Takes complete blocks, to store them. Its methods are called by the thread that learns, and do not wait."""

    def offer(self, block: Block) -> None:
        """A block of which all shards have learned all; it may have been offered before."""

    def take_stored(self) -> list[tuple[int, int]]:
        """Partition and number of the blocks that have been stored since the last call."""


class Slices:
    """Groups of samples that have an id in a feature.

    Args:
        model: the model.
        wanted: "feature=id" each.

    Attributes:
        names: as wanted.

    Raises:
        ConfigError: a feature does not exist, or there are too many slices.
    """

    def __init__(self, model: Model, wanted: Sequence[str]) -> None:
        features = [feature.name for feature in model.schema.embedded]
        if len(wanted) > MOST_SLICES:
            raise ConfigError(f"compare.slices has {len(wanted)} slices; at most {MOST_SLICES}")
        self.names = tuple(wanted)
        self._keys: list[tuple[int, int]] = []
        for name in wanted:
            feature, equals, id_ = name.partition("=")
            if not equals or feature not in features:
                raise ConfigError(
                    f'compare.slices: {name!r} must be "feature=id" of one of the categorical features: '
                    f"{', '.join(features)}"
                )
            self._keys.append((features.index(feature), hash_bytes(id_.encode("utf-8", "surrogatepass"))))

    def of(self, batch: Batch) -> NDArray[np.uint32]:
        """The bits of each sample, uint32 [n]."""
        bits = np.zeros(len(batch), np.uint32)
        for i, (feature, key) in enumerate(self._keys):
            found = np.flatnonzero(batch.keys[batch.starts[feature] : batch.starts[feature + 1]] == np.uint64(key))
            bits[np.searchsorted(batch.offsets[feature], found, side="right") - 1] |= np.uint32(1 << i)
        return bits


class GroupFigures(msgspec.Struct, array_like=True):
    """Figures of a label in a block, over all of its samples or those of a slice.

    Attributes:
        label: name of the label.
        slice: name of the slice; "": all samples.
        binary: whether the label is binary.
        samples, non_finite, weight, labels, predictions, loss, absolute: as in `Sums`.
        bins: uint16 [m], little-endian: class * `BLOCK_BINS` + bin, ascending, of those that are not empty.
        counts: float32 [m], little-endian: their weights.
    """

    label: str
    slice: str
    binary: bool
    samples: int
    non_finite: int
    weight: float
    labels: float
    predictions: float
    loss: float
    absolute: float
    bins: bytes
    counts: bytes

    def add_to(self, sums: Sums) -> None:
        """Adds it to sums with `BLOCK_BINS` bins."""
        for name in ("samples", "non_finite", "weight", "labels", "predictions", "loss", "absolute"):
            setattr(sums, name, getattr(sums, name) + getattr(self, name))
        sums.spread = 0.0 if self.binary else math.nan  # which is not stored
        sums.counts.reshape(-1)[np.frombuffer(self.bins, "<u2")] += np.frombuffer(self.counts, "<f4")


class BlockFigures(msgspec.Struct, array_like=True):
    """What is stored of a block.

    Attributes:
        number: of the block in its partition.
        time: latest event time of its samples, in seconds since the epoch; 0: they have none.
        groups: figures by label and slice; a slice without samples has none.
    """

    number: int
    time: float
    groups: list[GroupFigures]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "BlockFigures":
        """The inverse of `encode`; raises ValueError if it is damaged."""
        figures: BlockFigures = msgspec.msgpack.decode(data, type=cls)
        for group in figures.groups:
            bins = np.frombuffer(group.bins, "<u2")
            if 2 * len(group.bins) != len(group.counts) or (bins >= 2 * BLOCK_BINS).any():
                raise ValueError(f"the bins of label {group.label!r} are damaged")
            if not math.isfinite(group.loss) or not group.weight >= 0:
                raise ValueError(f"the sums of label {group.label!r} are damaged")
        return figures


def figures_of(block: Block, model: Model, slices: Slices) -> BlockFigures:
    """The figures of a complete block."""
    columns, groups = block.columns(), []
    for name, mask in _groups(columns, slices):
        for j, label in enumerate(model.labels):
            sums = Sums(label.kind == "binary", BLOCK_BINS)
            sums.add(columns.predictions[mask, j], columns.labels[mask, j], columns.weights[mask])
            flat = sums.counts.reshape(-1)
            bins = np.flatnonzero(flat)
            groups.append(
                GroupFigures(
                    label.name,
                    name,
                    sums.binary,
                    *(sums.samples, sums.non_finite, sums.weight, sums.labels, sums.predictions),
                    *(sums.loss, sums.absolute, bins.astype("<u2").tobytes(), flat[bins].astype("<f4").tobytes()),
                )
            )
    return BlockFigures(block.number, block.time, groups)


def _groups(columns: BlockColumns, slices: Slices) -> Iterable[tuple[str, slice | NDArray[np.bool_]]]:
    yield "", slice(None)
    for i, name in enumerate(slices.names):
        if (mask := (columns.slices >> np.uint32(i)) & np.uint32(1) == 1).any():
            yield name, mask
