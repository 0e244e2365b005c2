"""The model of `published` in Redis."""

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

import streamtrain as stm
from streamtrain.model.spec import Spec
from streamtrain.store.publication import Publication, RowChange
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.layout import TableSize
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.store.redis.versions import RedisVersions
from tests.serve.published import KEYS, TIME, rows, weights

_names = itertools.count()
NO_KEYS = KEYS[:0]


class RedisPublished:
    """Publishes `counted`, by one shard."""

    def __init__(self, url: str, model: stm.Model) -> None:
        self.server = RedisServer(url, timeout=20)
        self.model = RedisModel(self.server, f"cached{next(_names)}")
        self.dictionaries = RedisDictionaries(self.model)
        self.versions = RedisVersions(self.model)
        self.origin = RedisOrigin(self.model)
        self._spec = Spec.of(model).to_json()
        self._there: set[int] = set()

    def publish(
        self,
        number: int,
        keys: NDArray[np.uint64] = KEYS,
        gone: Iterable[int] = (),
        *,
        full: bool = False,
        applied: bool = True,
    ) -> Publication:
        """The bias and the rows of keys become `number`; the dictionary has the rows only if they are `applied`."""
        layout = None
        if full:
            layout = self.dictionaries.begin({"user": TableSize(1, len(keys))}, shards=1)
            self._there = set()
        removed = np.array([*gone], np.uint64)
        self._there = (self._there | set(keys.tolist())) - set(removed.tolist())
        counts = {"user": len(self._there)}
        change = RowChange("user", keys, rows(number, len(keys)), removed)
        part = self.dictionaries.write(number, 0, [change], weights(number), rows=counts, layout=layout)
        publication = Publication(
            number, None, "model", "run", self._spec, {0: number}, TIME + number, TIME, "float32", counts
        )
        self.dictionaries.commit(publication, [part], layout)
        if applied:
            self.dictionaries.apply(0)
        return publication

    def close(self) -> None:
        """Ends connections."""
        self.server.close()
