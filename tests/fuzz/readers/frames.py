"""Frames: what a peer sends to a shard, or a shard to a worker; any bytes are refused by name, or well-formed.

Input: a byte that chooses, then bytes of one request or answer; or of a session, requests each after their length in
two bytes, of which the first that is no join is preceded by one.
"""

import json
import struct
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import numpy as np
import streamtrain.ps.rpc.ps_pb2 as pb
from google.protobuf.message import DecodeError

from streamtrain.checkpoint.shard_state import describe_run, describe_shard
from streamtrain.errors import ShardRefused
from streamtrain.model.spec import Spec
from streamtrain.ps.clock import PushOutcome, Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.server import Servicer
from streamtrain.ps.push import DenseChange, Push, PushResult, PushStats, RowUpdate
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.services import answering, parse_request
from streamtrain.ps.rpc.sessions import Sessions, SessionTimeouts
from streamtrain.ps.shard import InitialState, Run, Shard
from streamtrain.settings.groups import PsSettings
from tests.ps.rpc.test_wire import DTYPES, read_answer, read_request, sizes_of

_MOST_KEYS = 1 << 12
_EXPECTED = {  # what a peer is told whose requests are wrong
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
SPEC = Spec(
    schema="fuzz",
    seed=7,
    reduction="sum",
    tables=(
        {"name": "ids", "dim": 1, "optimizer": "sgd", "rate": 0.5, "expire_after": 0},
        {"name": "seen", "dim": 3, "optimizer": "adagrad", "rate": 0.1, "expire_after": 1000, "capacity": 5},
        {"name": "often", "dim": 2, "optimizer": "ftrl", "rate": 0.1, "expire_after": 0, "min_count": 2,
         "sketch_width": 1024, "dtype": "bfloat16"},
    ),
    dense=((3,),),
    statistics=((2,),),
    dense_optimizer={"optimizer": "adam", "rate": 0.01},
)  # fmt: skip
_DIMS = [one["dim"] for one in SPEC.tables]


class _Ended(Exception):
    """The call has ended with a status."""


class _Context:
    """The part of gRPC's context that is used of a call."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        assert code in _EXPECTED, (code, details)
        assert details
        raise _Ended

    def cancel(self) -> bool:
        return False


def run(data: bytes) -> None:
    """One input."""
    if not data:
        return
    kind, rest = data[0] % 5, data[1:]
    try:
        if kind == 0:
            read_request(rest)
        elif kind == 1:
            read_answer(rest)
        elif kind == 2:
            round_trip(rest)
        elif kind == 3:
            session(rest)
        else:
            initialise(rest)
    except (ShardRefused, _Ended):
        return
    except DecodeError as exc:  # what is read here was taken before by our own reader, so protobuf has to take it too
        raise AssertionError(data) from exc


def round_trip(data: bytes) -> None:
    """What a request was read as is written so that the same is read again."""
    dtype = DTYPES[data[0] % len(DTYPES)] if data else "float32"
    sizes = wire.Sizes(_DIMS, 3, 2, SPEC.dense_slots)
    read = wire.decode_request(*wire.unframe(pb.Request, data[1:]), sizes, dtype)
    again = wire.decode_request(*wire.unframe(pb.Request, wire.encode_request(*read, dtype)), sizes, dtype)
    for one, other in zip(read, again, strict=True):
        assert (one is None) == (other is None)
    if read[0] is not None and again[0] is not None:
        assert list(again[0].spans) == list(read[0].spans)
        assert sizes_of(again[0]) == sizes_of(read[0])
    assert [bytes(one) for one in _arrays(*again)] == [bytes(one) for one in _arrays(*read)]


def _arrays(push: Push | None, pull: wire.PullRequest | None) -> Iterator[Any]:
    yield from pull.keys if pull is not None else []
    if push is not None:
        for update in push.updates:
            yield from (update.keys, update.counts, update.times, np.isnan(update.gradients))
            yield np.empty(0, np.uint32) if update.repeats is None else update.repeats
            yield np.nan_to_num(update.gradients)
        for floats in push.dense[:3] if isinstance(push.dense, DenseChange) else [push.dense]:
            yield np.nan_to_num(floats)
        yield np.nan_to_num(push.statistics_change)


def session(data: bytes) -> None:
    """A shard answers a session, and stays one that can be served and written."""
    node = Node(0, 1, Async)
    initial = InitialState(Run("run", {0: 5}), SPEC, np.zeros(3, np.float32), np.zeros(2, np.float32))
    shard = node.initialise(initial)
    limits = PsSettings(max_message_bytes=1 << 16, max_keys=_MOST_KEYS)
    servicer = Servicer(node, limits, 0.01, Sessions(limits.sessions, SessionTimeouts(), node.count))
    try:
        for answer in servicer.session(_requests(data), _Context()):
            wire.unframe(pb.Answer, answer)
    finally:
        check(shard)


def initialise(data: bytes) -> None:
    """An empty shard is given what it begins with."""
    node = Node(0, 1, Async)
    servicer = Servicer(node, PsSettings(), 1.0, Sessions(256, SessionTimeouts(), node.count))
    with answering(_Context(), node.count):
        servicer.initialise(parse_request(pb.InitialiseRequest, iter([data])))
    check(node.shard)


def _requests(data: bytes) -> Iterator[bytes]:
    yield join()
    at = 0
    while at + 2 <= len(data):
        (size,) = struct.unpack_from("<H", data, at)
        yield data[at + 2 : at + 2 + size]
        at += 2 + size


def join(**changed: Any) -> bytes:
    """The request that a session begins with."""
    given = {"worker": "fuzz", "run": "run", "identity": SPEC.identity, "shard": 0, "shards": 1, "dtype": 0}
    return wire.frame(pb.Request(join=pb.Join(**(given | changed))), [])


def check(shard: Shard) -> None:
    """What a shard holds is finite, and can be told in a checkpoint."""
    json.dumps([describe_run(shard, aligned=True), describe_shard(shard)], allow_nan=False)
    for values in (shard.dense.pull(), shard.statistics.pull()):
        assert np.isfinite(values).all(), values
    for table in shard.tables:
        _, rows = table.scan(0, _MOST_KEYS * 4)
        assert np.isfinite(rows.embeddings).all()
        assert np.isfinite(rows.state).all()
        assert len({*rows.keys.tolist()}) == len(rows.keys) == len(table)


def seeds() -> Iterator[bytes]:
    """Requests and answers of every kind, as they are written, and sessions of them."""
    rng = np.random.default_rng(0)
    keys = [np.array([3, 5], np.uint64), np.array([7], np.uint64), np.array([], np.uint64)]
    spans = [Span(0, 5, 7), Span(3, 0, 1)]
    updates = [
        RowUpdate(k, rng.normal(size=(len(k), dim)).astype(np.float32), *np.ones((2, len(k)), np.uint32))
        for k, dim in zip(keys, _DIMS, strict=True)
    ]
    dense, statistics = np.ones(3, np.float32), np.ones(2, np.float32)
    push = Push(spans, 2, updates, dense, statistics, 1_700_000_000, {0: 1.7e9})
    pull = wire.PullRequest(keys, 0)
    repeats = [np.array([2, 1], np.uint32), np.array([0], np.uint32), np.array([], np.uint32)]
    of_steps = [
        RowUpdate(k, np.ones((int(r.sum()), dim), np.float32), np.ones(int(r.sum()), np.uint32), np.ones_like(r), r)
        for k, r, dim in zip(keys, repeats, _DIMS, strict=True)
    ]
    slots = SPEC.dense_slots
    change = DenseChange(dense, np.ones((slots, len(dense)), np.float32), np.full(slots, 0.5, np.float32), 3.0)
    in_steps = push._replace(updates=of_steps, dense=change)
    nothing = [RowUpdate(one.keys[:0], one.gradients[:0], one.counts[:0], one.times[:0]) for one in updates]
    empty = Push([Span(0, 5, 6)], 0, nothing, dense, statistics, 0)
    requests = [join(), wire.frame(pb.Request(park=pb.Park()), []), wire.frame(pb.Request(beat=pb.Beat()), [])]
    for i, dtype in enumerate(DTYPES):
        several = [wire.encode_request(one, asked, dtype) for one in (push, in_steps) for asked in (pull, None)]
        several.append(wire.encode_request(None, pull._replace(state=True), dtype))
        yield from (bytes([2, i]) + one for one in several)
        requests += several
        yield b"\x01" + wire.encode_answer(
            PushResult(PushOutcome.REJECTED, {0: 5}, PushStats(1)), wire.PullResult([dense, statistics]), dtype
        )
    requests += [wire.encode_request(None, pull, "float32"), wire.encode_request(empty, None, "float32")]
    yield from (b"\x00" + one for one in requests)
    yield from (b"\x03" + _sized(one) for one in requests)
    later = push._replace(spans=[Span(0, 7, 9)], watermark=1_700_009_000)
    yield b"\x04" + _beginning()
    yield b"\x03" + b"".join(_sized(wire.encode_request(one, pull, "float32")) for one in (push, push, later))


def _beginning() -> bytes:
    dense, statistics = np.ones(3, np.float32).tobytes(), np.ones(2, np.float32).tobytes()
    request = pb.InitialiseRequest(
        shard=0,
        shards=1,
        run="run",
        spec=SPEC.to_json(),
        dense=dense,
        statistics=statistics,
        start=wire.encode_positions({0: 5}),
    )
    return bytes(request.SerializeToString())


def _sized(request: bytes) -> bytes:
    return struct.pack("<H", len(request)) + request
