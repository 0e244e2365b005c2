"""Clients of shards that go away, come back as they were, older or empty, are silent, or make them wait."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from streamtrain.errors import ShardRefused, ShardUnavailable
from streamtrain.periodic import PeriodicTask
from streamtrain.ps.bulk import BulkSynchronous
from streamtrain.ps.client import any_rejected
from streamtrain.ps.clock import Cursor, Ends, PushOutcome, Span
from streamtrain.ps.consistency import Async, Bounded, Consistency
from streamtrain.ps.hooks import RestoredShard
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.server import ShardServer
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc import remote_session as remote
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, Retry, patiently
from streamtrain.ps.rpc.sessions import SessionTimeouts
from streamtrain.ps.shard import InitialState, Run, Shard
from tests.patience import PATIENCE, until
from tests.ps.counting import DENSE, SPEC, Log, assert_exact, new_shard, plan_of
from tests.ps.served import COUNTING, Served, learn, push, served
from tests.ps.test_exactly_once import load, save

LOG: Log = {0: [[1, 2], [2], [3], [1]], 1: [[1], [4], [4], [2, 5]]}
ENDS = {p: len(samples) for p, samples in LOG.items()}
QUICK = Retry(first_backoff=0.01, last_backoff=0.05, give_up=PATIENCE)


@pytest.fixture(params=["lanes", "calls"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How messages go: through shared memory, or over gRPC as between machines."""
    if request.param == "calls":
        monkeypatch.setattr(remote, "create_lane", lambda target: None)
    return str(request.param)


def stop(of: Served, index: int) -> None:
    of.servers[index].stop(0)


def start(of: Served, index: int, node: Node | None = None, *interceptors: grpc.ServerInterceptor) -> None:
    """Serves a shard, or another in its place, where it was served before."""
    of.nodes[index] = node or of.nodes[index]
    server = ShardServer(of.nodes[index], interceptors=interceptors)
    server.grpc.add_insecure_port(of.channels[index][1])
    server.start()
    of.servers[index] = server


def empty(index: int, count: int = 2) -> Node:
    return Node(index, count, Async)


def holding(shard: Shard) -> Node:
    """A node that has restored a shard."""

    class Store:
        digest = ""

        def restore(self, index: int, shards: int, held: Shard | None = None) -> RestoredShard:
            return RestoredShard(shard, 0)

        def read_ahead(self, index: int, shards: int, held: Shard | None = None, *, rate: float = 0.0) -> None:
            raise NotImplementedError

        rows_ahead = 0

        def stop_reading(self) -> None:
            raise NotImplementedError

        def snapshot(self, shard: Shard, full: bool) -> Any:
            raise NotImplementedError

        def forget(self) -> None:
            raise NotImplementedError

    node = Node(shard.index, shard.shards, Async, Store())
    assert node.restore()
    return node


class Worker:
    """Learns a log, and goes back when it is told to.

    Args:
        shards: from which it learns.
        log: what it learns.
    """

    def __init__(self, shards: Shards, log: Log = LOG, name: str = "worker", retry: Retry = QUICK) -> None:
        self.shards = shards
        self.client = shards.client(name, shards.agree(), retry=retry)
        self.rewinds = 0
        self._log = log
        self._cursor = Cursor()
        self._ends = Ends({p: len(samples) for p, samples in log.items()})

    def begin(self) -> "Worker":
        self.client.join()
        self._rewind()
        return self

    def learn(self, batches: int = 1_000) -> None:
        """Learns so many batches, or what there is."""
        for _ in range(batches):
            spans = self._cursor.next(self._ends, 1)
            if not spans:
                return
            if any_rejected(push(self.client, self._log, spans).wait()):
                self.rewinds += 1
                self._rewind()

    def _rewind(self) -> None:
        self._cursor.rewind(self._log, patiently(self.shards.clocks, QUICK, threading.Event()))


@contextmanager
def working(of: Served, *args: Any, **kwargs: Any) -> Iterator[Worker]:
    worker = Worker(of.shards(), *args, **kwargs).begin()
    yield worker
    worker.client.close()


# --- shards that go away ---


