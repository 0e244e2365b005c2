"""When checkpoints are taken, of which kind, and how many stay."""

import threading
from typing import Any

import pytest

from streamtrain.checkpoint.cluster_checkpoint import Checkpointer, CheckpointInfo, CheckpointSchedule
from streamtrain.store.checkpoint.epochs import Epochs
from tests.checkpoint.saved import Cluster, aside, some_log
from tests.patience import PATIENCE
from tests.ps.counting import assert_exact

LOG = some_log(1, 1_000)
SAME_IDS = {0: [[1, 2, 3]] * 1_000}


def test_checkpoints_are_taken_at_intervals(place: str) -> None:
    cluster = Cluster(place)
    taken = threading.Semaphore(0)
    take = cluster.checkpointer.take

    def counting(**options: Any) -> CheckpointInfo:
        done = take(**options)
        taken.release()
        return done

    cluster.checkpointer.take = counting  # type: ignore[method-assign]
    schedule = CheckpointSchedule(cluster.checkpointer, 0.01)
    schedule.start()
    for at in range(4):
        cluster.learn(LOG, (0, at * 100, at * 100 + 100))
        assert taken.acquire(timeout=PATIENCE)
    schedule.stop()
    assert schedule.failed == 0
    assert Epochs(place).numbers() == list(range(1, schedule.taken + 1))
    assert schedule.taken >= 3  # one may have been of the empty shards
    assert not schedule._task._thread.is_alive()


def test_what_is_saved_already_is_not_saved_again(place: str) -> None:
    cluster = Cluster(place)
    assert cluster.checkpointer.changed()
    cluster.learn(LOG, (0, 0, 100))
    cluster.take()
    assert not cluster.checkpointer.changed()
    cluster.learn(LOG, (0, 100, 101))
    assert cluster.checkpointer.changed()


class Broken(Checkpointer):
    """Fails as nothing should."""

    def __init__(self) -> None:
        self.called = threading.Semaphore(0)

    def changed(self) -> bool:
        return True

    def take(self, *, full: bool = False, delta: bool = False, hold: float = 0.0) -> CheckpointInfo:
        self.called.release()
        raise MemoryError("no memory")


def test_schedule_survives_any_error(caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = Broken()
    schedule = CheckpointSchedule(checkpointer, 0.001)
    schedule.start()
    assert all(checkpointer.called.acquire(timeout=PATIENCE) for _ in range(3))
    schedule.stop()
    assert schedule.failed >= 2
    assert "no memory" in caplog.text


def test_schedule_stops_promptly() -> None:
    checkpointer = Broken()
    schedule = CheckpointSchedule(checkpointer, 3600.0)
    schedule.start()
    aside(schedule.stop).result(PATIENCE)
    assert not checkpointer.called.acquire(blocking=False)


@pytest.mark.parametrize(("keep", "full_every"), [(2, 2), (1, 0), (3, 100)])
def test_so_many_are_kept_and_so_many_are_deltas(place: str, keep: int, full_every: int) -> None:
    """Also when whoever takes them was restarted in between."""
    kinds, cluster = [], Cluster(place, keep=keep, full_every=full_every)
    for at in range(8):
        if at in (4, 5):
            cluster = Cluster(place, keep=keep, full_every=full_every)
        cluster.learn(SAME_IDS, (0, at * 10, at * 10 + 10))
        kinds.append(cluster.take().kind)
        numbers = Epochs(place).numbers()
        fulls = [n for n in range(1, at + 2) if kinds[n - 1] == "full"]
        oldest = max(n for n in fulls if n <= max(at + 2 - keep, 1))
        assert set(range(max(at + 2 - keep, 1), at + 2)) <= set(numbers)
        assert min(numbers) == oldest
    assert kinds == ["delta" if at % (full_every + 1) else "full" for at in range(8)]
    assert_exact(Cluster(place).shards, {0: SAME_IDS[0][:80]})


def test_a_full_one_waits_until_the_deltas_have_as_many_rows(place: str) -> None:
    log = {0: [[i] for i in range(20)] + [[i % 3] for i in range(40)]}
    kinds, cluster = [], Cluster(place, keep=1, full_every=2)
    for end in (20, *range(21, 60)):
        cluster.learn(log, (0, 0 if end == 20 else end - 1, end))
        kinds.append(cluster.take().kind)
    assert [at for at, kind in enumerate(kinds) if kind == "full"] == [0, 21], "after 20 of a row each"
    few = Cluster(place, keep=1, full_every=1)
    few.take(full=True)
    assert [few.take().kind for _ in range(12)] == ["delta"] * 10 + ["full", "delta"], (
        "or, of none, after ten times as many"
    )
    assert_exact(few.shards, {0: log[0][:59]})
