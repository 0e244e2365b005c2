"""A model in Redis whose head the benchmarks move on."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from versioned import KEYS, WIDTH, model, weights_of

from streamtrain._core import hash_integers
from streamtrain.model.spec import Spec
from streamtrain.store.origin import Publication, RowChange
from streamtrain.store.redis_dictionaries import RedisDictionaries
from streamtrain.store.redis_layout import TableSize
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_server import RedisServer
from streamtrain.store.redis_versions import RedisVersions

PART = 1 << 15


class Head:
    """The model of versioned.py, of which every publication says its number in all that it predicts.

    Args:
        url: of the server.
        name: under which it is published.
        rows: of its table, beside those that are asked for.
    """

    def __init__(self, url: str, name: str, rows: int) -> None:
        self._server = RedisServer(url, timeout=60)
        place = RedisModel(self._server, name)
        self._dictionaries, self._versions = RedisDictionaries(place), RedisVersions(place)
        self._rows, self._name = rows, name
        self.number = 0

    def publish(self) -> None:
        """The next publication; the first is a full one."""
        self.number += 1
        layout, changes = None, iter([self._asked()])
        if self.number == 1:
            sizes = {"user": TableSize(WIDTH, 2 * (self._rows + len(KEYS)))}
            layout, changes = self._dictionaries.begin(sizes, shards=1), self._all()
        rows = {"user": self._rows + len(KEYS)}
        part = self._dictionaries.write(self.number, 0, changes, weights_of(self.number), rows=rows, layout=layout)
        about: dict[str, Any] = {"clock": {0: self.number}, "watermark": time.time(), "published": time.time()}
        about |= {"dtype": "float32", "rows": rows, "spec": Spec.of(model).to_json()}
        self._dictionaries.commit(Publication(self.number, None, self._name, "run", **about), [part], layout)
        self._dictionaries.apply(0)

    def _asked(self) -> RowChange:
        return RowChange("user", KEYS, np.full((len(KEYS), WIDTH), self.number, np.float32), KEYS[:0])

    def _all(self) -> Iterator[RowChange]:
        yield self._asked()
        for start in range(0, self._rows, PART):
            keys = hash_integers(np.arange(start, min(start + PART, self._rows), dtype=np.int64))
            yield RowChange("user", keys, np.random.default_rng(start).random((len(keys), WIDTH), np.float32), keys[:0])

    def keep(self) -> int:
        """Makes a version of it."""
        version = self._versions.make("benchmark").version
        assert version
        return version

    def close(self) -> None:
        """Ends the connection."""
        self._server.close()


class Moving:
    """A thread that publishes at intervals.

    Args:
        head: what is published.
        every: seconds from one publication to the next.
    """

    def __init__(self, head: Head, every: float) -> None:
        self._head, self._every = head, every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: Exception | None = None

    def __enter__(self) -> "Moving":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._every):
                self._head.publish()
        except Exception as exc:  # told by whoever ends it
            self._error = exc
