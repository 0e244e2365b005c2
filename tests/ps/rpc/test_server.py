"""What a server withstands: bad requests and bad clients get a clear refusal, are counted, and do the shard no harm."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import streamtrain.ps.rpc.ps_pb2 as pb
from grpc._cython import cygrpc

from streamtrain._core import shards_of
from streamtrain.errors import ShardBroken, ShardRefused
from streamtrain.logs import LogThrottle
from streamtrain.ps.bulk import BulkSynchronous
from streamtrain.ps.clock import PushOutcome
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.server import ShardServer
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc import services, wire
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl
from streamtrain.ps.rpc.security import authenticate
from streamtrain.ps.rpc.services import server_options
from streamtrain.ps.rpc.sessions import SessionTimeouts
from streamtrain.ps.shard import InitialState, Run, Shard
from streamtrain.settings.groups import PsSettings
from tests.patience import PATIENCE, until
from tests.ps.counting import DENSE, SPEC, Log, assert_exact, key
from tests.ps.raw import Raw, join_of, pull_of, push_of
from tests.ps.served import COUNTING, Served, learn, served

MALFORMED = grpc.StatusCode.INVALID_ARGUMENT
MISMATCH = grpc.StatusCode.FAILED_PRECONDITION
LIMIT = grpc.StatusCode.RESOURCE_EXHAUSTED
LOG: Log = {0: [[1, 2], [2], [3], [1]], 1: [[1], [4], [4], [2, 5]]}
BULK = b"".join([np.uint64(key(1)).tobytes(), bytes(8), bytes(4), bytes(4 * DENSE), bytes(8)])  # of a push of one key
BEAT = wire.frame(pb.Request(beat=pb.Beat()), [])


class Victim:
    """A server, and what becomes of it.

    Args:
        of: what is served.
    """

    def __init__(self, of: Served) -> None:
        self.of = of
        self.shards = of.shards()
        self.run = self.shards.agree().id

    def raw(self, channel: Any = None) -> Raw:
        return Raw(channel or self.of.channels[0][0])

    def joined(self, channel: Any = None, **changed: Any) -> Raw:
        """A session that has joined."""
        raw = self.raw(channel).say(self.join(**changed))
        assert raw.hear_what() == "joined"
        return raw

    def join(self, **changed: Any) -> bytes:
        return join_of(**{"run": self.run, "shards": len(self.of.nodes), **changed})

    def counters(self) -> dict[str, int]:
        return dict(self.shards.controls[0].status().counters)

    def workers(self) -> list[str]:
        return list(self.shards.controls[0].status().workers)

    def assert_unharmed(self) -> None:
        """A good client learns as if nothing had been."""
        learn(self.of, LOG)
        assert_exact(self.of.held, LOG)


@contextmanager
def attacked(*args: Any, **kwargs: Any) -> Iterator[Victim]:
    """A server that nothing is to happen to."""
    with served(*args, **kwargs) as of:
        victim = Victim(of)
        yield victim
        victim.assert_unharmed()


# --- bad requests ---

JOINED = "joined"
REFUSED: dict[str, tuple[list[Any], grpc.StatusCode, str, str]] = {
    "no join": ([pull_of([0])], MALFORMED, "a session must start with join.*contains pull", "refused_malformed"),
    "second join": ([JOINED, {}], MALFORMED, "contain no other join; this request contains join", "refused_malformed"),
    "nothing": ([JOINED, b""], MALFORMED, "it contains nothing|request contains nothing", "refused_malformed"),
    "no worker": ([{"worker": ""}], MALFORMED, "join names no worker", "refused_malformed"),
    "unknown dtype": ([{"dtype": 3}], MALFORMED, "unknown dtype 3 on the wire", "refused_malformed"),
    "other shard": ([{"shard": 1}], MISMATCH, "shard 0 has index 0, but the worker expects 1", "refused_mismatch"),
    "other shard count": ([{"shards": 7}], MISMATCH, "has number of shards 1, but .* 7", "refused_mismatch"),
    "other model": ([{"identity": "f00"}], MISMATCH, f"has model '{SPEC.identity}', but .*'f00'", "refused_mismatch"),
    "other run": ([{"run": "another"}], MISMATCH, "has run '[0-9a-f]+', but .*'another'", "refused_mismatch"),
    "tables of a pull": ([JOINED, pull_of([1, 1], [7, 7])], MALFORMED, "for 2 tables, but .* 1", "refused_malformed"),
    "no tables": ([JOINED, pull_of([])], MALFORMED, "for 0 tables, but the model has 1", "refused_malformed"),
    "tables of a push": ([JOINED, push_of([(0, 0, 1)], rows=[0, 0])], MALFORMED, "for 2 tables", "refused_malformed"),
    "bulk of a pull too short": ([JOINED, pull_of([2], [7])], MALFORMED, "8 bytes, but .* 16", "refused_malformed"),
    "bulk of a pull too long": ([JOINED, pull_of([1], [7, 7])], MALFORMED, "16 bytes, but .* 8", "refused_malformed"),
    "bulk of a push too short": (
        [JOINED, push_of([(0, 0, 1)], np.frombuffer(BULK[:-1], "u1"), rows=[1], samples=1)],
        *(MALFORMED, f"bulk has {len(BULK) - 1} bytes, but the message describes at least {len(BULK)}"),
        "refused_malformed",
    ),
    "bulk of a push too long": (
        [JOINED, push_of([(0, 0, 1)], np.frombuffer(BULK + b"\0", "u1"), rows=[1], samples=1)],
        *(MALFORMED, f"bulk has {len(BULK) + 1} bytes, but the message describes {len(BULK)}"),
        "refused_malformed",
    ),
    "reversed": ([JOINED, push_of([(3, 2, 1)], rows=[0])], MALFORMED, "partition 3 ends at 1", "refused_malformed"),
    "partition twice": (
        [JOINED, push_of([(3, 0, 1), (3, 1, 2)], rows=[0])],
        *(MALFORMED, "partition 3 has two ranges in one push", "refused_malformed"),
    ),
    "too many keys to pull": ([JOINED, pull_of([9], range(9))], LIMIT, "has 9 keys; at most 8", "refused_limit"),
    "too many keys to push": ([JOINED, push_of([], rows=[2**32 - 1])], LIMIT, "at most 8", "refused_limit"),
    "message too large": ([JOINED, pull_of([2500], range(2500))], LIMIT, "2.* bytes; at most 16384", "refused_limit"),
    "message too large for gRPC": ([JOINED, pull_of([5000], range(5000))], LIMIT, "[Ll]arger than max", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_and_counted(name: str) -> None:
    said, code, message, counter = REFUSED[name]
    with attacked(1, limits=PsSettings.model_construct(max_message_bytes=16 << 10, max_keys=8)) as victim:
        before = victim.counters()
        raw = victim.raw()
        for one in said:
            raw.say(one if isinstance(one, bytes) else victim.join(**({} if one == JOINED else one)))
        found, details = raw.refusal()
        assert found == code, details
        assert_matches(message, details)
        if counter:  # what gRPC refuses is not seen by anybody of ours
            until(lambda: victim.counters().get(counter, 0) == before.get(counter, 0) + 1)
        until(lambda: not victim.workers())


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=pattern):
        raise RuntimeError(text)


def damaged(data: bytes) -> Iterator[bytes]:
    """Cut off at every byte, and with one bit of every byte flipped."""
    for i in range(len(data)):
        yield data[:i]
        yield data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :]


def test_damage_at_every_byte_does_no_harm() -> None:
    """To a push that no flip of a bit makes one that follows on the clock: the rest shall change nothing."""
    push = push_of([(0, 3, 300)], np.frombuffer(BULK, "u1"), rows=[1], samples=1)
    with served(1) as of:
        victim = Victim(of)
        learn(of, LOG)
        codes = {}
        for join, after in (
            *((True, one) for frame in (push, pull_of([1], [7])) for one in damaged(frame)),
            *((False, one) for one in damaged(victim.join())),
        ):
            raw = victim.joined() if join else victim.raw()
            try:
                raw.say(after).hear()
                raw.end()
            except grpc.RpcError as exc:
                codes[exc.code()] = exc.details()
                raw.vanish()
        assert codes.keys() == {MALFORMED, MISMATCH}
        assert all(codes.values())
        assert victim.counters()["refused_malformed"] > len(push)
        assert of.held[0].pushes[PushOutcome.REJECTED] > 0
        learn(of, LOG)
        assert_exact(of.held, LOG)


def test_what_is_refused_is_said_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_seldom", LogThrottle())
    with served() as of:
        victim = Victim(of)
        for _ in range(5):
            assert victim.raw().say(victim.join(shards=7)).refusal()[0] == MISMATCH
    (said,) = [one.getMessage() for one in caplog.records if one.name == "streamtrain.ps.rpc.services"]
    assert said == "1 requests refused: shard 0 has number of shards 2, but the worker expects 7"


def test_keys_of_another_shard_are_refused() -> None:
    keys = np.array([key(i) for i in range(20)], np.uint64)
    foreign = keys[shards_of(keys, 2) == 1][:1]
    push = push_of([(0, 0, 1)], np.frombuffer(foreign.tobytes() + bytes(12), "u1"), rows=[1])
    with attacked(2) as victim:
        for request in (pull_of([1], foreign), push):
            code, details = victim.raw().say(victim.join(), request).refusal()
            assert code == MISMATCH
            assert f"key {int(foreign[0]):#x} of table 'ids' is not of shard 0 of 2" in details
        assert victim.counters()["refused_mismatch"] == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_gradients_that_are_not_finite_are_dropped_and_counted(bad: float) -> None:
    """The clock goes on: the sample has been learned from, as far as it could be."""
    log: Log = {**LOG, 2: [[]]}
    with served(1) as of:
        victim = Victim(of)
        floats = np.array([bad, *[-1.0] * DENSE, 1.0, 1.0], np.float32)
        bulk = np.frombuffer(np.uint64(key(9)).tobytes() + bytes(8) + floats.tobytes(), "u1")
        raw = victim.joined().say(push_of([(2, 0, 1)], bulk, rows=[1], samples=1))
        assert raw.hear()[0].pushed == pb.Pushed(stats=pb.PushStats(non_finite_rows=1))
        assert victim.counters()["gradients_non_finite_rows"] == 1
        learn(of, LOG)
        assert_exact(of.held, log)


def test_a_dense_gradient_that_is_not_finite_is_dropped_and_counted() -> None:
    with served(1) as of:
        victim = Victim(of)
        floats = np.array([*[-1.0] * (DENSE - 1), np.nan, 1.0, 1.0], np.float32)
        raw = victim.joined().say(push_of([(2, 0, 1)], floats.view("u1"), rows=[0], samples=1))
        assert raw.hear()[0].pushed == pb.Pushed(stats=pb.PushStats(non_finite_dense=1))
        assert victim.counters()["gradients_non_finite_dense"] == 1
        assert of.held[0].clock() == {2: 1}
        assert not of.held[0].dense.pull().any()


def test_a_change_of_statistics_that_is_not_finite_is_dropped_and_counted() -> None:
    with served(1) as of:
        victim = Victim(of)
        floats = np.array([*[-1.0] * DENSE, np.nan, 1.0], np.float32)
        raw = victim.joined().say(push_of([(2, 0, 1)], floats.view("u1"), rows=[0], samples=1))
        assert raw.hear()[0].pushed == pb.Pushed(stats=pb.PushStats(non_finite_statistics=1))
        assert victim.counters()["gradients_non_finite_statistics"] == 1
        assert not of.held[0].statistics.pull().any()


# --- initialise ---

ZEROS = bytes(4 * DENSE)


def spec_with(**changed: Any) -> str:
    return json.dumps({**json.loads(SPEC.to_json()), **changed})


def table_without(field: str, **changed: Any) -> dict[str, Any]:
    return {**{k: v for k, v in SPEC.tables[0].items() if k != field}, **changed}


INITIALISE: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "dense too short": ({"dense": ZEROS[4:]}, MALFORMED, "dense slice of shard 0 has 4 floats, not 5"),
    "dense too long": ({"dense": ZEROS + ZEROS}, MALFORMED, "dense slice of shard 0 has 10 floats, not 5"),
    "no floats": ({"dense": ZEROS[1:]}, MALFORMED, "19 bytes are not a float32 array"),
    "statistics": ({"statistics": b""}, MALFORMED, "statistics slice of shard 0 has 0 floats, not 2"),
    "other index": ({"shard": 1}, MISMATCH, "this is shard 0 of 1, not 1 of 1"),
    "other count": ({"shards": 2}, MISMATCH, "this is shard 0 of 1, not 0 of 2"),
    "no spec": ({"spec": ""}, MALFORMED, "invalid model spec"),
    "half a spec": ({"spec": SPEC.to_json()[:50]}, MALFORMED, "invalid model spec"),
    "no object": ({"spec": "[]"}, MALFORMED, "invalid model spec"),
    "deep": ({"spec": "[" * 100_000}, MALFORMED, "invalid model spec"),
    "infinite seed": ({"spec": spec_with(seed=float("inf"))}, MALFORMED, "invalid model spec"),
    "no tables": ({"spec": spec_with(tables="ids")}, MALFORMED, "invalid model spec"),
    "table without a name": ({"spec": spec_with(tables=[table_without("name")])}, MALFORMED, "'name'"),
    "name that is none": ({"spec": spec_with(tables=[table_without("name", name=7)])}, MALFORMED, "name"),
    "no expire_after": ({"spec": spec_with(tables=[table_without("expire_after")])}, MALFORMED, "'expire_after'"),
    "other optimizer": ({"spec": spec_with(dense_optimizer={"optimizer": "?", "rate": 1.0})}, MALFORMED, "optimizer"),
    "negative shape": ({"spec": spec_with(dense=[[-5], [10]])}, MALFORMED, "shape"),
    "reduction": ({"spec": spec_with(reduction="most")}, MALFORMED, "reduction"),
}


@pytest.mark.parametrize("name", INITIALISE)
def test_a_bad_beginning_is_refused_and_the_shard_stays_empty(name: str) -> None:
    changed, code, message = INITIALISE[name]
    good = {"run": "r", "spec": SPEC.to_json(), "shard": 0, "shards": 1, "dense": ZEROS, "statistics": bytes(8)}
    with served(1) as of:
        control = RemoteControl(*of.channels[0])
        initialise = of.channels[0][0].unary_unary(f"/{wire.SERVICE}/Initialise")
        with pytest.raises(grpc.RpcError) as caught:
            initialise(pb.InitialiseRequest(**{**good, **changed}).SerializeToString(), timeout=PATIENCE)
        assert caught.value.code() == code
        assert_matches(message, caught.value.details())
        status = control.status()
        assert not status.ready
        assert sum(status.counters.values()) == 1
        Victim(of).assert_unharmed()


def test_bytes_that_are_no_request_are_refused_and_counted() -> None:
    with attacked(1) as victim:
        for method in ("Status", "Initialise", "Freeze", "Cut", "Write"):
            call = victim.of.channels[0][0].unary_unary(f"/{wire.SERVICE}/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff", timeout=PATIENCE)
            assert caught.value.code() == MALFORMED
            assert "the request is not a " in caught.value.details()
        assert victim.counters()["refused_malformed"] == 5


def test_an_error_of_ours_is_counted_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with attacked(1) as victim:
        with monkeypatch.context() as patch:
            patch.setattr(wire, "encode_answer", None)
            code, details = victim.joined().say(pull_of([0])).refusal()
        assert code == grpc.StatusCode.UNKNOWN
        assert "'NoneType' object is not callable" in details
        until(lambda: victim.counters().get("failed_TypeError") == 1)


def test_an_empty_shard_is_unavailable() -> None:
    with served(1) as of:
        code, details = Raw(of.channels[0][0]).say(join_of(), pull_of([0])).refusal()
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "shard 0 is empty: it found no checkpoint and waits to be initialised" in details
        assert RemoteControl(*of.channels[0]).status().counters["failed_ShardUnavailable"] == 1
        Victim(of).assert_unharmed()


# --- bad clients ---


def test_too_many_sessions_are_refused() -> None:
    with attacked(1, limits=PsSettings(sessions=2)) as victim:
        first, second = victim.joined(worker="a"), victim.joined(worker="b")
        code, details = victim.raw().say(victim.join(worker="c")).refusal()
        assert (code, details) == (LIMIT, "2 sessions are open already, and no more are taken")
        assert victim.counters()["refused_limit"] == 1
        first.end()
        second.end()
        until(lambda: not victim.workers())


def test_sessions_that_never_join_are_ended_and_keep_nobody_from_working() -> None:
    with served(1, limits=PsSettings(sessions=4), timeouts=SessionTimeouts(join=2.0)) as of:
        victim = Victim(of)
        good = victim.joined(worker="good")
        began = time.monotonic()
        silent = [victim.raw() for _ in range(3)]
        until(lambda: len(of.servers[0]._sessions._open) == 4)
        good.say(pull_of([1], [7]))
        assert good.hear_what() == "pulled"
        assert [raw.refusal()[0] for raw in silent] == [grpc.StatusCode.CANCELLED] * 3
        assert 1.9 < time.monotonic() - began < PATIENCE / 2
        until(lambda: victim.counters().get("silent_sessions") == 3)
        good.end()
        victim.assert_unharmed()


def test_calls_that_never_ask_are_ended_and_keep_nobody_from_working() -> None:
    """They hold threads as sessions do: a client that opens a call need not say anything."""
    with attacked(1, limits=PsSettings(sessions=2), timeouts=SessionTimeouts(join=0.3)) as victim:
        silent = [Raw(victim.of.channels[0][0], method=method) for method in ("Status", "Freeze") * 5]
        assert [raw.refusal()[0] for raw in silent] == [grpc.StatusCode.CANCELLED] * 10
        until(lambda: victim.counters().get("silent_sessions") == 10)


def test_an_idle_session_is_ended_unless_it_beats() -> None:
    timeouts = SessionTimeouts(join=2.0, idle=1.5)
    with attacked(1, timeouts=timeouts) as victim:
        idle, alive = victim.joined(worker="idle"), victim.joined(worker="alive")
        began = time.monotonic()

        def beaten_for_long() -> bool:
            alive.say(BEAT)
            return time.monotonic() - began > 2 * timeouts.idle

        until(beaten_for_long)
        assert victim.workers() == ["alive"]
        assert idle.refusal()[0] == grpc.StatusCode.CANCELLED
        alive.say(pull_of([1], [7]))
        assert alive.hear_what() == "pulled"
        assert alive.refusal()[0] == grpc.StatusCode.CANCELLED
        until(lambda: victim.counters().get("silent_sessions") == 2)


def test_a_client_that_does_not_read_its_answers_is_ended() -> None:
    with attacked(1, timeouts=SessionTimeouts(join=2.0, idle=0.5)) as victim:
        deaf = victim.joined(worker="deaf")
        deaf.say(*[pull_of([100_000], range(100_000))] * 100)  # more than the network holds
        until(lambda: victim.counters().get("silent_sessions") == 1)
        until(lambda: victim.workers() == [])


TOGETHER: dict[str, Callable[[Shard], Consistency]] = {
    "bounded": lambda shard: Bounded(shard, 0, 1000.0, time.monotonic),
    "bulk": lambda shard: BulkSynchronous(shard, 2, 1000.0, time.monotonic),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("waits", [False, True], ids=["silent", "waiting"])
def test_nobody_waits_for_a_client_that_disappears(name: str, waits: bool) -> None:
    """Its lease would last: the end of its connection is enough, also while the server waits on its behalf."""
    with served(1, TOGETHER[name], timeouts=SessionTimeouts(waiting=0.05)) as of, ExitStack() as stack:
        victim = Victim(of)
        channel = stack.enter_context(grpc.insecure_channel(of.channels[0][1], [("grpc.use_local_subchannel_pool", 1)]))
        gone, stays = victim.joined(channel, worker="gone"), victim.joined(worker="stays")
        until(lambda: victim.workers() == ["gone", "stays"])
        if waits:  # both do: for a third one that has nothing to say
            third = victim.joined(worker="third")
            gone.say(push_of([(1, 0, 1)], rows=[0]), pull_of([0]))
        stays.say(push_of([(0, 0, 1)], rows=[0]), pull_of([0]))
        heard = stays.hear_what()
        while heard == "pushed":
            heard = stays.hear_what()
        assert heard == "waiting"
        channel.close()
        if waits:
            until(lambda: victim.workers() == ["stays", "third"])
            third.vanish()
        while heard != "pulled":
            heard = stays.hear_what()
        assert victim.workers() == ["stays"]
        assert of.held[0].clock()[0] == 1
        stays.end()


class Failing:
    """A table that runs out of memory half-way."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def push(self, *update: Any, **options: Any) -> None:
        self._table.push(*update, **options)
        raise MemoryError("no memory for a row")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __len__(self) -> int:
        return len(self._table)


