"""Rows of a table in Parquet, for pandas, DuckDB and anything else that reads it.

Columns have no nulls and lists of a fixed size, which makes the decoding of lists about as fast as it gets. LZ4 costs
almost nothing where it does not help, which is in the floats themselves.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from streamtrain.store.files import Directory, FileFacts, Output

GROUP_ROWS = 1 << 16
"""Rows of a row group in a file, and of a part that is read."""

_PAGE_BYTES = 1 << 18  # a page is decoded within a core's cache
_KEYS = pa.schema([pa.field("key", pa.uint64(), nullable=False)])


Check = Callable[[FileFacts], object]
"""Called with a file's size and SHA-256 once all of it was read. May raise CheckpointCorrupt."""


class RowPart(NamedTuple):
    """Some rows of a table, column by column.

    Attributes:
        keys: uint64 [n].
        embeddings: float32 [n, dim].
        state: float32 [n, state_size], the optimizer's.
        counts: uint32 [n], occurrences learned from.
        last_seen: uint32 [n], event time in seconds.
    """

    keys: NDArray[np.uint64]
    embeddings: NDArray[np.float32]
    state: NDArray[np.float32]
    counts: NDArray[np.uint32]
    last_seen: NDArray[np.uint32]


class Tombstones(NamedTuple):
    """Rows that are gone.

    Attributes:
        keys: uint64 [n].
    """

    keys: NDArray[np.uint64]


class TablePart(NamedTuple):
    """The rows of one shard of a table, for writing.

    Attributes:
        table: name of the table.
        dim: width of an embedding.
        state_size: floats of optimizer state per row.
        rows: the rows, in parts of any size. Small ones are gathered, so their arrays must stay as they are.
    """

    table: str
    dim: int
    state_size: int
    rows: Iterable[RowPart]


def write_rows(output: Output, part: TablePart) -> int:
    """Writes rows and returns how many they were; two row groups and a part are held in memory at most."""
    schema = _schema(part.dim, part.state_size)
    return _write(output, schema, (_table(output, schema, rows) for rows in part.rows))


def write_keys(output: Output, keys: Iterable[NDArray[np.uint64]]) -> int:
    """Writes parts of keys and returns how many there were."""
    return _write(output, _KEYS, (pa.table([pa.array(part)], schema=_KEYS) for part in keys))


def write_embeddings(output: Output, dim: int, parts: Iterable[tuple[NDArray[np.uint64], NDArray[np.float32]]]) -> int:
    """Writes keys uint64 [n] with their rows float32 [n, dim] only, in parts, and returns how many they were."""
    schema = pa.schema([_schema(dim, 0).field(name) for name in ("key", "embedding")])

    def table(keys: NDArray[np.uint64], rows: NDArray[np.float32]) -> pa.Table:
        with output.writing():
            return pa.table([pa.array(keys), _lists(rows, schema.field("embedding").type)], schema=schema)

    return _write(output, schema, (table(*part) for part in parts))


def read_rows(directory: Directory, name: str, check: Check | None = None) -> Iterator[RowPart]:
    """Reads rows in parts of at most 65536.

    Args:
        directory: of the file.
        name: of the file.
        check: is given the facts of the file after its last row; None: they are not known then.

    Raises:
        CheckpointCorrupt: it is not a file of rows.
    """
    for batch in _read(directory, name, _expected, check):
        n = batch.num_rows
        yield RowPart(
            batch.column("key").to_numpy(),
            batch.column("embedding").flatten().to_numpy().reshape(n, -1),
            batch.column("state").flatten().to_numpy().reshape(n, -1),
            batch.column("count").to_numpy(),
            batch.column("last_seen").to_numpy(),
        )


def read_keys(directory: Directory, name: str, check: Check | None = None) -> Iterator[NDArray[np.uint64]]:
    """Reads keys in parts of at most 65536; raises CheckpointCorrupt if it is not a file of keys. See `read_rows`."""
    for batch in _read(directory, name, lambda _: _KEYS, check):
        yield batch.column("key").to_numpy()