@pytest.mark.parametrize("late", [False, True], ids=["lost", "late"])
def test_what_has_no_answer_is_sent_again_in_order_and_counts_once(late: bool) -> None:
    """Pushes wait at a gate when the server ends. What has arrived there may still be applied, by the old server."""
    log: Log = {0: [[1]] * 3}
    with served(1) as of, working(of, log) as worker:
        shard = of.held[0]
        shard.freeze(PATIENCE)
        client, sent = worker.client, []
        plan = plan_of(log, [Span(0, 0, 1)], 1)
        for i in range(3):
            dense, statistics = np.full(DENSE, -1, np.float32), np.ones(2, np.float32)
            gradients = -np.ones(1, np.float32)
            pushing = client.push(plan, gradients, dense, statistics, spans=[Span(0, i, i + 1)], watermark=0)
            sent.append((pushing, client.pull(plan)))
        until(lambda: shard._lock._waiters)  # type: ignore[attr-defined]  # of the condition
        stop(of, 0)
        if late:
            open_gate(shard)
            until(lambda: shard.clock() == {0: 1})
        start(of, 0)
        if not late:
            open_gate(shard)
        outcomes = []
        for i, (pushing, pulled) in enumerate(sent):
            outcomes += [one.outcome for one in pushing.wait()]
            assert pulled.wait().rows.tolist() == [i + 1]
        assert outcomes[0] is PushOutcome.DUPLICATE or not late
        assert outcomes[1:] == [PushOutcome.APPLIED] * 2
        assert client.reconnects == 1
        assert_exact(of.held, log)


def open_gate(shard: Shard) -> None:
    shard.cut({}, 0.0, lambda: None)


def test_a_shard_that_comes_back_as_it_was_goes_on() -> None:
    with served() as of, working(of) as worker:
        worker.learn(3)
        for index in range(2):
            stop(of, index)
            start(of, index)
            worker.learn(1)
        worker.learn()
        assert worker.client.reconnects == 2
        assert worker.rewinds == 0
        assert_exact(of.held, LOG)


def test_a_shard_that_comes_back_later_is_waited_for() -> None:
    with served() as of, working(of) as worker, ThreadPoolExecutor(1) as pool:
        worker.learn(3)
        stop(of, 1)
        rest = pool.submit(worker.learn)
        until(lambda: worker.client.reconnects)
        assert worker.client.away == 1
        start(of, 1)
        rest.result(PATIENCE)
        assert worker.client.away == 0
        assert_exact(of.held, LOG)


def test_a_shard_that_comes_back_empty_begins_the_run_again() -> None:
    with served() as of, working(of) as worker:
        worker.learn(3)
        run = of.held[0].run
        stop(of, 1)
        start(of, 1, empty(1))
        worker.learn()
        assert worker.rewinds == 1
        assert of.held[1].run == run
        assert_exact(of.held, LOG)


def test_a_shard_that_comes_back_older_is_learned_anew_from_there() -> None:
    with served() as of:
        for node in of.nodes:
            node.initialise(initial(node.index))
        with working(of) as worker:
            worker.learn(2)
            saved = save(of.held[1])
            worker.learn(3)
            stop(of, 1)
            start(of, 1, holding(load(saved, 1, 2)))
            worker.learn()
            assert worker.rewinds == 1
            assert of.held[0].pushes[PushOutcome.DUPLICATE] == 3 + 1
            assert_exact(of.held, LOG)


def initial(index: int, run: str = "run") -> InitialState:
    shard = new_shard(index, 2)
    return InitialState(Run(run, {}), SPEC, shard.dense.pull(), shard.statistics.pull())


def test_shards_that_all_come_back_empty_begin_the_run_again() -> None:
    """Nobody but the workers knows of it any more. One of another run would have to be restarted itself."""
    with served() as of, working(of) as worker:
        worker.learn(3)
        run = of.held[0].run
        for index in range(2):
            stop(of, index)
            start(of, index, empty(index))
        worker.learn()
        assert [shard.run for shard in of.held] == [run, run]
        assert_exact(of.held, LOG)


def test_shards_of_another_run_in_their_place_are_refused() -> None:
    with served() as of, working(of) as worker:
        worker.learn(3)
        for index in range(2):
            stop(of, index)
            node = empty(index)
            node.initialise(initial(index, "another"))
            start(of, index, node)
        with pytest.raises(ShardRefused, match=r"127\.0\.0\.1:\d+: shard 0 has run 'another', but the worker expects"):
            worker.learn()


