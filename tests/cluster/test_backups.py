"""Shards with backups as an operator runs them: real processes, kill -9, pauses, and exact counts."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamtrain.cluster.client import CoordinatorClient
from streamtrain.cluster.status_reader import StatusReader
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ShardUnavailable
from streamtrain.ps.clock import Span
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc.control import Retry
from streamtrain.store.checkpoint.epochs import Epochs
from tests.cluster.backed import SAMPLES, Backed
from tests.cluster.counted import beginning
from tests.cluster.here import run
from tests.patience import PATIENCE, until


@contextmanager
def running(name: str, place: Path | None = None) -> Iterator[Backed]:
    """Two shards with backups in step, and a worker."""
    with Valkey() as server:
        made = Backed(server.url, name, place)
        try:
            made.start_all()
            yield made
        finally:
            made.close()


@pytest.fixture
def backed(request: pytest.FixtureRequest) -> Iterator[Backed]:
    """The same, without checkpoints."""
    with running(request.node.name) as made:
        yield made


def test_backups_take_over_from_primaries_that_are_killed(backed: Backed) -> None:
    """And back again from those, while a worker learns; nothing is lost, doubled or read again."""
    backed.fill(0, SAMPLES)
    backed.learned(1_000)
    for index in (0, 1):
        backed.kill(index, 0)
    backed.learned(2_000)
    for index in (0, 1):
        backed.start(index, 0)
    for index in (0, 1):
        assert backed.is_ready(index, 1)
        backed.wait_ready(index, 0)
        backed.wait_in_step(index, 1)
    backed.kill(0, 1)
    backed.learned(SAMPLES)
    backed.fill(SAMPLES, SAMPLES + 1_000)
    backed.kill(1, 1)
    backed.learned(SAMPLES + 1_000)
    backed.assert_exact(SAMPLES + 1_000)


def test_two_that_wait_for_each_other_begin_again(backed: Backed) -> None:
    """A primary may end before the other process is in step with it, and is started again as the backup."""
    backed.fill(0, SAMPLES)
    backed.learned(1_000)
    backed.kill(0, 0)
    backed.learned(2_000)
    backed.start(0, 0)
    backed.processes[0, 0].serving()
    backed.kill(0, 1)
    backed.start(0, 1)
    backed.learned(SAMPLES)
    backed.assert_counts(SAMPLES)
    backed.wait_in_step(0, 0)


def test_a_primary_that_was_paused_acknowledges_nothing_and_ends(backed: Backed) -> None:
    """Also what had reached it while it was paused."""
    backed.fill(0, 2_000)
    backed.learned(1_000)
    late = Shards(backed.channels[:2], beginning(tensorflow=False))
    client = late.client("late", late.agree(), retry=Retry(timeout=60.0, give_up=0.0))
    client.join()
    backed.send(0, 0, signal.SIGSTOP)
    pushing = client.skip([Span(9, 0, 5)], 0)
    client.beat()
    backed.learned(2_000)
    backed.fill(2_000, 3_000)
    backed.learned(3_000)
    backed.send(0, 0, signal.SIGCONT)
    with pytest.raises(ShardUnavailable):
        pushing.pending[0].result()
    client.close()
    code, said = backed.ended(0, 0)
    assert code == 1
    assert "has taken over" in said[-1]
    backed.start(0, 0)
    backed.wait_in_step(0, 1)
    backed.kill(0, 1)
    backed.fill(3_000, 4_000)
    backed.learned(4_000)
    assert 9 not in backed.shards().clocks()[0]
    backed.assert_exact(4_000)


def test_a_primary_goes_on_without_its_backup_and_has_the_next_one_follow(backed: Backed) -> None:
    """Killed, paused, and back."""
    backed.fill(0, SAMPLES)
    backed.learned(500)
    backed.kill(0, 1)
    backed.wait_alone(0, 0)
    backed.send(1, 1, signal.SIGSTOP)
    backed.wait_alone(1, 0)
    backed.start(0, 1)
    backed.send(1, 1, signal.SIGCONT)
    backed.learned(SAMPLES)
    for index in (0, 1):
        backed.wait_in_step(index, 0)
        backed.kill(index, 0)
    backed.fill(SAMPLES, SAMPLES + 500)
    backed.learned(SAMPLES + 500)
    backed.assert_exact(SAMPLES + 500)


def test_backups_go_on_with_checkpoints_and_come_back_from_them(tmp_path: Path) -> None:
    """The backup of shard 0 leads all shards from when it has taken over; what has lost both is restored."""
    with running("saved", tmp_path) as backed:
        backed.fill(0, 2_000)
        backed.learned(500)
        backed.kill(0, 0)
        backed.learned(2_000)
        wait_for_epoch(tmp_path, 2_000)
        check_what_commands_ask(backed, 2_000)
        backed.fill(2_000, 3_000)
        backed.kill(1, 1)
        backed.learned(3_000)
        backed.assert_exact(3_000)
        wait_for_epoch(tmp_path, 3_000)
        for key in [*backed.processes]:
            backed.kill(*key)
        for place in (1, 0):
            for index in (0, 1):
                backed.start(index, place)
        backed.fill(3_000, 4_000)
        backed.learned(4_000)
        backed.assert_counts(4_000)


def check_what_commands_ask(backed: Backed, learned: int) -> None:
    """It is the backup of shard 0 that is asked, as it has taken over; of shard 1 it is not."""
    with CoordinatorClient.from_settings(backed.settings) as client:
        assert client.publish_now(timeout=PATIENCE).clock == {0: learned, 1: learned}
        assert client.verify(timeout=PATIENCE).agrees
    with StatusReader.from_settings(backed.settings, None) as reader:
        until(lambda: len(reader.read()["workers"]) == 1 and not reader.note, PATIENCE)  # it finds the backup, too
        shards = reader.read()["shards"]
    assert [shard["state"] for shard in shards] == ["ready", "ready"]
    assert [shard["address"] for shard in shards] == [backed.settings.ps.backups[0], backed.settings.ps.addresses[1]]
    assert [shard["backup_in_step"] for shard in shards] == [False, True]
    ps = backed.settings.ps
    shown = run("status", "--ps", ",".join(ps.addresses), "--set", f"ps.backups={','.join(ps.backups)}").stdout
    assert "ready, no backup" in shown
    assert "ready, backup in step" in shown


def wait_for_epoch(place: Path, offset: int) -> None:
    """Until a checkpoint holds all partitions up to an offset."""

    def is_so() -> bool:
        epochs = Epochs(str(place))
        newest = max(epochs.numbers(), default=None)
        if newest is None:
            return False
        clocks = [one["clock"] for one in epochs.open(newest).shards]
        return all(set(clock.values()) == {offset} for clock in clocks)

    until(is_so, PATIENCE)