def _schema(dim: int, state_size: int) -> pa.Schema:
    element = pa.field("element", pa.float32(), nullable=False)
    columns = {
        "key": pa.uint64(),
        "embedding": pa.list_(element, dim),
        # Arrow cannot read lists of the fixed size 0 from Parquet.
        "state": pa.list_(element, state_size or -1),
        "count": pa.uint32(),
        "last_seen": pa.uint32(),
    }
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def _table(output: Output, schema: pa.Schema, rows: RowPart) -> pa.Table:
    with output.writing():
        return pa.table(
            [
                pa.array(rows.keys),
                _lists(rows.embeddings, schema.field("embedding").type),
                _lists(rows.state, schema.field("state").type),
                pa.array(rows.counts),
                pa.array(rows.last_seen),
            ],
            schema=schema,
        )


def _lists(values: NDArray[np.float32], kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), type=kind)
    return pa.array([[]] * len(values), kind)


def _write(output: Output, schema: pa.Schema, parts: Iterable[pa.Table]) -> int:
    written = 0
    with pq.ParquetWriter(
        output, schema, compression="lz4", use_dictionary=False, write_statistics=False, data_page_size=_PAGE_BYTES
    ) as writer:
        for group in _groups(parts):
            with output.writing():
                writer.write_table(group, GROUP_ROWS)
            written += group.num_rows
    return written


def _groups(parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Small parts together: every row group has a cost of its own."""
    pending: list[pa.Table] = []
    for part in parts:
        pending.append(part)
        if sum(one.num_rows for one in pending) >= GROUP_ROWS:
            yield pa.concat_tables(pending)
            pending = []
    if pending:
        yield pa.concat_tables(pending)


def _read(
    directory: Directory, name: str, columns: Callable[[pa.Schema], pa.Schema], check: Check | None
) -> Iterator[pa.RecordBatch]:
    with ExitStack() as stack:
        once = None if check is None else stack.enter_context(directory.open_once(name))
        file = stack.enter_context(directory.open(name)) if once is None else pa.PythonFile(once, "r")
        with directory.reading(name):
            parquet = pq.ParquetFile(file)
            found = parquet.schema_arrow
            if not found.equals(columns(found)):
                shown = ", ".join(f"{field.name}: {field.type}" for field in found)
                raise pa.ArrowInvalid(f"unexpected columns: {shown}")
            ends = _ends(parquet.metadata) if once else ()
        for group in range(parquet.num_row_groups):  # `iter_batches` keeps the memory of all groups to the end
            with directory.reading(name):
                if once is not None:
                    once.next_region(ends[group])
                batches = parquet.read_row_group(group).to_batches(max_chunksize=GROUP_ROWS)
            yield from batches
        if once is not None and check is not None:
            with directory.reading(name):
                facts = once.facts()
            check(facts)


def _ends(metadata: pq.FileMetaData) -> list[int]:
    """Where each row group ends.

    Raises:
        ArrowInvalid: a group begins before the one before it ends, or is larger than its rows can be.
    """
    ends = [len(b"PAR1")]
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        if not group.num_rows:
            ends.append(ends[-1])
            continue
        columns = [group.column(c) for c in range(group.num_columns)]
        begins = [c.dictionary_page_offset if c.has_dictionary_page else c.data_page_offset for c in columns]
        end = max(begin + c.total_compressed_size for begin, c in zip(begins, columns, strict=True))
        if min(begins) < ends[-1] or not 0 < end - ends[-1] <= 2 * group.total_byte_size + _PAGE_BYTES:
            raise pa.ArrowInvalid(f"row group {g} is at {min(begins)} to {end}, after {ends[-1]}")
        ends.append(end)
    return ends[1:]


def _expected(found: pa.Schema) -> pa.Schema:
    """The columns of a table whose lists are as wide as those found."""

    def width(column: str) -> int:
        return max(getattr(found.field(column).type, "list_size", 0), 0)

    return _schema(width("embedding"), width("state"))
