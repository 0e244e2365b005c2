"""The model of published.py in a real Redis, and servers of it as settings make them."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np

import streamtrain as stm
from streamtrain.model.spec import Spec
from streamtrain.processes.serving import follow
from streamtrain.publish.versions import VersionControl
from streamtrain.settings.groups import GateSettings, Settings
from streamtrain.store.publication import Publication, RowChange
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.layout import TableSize
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.versions import RedisVersions
from tests.patience import PATIENCE, until
from tests.serve.published import KEYS, TIME, counted, rows, weights
from tests.serve.running import serving

MODEL = counted()
PREDICT = "/v1/models/model:predict"
_names = itertools.count()
_NO_KEYS = np.empty(0, np.uint64)


class InRedis:
    """`counted` in Redis, under a name of its own unless one is given, published by one shard."""

    def __init__(self, url: str, name: str | None = None) -> None:
        self.url = url
        self.server = RedisServer(url, timeout=20)
        self.model = RedisModel(self.server, name or f"served{next(_names)}")
        self.dictionaries = RedisDictionaries(self.model)
        self.versions = RedisVersions(self.model)
        self.control = VersionControl(self.versions, GateSettings(auc_drop=0.1, min_samples=0))

    def publish(self, number: int, model: stm.Model = MODEL, *, row: float | None = None, **about: Any) -> Publication:
        """All rows, unless they are given, and the bias become `number`; the first one is a full publication."""
        full = number == 1
        layout = self.dictionaries.begin({"user": TableSize(1, 100)}, dtype="float32", shards=1) if full else None
        change = RowChange("user", KEYS, rows(number if row is None else row), _NO_KEYS)
        part = self.dictionaries.write(number, 0, [change], weights(number), rows={"user": len(KEYS)}, layout=layout)
        given: dict[str, Any] = {"clock": {0: number}, "watermark": TIME + number, "published": TIME}
        given |= {"dtype": "float32", "rows": {"user": len(KEYS)}} | about
        publication = Publication(number, None, model.name, "run", Spec.of(model).to_json(), **given)
        self.dictionaries.commit(publication, [part], layout)
        self.dictionaries.apply(0)
        return publication

    def keep(self, *numbers: int, **about: Any) -> None:
        """Publishes, and makes a version of each."""
        for number in numbers:
            self.publish(number, **about)
            self.versions.make("ann")

    def labels(self) -> dict[str, int]:
        """Version by label, as it stands in Redis."""
        return self.versions.labels()

    def settings(self, *, watchdog: dict[str, Any] | None = None, **serve: Any) -> Settings:
        """Of a server."""
        publish = {"url": self.url, "model": self.model.keys.model, "every": 0.05}
        gate = {"auc_drop": 0.1, "min_samples": 0}
        return Settings.model_validate({"publish": publish, "serve": serve, "gate": gate, "watchdog": watchdog or {}})

    @contextmanager
    def served(self, **given: Any) -> Iterator[httpx.Client]:
        """A client of a server that is ready."""
        settings = self.settings(**given)
        follower = follow(MODEL, settings)
        with serving(follower.registry, follower, watchdog=settings.watchdog) as client:
            until(lambda: client.get("/healthz/ready").status_code == 200, PATIENCE)
            yield client


def predicted(client: httpx.Client) -> tuple[str, float]:
    """The version that answers, and the number of the publication that predicts."""
    answer = client.post(PREDICT, json={"instances": [{"user": "u1"}]})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-model-version"], float(answer.json()["predictions"][0][0]) / 1001
