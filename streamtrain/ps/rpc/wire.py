"""Wire: encodes arrays as messages of schemas/ps.proto and decodes them.

A message with bulk arrays is written by hand around protobuf's own bytes: padding, bulk, then the other fields. Any
protobuf parser can read it; but arrays are copied only once, straight into the message, and are read in place, aligned.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

import streamtrain.ps.rpc.ps_pb2 as pb
from streamtrain._core import narrow, widen
from streamtrain.errors import ShardRefused
from streamtrain.model.bad_samples import Refusals
from streamtrain.model.features import RowType
from streamtrain.model.spec import Rates
from streamtrain.ps.clock import Clock, Progress, PushOutcome, Span
from streamtrain.ps.push import DenseChange, Floats, Push, PushResult, PushStats, RowUpdate
from streamtrain.ps.session import PullBuffers
from streamtrain.ps.shard import Shard

Array = NDArray[Any]
M = TypeVar("M", bound=Message)

SERVICE = "streamtrain.ps.v1.ParameterServer"

_PADDING, _BULK = 0x72, 0x7A  # tags of the fields 14 and 15, length-delimited
_ALIGNMENT = 16
_LENGTH_BYTES = 5
_MAX_FIELD_BYTES = 1 << 20

DTYPES: dict[RowType, int] = {"float32": 0, "float16": 1, "bfloat16": 2}
_NAMES: dict[int, RowType] = {number: name for name, number in DTYPES.items()}


def parse_dtype(number: int) -> RowType:
    """The name of a `Dtype`."""
    if number not in _NAMES:
        raise ShardRefused(f"unknown dtype {number} on the wire; the dtypes are {DTYPES}")
    return _NAMES[number]


def frame(message: Any, arrays: Sequence[Array]) -> bytes:
    """Encodes a message with `arrays`, contiguous and concatenated, as its bulk."""
    length = _varint(sum(array.nbytes for array in arrays))
    padding = -(3 + len(length)) % _ALIGNMENT
    head = bytes([_PADDING, padding]) + bytes(padding) + bytes([_BULK]) + length
    return b"".join([head, *(array.data for array in arrays if array.size), message.SerializeToString()])


def unframe(kind: Callable[[], M], data: bytes) -> tuple[M, memoryview]:
    """Decodes a message and its bulk.

    Raises:
        ShardRefused: the bytes are not a message of this kind.
    """
    message = kind()
    try:
        start, size = _find_bulk(data)
        if size < 0:  # from a writer with a different order of fields
            message.ParseFromString(data)
            return message, memoryview(getattr(message, "bulk"))  # noqa: B009  # not all messages have it
        if len(data) - start - size > _MAX_FIELD_BYTES:  # parsing takes many times its size in memory
            raise ShardRefused(
                f"{len(data) - start - size} bytes in addition to bulk; at most {_MAX_FIELD_BYTES}", "limit"
            )
        message.ParseFromString(data[start + size :])
        if getattr(message, "bulk"):  # noqa: B009  # any other parser would take this one
            raise ShardRefused("the message contains bulk twice")
    except (DecodeError, IndexError) as exc:
        raise ShardRefused(f"{len(data)} bytes are not a valid {message.DESCRIPTOR.name}: {exc}") from exc
    return message, memoryview(data)[start : start + size]


def _find_bulk(data: bytes) -> tuple[int, int]:
    """Start and length of the bulk; length -1 unless padding and bulk come first."""
    if len(data) < 3 or data[0] != _PADDING or data[1] >= 0x80:
        return 0, -1
    at = 2 + data[1]
    if at >= len(data) or data[at] != _BULK:
        return 0, -1
    size = 0
    for i in range(_LENGTH_BYTES):
        byte = data[at + 1 + i]
        size |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            start = at + 2 + i
            if start + size > len(data):
                raise DecodeError(f"its bulk has {len(data) - start} bytes instead of {size}")
            return start, size
    raise DecodeError("the length of its bulk is too long")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class ArrayReader:
    """Reads arrays from bulk, one after another.

    Args:
        dtype: of floats.

    Raises:
        ShardRefused: the bulk is shorter or longer than described; from every method.
    """

    def __init__(self, data: memoryview, dtype: RowType) -> None:
        self._data = data
        self._dtype = dtype
        self._at = 0

    def take(self, dtype: Any, count: int) -> Array:
        """The next `count` elements, in place; or a copy if they are not aligned there."""
        end = self._at + count * np.dtype(dtype).itemsize
        if end > len(self._data):
            raise ShardRefused(f"bulk has {len(self._data)} bytes, but the message describes at least {end}")
        array = np.frombuffer(self._data, dtype, count, self._at)
        self._at = end
        return array if array.flags.aligned else array.copy()

    def floats(self, count: int) -> Floats:
        """The next `count` floats, as float32."""
        if self._dtype == "float32":
            return self.take("<f4", count)
        return widen(self.take("<u2", count), self._dtype)

    def floats_into(self, out: Floats) -> None:
        """The next floats, as many as `out` (contiguous, any shape) takes, into it."""
        flat = out.reshape(-1)
        if self._dtype == "float32":
            flat[:] = self.take("<f4", flat.size)
        else:
            widen(self.take("<u2", flat.size), self._dtype, flat)

    def end(self) -> None:
        """Raises unless all bytes have been read."""
        if self._at != len(self._data):
            raise ShardRefused(f"bulk has {len(self._data)} bytes, but the message describes {self._at}")


def _encode_floats(arrays: Iterable[Floats], dtype: RowType) -> list[Array]:
    """Converts floats to the dtype of the wire."""
    if dtype == "float32":
        return [np.ascontiguousarray(one) for one in arrays]
    return [narrow(np.ascontiguousarray(one).reshape(-1), dtype) for one in arrays]


def encode_keys(keys: NDArray[np.uint64]) -> bytes:
    """Encodes keys, uint64 [n]."""
    return keys.astype("<u8", copy=False).tobytes()


def decode_keys(data: bytes) -> NDArray[np.uint64]:
    """The inverse of `encode_keys`; raises ShardRefused if it is no array of keys."""
    if len(data) % 8:
        raise ShardRefused(f"{len(data)} bytes are not an array of keys")
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)


def encode_positions(
    clock: Clock,
    watermarks: Mapping[int, float] = {},
    refusals: Mapping[int, Refusals] = {},
    predictions: Mapping[int, bytes] = {},
) -> list[Any]:
    """Encodes a clock, with what belongs to it: the fields of a `Progress`."""
    return [
        pb.Position(partition=p, next=at, **_encode_state(p, watermarks, refusals, predictions))
        for p, at in clock.items()
    ]


def _encode_state(
    partition: int,
    watermarks: Mapping[int, float],
    refusals: Mapping[int, Refusals],
    predictions: Mapping[int, bytes],
) -> dict[str, Any]:
    """The fields that spans and positions have in common."""
    return {
        "watermark": watermarks.get(partition, 0.0),
        "predictions": predictions.get(partition, b""),
        **_encode_refusals(refusals, partition),
    }


def _encode_refusals(refusals: Mapping[int, Refusals], partition: int) -> dict[str, float]:
    return refusals[partition]._asdict() if partition in refusals else {}


def _decode_refusals(listed: Iterable[Any]) -> dict[int, Refusals]:
    return {one.partition: Refusals(one.seen, one.refused) for one in listed if one.seen}


def _decode_predictions(listed: Iterable[Any]) -> dict[int, bytes]:
    return {one.partition: one.predictions for one in listed if one.predictions}


def decode_progress(given: Iterable[Any]) -> Progress:
    """Decodes a clock with what belongs to it."""
    listed = list(given)
    watermarks = {one.partition: one.watermark for one in listed if one.watermark}
    return Progress(decode_clock(listed), watermarks, _decode_refusals(listed), _decode_predictions(listed))


def decode_clock(given: Iterable[Any]) -> dict[int, int]:
    """Decodes a clock."""
    return {one.partition: one.next for one in given}


class PullRequest(NamedTuple):
    """A request for rows and the dense slice.

    Attributes:
        keys: uint64 by table.
        ahead: batches that are pulled and not pushed yet.
        state: whether to include optimizer state.
    """

    keys: Sequence[NDArray[np.uint64]]
    ahead: int
    state: bool = False


class Sizes(NamedTuple):
    """Array sizes of a shard.

    Attributes:
        dims: width of a row, by table.
        dense: floats of its dense slice.
        statistics: floats of its slice of the statistics.
        slots: number of slots of the dense optimizer.
    """

    dims: Sequence[int]
    dense: int
    statistics: int
    slots: int = 0

    @classmethod
    def of(cls, shard: Shard) -> "Sizes":
        return cls(shard.spec.dims, len(shard.dense), len(shard.statistics), shard.spec.dense_slots)


def encode_request(push: Push | None, pull: PullRequest | None, dtype: RowType) -> bytes:
    """Encodes a push, a pull, or both."""
    request = pb.Request()
    arrays: list[Array] = []
    if pull is not None:
        request.pull.CopyFrom(pb.Pull(rows=[len(one) for one in pull.keys], ahead=pull.ahead, state=pull.state))
        arrays += pull.keys
    if push is not None:
        arrays += encode_push(push, request.push, dtype)
    return frame(request, arrays)


def encode_push(push: Push, message: Any, dtype: RowType) -> list[Array]:
    """Encodes a push into a message; returns its bulk."""
    state = push.watermarks, push.refusals, push.predictions
    message.CopyFrom(
        pb.Push(
            rows=[len(update.keys) for update in push.updates],
            spans=[pb.Span(partition=p, start=s, end=e, **_encode_state(p, *state)) for p, s, e in push.spans],
            samples=push.samples,
            watermark=push.watermark,
            idle=push.idle,
            rates=push.rates or (),
            seen=push.seen,
        )
    )
    arrays: list[Array] = []
    in_steps = any(update.repeats is not None for update in push.updates)
    for update in push.updates:
        arrays += [update.keys, *_encode_repeats(update, in_steps), update.counts, update.times]
    if in_steps:
        message.gradients.extend(len(update.gradients) for update in push.updates)
    floats = [update.gradients for update in push.updates]
    if not push.samples:
        return arrays + _encode_floats(floats, dtype)
    if not isinstance(push.dense, DenseChange):
        return arrays + _encode_floats([*floats, push.dense, push.statistics_change], dtype)
    message.steps = push.dense.steps
    message.decay.extend(push.dense.decay.tolist())
    return [
        *arrays,
        *_encode_floats([*floats, push.dense.by, push.statistics_change], dtype),
        np.ascontiguousarray(push.dense.added),
    ]


def _encode_repeats(update: RowUpdate, in_steps: bool) -> list[Array]:
    if not in_steps:
        return []
    return [np.ones(len(update.keys), np.uint32) if update.repeats is None else update.repeats]


def decode_request(
    request: Any, bulk: memoryview, sizes: Sizes, dtype: RowType
) -> tuple[Push | None, PullRequest | None]:
    """Decodes the push and the pull of a request, each None if absent."""
    arrays = ArrayReader(bulk, dtype)
    pull = _decode_pull(request.pull, arrays, len(sizes.dims)) if request.HasField("pull") else None
    push = decode_push(request.push, arrays, sizes) if request.HasField("push") else None
    arrays.end()
    return push, pull


def _decode_pull(pull: Any, arrays: ArrayReader, tables: int) -> PullRequest:
    _check_tables(pull.rows, tables)
    return PullRequest([arrays.take("<u8", count) for count in pull.rows], pull.ahead, pull.state)


def decode_push(push: Any, arrays: ArrayReader, sizes: Sizes) -> Push:
    """Decodes a push, whose bulk comes next."""
    dims, dense, statistics, _ = sizes
    _check_tables(push.rows, len(dims))
    columns = _decode_columns(push, arrays, len(dims))
    gradients = [
        arrays.floats(len(c) * dim).reshape(len(c), dim) for (_, _, c, _), dim in zip(columns, dims, strict=True)
    ]
    of_samples = 1 if push.samples else 0
    dense_floats, statistics_change = arrays.floats(dense * of_samples), arrays.floats(statistics * of_samples)
    taken = Push(
        spans=[Span(one.partition, one.start, one.end) for one in push.spans],
        samples=push.samples,
        updates=[RowUpdate(k, g, c, t, r) for (k, r, c, t), g in zip(columns, gradients, strict=True)],
        dense=_decode_change(push, arrays, dense_floats, sizes) if push.steps and push.samples else dense_floats,
        statistics_change=statistics_change,
        watermark=push.watermark,
        watermarks={one.partition: one.watermark for one in push.spans if one.watermark},
        idle=push.idle,
        refusals=_decode_refusals(push.spans),
        predictions=_decode_predictions(push.spans),
        rates=_decode_rates(push.rates),
        seen=push.seen if push.HasField("seen") else None,
    )
    _check_spans(taken.spans, taken.watermarks)
    _check_refusals(taken.refusals)
    return taken


def _decode_rates(given: Sequence[float]) -> Rates | None:
    if not given:
        return None
    if len(given) != len(Rates._fields) or not all(0 < rate < math.inf for rate in given):
        raise ShardRefused(f"learning rates must be {len(Rates._fields)} finite numbers > 0, not {list(given)}")
    return Rates._make(given)


def _decode_columns(push: Any, arrays: ArrayReader, tables: int) -> list[tuple[Array, Array | None, Array, Array]]:
    """Keys, repeats, counts and times, by table."""
    if not push.gradients:
        return [(arrays.take("<u8", n), None, arrays.take("<u4", n), arrays.take("<u4", n)) for n in push.rows]
    _check_tables(push.gradients, tables)
    columns: list[tuple[Array, Array | None, Array, Array]] = []
    for n, gradients in zip(push.rows, push.gradients, strict=True):
        keys, repeats = arrays.take("<u8", n), arrays.take("<u4", n)
        if int(repeats.sum(dtype=np.uint64)) != gradients:
            raise ShardRefused(f"{gradients} gradients are announced, but the keys have {repeats.sum(dtype=np.uint64)}")
        columns.append((keys, repeats, arrays.take("<u4", gradients), arrays.take("<u4", n)))
    return columns


def _decode_change(push: Any, arrays: ArrayReader, by: Floats, sizes: Sizes) -> DenseChange:
    decay = np.array(push.decay, np.float32)
    if len(decay) != sizes.slots:
        raise ShardRefused(f"the change is for {len(decay)} slots, but the dense optimizer has {sizes.slots}")
    added = arrays.take("<f4", sizes.slots * sizes.dense).reshape(sizes.slots, sizes.dense)
    return DenseChange(by, added, decay, push.steps)


@dataclass
class PullResult:
    """The reply to a pull.

    Attributes:
        floats: rows by table, then the slices.
        exact: optimizer state, if requested: of rows by table, then the slots; always float32.
        awaited: by table uint8, if state was requested.
        steps: step count of the dense optimizer, if state was requested.
        rates: learning rates in force.
        learned: samples that the shard has learned.
    """

    floats: Sequence[Floats]
    exact: Sequence[Floats] = ()
    awaited: Sequence[Array] = ()
    steps: float = 0.0
    rates: Rates | None = None
    learned: int = 0

    @classmethod
    def of(cls, shard: Shard, pull: PullRequest) -> "PullResult":
        dims, learned = shard.spec.dims, shard.samples
        dense, statistics = np.empty(len(shard.dense), np.float32), np.empty(len(shard.statistics), np.float32)
        if not pull.state:
            rows = [np.empty((len(k), dim), np.float32) for k, dim in zip(pull.keys, dims, strict=True)]
            shard.pull_rows(pull.keys, rows)
            shard.pull_dense(dense, statistics)
            return cls([*rows, dense, statistics], rates=shard.rates, learned=learned)
        widths = [dim + state for dim, state in zip(dims, shard.spec.state_sizes, strict=True)]
        rows = [np.empty((len(k), width), np.float32) for k, width in zip(pull.keys, widths, strict=True)]
        awaited = [np.zeros(len(k), np.uint8) for k in pull.keys]
        slots = np.empty((shard.spec.dense_slots, len(dense)), np.float32)
        shard.pull_state(pull.keys, rows, awaited)
        steps = shard.pull_dense_state(dense, slots, statistics)
        values = [row[:, :dim] for row, dim in zip(rows, dims, strict=True)]
        states = [np.ascontiguousarray(row[:, dim:]) for row, dim in zip(rows, dims, strict=True)]
        return cls([*values, dense, statistics], [*states, slots], awaited, steps, shard.rates, learned)


def decode_pulled(pulled: Any, arrays: ArrayReader, into: PullBuffers) -> None:
    """Decodes the reply to a pull, whose bulk comes next, into buffers."""
    into.rates = _decode_rates(pulled.rates)
    into.learned = pulled.learned if pulled.HasField("learned") else None
    if into.state is None:
        for out in (*into.rows, into.dense, into.statistics):
            arrays.floats_into(out)
        return
    state = into.state
    for row, dim in zip(into.rows, state.dims, strict=True):
        row[:, :dim] = arrays.floats(len(row) * dim).reshape(len(row), dim)
    arrays.floats_into(into.dense)
    arrays.floats_into(into.statistics)
    for row, dim in zip(into.rows, state.dims, strict=True):
        state_size = row.shape[1] - dim
        row[:, dim:] = arrays.take("<f4", len(row) * state_size).reshape(len(row), state_size)
    state.slots[:] = arrays.take("<f4", state.slots.size).reshape(state.slots.shape)
    for awaited in state.awaited:
        awaited[:] = arrays.take("u1", len(awaited))
    state.steps = pulled.steps


def encode_answer(pushed: PushResult | None, pulled: PullResult | None, dtype: RowType) -> bytes:
    """Encodes the reply to a push, to a pull, or to both."""
    answer = pb.Answer()
    if pushed is not None:
        stats = pb.PushStats(**vars(pushed.stats))
        answer.pushed.CopyFrom(
            pb.Pushed(outcome=int(pushed.outcome), clock=encode_positions(pushed.clock), stats=stats)
        )
    if pulled is None:
        return frame(answer, [])
    answer.pulled.CopyFrom(pb.Pulled(steps=pulled.steps, rates=pulled.rates or (), learned=pulled.learned))
    return frame(answer, [*_encode_floats(pulled.floats, dtype), *pulled.exact, *pulled.awaited])


def decode_pushed(pushed: Any) -> PushResult:
    """Decodes the reply to a push."""
    try:
        outcome = PushOutcome(pushed.outcome)
    except ValueError as exc:
        raise ShardRefused(f"unknown push outcome {pushed.outcome}; the outcomes are {[*PushOutcome]}") from exc
    stats = PushStats(**{name: getattr(pushed.stats, name) for name in vars(PushStats())})
    return PushResult(outcome, decode_clock(pushed.clock), stats)


def _check_tables(rows: Sequence[int], tables: int) -> None:
    if len(rows) != tables:
        raise ShardRefused(f"the request is for {len(rows)} tables, but the model has {tables}")


def _check_refusals(refusals: Mapping[int, Refusals]) -> None:
    for partition, (seen, refused) in refusals.items():
        if not (math.isfinite(seen) and 0 <= refused <= seen):
            raise ShardRefused(f"partition {partition}: {refused} of {seen} messages cannot have been refused")


def _check_spans(spans: Sequence[Span], watermarks: Mapping[int, float]) -> None:
    seen = set()
    for partition, start, end in spans:
        if start > end:
            raise ShardRefused(f"the range of partition {partition} ends at {end}, before its start {start}")
        if partition in seen:
            raise ShardRefused(f"partition {partition} has two ranges in one push")
        seen.add(partition)
    for partition, watermark in watermarks.items():
        if not math.isfinite(watermark):  # a checkpoint could not store it
            raise ShardRefused(f"the watermark of partition {partition} is not a time: {watermark}")
