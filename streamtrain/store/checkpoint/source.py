"""Checkpoints as an origin: every epoch is a version."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import CheckpointCorrupt, CheckpointError, OriginUnavailable, PublicationCorrupt
from streamtrain.store.checkpoint.epochs import CheckpointChain, Epochs, open_chain, parse_epoch
from streamtrain.store.checkpoint.manifest import MANIFEST
from streamtrain.store.checkpoint.parquet import Tombstones
from streamtrain.store.files import Directory
from streamtrain.store.publication import Floats, Publication, PublicationStep, RowChange, Weights

logger = logging.getLogger(__name__)


class CheckpointOrigin:
    """The head is the newest epoch, and does not move: open it again to have a later one.

    A publication's number and version are its epoch. When it was published is not known, and is 0. The clock of an
    epoch whose shards were cut at different ones is the least by partition.

    Args:
        url: the root of the epochs: a local path or any URL of fsspec. Or one checkpoint, such as a learner saves: it
            alone exists then, as version 1 if it is not an epoch.
        name: of the model, which checkpoints do not say.

    Attributes:
        url: for messages; without credentials.

    Raises:
        CheckpointError: fsspec does not know the protocol, or its package is not installed.
    """

    def __init__(self, url: str | Path, name: str) -> None:
        self._given, self._epochs, self.name = url, Epochs(url), name
        self.url = self._epochs.url
        self._known: dict[int, Publication] = {}
        self._lock = threading.Lock()

    def versions(self) -> list[Publication]:
        """Without those that are damaged; to count the rows of deltas, they are read once."""
        return [*self.newest_first()][::-1]

    def newest_first(self) -> Iterator[Publication]:
        """Versions, newest first, read lazily; skips damaged ones."""
        for number in sorted(self._numbers(), reverse=True):
            try:
                publication = self.find(number)
            except PublicationCorrupt as exc:
                logger.warning("%s; skipping epoch %d", exc, number)
                continue
            if publication:
                yield publication

    def labels(self) -> dict[str, int]:
        """There are none."""
        return {}

    def find(self, version: int | None) -> Publication | None:
        numbers = self._numbers()
        if version is None:
            version = max(numbers, default=None)
        if version is None or version not in numbers:
            return None
        with self._lock:
            if version not in self._known:
                with _translating():
                    self._known[version] = self._publication(version, self._open(version))
            return self._known[version]

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        """All files are verified first."""
        with _translating():
            chain = self._open(publication.number)
            chain.verify()
            arrays = [chain.arrays(shard) for shard in range(len(chain.shards))]
            weights = Weights(*(_joined(arrays, name) for name in Weights._fields))
        for table in publication.rows:
            for change in _changes(chain, table):
                take(change)
        return publication, weights

    def follow(self, publication: Publication, seconds: float) -> Iterator[PublicationStep]:
        """There are none."""
        return iter(())

    def _numbers(self) -> list[int]:
        with _translating():
            return [parse_epoch(self._given) or 1] if self._is_alone() else self._epochs.numbers()

    def _open(self, number: int) -> CheckpointChain:
        return open_chain(self._given) if self._is_alone() else self._epochs.open(number)

    def _is_alone(self) -> bool:
        return Directory(self._given).exists(MANIFEST)

    def _publication(self, number: int, chain: CheckpointChain) -> Publication:
        try:
            clocks = [shard["clock"] for shard in chain.shards]
            given = {
                "number": number,
                "version": number,
                "model": self.name,
                "run": chain.about["run"],
                "spec": chain.about["spec"],
                "clock": {partition: min(clock.get(partition, 0) for clock in clocks) for partition in clocks[0]},
                "watermark": max(shard["watermark"] for shard in chain.shards),
                "published": 0.0,
                "dtype": "float32",
                "rows": self._counts(chain),
            }
            return Publication.from_json(given)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise PublicationCorrupt(f"{chain.url} has no valid training state: {exc!r}") from exc

    def _counts(self, chain: CheckpointChain) -> dict[str, int]:
        counts = chain.first_row_counts
        if len(chain.epochs) == 1:
            return counts
        return {table: _count(_changes(chain, table)) for table in counts}


def _count(changes: Iterator[RowChange]) -> int:
    keys = np.empty(0, np.uint64)
    for change in changes:
        keys = np.setdiff1d(np.union1d(keys, change.keys), change.gone)
    return len(keys)


def _changes(chain: CheckpointChain, table: str) -> Iterator[RowChange]:
    changes, rows = chain.changes(table), np.empty((0, 0), np.float32)
    while True:
        with _translating():
            part = next(changes, None)
        if part is None:
            return
        if isinstance(part, Tombstones):
            yield RowChange(table, part.keys[:0], rows[:0], part.keys)
        else:
            rows = part.embeddings
            yield RowChange(table, part.keys, part.embeddings, part.keys[:0])


def _joined(arrays: list[dict[str, NDArray[Any]]], name: str) -> Floats:
    try:
        return np.concatenate([shard[name].astype(np.float32, copy=False).ravel() for shard in arrays])
    except KeyError as exc:
        raise PublicationCorrupt(f"the checkpoint has no {name} parameters: it was not written by a learner") from exc


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except CheckpointCorrupt as exc:
        raise PublicationCorrupt(str(exc)) from exc
    except CheckpointError as exc:
        raise OriginUnavailable(str(exc)) from exc
