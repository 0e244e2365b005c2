"""Wire: messages of schemas/ps.proto to and from arrays.

A message with bulk arrays is written by hand around protobuf's own bytes: padding, bulk, then the other fields. Any
protobuf parser reads it. But the arrays are copied once, straight into the message, and read in place, aligned.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

import streamtrain.ps.ps_pb2 as pb
from streamtrain._core import narrow, widen
from streamtrain.errors import ShardRefused
from streamtrain.model.features import RowType
from streamtrain.ps.clock import Clock, Outcome, Span, Stand
from streamtrain.ps.push import Floats, Push, Pushed, PushStats, RowUpdate

Array = NDArray[Any]
M = TypeVar("M", bound=Message)

SERVICE = "streamtrain.ps.v1.ParameterServer"

_PADDING, _BULK = 0x72, 0x7A  # tags of the fields 14 and 15, length-delimited
_ALIGNMENT = 16
_LENGTH_BYTES = 5
_MOST_BESIDE_BULK = 1 << 20

DTYPES: dict[RowType, int] = {"float32": 0, "float16": 1, "bfloat16": 2}
_NAMES: dict[int, RowType] = {number: name for name, number in DTYPES.items()}


def dtype_of(number: int) -> RowType:
    """The name of a `Dtype`."""
    if number not in _NAMES:
        raise ShardRefused(f"dtype {number} of the wire is not known; there are {DTYPES}")
    return _NAMES[number]


def frame(message: Any, arrays: Sequence[Array]) -> bytes:
    """A message whose bulk are `arrays`, contiguous, one after another."""
    length = _varint(sum(array.nbytes for array in arrays))
    padding = -(3 + len(length)) % _ALIGNMENT
    head = bytes([_PADDING, padding]) + bytes(padding) + bytes([_BULK]) + length
    return b"".join([head, *(array.data for array in arrays if array.size), message.SerializeToString()])


def unframe(kind: Callable[[], M], data: bytes) -> tuple[M, memoryview]:
    """A message and its bulk.

    Raises:
        ShardRefused: the bytes are not such a message.
    """
    message = kind()
    try:
        start, size = _bulk_of(data)
        if size < 0:  # from a writer that keeps another order of fields
            message.ParseFromString(data)
            return message, memoryview(getattr(message, "bulk"))  # noqa: B009  # not all messages have it
        if len(data) - start - size > _MOST_BESIDE_BULK:  # parsed, it takes many times its size
            raise ShardRefused(f"{len(data) - start - size} bytes beside bulk; at most {_MOST_BESIDE_BULK}", "limit")
        message.ParseFromString(data[start + size :])
        if getattr(message, "bulk"):  # noqa: B009  # any other parser would take this one
            raise ShardRefused("the message has bulk twice")
    except (DecodeError, IndexError) as exc:
        raise ShardRefused(f"{len(data)} bytes are no {message.DESCRIPTOR.name}: {exc}") from exc
    return message, memoryview(data)[start : start + size]


def _bulk_of(data: bytes) -> tuple[int, int]:
    """Where bulk starts and how long it is; the length is -1 unless padding and bulk are in front."""
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
                raise DecodeError(f"its bulk should have {size} bytes, but {len(data) - start} follow")
            return start, size
    raise DecodeError("the length of its bulk is too long")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class Bulk:
    """Takes arrays from bulk, one after another.

    Args:
        data: the bytes.
        dtype: of floats.

    Raises:
        ShardRefused: the bytes do not hold what is asked for; from every method.
    """

    def __init__(self, data: memoryview, dtype: RowType) -> None:
        self._data = data
        self._dtype = dtype
        self._at = 0

    def take(self, dtype: Any, count: int) -> Array:
        """The next `count` elements, in place."""
        end = self._at + count * np.dtype(dtype).itemsize
        if end > len(self._data):
            raise ShardRefused(f"bulk has {len(self._data)} bytes, but the message describes at least {end}")
        array = np.frombuffer(self._data, dtype, count, self._at)
        self._at = end
        return array

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
        """There must be no more."""
        if self._at != len(self._data):
            raise ShardRefused(f"bulk has {len(self._data)} bytes, but the message describes {self._at}")


def _floats_of(arrays: Iterable[Floats], dtype: RowType) -> list[Array]:
    """Arrays as they travel."""
    if dtype == "float32":
        return [np.ascontiguousarray(one) for one in arrays]
    return [narrow(np.ascontiguousarray(one).reshape(-1), dtype) for one in arrays]


def positions(clock: Clock, watermarks: Mapping[int, float] = {}) -> list[Any]:
    """A clock as messages."""
    return [pb.Position(partition=p, next=at, watermark=watermarks.get(p, 0.0)) for p, at in clock.items()]


def stand_of(given: Iterable[Any]) -> Stand:
    """A clock with its watermarks, from messages."""
    listed = list(given)
    return Stand(clock_of(listed), {one.partition: one.watermark for one in listed if one.watermark})


def clock_of(given: Iterable[Any]) -> dict[int, int]:
    """A clock from messages."""
    return {one.partition: one.next for one in given}


class Pull(NamedTuple):
    """What is asked of a shard: keys uint64 by table, and how many batches have been pulled and not been pushed yet."""

    keys: Sequence[NDArray[np.uint64]]
    ahead: int


class Sizes(NamedTuple):
    """What a shard holds: width of a row by table, floats of the dense slice and of that of the statistics."""

    dims: Sequence[int]
    dense: int
    statistics: int


def encode_request(push: Push | None, pull: Pull | None, dtype: RowType) -> bytes:
    """A push, a pull, or both."""
    request = pb.Request()
    arrays: list[Array] = []
    if pull is not None:
        request.pull.CopyFrom(pb.Pull(rows=[len(one) for one in pull.keys], ahead=pull.ahead))
        arrays += pull.keys
    if push is not None:
        arrays += put_push(push, request.push, dtype)
    return frame(request, arrays)


def put_push(push: Push, message: Any, dtype: RowType) -> list[Array]:
    """Puts a push into a message, and gives its bulk."""
    marks = push.watermarks
    message.CopyFrom(
        pb.Push(
            rows=[len(update.keys) for update in push.updates],
            spans=[pb.Span(partition=p, start=s, end=e, watermark=marks.get(p, 0.0)) for p, s, e in push.spans],
            samples=push.samples,
            watermark=push.watermark,
        )
    )
    arrays: list[Array] = []
    for update in push.updates:
        arrays += [update.keys, update.counts, update.times]
    floats = [update.gradients for update in push.updates]
    floats += [push.dense_gradient, push.statistics_change] if push.samples else []
    return arrays + _floats_of(floats, dtype)


def decode_request(request: Any, bulk: memoryview, sizes: Sizes, dtype: RowType) -> tuple[Push | None, Pull | None]:
    """The push and the pull of a request to a shard of some sizes, as far as there are."""
    arrays = Bulk(bulk, dtype)
    pull = _take_pull(request.pull, arrays, len(sizes.dims)) if request.HasField("pull") else None
    push = take_push(request.push, arrays, sizes) if request.HasField("push") else None
    arrays.end()
    return push, pull


def _take_pull(pull: Any, arrays: Bulk, tables: int) -> Pull:
    _check_tables(pull.rows, tables)
    return Pull([arrays.take("<u8", count) for count in pull.rows], pull.ahead)


def take_push(push: Any, arrays: Bulk, sizes: Sizes) -> Push:
    """A push, whose bulk comes next."""
    dims, dense, statistics = sizes
    _check_tables(push.rows, len(dims))
    columns = [(arrays.take("<u8", n), arrays.take("<u4", n), arrays.take("<u4", n)) for n in push.rows]
    gradients = [arrays.floats(n * dim).reshape(n, dim) for n, dim in zip(push.rows, dims, strict=True)]
    of_samples = 1 if push.samples else 0
    taken = Push(
        spans=[Span(one.partition, one.start, one.end) for one in push.spans],
        samples=push.samples,
        updates=[RowUpdate(k, g, c, t) for (k, c, t), g in zip(columns, gradients, strict=True)],
        dense_gradient=arrays.floats(dense * of_samples),
        statistics_change=arrays.floats(statistics * of_samples),
        watermark=push.watermark,
        watermarks={one.partition: one.watermark for one in push.spans if one.watermark},
    )
    _check_spans(taken.spans, taken.watermarks)
    return taken


def encode_answer(pushed: Pushed | None, pulled: Sequence[Floats] | None, dtype: RowType) -> bytes:
    """The answer to a push, to a pull (rows by table, then the slices), or to both."""
    answer = pb.Answer()
    if pushed is not None:
        stats = pb.PushStats(**vars(pushed.stats))
        answer.pushed.CopyFrom(pb.Pushed(outcome=int(pushed.outcome), clock=positions(pushed.clock), stats=stats))
    if pulled is None:
        return frame(answer, [])
    answer.pulled.SetInParent()
    return frame(answer, _floats_of(pulled, dtype))


def decode_pushed(pushed: Any) -> Pushed:
    """What became of a push."""
    try:
        outcome = Outcome(pushed.outcome)
    except ValueError as exc:
        raise ShardRefused(f"outcome {pushed.outcome} of a push is not known; there are {[*Outcome]}") from exc
    stats = PushStats(**{name: getattr(pushed.stats, name) for name in vars(PushStats())})
    return Pushed(outcome, clock_of(pushed.clock), stats)


def _check_tables(rows: Sequence[int], tables: int) -> None:
    if len(rows) != tables:
        raise ShardRefused(f"the request is for {len(rows)} tables, but the model has {tables}")


def _check_spans(spans: Sequence[Span], watermarks: Mapping[int, float]) -> None:
    seen = set()
    for partition, start, end in spans:
        if start > end:
            raise ShardRefused(f"the range of partition {partition} ends at {end}, before its start {start}")
        if partition in seen:
            raise ShardRefused(f"partition {partition} has two ranges in one push")
        seen.add(partition)
    for partition, watermark in watermarks.items():
        if not math.isfinite(watermark):  # no checkpoint could be written any more
            raise ShardRefused(f"the watermark of partition {partition} is {watermark}, which is no time")
