"""A model with every kind of field, publications of it, and a cluster that says what tests want."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np

import streamtrain as stm
from streamtrain._core import hash_bytes
from streamtrain.errors import ShardUnavailable
from streamtrain.model.features import Feature
from streamtrain.model.spec import Spec
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.store.publication import Publication, PublicationStep, RowChange, Weights
from streamtrain.testing.store import MemoryOrigin

USERS, ITEMS, TAGS = (
    [f"u{i}" for i in range(40)],
    [str(i) for i in range(60)],
    ["news", "sport", "film", "été", "a,b", "x/y"],
)


def graph(inputs: dict[str, Any]) -> dict[str, Any]:
    x = keras.layers.Concatenate()(list(inputs.values()))
    return {name: keras.layers.Dense(1, "sigmoid", name=name)(x) for name in ("click", "buy")}


def model_of() -> stm.Model:
    """Two labels; ids, lists of ids with a table of two features, a cross, and numbers with and without a default."""
    features: list[Feature] = [
        stm.Categorical("user", dim=8),
        stm.Categorical("item", dim=8),
        stm.Categorical("history", table="item", dim=8, max_length=5),
        stm.Categorical("tags", dim=4, default="none"),
        stm.Cross("user & tags", 2, of=("user", "tags")),
        stm.Numeric("price", transform=None),
        stm.Numeric("age", default=30.0, transform="standardize", mean=30.0, stddev=10.0),
    ]
    return stm.Model(stm.Schema(features=features, label=["click", "buy"], time="ts"), graph, name="shop")


def keys_of(ids: list[str]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([hash_bytes(one.encode()) for one in ids], np.uint64)


def publish(origin: MemoryOrigin, model: stm.Model, watermark: float) -> None:
    """One more publication: rows of all users, items and tags, and weights."""
    rng = np.random.default_rng(int(watermark) % 1000)
    ids = {"user": USERS, "item": ITEMS, "tags": TAGS}
    rows = {
        name: (keys_of(of), rng.normal(0, 0.2, (len(of), 4 if name == "tags" else 8)).astype(np.float32))
        for name, of in ids.items()
    }
    spec = Spec.of(model)
    weights = Weights(
        rng.normal(0, 0.3, spec.dense_size).astype(np.float32), np.zeros(spec.statistics_size, np.float32)
    )
    at = int(watermark) % 100_000
    origin.publish(rows, weights, clock={0: 10 * at, 1: 9 * at}, watermark=watermark)


def registry_of(model: stm.Model, origin: MemoryOrigin) -> Registry:
    """With three publications: versions 1 and 2 (labelled prod), and the head, which is served."""
    for age, label in ((7200, "first"), (600, "prod"), (1.2, None)):
        publish(origin, model, time.time() - age)
        if label:
            origin.keep(label)
    registry = Registry(model, origin)
    registry.promote(HEAD)
    for version in registry.refresh_labels().values():
        registry.keep(version)
    return registry


class WithFigures(MemoryOrigin):
    """Its publications have figures, as those of a cluster have."""

    def find(self, version: int | None) -> Publication | None:
        found = super().find(version)
        return found and _with_figures(found)

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        loaded, weights = super().load(publication, take)
        return _with_figures(loaded), weights

    def follow(self, publication: Publication, seconds: float) -> Iterator[PublicationStep]:
        for step in super().follow(publication, seconds):
            yield step._replace(publication=_with_figures(step.publication))

    def versions(self) -> list[Publication]:
        return [_with_figures(one) for one in super().versions()]


def _with_figures(publication: Publication) -> Publication:
    better = publication.number / 1000
    figures: dict[str, dict[str, float | None]] = {
        "click": {"auc": 0.77 + better, "log_loss": 0.46 - better, "calibration": 1.01},
        "buy": {"auc": 0.82 + better, "log_loss": 0.11, "calibration": None},
    }
    return replace(publication, metrics=figures)


def origin_of(model: stm.Model) -> WithFigures:
    return WithFigures(Spec.of(model).to_json(), model.name)


@dataclass
class Told:
    """A cluster that tells what it is given.

    Attributes:
        said: the status.
        seen: by table and key what `inspect` says.
        away: why it is away; "": it is there.
        asked: how often the status was asked for.
    """

    said: dict[str, Any]
    seen: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    away: str = ""
    asked: int = 0

    def status(self) -> dict[str, Any]:
        self.asked += 1
        self._check()
        return self.said | {"time": time.time()}

    def inspect(self, table: str, key: int) -> dict[str, Any] | None:
        self._check()
        return self.seen.get((table, key))

    def _check(self) -> None:
        if self.away:
            raise ShardUnavailable(self.away)


def told() -> Told:
    """A cluster of three shards, one of them away, after ten minutes of learning."""
    now = time.time()
    rng = np.random.default_rng(3)
    shards: list[dict[str, Any]] = [
        {
            "index": i,
            "address": f"10.0.0.{4 + i}:7000",
            "state": "ready",
            "rows": {"user": 41_210 + 37 * i, "item": 8_120 - 9 * i, "tags": 212 + i, "user & tags": 120_400 + 11 * i},
            "bytes": 91_200_000 + 1_300_000 * i,
            "clock": {"0": 604_120, "1": 598_331, "2": 601_002},
            "samples": 1_803_453,
            "epoch": 14,
            "backup_in_step": (None, False)[i],
        }
        for i in range(2)
    ]
    gone = {"index": 2, "address": "10.0.0.6:7000", "state": "away", "rows": {}, "bytes": None, "clock": {}}
    workers = [
        {
            "name": "worker-0",
            "partitions": [0, 2],
            "lag": 412,
            "samples_per_s": 2103.4,
            "samples_per_batch": 22.5,
            "seen": 0.4,
        },
        {
            "name": "worker-1",
            "partitions": [1],
            "lag": 96,
            "samples_per_s": 1040.0,
            "samples_per_batch": 12.0,
            "seen": 12.1,
        },
    ]
    servers = [
        {"name": "serving-0", "address": "10.0.0.9:8501", "version": "2", "publication": 512, "watermark": now - 1.2},
        {"name": "serving-1", "address": "10.0.0.10:8501", "version": "head", "publication": 513, "freshness_ms": None},
    ]
    steps = range(300)
    wave = [math.sin(i / 23) for i in steps]
    history = [
        {
            "time": now - 600 + 2 * i,
            "samples_per_s": float(3100 + 240 * wave[i] + rng.normal(0, 60)) if not 140 <= i < 152 else 0.0,
            "lag": float(max(0, 380 + 140 * wave[i] + rng.normal(0, 40))) + (9000 - 700 * (i - 151)) * (151 <= i < 163),
            "freshness_ms": float(1150 + rng.normal(0, 120)) if not 140 <= i < 152 else None,
            "auc": {"click": float(0.771 + i * 3e-5 + rng.normal(0, 8e-4)), "buy": float(0.824 + rng.normal(0, 2e-3))},
            "log_loss": {"click": float(0.462 - i * 2e-5 + rng.normal(0, 6e-4)), "buy": float(0.11 + i * 1e-6)},
        }
        for i in steps
    ]
    figures = {
        "click": {"samples": 1_803_453, "auc": 0.7802, "log_loss": 0.4561, "calibration": 1.003},
        "buy": {"samples": 640_120, "auc": 0.8239, "log_loss": None, "calibration": None},
    }
    said = {
        "run": "8f0c2d41",
        "figures": figures,
        "samples": 1_803_453,
        "samples_per_s": 3143.4,
        "watermark": now - 1.2,
        "lag": 508,
        "shards": [*shards, gone | {"samples": None, "epoch": None}],
        "workers": workers,
        "servers": servers,
        "log_time": now - 0.7,
        "workers_left": 1,
        "dead_letter_examples": {"missing_field": {"field": "item", "partition": 2, "offset": 7041}},
        "dead_letters": {"<b>not_json</b>": 3, "missing_field": 1204, "bad_time": 41},
        "checkpoint": {"epoch": 14, "at": now - 44},
        "publication": {"number": 513, "published": now - 0.8, "watermark": now - 1.2},
        "held": "",
        "history": history,
    }
    key = hash_bytes(b"u7")
    return Told(said, {("user", key): {"count": 1234, "last_seen": round(now - 90)}})
