"""Blocks: figures of predictions by block of offsets, for two models that learn from the same log to be compared.

Block k of a partition has its offsets from k * size to (k + 1) * size - 1. Its figures are a function of the log and of
the predictions that were made before their samples were learned. They come out the same whatever is killed or rewound:

* The predictions of blocks that are not stored yet travel with each push, and every shard keeps them with its clock,
  also in its checkpoints and its backup: a worker that continues from a clock has the predictions up to it.
* After a rewind, predictions are taken from the shard that has most of them. Samples that any shard has learned are not
  predicted again: these predictions would know the label.
* A block is handed over when it is complete and the shards have acknowledged all of it, and may be handed over again:
  it is stored under its number, in place of what was there.

A block of which the first offsets were learned without this, such as that in which a run begins, is left out.
"""

import json
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.ps.clock import Clock, Progress, Span
from streamtrain.ps.push import Floats
from streamtrain.quality.blocks import MOST_CARRIED, Block, BlockColumns, BlockSink, Slices
from streamtrain.train.intake import DecodedBatch
from streamtrain.train.trainer import BatchResult


class _Open(msgspec.Struct, array_like=True):
    """What is carried of a partition: block by block, then sample by sample. See schemas/README.md."""

    signature: int
    through: int
    blocks: list[tuple[int, int, float]]  # number, samples, time
    predictions: bytes
    labels: bytes
    weights: bytes
    slices: bytes


@dataclass
class _Partition:
    through: int  # offsets before it are in the blocks, or are left out
    blocks: deque[Block] = field(default_factory=deque)  # ascending, those that are not stored


