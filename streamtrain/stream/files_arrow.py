"""CSV and Parquet as JSON messages, by Arrow, a block at a time."""

import codecs
import csv
from collections.abc import Collection, Iterator, Sequence
from typing import IO, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from streamtrain.errors import ConfigError

_BLOCK = 1 << 20  # bytes of CSV parsed at once, and the longest row
_ROWS = 4096  # of Parquet converted at once
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"  # as JSON has them: 007 is none
_TRUTH = r"^(true|false|True|False|TRUE|FALSE)$"
_ESCAPED = r'["\\\x00-\x1f]'
_encode = msgspec.json.Encoder(decimal_format="number").encode


class Rows(NamedTuple):
    """Samples that follow each other.

    Attributes:
        values: messages.
        keys: value of the field that is the key, for every sample; None: there is no such field.
        times: the same of the event time.
        share: of the file that is read after these, 0 to 1; None: unknown.
    """

    values: list[bytes]
    keys: Sequence[Any] | None = None
    times: Sequence[Any] | None = None
    share: float | None = None


def csv_rows(stream: IO[bytes], key: str | None, time: str | None, text: Collection[str]) -> Iterator[Rows]:
    """Rows of CSV in UTF-8 whose first row names the fields; docs/produce.md says what becomes of cells.

    Args:
        stream: what to read.
        key: column of the keys; None: there are none.
        time: column of the event times; None: there are none.
        text: columns whose cells are text whatever they look like.

    Raises:
        ConfigError: the header is unusable, or a column that is asked for is not in it.
        pa.ArrowInvalid: a row is malformed; names it.
    """
    head = _head(stream)
    names = _header(head)
    _check_columns(names, [key, time, *text])
    reader = arrow_csv.open_csv(
        pa.PythonFile(_Reread(head, stream), "r"),
        read_options=arrow_csv.ReadOptions(block_size=_BLOCK, use_threads=False),
        parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True
        ),
    )
    for batch in _batches(reader):
        fields = [_csv_fields(name, batch.column(name), name in text) for name in names]
        inner = pc.ascii_rtrim(pc.binary_join_element_wise(*fields, ""), ",")
        values = pc.binary_join_element_wise("{", inner, "}", "").cast(pa.binary())
        yield Rows(values.to_numpy(zero_copy_only=False).tolist(), _list(batch, key), _list(batch, time))


def _batches(reader: arrow_csv.CSVStreamingReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except pa.ArrowInvalid as exc:
        if "straddling" in str(exc):
            raise ConfigError(f"a row has more than {_BLOCK:,} bytes; a quote may not be closed") from exc
        raise


class _Reread:
    """A stream whose beginning has been read already."""

    closed = False

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int) -> bytes:
        if not self._head:
            return self._stream.read(size)
        part, self._head = self._head[:size], self._head[size:]
        return part


def _head(stream: IO[bytes]) -> bytes:
    """The beginning of a stream: its first line that is not blank, and more."""
    head = b""
    while chunk := stream.read(_BLOCK):
        head += chunk
        if b"\n" in head.lstrip(b"\r\n") or len(head) > _BLOCK:
            break
    return head


def _header(head: bytes) -> list[str]:
    line = head.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n").partition(b"\n")[0]
    if len(line) > _BLOCK:
        raise ConfigError(f"the first line, which should name the columns, has more than {_BLOCK:,} bytes")
    if not line.strip():
        raise ConfigError("there is no header that names the columns")
    try:
        (names,) = csv.reader([line.decode()], strict=True)
    except (UnicodeDecodeError, csv.Error) as exc:
        raise ConfigError(f"the header, which should name the columns, cannot be read: {exc}") from exc
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ConfigError(f"the header names {min(repeated)!r} more than once")
    return names


def _csv_fields(name: str, cells: pa.StringArray, is_text: bool) -> pa.StringArray:
    """`"name":value,` for every cell, nothing for those that are empty."""
    odd = pc.match_substring_regex(cells, _ESCAPED)
    if pc.any(odd).as_py():
        escaped = [_encode(cell)[1:-1].decode() for cell in cells.filter(odd).to_pylist()]
        cells = pc.replace_with_mask(cells, pc.fill_null(odd, False), pa.array(escaped, pa.string()))
    values = pc.binary_join_element_wise('"', cells, '"', "")
    if not is_text:
        values = pc.if_else(pc.match_substring_regex(cells, _NUMBER), cells, values)
        values = pc.if_else(pc.match_substring_regex(cells, _TRUTH), pc.utf8_lower(cells), values)
    return pc.fill_null(pc.binary_join_element_wise(_encode(name).decode() + ":", values, ",", ""), "")


def parquet_rows(stream: IO[bytes], key: str | None, time: str | None, text: Collection[str]) -> Iterator[Rows]:
    """Rows of Parquet; docs/produce.md says what becomes of types.

    Args:
        stream: what to read, at random positions.
        key: column of the keys; None: there are none.
        time: column of the event times; None: there are none.
        text: columns whose values become text.

    Raises:
        ConfigError: there is no such column, or its values cannot become text.
        pa.ArrowInvalid: it is no Parquet, or damaged.
    """
    with pq.ParquetFile(stream, pre_buffer=False, buffer_size=_BLOCK) as file:
        names, total, done = file.schema_arrow.names, file.metadata.num_rows, 0
        _check_columns(names, [key, time, *text])
        for batch in file.iter_batches(_ROWS):
            columns = [
                _parquet_column(name, column, name in text).to_pylist()
                for name, column in zip(names, batch.columns, strict=True)
            ]
            values = [_encode(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
            of = dict(zip(names, columns, strict=True))
            done += len(values)
            yield Rows(values, of.get(key or ""), of.get(time or ""), done / total)


def _parquet_column(name: str, column: pa.Array, is_text: bool) -> pa.Array:
    """Values as JSON is to have them."""
    kind = column.type
    try:
        if is_text and pa.types.is_floating(kind):  # what pandas makes of integers with gaps
            column = pc.if_else(pc.is_nan(column), None, column).cast(pa.int64())
        if is_text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return column.cast(pa.list_(pa.string()) if pa.types.is_nested(kind) else pa.string())
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            microseconds = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
            return pc.divide(microseconds.cast(pa.float64(), safe=False), 1e6)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
        raise ConfigError(f"column {name!r}, of type {kind}, cannot be converted: {exc}") from exc
    return column


def _list(batch: pa.RecordBatch, name: str | None) -> list[Any] | None:
    return None if name is None else list(batch.column(name).to_pylist())


def _check_columns(names: list[str], wanted: list[str | None]) -> None:
    for name in wanted:
        if name is not None and name not in names:
            raise ConfigError(f"there is no column {name!r}; there are {', '.join(names)}")
