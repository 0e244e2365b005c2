"""Shards with backups as an operator runs them: real processes, kill -9, pauses, and exact counts."""

import signal
from collections.abc import Iterator

import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ShardUnavailable
from streamtrain.ps.clock import Span
from streamtrain.ps.control import Retry
from streamtrain.ps.shards import Shards
from tests.cluster.backed import SAMPLES, Backed
from tests.cluster.counted import beginning


@pytest.fixture
def backed(request: pytest.FixtureRequest) -> Iterator[Backed]:
    """Two shards with backups in step, and a worker."""
    with Valkey() as server:
        made = Backed(server.url, request.node.name)
        try:
            made.start_all()
            yield made
        finally:
            made.close()


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
        backed.wait_in_step(index, 1)
    backed.kill(0, 1)
    backed.learned(SAMPLES)
    backed.fill(SAMPLES, SAMPLES + 1_000)
    backed.kill(1, 1)
    backed.learned(SAMPLES + 1_000)
    backed.assert_exact(SAMPLES + 1_000)


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