class BlockTracker:
    """Sorts a worker's predictions into blocks. Used by one thread.

    Args:
        model: the model.
        size: offsets of a block.
        slices: groups of samples that have figures of their own.
        identity: of what the predictions are of: blocks of another one are not continued.
        sink: takes complete blocks.
    """

    def __init__(self, model: Model, size: int, slices: Slices, identity: str, sink: BlockSink) -> None:
        self._model, self._size, self._slices, self._sink = model, size, slices, sink
        labels = [(label.name, label.kind) for label in model.labels]
        self._signature = zlib.crc32(json.dumps([identity, size, labels, self._slices.names]).encode())
        self._of: dict[int, _Partition] = {}
        self._offered: dict[int, int] = {}  # next block to be offered, by partition

    def restore(self, positions: Clock, progress: Sequence[Progress]) -> None:
        """Goes on from where the shards stand."""
        self._offered.clear()
        self._of = {
            partition: self._restored(partition, at, [one.predictions.get(partition, b"") for one in progress])
            for partition, at in positions.items()
        }

    def _restored(self, partition: int, at: int, carried: Iterable[bytes]) -> _Partition:
        best = _Partition(-(-at // self._size) * self._size)
        found = False
        for data in carried:
            one = self._decode(partition, data)
            # One that ends before the position is of a worker that made no blocks since.
            if one is not None and one.through >= at and (not found or one.through > best.through):
                best, found = one, True
        return best

    def add(self, spans: Sequence[Span], decoded: DecodedBatch, result: BatchResult | None) -> dict[int, bytes]:
        """Adds a batch.

        Args:
            spans: its ranges.
            decoded: its samples.
            result: their predictions; None: it has no samples.

        Returns:
            What its push carries, by partition.
        """
        for partition, number in self._sink.take_stored():
            self._forget(partition, number)
        batch, origins = decoded.batch, decoded.origins
        if result is not None and origins is not None:
            columns = self._columns(batch, result.predictions)
            for partition, _, _ in spans:
                rows = np.flatnonzero(origins.partitions == partition)
                if len(rows):
                    of = slice(int(rows[0]), int(rows[-1]) + 1)
                    self._add(partition, origins.offsets[of], batch.times[of], columns.rows(of))
        for partition, _, end in spans:
            state = self._of[partition]
            state.through = max(state.through, end)
            while len(state.blocks) > MOST_CARRIED and self._is_complete(state, state.blocks[0]):
                state.blocks.popleft()
        return {partition: self._encode(self._of[partition]) for partition, _, _ in spans}

    def settle(self) -> None:
        """All that was added has been learned by all shards."""
        for partition, state in self._of.items():
            for block in state.blocks:
                if block.number >= self._offered.get(partition, 0) and self._is_complete(state, block):
                    self._offered[partition] = block.number + 1
                    self._sink.offer(block)

    def _is_complete(self, state: _Partition, block: Block) -> bool:
        return state.through >= (block.number + 1) * self._size

    def _forget(self, partition: int, number: int) -> None:
        if (state := self._of.get(partition)) is not None:
            # After a restore, a block that was stored may be in the making again.
            while state.blocks and state.blocks[0].number <= number and self._is_complete(state, state.blocks[0]):
                state.blocks.popleft()

    def _columns(self, batch: Batch, predictions: Floats) -> BlockColumns:
        weights = batch.weights
        if self._model.sampling is not None:
            predictions, weights = self._model.sampling.correct(predictions), self._model.sampling.represented(batch)
        slices = self._slices.of(batch) if self._slices.names else np.zeros(len(batch), np.uint32)
        return BlockColumns(predictions, batch.labels, weights, slices)

    def _add(
        self, partition: int, offsets: NDArray[np.int64], times: NDArray[np.float64], columns: BlockColumns
    ) -> None:
        state = self._of[partition]
        start = int(np.searchsorted(offsets, state.through))
        while start < len(offsets):
            number = int(offsets[start]) // self._size
            end = int(np.searchsorted(offsets, (number + 1) * self._size))
            if not state.blocks or state.blocks[-1].number != number:
                state.blocks.append(Block(partition, number))
            block = state.blocks[-1]
            block.time = max(block.time, float(times[start:end].max()))
            block.parts.append(columns.rows(slice(start, end)))
            start = end

    def _encode(self, state: _Partition) -> bytes:
        every = [block.columns() for block in state.blocks]
        blocks = [(block.number, len(one.weights), block.time) for block, one in zip(state.blocks, every, strict=True)]
        if not every:
            return msgspec.msgpack.encode(_Open(self._signature, state.through, blocks, b"", b"", b"", b""))
        whole = every[0] if len(every) == 1 else BlockColumns(*map(np.concatenate, zip(*every, strict=True)))
        is_binary = bool(((whole.labels == 0) | (whole.labels == 1)).all())
        return msgspec.msgpack.encode(
            _Open(
                self._signature,
                state.through,
                blocks,
                whole.predictions.astype("<f4").tobytes(),
                whole.labels.astype(np.uint8 if is_binary else "<f4").tobytes(),
                b"" if (whole.weights == 1).all() else whole.weights.astype("<f4").tobytes(),
                whole.slices.astype("<u4").tobytes() if self._slices.names else b"",
            )
        )

    def _decode(self, partition: int, data: bytes) -> _Partition | None:
        """The inverse of `_encode`; None: there is nothing, or it is of another model."""
        if not data:
            return None
        try:
            given = msgspec.msgpack.decode(data, type=_Open)
            if given.signature != self._signature:
                return None
            count, labels = sum(samples for _, samples, _ in given.blocks), len(self._model.labels)
            kind = np.uint8 if len(given.labels) == count * labels else np.dtype("<f4")
            columns = BlockColumns(
                np.frombuffer(given.predictions, "<f4").reshape(count, labels),
                np.frombuffer(given.labels, kind).astype(np.float32).reshape(count, labels),
                np.frombuffer(given.weights, "<f4") if given.weights else np.ones(count, np.float32),
                np.frombuffer(given.slices, "<u4") if given.slices else np.zeros(count, np.uint32),
            )
            if len(columns.weights) != count or len(columns.slices) != count:
                raise ValueError(f"{count} samples have {len(columns.weights)} weights, {len(columns.slices)} slices")
        except (msgspec.MsgspecError, ValueError):  # damaged: these blocks are left out
            return None
        state, start = _Partition(given.through), 0
        for number, samples, time in given.blocks:
            state.blocks.append(Block(partition, number, time, [columns.rows(slice(start, start + samples))]))
            start += samples
        return state
