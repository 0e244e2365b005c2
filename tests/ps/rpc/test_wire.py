"""Frames: what protobuf makes of them, round trips, and damage at every byte."""

import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import streamtrain.ps.rpc.ps_pb2 as pb
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamtrain.errors import ShardRefused
from streamtrain.model.features import RowType
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.push import DenseChange, Push, PushResult, PushStats, RowUpdate
from streamtrain.ps.rpc import wire
from streamtrain.ps.session import PullBuffers, StateBuffers

DTYPES: list[RowType] = ["float32", "float16", "bfloat16"]
ERRORS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
MOST_MEMORY = 64 << 10  # bytes, to read a damaged message of some hundred


counts = st.lists(st.integers(0, 5), min_size=1, max_size=4)
dims = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)
arrays = st.lists(st.binary(max_size=70).map(lambda data: np.frombuffer(data, np.uint8)), max_size=4)
spans = st.dictionaries(
    st.integers(0, 2**32 - 1), st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=4
).map(lambda by_partition: [Span(p, min(ends), max(ends)) for p, ends in by_partition.items()])
messages = st.one_of(
    st.builds(lambda rows, ahead: pb.Request(pull=pb.Pull(rows=rows, ahead=ahead)), counts, st.integers(0, 9)),
    st.builds(lambda worker, run: pb.Request(join=pb.Join(worker=worker, run=run)), st.text(), st.text()),
    st.just(pb.Request(park=pb.Park())),
    st.just(pb.Request()),
)


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Floats that every dtype of the wire holds as normal values."""
    values = rng.uniform(1, 2, shape) * 2.0 ** rng.integers(-14, 15, shape) * rng.choice([-1, 1], shape)
    return np.asarray(values, np.float32)


def some_push(rows: Sequence[int], dim: int, ranges: Sequence[Span], samples: int, seed: int) -> Push:
    rng = np.random.default_rng(seed)
    updates = [
        RowUpdate(
            rng.integers(0, 2**64, n, np.uint64),
            normal(rng, n, dim + t),
            *rng.integers(0, 2**32, (2, n), np.uint32),
        )
        for t, n in enumerate(rows)
    ]
    return Push(ranges, samples, updates, normal(rng, 7), normal(rng, 3), int(rng.integers(0, 2**32)))


def in_steps(push: Push, slots: int, seed: int) -> Push:
    """The same of a batch that was learned in several steps."""
    rng = np.random.default_rng(seed)
    updates = []
    for update in push.updates:
        repeats = rng.integers(0, 4, len(update.keys), np.uint32)
        total = int(repeats.sum())
        gradients = normal(rng, total, update.gradients.shape[1])
        updates.append(
            update._replace(gradients=gradients, counts=rng.integers(0, 9, total, np.uint32), repeats=repeats)
        )
    assert isinstance(push.dense, np.ndarray)
    change = DenseChange(push.dense, normal(rng, slots, len(push.dense)), np.full(slots, 0.5, np.float32), 3.0)
    return push._replace(updates=updates, dense=change)


def sizes_of(push: Push) -> wire.Sizes:
    dims = [update.gradients.shape[1] for update in push.updates]
    if isinstance(push.dense, DenseChange):
        return wire.Sizes(dims, len(push.dense.by), len(push.statistics_change), len(push.dense.added))
    return wire.Sizes(dims, len(push.dense), len(push.statistics_change))


def assert_near(received: NDArray[np.float32], sent: NDArray[np.float32], dtype: RowType) -> None:
    assert received.dtype == np.float32
    assert received.shape == sent.shape
    assert (np.abs(received - sent) <= ERRORS[dtype] * np.abs(sent)).all()


# --- frames are protobuf ---


@given(messages, arrays)
def test_protobuf_reads_what_we_write(message: Any, bulk: list[Any]) -> None:
    read = pb.Request.FromString(wire.frame(message, bulk))
    assert read.bulk == b"".join(one.tobytes() for one in bulk)
    assert set(read.padding) <= {0}
    read.ClearField("bulk")
    read.ClearField("padding")
    assert read == message


@given(messages, st.binary(max_size=300), st.binary(max_size=300), st.lists(st.integers(0, 3), unique=True))
def test_we_read_what_protobuf_writes(message: Any, bulk: bytes, padding: bytes, order: list[int]) -> None:
    """Fields in any order, some of them missing, and with those among them that we do not know."""
    unknown = pb.ShardStatus(epoch=7, spec="?")  # fields 8 and 13, which a Request does not have
    parts = [message, pb.Request(bulk=bulk), pb.Request(padding=padding), unknown]
    data = b"".join(parts[i].SerializeToString() for i in order)
    read, read_bulk = wire.unframe(pb.Request, data)
    expected = pb.Request.FromString(data)
    assert bytes(read_bulk) == expected.bulk
    for one in (read, expected):
        one.ClearField("bulk")
        one.ClearField("padding")
        one.DiscardUnknownFields()
    assert read == expected


@given(messages, arrays)
def test_bulk_is_aligned_and_read_in_place(message: Any, bulk: list[Any]) -> None:
    data = wire.frame(message, [np.zeros(1, np.uint8), *bulk])  # no address is told of nothing
    read = np.frombuffer(wire.unframe(pb.Request, data)[1], np.uint8)
    at = read.ctypes.data - np.frombuffer(data, np.uint8).ctypes.data
    assert 0 <= at < len(data)
    assert at % 16 == 0


@pytest.mark.parametrize("size", [0, 1, 127, 128, 2**14 - 1, 2**14, 2**21 - 1, 2**21])
def test_bulk_of_any_length(size: int) -> None:
    """The length is written by hand, in as many bytes as it takes."""
    data = wire.frame(pb.Request(park=pb.Park()), [np.ones(size, np.uint8)])
    assert len(pb.Request.FromString(data).bulk) == size
    assert len(wire.unframe(pb.Request, data)[1]) == size


# --- round trips ---


@given(counts, st.integers(0, 2**32 - 1), seeds)
def test_pull(rows: list[int], ahead: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = [rng.integers(0, 2**64, n, np.uint64) for n in rows]
    data = wire.encode_request(None, wire.PullRequest(keys, ahead), "float16")
    push, decoded = wire.decode_request(*wire.unframe(pb.Request, data), wire.Sizes([1] * len(rows), 0, 0), "float16")
    assert push is None
    assert decoded is not None
    assert [one.tolist() for one in decoded.keys] == [one.tolist() for one in keys]
    assert decoded.ahead == ahead


@given(st.builds(some_push, counts, dims, spans, st.integers(0, 2**32 - 1), seeds), st.sampled_from(DTYPES))
def test_push(push: Push, dtype: RowType) -> None:
    """Everything exact but floats: float32 exact, float16 within 2^-11 and bfloat16 within 2^-8 of normal values."""
    data = wire.encode_request(push, None, dtype)
    decoded, pull = wire.decode_request(*wire.unframe(pb.Request, data), sizes_of(push), dtype)
    assert pull is None
    assert_equal(decoded, push, dtype)


@given(
    st.builds(some_push, counts, dims, spans, st.integers(0, 9), seeds),
    st.integers(0, 2),
    st.sampled_from(DTYPES),
    seeds,
)
def test_a_push_of_several_steps(push: Push, slots: int, dtype: RowType, seed: int) -> None:
    push = in_steps(push, slots, seed)
    data = wire.encode_request(push, None, dtype)
    decoded, _ = wire.decode_request(*wire.unframe(pb.Request, data), sizes_of(push), dtype)
    assert_equal(decoded, push, dtype)


@pytest.mark.parametrize("samples", [None, 0, 1, 2**64 - 1])
def test_none_is_not_zero(samples: int | None) -> None:
    """A peer of an earlier release says nothing of samples, one that has learned none says 0."""
    push = some_push([1], 2, [], 4, 1)._replace(seen=samples)
    request, bulk = wire.unframe(pb.Request, wire.encode_request(push, None, "float32"))
    decoded, _ = wire.decode_request(request, bulk, sizes_of(push), "float32")
    assert decoded is not None
    assert decoded.seen == samples
    into = PullBuffers([], np.empty(0, np.float32), np.empty(0, np.float32))
    wire.decode_pulled(pb.Pulled(learned=samples), wire.ArrayReader(memoryview(b""), "float32"), into)
    assert into.learned == samples


@pytest.mark.parametrize("wrong", ["more gradients than there are", "other slots"])
def test_a_push_of_several_steps_that_does_not_fit_is_refused(wrong: str) -> None:
    push = in_steps(some_push([3, 1], 2, [Span(0, 3, 5)], 4, 1), 2, 1)
    request, bulk = wire.unframe(pb.Request, wire.encode_request(push, None, "float32"))
    if wrong == "other slots":
        request.push.decay.append(0.5)
    else:
        request.push.gradients[0] += 1
    with pytest.raises(ShardRefused, match=r"slots|gradients are announced"):
        wire.decode_request(request, bulk, sizes_of(push), "float32")


@given(st.builds(some_push, counts, dims, spans, st.integers(0, 9), seeds), st.sampled_from(DTYPES), seeds)
def test_push_and_pull_together(push: Push, dtype: RowType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = [rng.integers(0, 2**64, n, np.uint64) for n in rng.integers(0, 9, len(push.updates))]
    data = wire.encode_request(push, wire.PullRequest(keys, 1), dtype)
    decoded, pull = wire.decode_request(*wire.unframe(pb.Request, data), sizes_of(push), dtype)
    assert_equal(decoded, push, dtype)
    assert pull is not None
    assert [one.tolist() for one in pull.keys] == [one.tolist() for one in keys]


def assert_equal(decoded: Push | None, push: Push, dtype: RowType) -> None:
    assert decoded is not None
    assert (decoded.spans, decoded.samples, decoded.watermark) == (push.spans, push.samples, push.watermark)
    for theirs, mine in zip(decoded.updates, push.updates, strict=True):
        none = np.empty(0, np.uint32)
        repeats = [none if one.repeats is None else one.repeats for one in (theirs, mine)]
        for a, b in ((theirs.keys, mine.keys), (theirs.counts, mine.counts), (theirs.times, mine.times), repeats):
            assert a.dtype == b.dtype
            assert a.tolist() == b.tolist()
        assert_near(theirs.gradients, mine.gradients, dtype)
    if push.samples and isinstance(push.dense, DenseChange):
        assert isinstance(decoded.dense, DenseChange)
        assert_near(decoded.dense.by, push.dense.by, dtype)
        assert decoded.dense.added.tolist() == push.dense.added.tolist(), "exact in every dtype"
        assert (decoded.dense.decay.tolist(), decoded.dense.steps) == (push.dense.decay.tolist(), push.dense.steps)
        assert_near(decoded.statistics_change, push.statistics_change, dtype)
    elif push.samples:
        assert isinstance(decoded.dense, np.ndarray)
        assert isinstance(push.dense, np.ndarray)
        assert_near(decoded.dense, push.dense, dtype)
        assert_near(decoded.statistics_change, push.statistics_change, dtype)
    else:
        assert isinstance(decoded.dense, np.ndarray)
        assert len(decoded.dense) == len(decoded.statistics_change) == 0


@given(counts, dims, seeds, st.sampled_from(DTYPES))
def test_pulled(rows: list[int], dim: int, seed: int, dtype: RowType) -> None:
    """Rows and both slices, within the errors of `test_push`."""
    rng = np.random.default_rng(seed)
    sent = [*(normal(rng, n, dim + t) for t, n in enumerate(rows)), normal(rng, 5), normal(rng, 0)]
    answer, bulk = wire.unframe(pb.Answer, wire.encode_answer(None, wire.PullResult(sent), dtype))
    assert answer.HasField("pulled")
    assert not answer.HasField("pushed")
    floats = wire.ArrayReader(bulk, dtype)
    for one in sent:
        out = np.empty(one.shape, np.float32)
        floats.floats_into(out)
        assert_near(out, one, dtype)
    floats.end()


@given(counts, dims, st.integers(0, 3), seeds, st.sampled_from(DTYPES))
@example([0, 2], 2, 0, 1, "float32")
@example([0], 1, 2, 1, "float16")
def test_pulled_with_state(rows: list[int], dim: int, state: int, seed: int, dtype: RowType) -> None:
    """Rows come as in `test_pulled`, what the optimizer has of them exactly."""
    rng, slots = np.random.default_rng(seed), state % 3
    dims = [dim + t for t in range(len(rows))]
    values = [normal(rng, n, of_table) for n, of_table in zip(rows, dims, strict=True)]
    states = [normal(rng, n, state) for n in rows]
    dense, of_slots, statistics = normal(rng, 5), normal(rng, slots, 5), normal(rng, 2)
    awaited = [rng.integers(0, 256, n, np.uint8) for n in rows]
    sent = wire.PullResult([*values, dense, statistics], [*states, of_slots], awaited, 7.0)
    answer, bulk = wire.unframe(pb.Answer, wire.encode_answer(None, sent, dtype))
    into = PullBuffers(
        [np.empty((n, of_table + state), np.float32) for n, of_table in zip(rows, dims, strict=True)],
        np.empty(5, np.float32),
        np.empty(2, np.float32),
        StateBuffers(dims, [np.empty(n, np.uint8) for n in rows], np.empty((slots, 5), np.float32)),
    )
    arrays = wire.ArrayReader(bulk, dtype)
    wire.decode_pulled(answer.pulled, arrays, into)
    arrays.end()
    assert into.state is not None
    for t, of_table in enumerate(dims):
        assert_near(into.rows[t][:, :of_table], values[t], dtype)
        assert into.rows[t][:, of_table:].tolist() == states[t].tolist()
        assert into.state.awaited[t].tolist() == awaited[t].tolist()
    assert_near(into.dense, dense, dtype)
    assert (into.state.slots.tolist(), into.state.steps) == (of_slots.tolist(), 7.0)


@given(st.sampled_from(PushOutcome), st.dictionaries(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)), seeds)
def test_pushed(outcome: PushOutcome, clock: dict[int, int], seed: int) -> None:
    stats = PushStats(*np.random.default_rng(seed).integers(0, 2**62, 6).tolist())
    pushed = PushResult(outcome, clock, stats)
    answer, _ = wire.unframe(pb.Answer, wire.encode_answer(pushed, None, "float32"))
    assert wire.decode_pushed(answer.pushed) == pushed


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype: RowType) -> None:
    """The receiver counts it; 16 bits must not make a number of it, nor infinity of a large number."""
    sent = np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)
    _, bulk = wire.unframe(pb.Answer, wire.encode_answer(None, wire.PullResult([sent]), dtype))
    received = wire.ArrayReader(bulk, dtype).floats(4)
    assert np.isnan(received[0])
    assert received[1:3].tolist() == [np.inf, -np.inf]
    assert np.isfinite(received[3])


# --- damage ---

DAMAGED_PUSH = some_push([2, 1], 2, [Span(0, 3, 5), Span(1, 300, 1000)], 4, 1)
REQUESTS: dict[str, bytes] = {
    "pull": wire.encode_request(None, wire.PullRequest([update.keys for update in DAMAGED_PUSH.updates], 1), "float32"),
    "push": wire.encode_request(DAMAGED_PUSH, None, "float32"),
    "push in 16 bits": wire.encode_request(DAMAGED_PUSH, None, "float16"),
    "push of several steps": wire.encode_request(in_steps(DAMAGED_PUSH, 2, 1), None, "float32"),
    "both": wire.encode_request(
        DAMAGED_PUSH, wire.PullRequest([one.keys for one in DAMAGED_PUSH.updates], 0), "bfloat16"
    ),
    "join": wire.frame(
        pb.Request(join=pb.Join(worker="wörker", run="run", identity="0123", shard=1, shards=2, progress=300)), []
    ),
}
ANSWERS: dict[str, bytes] = {
    "pulled": wire.encode_answer(
        None, wire.PullResult([np.ones((2, 3), np.float32), np.ones(3, np.float32)]), "float32"
    ),
    "pushed": wire.encode_answer(
        PushResult(PushOutcome.REJECTED, {0: 300, 7: 2**40}, PushStats(1, 2, 3, 4, 5, 6)), None, "float32"
    ),
    "joined": wire.frame(pb.Answer(joined=pb.Joined(progress=300)), []),
}
REQUESTS |= {
    f"{name}, as protobuf orders it": pb.Request.FromString(one).SerializeToString() for name, one in REQUESTS.items()
}


def damaged(data: bytes) -> Iterator[bytes]:
    """Cut off at every byte; with every bit flipped; with every byte the least, the greatest, and about a sign."""
    for i in range(len(data)):
        yield data[:i]
        changes = {data[i] ^ 1 << bit for bit in range(8)} | {0x00, 0x7F, 0x80, 0xFF}
        for byte in changes - {data[i]}:
            yield data[:i] + bytes([byte]) + data[i + 1 :]


def read_request(data: bytes) -> None:
    """Reads a request as a server does, and checks that it comes out well-formed, and as protobuf reads it."""
    request, bulk = wire.unframe(pb.Request, data)
    assert pb.Request.FromString(data).bulk in (bulk, b"")  # an empty one that follows is passed over
    if request.HasField("join"):
        wire.parse_dtype(request.join.dtype)
    refused = sum(not is_well_formed(request, bulk, dtype) for dtype in DTYPES)
    if refused == len(DTYPES):
        raise ShardRefused("in every dtype")


def is_well_formed(request: Any, bulk: memoryview, dtype: RowType) -> bool:
    try:
        push, pull = wire.decode_request(request, bulk, sizes_of(DAMAGED_PUSH)._replace(slots=2), dtype)
    except ShardRefused:
        return False
    if pull is not None and push is None:
        assert sum(map(len, pull.keys)) * 8 == len(bulk)
    if push is not None:
        assert_well_formed(push)
    return True


def assert_well_formed(push: Push) -> None:
    assert len({span.partition for span in push.spans}) == len(push.spans)
    assert all(span.start <= span.end for span in push.spans)
    for (keys, gradients, seen, times, repeats), dim in zip(push.updates, sizes_of(DAMAGED_PUSH).dims, strict=True):
        assert gradients.shape == (len(keys) if repeats is None else repeats.sum(), dim)
        assert len(seen) == len(gradients)
        assert len(times) == len(keys)


def read_answer(data: bytes) -> None:
    """Reads an answer as a client does."""
    answer, bulk = wire.unframe(pb.Answer, data)
    if answer.HasField("pushed"):
        wire.decode_pushed(answer.pushed)
    if answer.HasField("pulled"):
        floats = wire.ArrayReader(bulk, "float32")
        floats.floats_into(np.empty((3, 3), np.float32))
        floats.end()


def assert_withstood(cases: Iterator[bytes], read: Callable[[bytes], None]) -> tuple[int, int]:
    """Assert that each case is read or refused, at little memory; how many were each."""
    ends = {"read": 0, "refused": 0}
    tracemalloc.start()
    try:
        for case in cases:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read(case)
                ends["read"] += 1
            except ShardRefused:
                ends["refused"] += 1
            assert tracemalloc.get_traced_memory()[1] - before < MOST_MEMORY, case.hex()
    finally:
        tracemalloc.stop()
    return ends["read"], ends["refused"]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_damaged_request_is_refused_or_well_formed(name: str) -> None:
    read_request(REQUESTS[name])
    well_formed, refused = assert_withstood(damaged(REQUESTS[name]), read_request)
    assert well_formed > 0
    assert refused > len(REQUESTS[name]) / 4


@pytest.mark.parametrize("name", ANSWERS)
def test_a_damaged_answer_is_refused_or_well_formed(name: str) -> None:
    read_answer(ANSWERS[name])
    assert min(assert_withstood(damaged(ANSWERS[name]), read_answer)) > 0


def test_a_count_beyond_the_bulk_costs_no_memory() -> None:
    rows = [2**32 - 1] * 2
    frames = (wire.frame(one, []) for one in (pb.Request(pull=pb.Pull(rows=rows)), pb.Request(push=pb.Push(rows=rows))))
    assert_withstood(frames, read_request)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_well_formed(data: bytes) -> None:
    assert_withstood(iter([data, b"\x72" + data, b"\x72\x00\x7a" + data]), read_request)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the request is for 0 tables, but the model has 2"),
        ([1, 1, 1], "the request is for 3 tables, but the model has 2"),
        ([2, 0], "bulk has 8 bytes, but the message describes at least 16"),
        ([0, 0], "bulk has 8 bytes, but the message describes 0"),
        ([2**32 - 1, 0], f"bulk has 8 bytes, but the message describes at least {8 * (2**32 - 1)}"),
    ],
)
def test_a_refused_pull_says_what_is_wrong(rows: list[int], message: str) -> None:
    with pytest.raises(ShardRefused, match=f"^{message}$"):
        wire.decode_request(
            pb.Request(pull=pb.Pull(rows=rows)), memoryview(bytes(8)), wire.Sizes([1, 1], 0, 0), "float32"
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(7, 5, 4)], "the range of partition 7 ends at 4, before its start 5"),
        ([(7, 0, 1), (8, 0, 1), (7, 1, 2)], "partition 7 has two ranges in one push"),
    ],
)
def test_a_refused_push_says_what_is_wrong(given: list[tuple[int, int, int]], message: str) -> None:
    push = some_push([1], 1, list(itertools.starmap(Span, given)), 1, 0)
    request, bulk = wire.unframe(pb.Request, wire.encode_request(push, None, "float32"))
    with pytest.raises(ShardRefused, match=f"^{message}$"):
        wire.decode_request(request, bulk, sizes_of(push), "float32")


def test_a_dtype_that_is_not_known_is_refused() -> None:
    with pytest.raises(ShardRefused, match=r"unknown dtype 3 on the wire; the dtypes are .*float32"):
        wire.parse_dtype(3)


def test_a_flood_of_ranges_is_refused_before_it_is_read() -> None:
    spans = [pb.Span(partition=i, start=1 << 60, end=1 << 60) for i in range(70_000)]
    data = wire.frame(pb.Request(push=pb.Push(spans=spans)), [np.zeros(1, np.uint8)])
    with pytest.raises(ShardRefused, match="bytes in addition to bulk; at most 1048576") as caught:
        wire.unframe(pb.Request, data)
    assert caught.value.reason == "limit"


@pytest.mark.parametrize("padding", range(17))
def test_arrays_are_aligned_whatever_the_padding_and_what_is_before_them(padding: int) -> None:
    """Any padding is one that protobuf reads; and gradients by step, if their number is odd, move what follows."""
    rng = np.random.default_rng(padding)
    repeats = np.array([1, 2], np.uint32)
    updates = [
        RowUpdate(rng.integers(0, 99, 2, np.uint64), normal(rng, 3, 1), np.ones(3, np.uint32), repeats, repeats)
        for _ in range(2)
    ]
    push = Push([Span(0, 0, 1)], 1, updates, normal(rng, 1), normal(rng, 1), 0)
    ours = wire.encode_request(push, None, "float32")
    bulk_at = 2 + ours[1]
    foreign = bytes([0x72, padding]) + bytes(padding) + ours[bulk_at:]
    request, bulk = wire.unframe(pb.Request, foreign)
    decoded, _ = wire.decode_request(request, bulk, sizes_of(push), "float32")
    assert_equal(decoded, push, "float32")
    assert decoded is not None
    for update in decoded.updates:
        assert all(one.flags.aligned for one in update if one is not None)
