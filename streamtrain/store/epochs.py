"""Epochs: numbered checkpoints below one root, of which a delta holds only what changed since the one before."""

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from streamtrain.errors import CheckpointCorrupt, CheckpointError, ConfigError
from streamtrain.store.chain import Chain
from streamtrain.store.checkpoint import CheckpointReader
from streamtrain.store.files import Directory
from streamtrain.store.manifest import MANIFEST

logger = logging.getLogger(__name__)

_NAME = re.compile(r"epoch-(\d{9,})", re.ASCII)


def epoch_of(url: str | Path) -> int | None:
    """The number of the epoch whose directory this is, if its name is one's."""
    match = _NAME.fullmatch(str(url).rstrip("/").rpartition("/")[2])
    return int(match[1]) if match else None


def open_chain(url: str | Path) -> Chain:
    """A checkpoint by its own directory; a delta with what it builds on, which lies beside it.

    Raises:
        CheckpointError: it is not there, or it is of another format.
        CheckpointCorrupt: a manifest is damaged, or a checkpoint is missing that it builds on.
    """
    reader = CheckpointReader(url)
    if reader.base is None:
        return Chain([0], [reader])
    if (epoch := epoch_of(url)) is None:
        raise CheckpointError(f"{url} is a delta and must be opened where it was written, beside what it builds on")
    return Epochs(str(url).rstrip("/").rpartition("/")[0] or ".").open(epoch)


class Epochs:
    """The checkpoints below a root, each in a directory such as epoch-000000012. Anything else there is left alone.

    Args:
        url: the root: a local path or any URL of fsspec; it need not be there yet.

    Attributes:
        url: the root.
        damaged: what `newest_good` found damaged, newest first; each names the file.

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
        return [number for number in self._started() if self.directory(number).exists(MANIFEST)]

    def directory(self, number: int) -> Directory:
        """Where an epoch is, or is to be written."""
        return self._root / _name(number)

    def place(self, number: int) -> str:
        """The same as a URL for `open_chain`, with credentials if the root had them."""
        return f"{self._given}/{_name(number)}"

    def next(self) -> int:
        """A number greater than that of any epoch there, complete or not."""
        return max(self._started(), default=0) + 1

    def open(self, number: int) -> Chain:
        """An epoch with all that it builds on.

        Raises:
            CheckpointError: it is not there, or it is of another format.
            CheckpointCorrupt: a manifest is damaged, or a checkpoint is missing that it builds on.
        """
        epochs, readers = [number], [CheckpointReader(self.directory(number))]
        while (base := readers[0].base) is not None:
            epochs.insert(0, base)
            readers.insert(0, self._base(base, readers[0], epochs[1]))
        return Chain(epochs, readers)

    def newest_good(
        self,
        accept: Callable[[Chain], bool] | None = None,
        shards: Callable[[Chain], Iterable[int]] | None = None,
    ) -> Chain | None:
        """The newest epoch that is whole, all that it builds on included.

        One that is damaged is left out with a warning, and put into `damaged`.

        Args:
            accept: says of a chain, before its files are verified, whether it is of use; all are by default.
            shards: says of a chain whose files to verify; all by default.

        Returns:
            The chain, verified; None if there is none.

        Raises:
            CheckpointError: a checkpoint is out of reach, or of another format.
        """
        self.damaged = []
        checked: dict[int, str | None] = {}
        found = None
        for number in reversed(self.numbers()):
            try:
                chain = self.open(number)
                if accept is None or accept(chain):
                    chain._verify(list(shards(chain)) if shards else None, checked)
                    found = chain
                    break
            except CheckpointCorrupt as exc:
                self.damaged.append(str(exc))
        instead = f"epoch {found.epoch} is used instead" if found else "there is no older epoch to use"
        for message in self.damaged:
            logger.warning("%s; %s", message, instead)
        return found

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
        kept: list[Chain] = []
        for number in reversed(complete):
            try:
                kept.append(self.open(number))
            except CheckpointCorrupt as exc:
                logger.warning("%s; epoch %d does not count as one that is kept", exc, number)
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
        """What is wrong with complete epochs, or with what they build on, by number. All files are read.

        Raises:
            CheckpointError: a checkpoint is out of reach, or of another format.
        """
        checked: dict[int, str | None] = {}
        found: dict[int, str] = {}
        for number in self.numbers():
            try:
                self.open(number)._verify(None, checked)
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

    def _base(self, number: int, on_it: CheckpointReader, its_number: int) -> CheckpointReader:
        if number >= its_number or not self.directory(number).exists(MANIFEST):
            raise CheckpointCorrupt(f"{on_it.url} builds on epoch {number}, which is not there")
        base = CheckpointReader(self.directory(number))
        if len(base.shards) != len(on_it.shards):
            raise CheckpointCorrupt(
                f"{on_it.url} has {len(on_it.shards)} shards, but epoch {number}, which it builds on, "
                f"{len(base.shards)}"
            )
        return base

    def _delete(self, number: int) -> None:
        """Without its manifest it is no checkpoint, so half of it is never seen."""
        directory = self.directory(number)
        directory.delete(MANIFEST)
        directory.delete_all()


def _name(number: int) -> str:
    return f"epoch-{number:09d}"
