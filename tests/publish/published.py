"""What the tests of publications share: shards that learn a log, published to a server of their own."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.model.spec import Spec, shard_slice
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.shards import Control, LocalControl
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.shard import InitialState, Run
from streamtrain.publish.cluster_publisher import Publications
from streamtrain.publish.shard_publisher import ShardPublisher
from streamtrain.store.publication import Publication, Weights
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.source import RedisOrigin
from tests.ps.counting import DENSE, SPEC, Log, key, pushes

LOG: Log = {0: [[1, 2], [2], [3], [1], [7, 8], [9], [2, 3], [11]]}


OPEN: list[RedisServer] = []


def connect(url: str, *, cluster: bool = False) -> RedisServer:
    """A connection that ends with the test."""
    OPEN.append(RedisServer(url, cluster=cluster, timeout=20.0))
    return OPEN[-1]


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as one:
        yield one
    while OPEN:
        OPEN.pop().close()


class Cluster:
    """Shards that learn a log, published under a name."""

    def __init__(
        self,
        url: str,
        shards: int = 2,
        run: str = "run",
        *,
        spec: Spec = SPEC,
        dense: Any = None,
        dictionaries: RedisDictionaries | None = None,
        cluster: bool = False,
        memory: RowMemory | None = None,
        **options: Any,
    ) -> None:
        self.model = RedisModel(connect(url, cluster=cluster), "counted")
        self.nodes = [
            Node(i, shards, Async, publisher=ShardPublisher(RedisDictionaries(self.model)), memory=memory)
            for i in range(shards)
        ]
        first = (np.zeros(DENSE, np.float32) if dense is None else dense, np.zeros(2, np.float32))
        for i, node in enumerate(self.nodes):
            slices = (values[shard_slice(len(values), i, shards)] for values in first)
            node.initialise(InitialState(Run(run, {}), spec, *slices))
        self.controls: list[Control] = [LocalControl(node) for node in self.nodes]
        dictionaries = dictionaries or RedisDictionaries(self.model)
        self.publications = Publications(self.controls, dictionaries, "counted", **options)
        self.learned = 0

    def learn(self, samples: int) -> None:
        span = Span(0, self.learned, self.learned + samples)
        for node, push in zip(self.nodes, pushes(LOG, [span], len(self.nodes)), strict=True):
            node.shard.push(push)
        self.learned += samples

    def publish(self) -> Publication:
        published = self.publications.publish()
        assert published is not None
        return published


def read(url: str) -> tuple[Publication, dict[int, float], Weights]:
    """The head as a server loads it."""
    origin = RedisOrigin(RedisModel(connect(url), "counted"))
    head = origin.find(None)
    assert head is not None
    rows: dict[int, float] = {}

    def take(change: Any) -> None:
        for one in change.gone.tolist():
            rows.pop(one, None)
        rows.update(zip(change.keys.tolist(), change.rows[:, 0].tolist(), strict=True))

    publication, weights = origin.load(head, take)
    return publication, rows, weights


def counts(samples: Sequence[Sequence[int]]) -> dict[int, float]:
    return {key(one): float(n) for one, n in Counter(one for sample in samples for one in sample).items()}


def assert_published(url: str, samples: int) -> None:
    publication, rows, weights = read(url)
    assert dict(publication.clock) == {0: samples}
    assert rows == counts(LOG[0][:samples])
    assert dict(publication.rows) == {"ids": len(rows)}
    assert weights.dense.tolist() == [samples] * DENSE
    assert weights.statistics.tolist() == [samples] * 2
