"""Chain: a checkpoint with what it builds on."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from streamtrain.errors import CheckpointCorrupt
from streamtrain.store.checkpoint import CheckpointReader
from streamtrain.store.rows import RowPart, Tombstones


class Chain:
    """A full checkpoint and the deltas on it, in order: all that there is at the last one's epoch.

    Args:
        epochs: their numbers, the full one's first.
        readers: of each.

    Attributes:
        epochs: their numbers; the last is that of the chain.
        about: facts of the newest.
        shards: facts of the newest, by shard.
    """

    def __init__(self, epochs: Sequence[int], readers: Sequence[CheckpointReader]) -> None:
        self.epochs = list(epochs)
        self.about, self.shards = readers[-1].about, readers[-1].shards
        self._readers = list(readers)

    @property
    def epoch(self) -> int:
        """Number of the newest."""
        return self.epochs[-1]

    @property
    def url(self) -> str:
        """Where the newest is, for messages."""
        return self._readers[-1].url

    @property
    def first_row_counts(self) -> dict[str, int]:
        """Number of rows by table of the full checkpoint, without its deltas."""
        return dict(self._readers[0].row_counts)

    def verify(self, shards: Iterable[int] | None = None) -> None:
        """Compares size and checksum of all files of it, or of those of some shards.

        Raises:
            CheckpointCorrupt: a file is missing or damaged; the message names it.
        """
        self._verify(None if shards is None else list(shards), {})

    def _verify(self, shards: list[int] | None, checked: dict[int, str | None]) -> None:
        """Leaves out epochs that have been checked, and adds to them what is wrong with others, or None."""
        for epoch, reader in zip(self.epochs, self._readers, strict=True):
            if epoch not in checked:
                try:
                    reader.verify(shards)
                    checked[epoch] = None
                except CheckpointCorrupt as exc:
                    checked[epoch] = str(exc)
            if (fault := checked[epoch]) is not None:
                raise CheckpointCorrupt(fault)

    def changes(self, table: str, shards: Iterable[int] | None = None) -> Iterator[RowPart | Tombstones]:
        """The rows of a table, and those that went: applied in order, they give the table.

        Parts have at most 65536 rows.

        Args:
            table: its name.
            shards: those whose rows to read; all by default.

        Raises:
            CheckpointCorrupt: a file is missing or damaged.
        """
        wanted = None if shards is None else list(shards)
        for reader in self._readers:
            for keys in reader.tombstones(table, wanted):
                yield Tombstones(keys)
            yield from reader.rows(table, wanted)

    def arrays(self, shard: int) -> dict[str, NDArray[Any]]:
        """The newest arrays of a shard.

        Raises:
            CheckpointCorrupt: their file is missing or damaged.
        """
        return self._readers[-1].arrays(shard)
