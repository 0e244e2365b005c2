"""A shard with a backup: what the one has the other has, and whoever of them dies, nothing is lost or doubled."""

import threading
from collections.abc import Callable
from typing import TypeVar

from streamtrain.ps.client import Client
from streamtrain.ps.clock import Cursor, Ends, Outcome, Span
from streamtrain.ps.control import Retry, patiently
from streamtrain.ps.push import Pushed
from streamtrain.ps.shards import Shards
from tests.ps.counting import Log, assert_exact
from tests.ps.paired import SECONDS, Paired
from tests.ps.served import push

T = TypeVar("T")
LOG: Log = {0: [[1, 2], [2], [3], [1]] * 10, 1: [[1], [4], [4], [2, 5]] * 10}
ENDS = {p: len(samples) for p, samples in LOG.items()}
RETRY = Retry(timeout=5.0, first_backoff=0.01, last_backoff=0.1, give_up=SECONDS)


class Worker:
    """Learns the log, one batch at a time, and goes back when it must."""

    def __init__(self, shards: Shards, name: str = "worker") -> None:
        self.shards = shards
        self.client: Client = shards.client(name, self.patiently(shards.agree), retry=RETRY)
        self.client.join()
        self.rewinds = -1
        self.rewind()

    def patiently(self, ask: Callable[[], T]) -> T:
        return patiently(ask, RETRY, threading.Event())

    def rewind(self) -> None:
        self.rewinds += 1
        self.cursor = Cursor()
        self.cursor.rewind(LOG, self.patiently(self.shards.clocks))

    def learn(self, most: int, batch: int = 2) -> None:
        """All partitions, up to an offset."""
        while spans := self.cursor.next(Ends(dict.fromkeys(LOG, most)), batch):
            if any(one.outcome is Outcome.REJECTED for one in self.push(spans)):
                self.rewind()

    def push(self, spans: list[Span]) -> list[Pushed]:
        return push(self.client, LOG, spans).wait()


def upto(most: int) -> Log:
    return {p: samples[:most] for p, samples in LOG.items()}


def test_a_backup_has_what_its_primary_has_and_takes_over() -> None:
    with Paired(2) as pairs:
        worker = Worker(pairs.shards())
        worker.learn(7)
        primaries = [pairs.wait(i) for i in range(2)]
        worker.learn(15)
        for primary in primaries:
            backup = pairs.other(primary).node
            assert backup is not None
            assert not backup.ready
            primary.kill()
        worker.learn(30)
        assert worker.rewinds == 0  # nothing was learned again
        nodes = [pairs.other(primary).node for primary in primaries]
        assert_exact([node.shard for node in nodes if node], upto(30))
        worker.client.close()