@pytest.mark.parametrize(
    "consistency", [Async, lambda shard: BulkSynchronous(shard, 1, 10.0, time.monotonic)], ids=["async", "bulk"]
)
def test_a_push_that_fails_half_way_breaks_the_shard(
    consistency: Callable[[Shard], Consistency], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_seldom", LogThrottle())
    with served(1, consistency) as of:
        victim = Victim(of)
        of.held[0].tables[0] = Failing(of.held[0].tables[0])  # type: ignore[call-overload]  # it need not be one
        push = push_of([(0, 0, 1)], np.frombuffer(BULK, "u1"), rows=[1], samples=1)
        for request in (push, push, pull_of([0])):
            code, details = victim.raw().say(victim.join(), request).refusal()
            assert code == grpc.StatusCode.DATA_LOSS
            assert "shard 0 must be restarted from a checkpoint: a push failed midway: MemoryError: no mem" in details
        assert victim.counters()["failed_ShardBroken"] == 3
        assert not of.held[0].clock()
        (said,) = [one for one in caplog.records if one.name == "streamtrain.ps.rpc.services"]  # of three
        assert said.levelno == logging.ERROR
        assert said.getMessage().startswith("shard 0 must be restarted from a checkpoint: a push failed midway")
        with pytest.raises(ShardBroken, match="must be restarted"):
            learn(of, LOG)


def test_a_broken_shard_is_not_saved() -> None:
    """Its rows are half a push ahead of its clock, and would be so for good."""
    marked: list[bool] = []

    class Store:
        digest = ""

        def restore(self, index: int, shards: int, held: Shard | None = None) -> None:
            return None

        def read_ahead(self, index: int, shards: int, held: Shard | None = None, *, rate: float = 0.0) -> None:
            raise NotImplementedError

        rows_ahead = 0

        def stop_reading(self) -> None:
            raise NotImplementedError

        def forget(self) -> None:
            raise NotImplementedError

        def snapshot(self, shard: Shard, full: bool) -> Any:
            marked.append(full)

    with served(1, stores=[Store()]) as of:
        victim = Victim(of)
        of.held[0].tables[0] = Failing(of.held[0].tables[0])  # type: ignore[call-overload]  # as above
        with pytest.raises(ShardBroken):
            learn(of, LOG)
        control = victim.shards.controls[0]
        for step in (control.freeze, lambda: control.cut(0, {}, True)):
            with pytest.raises(ShardBroken, match="must be restarted"):
                step()
        assert not marked


# --- token ---


def test_the_token_is_asked_for_in_every_call(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(0, 1, Async)
    server = ShardServer(node, interceptors=(authenticate("secret", lambda: node.count("refused_unauthenticated")),))
    target = f"127.0.0.1:{server.grpc.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with grpc.insecure_channel(target) as channel:
            of = Served([node], [server], [(channel, target)], COUNTING)
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                strange = Shards([(channel, target)], COUNTING, metadata)
                initial = InitialState(Run("strange", {}), SPEC, np.zeros(DENSE, np.float32), np.zeros(2, np.float32))
                control = strange.controls[0]
                for step in (
                    strange.agree,
                    control.freeze,
                    lambda: control.cut(0, {}, True),  # noqa: B023  # called here
                    lambda: control.write(0),  # noqa: B023
                    lambda: control.initialise(0, 1, initial),  # noqa: B023
                    lambda: strange.client("strange", Run("run", {})).join(),  # noqa: B023
                ):
                    with pytest.raises(ShardRefused, match="carries no token or a wrong one") as caught:
                        step()
                    assert caught.value.reason == "unauthenticated"
                assert Raw(channel, metadata).say(join_of()).refusal()[0] == grpc.StatusCode.UNAUTHENTICATED
            assert node.counters == {"refused_unauthenticated": 14}
            assert [one.getMessage() for one in caplog.records if one.name == "streamtrain.ps.rpc.security"] == [
                "rejected 1 calls with a missing or wrong cluster token"
            ]
            assert not node.ready
            metadata = (("authorization", "Bearer secret"),)
            learn(of, LOG, Shards([(channel, target)], COUNTING, metadata))
            assert_exact(of.held, LOG)
    finally:
        server.stop()


def test_options_are_those_that_grpc_knows() -> None:
    """It passes over all others without a word, and closes connections whose pings it was not told to expect."""
    library = Path(cygrpc.__file__).read_bytes()
    for name, _ in [*CHANNEL_OPTIONS, *server_options(1 << 20)]:
        assert name.encode() + b"\0" in library, name
