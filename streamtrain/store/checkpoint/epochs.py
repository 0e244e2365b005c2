"""Epochs: numbered checkpoints below a root; a delta has only what changed since the previous one."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import CheckpointCorrupt, CheckpointError, ConfigError
from streamtrain.store.checkpoint.checkpoint import CheckpointReader
from streamtrain.store.checkpoint.manifest import MANIFEST
from streamtrain.store.checkpoint.parquet import RowPart, Tombstones
from streamtrain.store.files import Directory, FileFacts

logger = logging.getLogger(__name__)

_REQUESTS = 16  # of a store at a time
_Used = TypeVar("_Used")


class CheckpointChain:
    """A full checkpoint and the deltas on it, in order: the complete state at the last epoch.

    Args:
        epochs: epoch numbers, the full one's first.
        readers: a reader per epoch.

    Attributes:
        epochs: epoch numbers; the last is that of the chain.
        about: facts of the newest.
        shards: facts of the newest, by shard.
    """

    def __init__(self, epochs: Sequence[int], readers: Sequence[CheckpointReader]) -> None:
        self.epochs = list(epochs)
        self.about, self.shards = readers[-1].about, readers[-1].shards
        self._readers = list(readers)

    @property
    def epoch(self) -> int:
        return self.epochs[-1]

    @property
    def url(self) -> str:
        """Location of the newest epoch, for messages."""
        return self._readers[-1].url

    @property
    def digest(self) -> str:
        """Digest of the newest epoch; see CheckpointReader."""
        return self._readers[-1].digest

    def part_digest(self, shard: int) -> str:
        """Digest of a shard's part of the newest epoch."""
        return self._readers[-1].part_digest(shard)

    @property
    def is_aligned(self) -> bool:
        """Whether all shards of the newest epoch were written at one clock."""
        clocks = [shard.get("clock") for shard in self.shards]
        return bool(self.about.get("aligned")) and all(clock == clocks[0] for clock in clocks)

    @property
    def first_row_counts(self) -> dict[str, int]:
        """Number of rows by table of the full checkpoint, without its deltas."""
        return dict(self._readers[0].row_counts)

    @property
    def changed_row_count(self) -> int:
        """Number of rows in the deltas."""
        return sum(sum(reader.row_counts.values()) for reader in self._readers[1:])

    def suits(self, shards: int) -> bool:
        """Whether it can be restored to a number of shards: to that of its own, or to any if it is aligned."""
        return len(self.shards) == shards or self.is_aligned

    def builds_on(self, other: "CheckpointChain") -> bool:
        """Whether it is that chain, or has it as its beginning."""
        mine = zip(self.epochs, self._readers, strict=True)
        theirs = zip(other.epochs, other._readers, strict=True)
        return [(n, one.digest) for n, one in mine][: len(other.epochs)] == [(n, one.digest) for n, one in theirs]

    def verify(self, shards: Iterable[int] | None = None, known: "CheckpointChain | None" = None) -> None:
        """Verifies size and checksum of all files, or of those of some shards, but for those of a `known` chain.

        Raises:
            CheckpointCorrupt: a file is missing or damaged; the message names it.
        """
        wanted = None if shards is None else list(shards)
        for reader in self._readers[len(known.epochs) if known else 0 :]:
            reader.verify(wanted)

    def changes(
        self, table: str, shards: Iterable[int] | None = None, known: "CheckpointChain | None" = None
    ) -> Iterator[RowPart | Tombstones]:
        """Written and deleted rows of a table; applied in order, they give the table.

        Parts have at most 65536 rows.

        Args:
            table: its name.
            shards: those whose rows to read; all by default.
            known: the beginning of the chain, which is passed over.

        Raises:
            CheckpointCorrupt: a file is missing or damaged.
        """
        wanted = None if shards is None else list(shards)
        for reader in self._readers[len(known.epochs) if known else 0 :]:
            for keys in reader.tombstones(table, wanted):
                yield Tombstones(keys)
            yield from reader.rows(table, wanted)

    def rows(self, table: str, shards: Iterable[int] | None = None) -> Iterator[RowPart]:
        """The rows of a table, the newest first: of a key that comes again, the first row counts.

        Args:
            table: its name.
            shards: those whose rows to read; all by default.

        Raises:
            CheckpointCorrupt: a file is missing or damaged.
        """
        wanted = None if shards is None else list(shards)
        gone, last = self._gone(table, wanted)
        for at, reader in reversed([*enumerate(self._readers)]):
            for part in reader.rows(table, wanted):
                if not len(gone):
                    yield part
                    continue
                order = np.argsort(part.keys)  # in which they are found several times as fast
                found = np.empty_like(order)
                found[order] = np.minimum(np.searchsorted(gone, part.keys[order]), len(gone) - 1)
                kept = (gone[found] != part.keys) | (last[found] <= at)
                yield RowPart._make(column[kept] for column in part)

    def _gone(self, table: str, shards: Sequence[int] | None) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Keys of rows that went, sorted, and where in the chain they did so last."""
        parts = [(at, keys) for at, reader in enumerate(self._readers) for keys in reader.tombstones(table, shards)]
        keys = np.concatenate([np.empty(0, np.uint64), *(part for _, part in parts)])
        epochs = np.repeat(np.array([at for at, _ in parts], np.intp), [len(part) for _, part in parts])
        order = np.argsort(keys, kind="stable")
        keys, epochs = keys[order], epochs[order]
        is_last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
        return keys[is_last], epochs[is_last]

    def copy_rows(self, table: str, shard: int, directory: Directory) -> dict[str, FileFacts]:
        """Copies the rows of a table of a full checkpoint to another one; see CheckpointReader."""
        (full,) = self._readers
        return full.copy_rows(table, shard, directory)

    def arrays(self, shard: int) -> dict[str, NDArray[Any]]:
        """The newest arrays of a shard.

        Raises:
            CheckpointCorrupt: their file is missing or damaged.
        """
        return self._readers[-1].arrays(shard)


_NAME = re.compile(r"epoch-(\d{9,})", re.ASCII)


def parse_epoch(url: str | Path) -> int | None:
    """The epoch number in the name of a directory, if it has one."""
    match = _NAME.fullmatch(str(url).rstrip("/").rpartition("/")[2])
    return int(match[1]) if match else None


def epochs_at(url: str | Path) -> "Epochs | None":
    """The epochs in a directory; None if there are none, or if it is a checkpoint itself."""
    epochs = Epochs(url)
    return epochs if not Directory(url).exists(MANIFEST) and epochs.numbers() else None


def open_chain(url: str | Path) -> CheckpointChain:
    """Opens a checkpoint by its directory; a delta with its bases, which lie next to it.

    Args:
        url: the directory; or one of epochs, of which the newest is taken that is intact.

    Raises:
        CheckpointError: it is not there, or it is of another format.
        CheckpointCorrupt: a manifest is damaged, or a checkpoint is missing that it builds on.
    """
    if (epochs := epochs_at(url)) is not None:
        return epochs.newest()
    reader = CheckpointReader(url)
    if reader.base is None:
        return CheckpointChain([0], [reader])
    if (epoch := parse_epoch(url)) is None:
        raise CheckpointError(f"{reader.url} is a delta and must be opened where it was written, next to its base")
    return Epochs(str(url).rstrip("/").rpartition("/")[0] or ".").open(epoch)


class Epochs:
    """The checkpoints below a root, each in a directory such as epoch-000000012. Anything else there is left alone.

    Args:
        url: the root: a local path or any URL of fsspec; it need not be there yet.

    Attributes:
        damaged: what `first_good` found damaged, newest first; each names the file.

    Raises:
        CheckpointError: fsspec does not know the protocol, or its package is not installed.
    """

    def __init__(self, url: str | Path) -> None:
        self._given = str(url).rstrip("/")
        self._root = Directory(url)
        self.url = self._root.url
        self.damaged: list[str] = []

    def numbers(self) -> list[int]:
        """The complete epochs, ascending."""
        started = self._started()
        with ThreadPoolExecutor(_REQUESTS) as pool:
            complete = pool.map(lambda number: self.directory(number).exists(MANIFEST), started)
            return [number for number, is_complete in zip(started, complete, strict=True) if is_complete]

    def directory(self, number: int) -> Directory:
        return self._root / _name(number)

    def place(self, number: int) -> str:
        """The same as a URL for `open_chain`, with credentials if the root had them."""
        return f"{self._given}/{_name(number)}"

    def next(self) -> int:
        """A number greater than that of any epoch there, complete or not."""
        return max(self._started(), default=0) + 1

    def open(self, number: int) -> CheckpointChain:
        """An epoch with all that it builds on.

        Raises:
            CheckpointError: it is not there, or it is of another format.
            CheckpointCorrupt: a manifest is damaged, or a checkpoint is missing that it builds on.
        """
        return self._open(number, {})

    def _open(self, number: int, read: dict[int, CheckpointReader]) -> CheckpointChain:
        """Reads no manifest that is in `read`, and adds the others to it."""
        epochs, readers = [number], [read.get(number) or CheckpointReader(self.directory(number))]
        while (base := readers[0].base) is not None:
            epochs.insert(0, base)
            readers.insert(0, self._base(base, readers[0], epochs[1], read.get(base)))
        read.update(zip(epochs, readers, strict=True))
        return CheckpointChain(epochs, readers)

    def newest_good(self, accept: Callable[[CheckpointChain], bool] = lambda chain: True) -> CheckpointChain | None:
        """The newest epoch that is intact, including all that it builds on; otherwise as `first_good`.

        Args:
            accept: says of a chain, before its files are verified, whether it is of use; all are by default.

        Returns:
            The chain, verified; None if there is none.
        """

        def verified(chain: CheckpointChain) -> CheckpointChain:
            chain.verify()
            return chain

        return self.first_good(verified, accept)

    def first_good(
        self, use: Callable[[CheckpointChain], _Used], accept: Callable[[CheckpointChain], bool] = lambda chain: True
    ) -> _Used | None:
        """What is made of the newest epoch that is found intact when it is used, including all that it builds on.

        Damaged ones are skipped with a warning and added to `damaged`.

        Args:
            use: makes something of a chain, for which it reads or verifies its files.
            accept: says of a chain, before it is used, whether it is of use; all are by default.

        Returns:
            What `use` has returned; None if there is no such epoch.

        Raises:
            CheckpointError: a checkpoint is out of reach, or of another format.
        """
        self.damaged = []
        read: dict[int, CheckpointReader] = {}
        used, instead = None, "there is no older epoch"
        for number in reversed(self.numbers()):
            try:
                chain = self._open(number, read)
                if accept(chain):
                    used, instead = use(chain), f"using epoch {number} instead"
                    break
            except CheckpointCorrupt as exc:
                self.damaged.append(str(exc))
        for message in self.damaged:
            logger.warning("%s; %s", message, instead)
        return used

    def newest(self, shards: int | None = None) -> CheckpointChain:
        """The newest epoch that is intact, verified; with `shards` one that can be restored to that number of shards.

        Raises:
            CheckpointError: there is none.
        """
        return self.required(self.newest_good(lambda one: shards is None or one.suits(shards)))

    def required(self, found: _Used | None) -> _Used:
        """What was found; raises CheckpointError if nothing was, which says why."""
        if found is not None:
            return found
        if not self.numbers():
            raise CheckpointError(
                f"there is no checkpoint at {self.url} yet; `streamtrain checkpoint` has a running cluster take one"
            )
        raise CheckpointError(
            f"none of the checkpoints at {self.url} can be used; `streamtrain restore --list` says why"
        )

    def retain(self, keep: int) -> list[int]:
        """Deletes old epochs: those beyond the newest `keep`, and unfinished ones older than the newest complete one.

        What a kept delta builds on is kept too. An epoch whose manifest, or that of one it builds on, is damaged or
        missing does not count as kept, and is deleted only if it is older than those that are.

        Returns:
            The numbers of the epochs deleted.

        Raises:
            ConfigError: `keep` is less than 1.
            CheckpointError: an epoch cannot be read or deleted.
        """
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, not {keep}")
        complete = self.numbers()
        kept: list[CheckpointChain] = []
        read: dict[int, CheckpointReader] = {}
        for number in reversed(complete):
            try:
                kept.append(self._open(number, read))
            except CheckpointCorrupt as exc:
                logger.warning("%s; epoch %d does not count as kept", exc, number)
            if len(kept) == keep:
                break
        if not kept:
            return []
        needed = {number for chain in kept for number in chain.epochs}
        oldest = min(chain.epoch for chain in kept)
        newest = max(complete)
        spare = [
            number
            for number in self._started()
            if number not in needed and number < (oldest if number in complete else newest)
        ]
        for number in spare:
            self._delete(number)
        return spare

    def check(self) -> dict[int, str]:
        """Faults of complete epochs, or of what they build on, by number. Reads all files.

        Raises:
            CheckpointError: a checkpoint is out of reach, or of another format.
        """
        read: dict[int, CheckpointReader] = {}
        found: dict[int, str] = {}
        for number in self.numbers():
            try:
                self._open(number, read).verify()
            except CheckpointCorrupt as exc:
                found[number] = str(exc)
        return found

    def set_aside(self, newest: int, name: str) -> list[int]:
        """Moves all epochs after one, complete or not, into a folder below the root, where they do not count.

        Moved back, they are as they were. If it ends half way, as it may, it can be done again with the same name.

        Args:
            newest: the one that becomes the newest.
            name: of the folder.

        Returns:
            The numbers of the epochs moved, ascending.

        Raises:
            CheckpointError: one cannot be moved.
        """
        later = [number for number in self._started() if number > newest]
        for number in reversed(later):  # a delta goes before what it builds on
            self._root.move(_name(number), self._root / name)
        return later

    def _started(self) -> list[int]:
        """Epochs, complete or not, ascending."""
        found = [(name, _NAME.fullmatch(name)) for name in self._root.names()]
        return sorted(int(match[1]) for name, match in found if match and name == _name(int(match[1])))

    def _base(
        self, number: int, on_it: CheckpointReader, its_number: int, read: CheckpointReader | None
    ) -> CheckpointReader:
        missing = f"{on_it.url} builds on epoch {number}, which does not exist"
        if number >= its_number:
            raise CheckpointCorrupt(missing)
        try:
            base = read or CheckpointReader(self.directory(number))
        except CheckpointError as exc:
            if isinstance(exc, CheckpointCorrupt) or self.directory(number).exists(MANIFEST):
                raise
            raise CheckpointCorrupt(missing) from exc
        if on_it.base_digest not in (None, base.digest):
            raise CheckpointCorrupt(f"{on_it.url} builds on epoch {number}, which was replaced by another checkpoint")
        if len(base.shards) != len(on_it.shards):
            raise CheckpointCorrupt(
                f"{on_it.url} has {len(on_it.shards)} shards, but its base, epoch {number}, has {len(base.shards)}"
            )
        return base

    def _delete(self, number: int) -> None:
        """The manifest is deleted first, so a partly deleted checkpoint is never read."""
        directory = self.directory(number)
        directory.delete(MANIFEST)
        directory.delete_all()


def _name(number: int) -> str:
    return f"epoch-{number:09d}"