def test_stopped_ends_the_waiting() -> None:
    stopped = threading.Event()
    with served() as of, ThreadPoolExecutor(1) as pool:
        shards = of.shards()
        client = shards.client("worker", shards.agree(), retry=QUICK, stopped=stopped)
        client.join()
        stop(of, 0)
        waiting = pool.submit(lambda: push(client, LOG, [Span(0, 0, 1)]).wait())
        until(lambda: client.reconnects)
        assert not waiting.done()
        stopped.set()
        with pytest.raises(ShardUnavailable):
            waiting.result(PATIENCE)
        client.close()


def test_who_has_waited_for_long_enough_gives_up() -> None:
    with served() as of, working(of, retry=replace(QUICK, give_up=0.2)) as worker:
        stop(of, 1)
        with pytest.raises(ShardUnavailable, match=r"127\.0\.0\.1:"):
            worker.learn()


# --- shards that are silent ---


class Mute(grpc.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Lets the first sessions give some answers, and then no more.

    Args:
        sessions: how many.
        answers: that come through.
        ends: whether they are ended then, with OK; they stay silent otherwise.
    """

    def __init__(self, sessions: int, answers: int, *, ends: bool = False) -> None:
        self._left = sessions
        self._answers = answers
        self._ends = ends

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if not details.method.endswith("/Session") or not self._left:
            return handler
        self._left -= 1

        def muted(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            for _, answer in zip(range(self._answers), handler.stream_stream(requests, context), strict=False):
                yield answer
            while not self._ends and next(requests, None) is not None:
                continue

        return grpc.stream_stream_rpc_method_handler(muted)


@pytest.mark.parametrize("way", ["calls"], indirect=True)
@pytest.mark.parametrize("answers", [0, 1, 3], ids=["from the beginning", "after the join", "later"])
def test_a_silent_shard_is_connected_to_again(answers: int) -> None:
    retry = replace(QUICK, timeout=1.0)  # the other shard is not silent for so long
    with served() as of:
        stop(of, 1)
        start(of, 1, None, Mute(2, answers))
        worker = Worker(of.shards(), retry=retry)
        with PeriodicTask("heartbeat", worker.client.beat, 0.02):
            worker.begin().learn()
            worker.client.close()
        assert worker.client.reconnects == (0 if answers == 0 else 2)
        assert_exact(of.held, LOG)


@pytest.mark.parametrize("way", ["calls"], indirect=True)
def test_a_session_that_the_server_ends_is_begun_again() -> None:
    """With OK, as a proxy in between may do."""
    with served() as of:
        stop(of, 1)
        start(of, 1, None, Mute(2, 3, ends=True))
        with working(of) as worker:
            worker.learn()
            assert worker.client.reconnects == 2
        assert_exact(of.held, LOG)


def test_a_beat_does_not_come_before_the_join() -> None:
    """It comes from another thread, at any time."""
    with served(1) as of:
        worker = Worker(of.shards(), retry=replace(QUICK, timeout=0.0))
        session: Any = worker.client._sessions[0]
        begin = session._open

        def at_the_worst_time(*args: Any, **kwargs: Any) -> Any:
            session.beat()
            return begin(*args, **kwargs)

        session._open = at_the_worst_time
        worker.begin().learn()
        assert_exact(of.held, LOG)
        worker.client.close()


# --- agreeing ---


def test_a_shard_of_another_run_is_refused_by_name() -> None:
    with served() as of:
        of.nodes[0].initialise(initial(0, "this"))
        of.nodes[1].initialise(initial(1, "that"))
        with pytest.raises(ShardRefused, match=f"{of.channels[1][1]} is of run that, others are of this") as caught:
            of.shards().agree()
        assert caught.value.reason == "mismatch"


def test_shards_of_another_model_are_refused_by_name() -> None:
    with served() as of:
        of.shards().agree()
        other = replace(COUNTING, spec=replace(SPEC, seed=1, schema="other"))
        message = f"{of.channels[0][1]} holds another model; they differ in: schema, seed"
        with pytest.raises(ShardRefused, match=message):
            Shards(of.channels, other).agree()


def test_settings_stay_as_the_run_began_for_workers_and_for_a_shard_that_was_lost() -> None:
    """A worker steps as the shards do, whatever its model file says; and an empty shard joins as the others are."""
    tables = tuple({**table, "rate": 0.5} for table in SPEC.tables)
    edited = replace(COUNTING, spec=replace(SPEC, tables=tables))
    with served() as of:
        first = of.shards()
        run = first.agree()
        stop(of, 1)
        start(of, 1)
        shards = Shards(of.channels, edited)
        assert shards.agree().id == run.id
        assert shards.client("edited", run).spec == SPEC
        assert [shard.spec for shard in of.held] == [SPEC, SPEC]


def test_all_who_agree_at_once_agree_on_one_run() -> None:
    workers = 8
    with served(3) as of, ExitStack() as stack, ThreadPoolExecutor(workers) as pool:
        every = [
            Shards([(stack.enter_context(channel_to(target)), target) for _, target in of.channels], of.beginning)
            for _ in range(workers)
        ]
        barrier = threading.Barrier(workers)

        def agree(shards: Shards) -> Run:
            shards.controls[0].status()  # so that all are connected
            barrier.wait(PATIENCE)
            return shards.agree()

        runs = {run.id for run in pool.map(agree, every)}
        assert runs == {shard.run.id for shard in of.held}
        assert len(runs) == 1
        learn(of, LOG)
        assert_exact(of.held, LOG)


def channel_to(target: str) -> Any:
    return grpc.insecure_channel(target, options=[*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])


# --- together ---


def test_a_node_of_this_process_beside_a_channel() -> None:
    with served() as of:
        shards = Shards([of.nodes[0], of.channels[1]], of.beginning)
        learn(of, {0: LOG[0]}, shards)
        stop(of, 1)
        start(of, 1)
        learn(of, LOG, shards)
        assert_exact(of.held, LOG)


def test_a_beat_of_who_has_been_given_up_does_not_fail() -> None:
    """It comes from a thread of its own, which would end, and nobody would say any more that the worker is alive."""
    seconds = [0.0]
    with served(2, lambda shard: Bounded(shard, 0, 1.0, lambda: seconds[0])) as of:
        shards = Shards([of.nodes[0], of.channels[1]], of.beginning)
        run = shards.agree()
        gone, stays = shards.client("gone", run), shards.client("stays", run)
        gone.join()
        stays.join()
        push(stays, LOG, [Span(0, 0, 1)]).wait()
        seconds[0] = 10.0
        push(stays, LOG, [Span(0, 1, 2)]).wait()
        gone.beat()
        for client in (gone, stays):
            client.close()


TOGETHER: dict[str, Callable[[Shard], Consistency]] = {
    "async": Async,
    "bounded": lambda shard: Bounded(shard, 1, PATIENCE, time.monotonic),
    "bulk": lambda shard: BulkSynchronous(shard, 2, PATIENCE, time.monotonic),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("local", [False, True], ids=["remote", "mixed"])
def test_two_workers_learn_together(name: str, local: bool) -> None:
    with served(2, TOGETHER[name], timeouts=SessionTimeouts(waiting=0.01)) as of, ThreadPoolExecutor(2) as pool:
        places: list[Any] = [of.nodes[0], of.channels[1]] if local else of.channels
        both = [Worker(Shards(places, of.beginning), {p: LOG[p]}, f"worker {p}") for p in LOG]
        for worker in both:
            worker.begin()

        def work(worker: Worker) -> None:
            worker.learn()
            worker.client.park()

        list(pool.map(work, both))
        for worker in both:
            worker.client.close()
        assert_exact(of.held, LOG, averaged=name == "bulk")


@pytest.mark.parametrize("name", ["bounded", "bulk"])
def test_who_waits_for_others_knows_that_the_shard_is_alive(name: str) -> None:
    """For longer than it waits for a silent one."""
    retry = replace(QUICK, timeout=1.0)
    with served(2, TOGETHER[name], timeouts=SessionTimeouts(waiting=0.02)) as of, ThreadPoolExecutor(2) as pool:
        early, late = (Worker(of.shards(), {p: LOG[p]}, f"worker {p}", retry) for p in LOG)
        early.begin()
        if name == "bounded":
            late.begin()
        with PeriodicTask("heartbeat", early.client.beat, 0.02), PeriodicTask("heartbeat", late.client.beat, 0.02):
            first = pool.submit(early.learn)
            began = time.monotonic()
            until(lambda: time.monotonic() > began + 2 * retry.timeout)
            assert not first.done()
            assert early.client.reconnects == 0
            second = pool.submit(late.learn if name == "bounded" else late.begin().learn)
            for one in (first, second):
                one.result(PATIENCE)
            for worker in (early, late):
                worker.client.close()
        assert_exact(of.held, LOG, averaged=name == "bulk")
