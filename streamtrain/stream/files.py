"""Files of samples: read in blocks, so that memory stays bounded whatever their size.

They are JSON lines, CSV or Parquet, on disk or at any URL that fsspec knows; or JSON lines on standard input.
docs/produce.md says how rows become messages. Whatever reading raises becomes a ConfigError that names the file.
"""

import ast
import math
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain
from typing import IO, Any, NamedTuple, TypeVar

import fsspec
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.core import get_compression
from fsspec.implementations.local import LocalFileSystem
from pyarrow import csv

from streamtrain.address import redacted
from streamtrain.errors import ConfigError

FileSample = tuple[bytes, float | None, bytes | None]
"""A message, its event time in seconds since the epoch, and the key that decides its partition."""

FORMATS = ("jsonl", "csv", "parquet")
STDIN = "-"

T = TypeVar("T")

_SUFFIXES = {
    **dict.fromkeys(("jsonl", "ndjson", "json"), "jsonl"),
    **dict.fromkeys(("csv", "tsv"), "csv"),
    **dict.fromkeys(("parquet", "pq"), "parquet"),
}
_SEPARATORS = "\t;|"  # of CSV where there is no comma
_COMPRESSED = re.compile(r"\.(gz|bz2|xz|zst)$")
_BLOCK = 1 << 20  # bytes read at once; of CSV also the longest row
_ROWS = 4096  # of Parquet converted at once
_MAX_LINE = 16 << 20  # bytes
_SHOWN = 80  # characters of a row that is refused
EARLIEST, LATEST = -62_135_596_800, 253_402_300_800  # years 0001 to 9999, as in samples
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"  # as JSON has them: 007 is not one
_BOOLEAN = r"^(true|false|True|False|TRUE|FALSE)$"
_ARRAY = r"(?s)^\[.*\]$"
_ESCAPED = r'["\\\x00-\x1f]'
_encode = msgspec.json.Encoder(decimal_format="number").encode
_decode = msgspec.json.decode


class FileBlock(NamedTuple):
    """Samples that follow each other.

    Attributes:
        samples: samples in the order of the file.
        share: share of the file that has been read after these, 0 to 1; None: unknown.
        restarts: whether event time starts over, as the file is read again.
    """

    samples: list[FileSample]
    share: float | None
    restarts: bool = False


class _Rows(NamedTuple):
    """Messages that follow each other, with the values of the key's and the event time's fields, and `Block.share`."""

    values: list[bytes]
    keys: Sequence[Any] | None = None
    times: Sequence[Any] | None = None
    share: float | None = None


class _Rules(NamedTuple):
    """How the cells of columns become JSON: `text` and `lists` of `SampleFile`."""

    text: frozenset[str]
    lists: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        return [*self.text, *self.lists]


class _Header(NamedTuple):
    """What separates the columns of CSV, and their names."""

    separator: str
    names: list[str]


class SampleFile:
    """A file of samples, which one iteration at a time reads.

    Args:
        url: a path, a URL that fsspec knows, or "-", standard input.
        format: one of `FORMATS`; None: by the file's name.
        key: field whose value is the key of a message; None: messages have no key.
        time: field with the event time, in seconds or ISO 8601; None: messages have no event time.
        text: columns of CSV and Parquet whose values are text, also where they look like numbers or arrays.
        lists: columns of CSV and Parquet whose values are lists, by name the character that separates the elements.

    Raises:
        ConfigError: the format does not follow from the name, or the arguments do not fit it.
    """

    def __init__(
        self,
        url: str,
        format: str | None = None,
        *,
        key: str | None = None,
        time: str | None = None,
        text: Collection[str] = (),
        lists: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self.name = "standard input" if url == STDIN else redacted(url)
        self.format = format or self._format()
        self._key, self._time, self._rules = key, time, _Rules(frozenset(text), lists or {})
        self._blanks = array("q")  # by blank line, the number of samples before it
        if self.format not in FORMATS:
            raise ConfigError(f"the format of samples must be one of {', '.join(FORMATS)}, not {self.format!r}")
        if self._rules.names and self.format == "jsonl":
            raise ConfigError("columns of text and lists can be named for CSV and Parquet only: JSON itself has both")
        if url == STDIN and self.format != "jsonl":
            raise ConfigError(f"standard input is read as JSON lines: write {self.format} to a file first")

    def _format(self) -> str:
        if self.url == STDIN:
            return "jsonl"
        suffix = _COMPRESSED.sub("", self.url.lower()).rpartition(".")[2]
        if suffix not in _SUFFIXES:
            raise ConfigError(f"cannot tell the format of {self.name} from its name: use --format {'|'.join(FORMATS)}")
        return _SUFFIXES[suffix]

    def blocks(self) -> Iterator[FileBlock]:
        """All samples, once.

        Raises:
            ConfigError: the file is missing, cut off, or not of its format; the message says where.
        """
        count = 0
        self._blanks = array("q")
        try:
            with ExitStack() as stack:
                for rows in filter(lambda rows: rows.values, self._rows(stack)):
                    count += len(rows.values)
                    keys, times = _each(parse_key, rows.keys, rows.values), _each(parse_time, rows.times, rows.values)
                    yield FileBlock(list(zip(rows.values, times, keys, strict=True)), rows.share)
        except Exception as exc:  # decoders and the clients of object stores have errors of their own
            place = f" after sample {count:,}" if count else ""
            raise ConfigError(f"cannot read {self.name}{place}: {_reason(exc)}") from exc

    def messages(self) -> Iterator[bytes]:
        """The messages of all samples, once; errors as `blocks`."""
        return (message for block in self.blocks() for message, _, _ in block.samples)

    def opened(self) -> Iterator[bytes]:
        """Like `messages`, but errors at the file's beginning are raised now.

        Raises:
            ConfigError: as `blocks`; or there are no samples.
        """
        messages = self.messages()
        first = next(messages, None)
        if first is None:
            raise ConfigError(f"{self.name} has no samples")
        return chain([first], messages)

    def place(self, index: int) -> str:
        """Where a sample that has been read stands in the file, such as "line 17", by its index from 0."""
        if self.format != "jsonl":
            return f"row {index + 1:,}"
        return f"line {index + 1 + bisect_right(self._blanks, index):,}"

    def _rows(self, stack: ExitStack) -> Iterator[_Rows]:
        if self.url == STDIN:
            yield from self._json_rows(lambda size: os.read(0, size), checked=False)
            return
        raw, stream = self._open(stack)
        size = getattr(raw, "size", None)
        if self.format == "parquet":
            yield from _parquet_rows(raw, self._key, self._time, self._rules)
            return
        if self.format == "csv":
            with ExitStack() as start:
                separator = _separator(self._open(start)[1])
            with ExitStack() as header:
                names = _csv_names(self._open(header)[1], separator)
            _check_columns(names, [self._key, self._time, *self._rules.names])
            rows = _csv_rows(stream, _Header(separator, names), self._key, self._time, self._rules)
        else:
            rows = self._json_rows(stream.read, checked=True)
        for each in rows:
            yield each._replace(share=min(1.0, raw.tell() / size) if size else None)

    def _json_rows(self, read: Callable[[int], bytes], *, checked: bool) -> Iterator[_Rows]:
        """Lines as they are, whether they are JSON or not, but blank ones.

        Args:
            read: reads up to a number of bytes.
            checked: whether it is an error if the first line is the beginning of an array, or none of the first lines
                has the fields of key and event time.
        """
        read_key, read_time = _field_reader(self._key), _field_reader(self._time)
        count = 0
        for lines in _lines(read):
            values = [line for line in lines if line and not line.isspace()]
            if checked and values and values[0].lstrip().startswith(b"["):
                raise ConfigError(
                    "it is one JSON array, not JSON lines: write each sample to a line of its own, such as with "
                    "jq --compact-output '.[]'"
                )
            if len(values) < len(lines):
                self._note_blanks(lines, count)
            count += len(values)
            rows = _Rows(values, read_key and [*map(read_key, values)], read_time and [*map(read_time, values)])
            for name, column in ((self._key, rows.keys), (self._time, rows.times)):
                if checked and column and all(value is None for value in column):
                    raise ConfigError(f"none of the first {len(column):,} samples has a field {name!r}")
            checked = checked and not values
            yield rows

    def _note_blanks(self, lines: list[bytes], count: int) -> None:
        for line in lines:
            if line and not line.isspace():
                count += 1
            else:
                self._blanks.append(count)

    def _open(self, stack: ExitStack) -> tuple[Any, Any]:
        """The file as it is, and uncompressed."""
        if re.search("::|://", self.url):
            fs, path = fsspec.core.url_to_fs(self.url)
            raw = stack.enter_context(fs.open(path, "rb"))
        else:
            raw = stack.enter_context(LocalFileSystem().open(self.url, "rb"))
        if self.url.lower().endswith(".zst"):  # fsspec needs another package for it
            return raw, stack.enter_context(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
        kind = get_compression(self.url, "infer")
        return raw, stack.enter_context(fsspec.compression.compr[kind](raw, mode="rb")) if kind else raw


def _each(convert: Callable[[Any], T | None], values: Sequence[Any] | None, messages: list[bytes]) -> list[T | None]:
    return [None] * len(messages) if values is None else [convert(value) for value in values]


def _reason(exc: Exception) -> str:
    text = (isinstance(exc, OSError) and exc.strerror) or str(exc) or type(exc).__name__
    return redacted(" ".join(text.split())[:500])


def _check_columns(names: list[str], wanted: list[str | None]) -> None:
    for name in wanted:
        if name is not None and name not in names:
            raise ConfigError(f"missing column {name!r}; the columns are {', '.join(names)}")


def _lines(read: Callable[[int], bytes]) -> Iterator[list[bytes]]:
    rest = b""
    while chunk := read(_BLOCK):
        lines = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        rest = lines.pop()
        if len(rest) > _MAX_LINE:
            raise ConfigError(f"a line has more than {_MAX_LINE:,} bytes: these are not JSON lines")
        yield lines
    yield [rest]


def _field_reader(name: str | None) -> Callable[[bytes], int | float | str | None] | None:
    """Reads one field of a JSON message; None where it is missing, of another type, or the message is malformed."""
    if name is None:
        return None
    try:
        struct = msgspec.defstruct("Field", [("value", int | float | str | None, None)], rename={"value": name})
    except ValueError as exc:
        raise ConfigError(f"a field cannot be named {name!r}: {exc}") from exc
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(struct).decode

    def read(message: bytes) -> int | float | str | None:
        try:
            value: int | float | str | None = decode(message).value
            return value
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None  # the worker that reads the message refuses it

    return read


def _separator(stream: IO[bytes]) -> str:
    """What separates the names of a header: a comma, or if it has none, the first of the others that it has."""
    line, _, _ = stream.read(_BLOCK).lstrip(b"\xef\xbb\xbf\r\n").partition(b"\n")
    unquoted = re.sub(rb'"[^"]*"', b"", line).decode("utf-8", "replace")
    found = [one for one in _SEPARATORS if one in unquoted]
    return found[0] if found and "," not in unquoted else ","


def _open_csv(
    stream: Any, separator: str, is_invalid: Callable[[csv.InvalidRow], str], **types: pa.DataType
) -> csv.CSVStreamingReader:
    return csv.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=csv.ReadOptions(block_size=_BLOCK, use_threads=False),
        parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=is_invalid),
        convert_options=csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )


def _csv_names(stream: IO[bytes], separator: str) -> list[str]:
    """The names of the columns.

    Raises:
        ConfigError: there are none, or one is repeated.
    """
    try:
        with _open_csv(stream, separator, lambda row: "skip") as reader:
            names: list[str] = reader.schema.names
    except (pa.ArrowInvalid, UnicodeDecodeError) as exc:
        raise ConfigError(f"the header, which should name the columns, cannot be read: {exc}") from exc
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ConfigError(f"the header names {min(repeated)!r} more than once")
    return names


def _csv_rows(stream: IO[bytes], header: _Header, key: str | None, time: str | None, rules: _Rules) -> Iterator[_Rows]:
    """Rows of CSV, each cell of which is judged by itself."""
    invalid: list[csv.InvalidRow] = []
    counted, last = _QuoteCount(stream), None

    def refuse(row: csv.InvalidRow) -> str:
        invalid.append(row)
        return "error"

    try:
        for batch in _open_csv(counted, header.separator, refuse, **dict.fromkeys(header.names, pa.string())):
            fields = [_csv_fields(name, batch.column(name), rules) for name in header.names]
            inner = pc.ascii_rtrim(pc.binary_join_element_wise(*fields, ""), ",")
            values = pc.binary_join_element_wise("{", inner, "}", "").cast(pa.binary())
            keys, times = (None if name is None else batch.column(name).to_pylist() for name in (key, time))
            yield _Rows(values.to_numpy(zero_copy_only=False).tolist(), keys, times)
            last = batch.column(header.names[-1])[-1].as_py() if len(batch) else last
    except pa.ArrowInvalid as exc:
        if "straddling" in str(exc):
            raise ConfigError(f"a row has more than {_BLOCK:,} bytes; a quote may not be closed") from exc
        if invalid:
            raise ConfigError(_describe_row(invalid[0], header)) from exc
        raise
    if counted.quotes % 2 and "\n" in (last or ""):  # rows that the last cell has swallowed
        raise ConfigError("a quote in the last row is not closed")


class _QuoteCount:
    """A stream that counts the quotes that were read."""

    closed = False

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.quotes = 0

    def read(self, size: int) -> bytes:
        chunk = self._stream.read(size)
        self.quotes += chunk.count(b'"')
        return chunk


def _describe_row(row: csv.InvalidRow, header: _Header) -> str:
    text = f"{row.text[:_SHOWN]}…" if len(row.text) > _SHOWN else row.text
    return (
        f"row {row.number - 1:,}, {text!r}, does not have {len(header.names)} columns, as the header has, but "
        f"{row.actual_columns}: it may be cut off, a quote may not be closed, or a text that contains "
        f"{header.separator!r} may lack its quotes"
    )


def _csv_fields(name: str, cells: pa.StringArray, rules: _Rules) -> pa.StringArray:
    """`"name":value,` for every cell; nothing for one that is empty, but of lists `"name":[],`."""
    if name in rules.lists:
        values = _lists(name, cells, rules)
    else:
        values = pc.binary_join_element_wise('"', _escape(cells), '"', "")
    if name not in rules.names:
        values = pc.if_else(pc.match_substring_regex(cells, _NUMBER), cells, values)
        values = pc.if_else(pc.match_substring_regex(cells, _BOOLEAN), pc.utf8_lower(cells), values)
        values = _replace_arrays(cells, values)
    return pc.fill_null(pc.binary_join_element_wise(_encode(name).decode() + ":", values, ",", ""), "")


def _lists(name: str, cells: pa.StringArray, rules: _Rules) -> pa.StringArray:
    """Arrays of JSON for the cells of a column in `lists`."""
    values = pc.fill_null(_split(cells, rules.lists[name]), "[]")
    return values if name in rules.text else _replace_arrays(cells, values)


def _escape(cells: pa.StringArray) -> pa.StringArray:
    """Text as it stands between the quotes of JSON."""
    odd = pc.match_substring_regex(cells, _ESCAPED)
    if not pc.any(odd).as_py():
        return cells
    escaped = [_encode(cell)[1:-1].decode() for cell in cells.filter(odd).to_pylist()]
    return pc.replace_with_mask(cells, pc.fill_null(odd, False), pa.array(escaped, pa.string()))


def _split(cells: pa.StringArray, separator: str) -> pa.StringArray:
    """Cells as JSON arrays of text. Separators at the ends, or side by side, separate nothing."""
    inner = pc.utf8_trim(_escape(cells), separator)
    inner = pc.replace_substring_regex(inner, f"[{re.escape(separator)}]+", '","')
    return pc.if_else(pc.equal(inner, ""), "[]", pc.binary_join_element_wise('["', inner, '"]', ""))


def _replace_arrays(cells: pa.StringArray, values: pa.StringArray) -> pa.StringArray:
    """The values, but arrays where cells are arrays of JSON, or lists as Python writes them."""
    found = pc.fill_null(pc.match_substring_regex(cells, _ARRAY), False)
    if not pc.any(found).as_py():
        return values
    arrays = pa.array([_array(cell) for cell in cells.filter(found).to_pylist()], pa.string())
    return pc.replace_with_mask(values, found, pc.coalesce(arrays, values.filter(found)))


def _array(cell: str) -> str | None:
    """An array of JSON by itself, or as Python, and so pandas, writes a list; None: it is neither."""
    try:
        return cell if isinstance(_decode(cell), list) else None
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        value = ast.literal_eval(cell)
        return _encode(value).decode() if isinstance(value, list) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _parquet_rows(stream: IO[bytes], key: str | None, time: str | None, rules: _Rules) -> Iterator[_Rows]:
    with pq.ParquetFile(stream, pre_buffer=False, buffer_size=_BLOCK) as file:
        names, total, done = file.schema_arrow.names, file.metadata.num_rows, 0
        _check_columns(names, [key, time, *rules.names])
        for batch in file.iter_batches(_ROWS):
            columns = [_parquet_values(name, column, rules) for name, column in zip(names, batch.columns, strict=True)]
            values = [_encode(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
            by_name = dict(zip(names, columns, strict=True))
            done += len(values)
            yield _Rows(values, by_name.get(key or ""), by_name.get(time or ""), done / total)


def _parquet_values(name: str, column: pa.Array, rules: _Rules) -> list[Any]:
    """Values as JSON is to have them."""
    if name in rules.lists and not pa.types.is_nested(column.type):
        cells = _parquet_column(name, column, is_text=True)
        return [msgspec.Raw(value.encode()) for value in _lists(name, cells, rules).to_pylist()]
    return _parquet_column(name, column, is_text=name in rules.text).to_pylist()  # type: ignore[no-any-return]


def _parquet_column(name: str, column: pa.Array, *, is_text: bool) -> pa.Array:
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


def parse_key(value: Any) -> bytes | None:
    """The key of a message by the value of a field: the text of an id, the same for 77 and "77"; None: it is not an id.

    >>> parse_key(77)
    b'77'
    """
    if isinstance(value, str):
        return value.encode()
    return b"%d" % value if isinstance(value, int) and not isinstance(value, bool) else None


def parse_time(value: Any) -> float | None:
    """Seconds since the epoch by a number or ISO 8601 text, by default UTC; None: it is not a time.

    >>> parse_time("1970-01-01T00:01")
    60.0
    """
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        try:
            time = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            return None
        seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return seconds if math.isfinite(seconds) and EARLIEST <= seconds < LATEST else None


def limited(blocks: Iterable[FileBlock], limit: int) -> Iterator[FileBlock]:
    """The first `limit` samples."""
    for block in blocks:
        yield block._replace(samples=block.samples[:limit])
        limit -= len(block.samples)
        if limit <= 0:
            return


def repeated(file: SampleFile) -> Iterator[FileBlock]:
    """All samples again and again, until the file is empty; errors as `SampleFile.blocks`.

    Raises:
        ConfigError: it is standard input.
    """
    if file.url == STDIN:
        raise ConfigError("standard input cannot be repeated")
    return _rounds(file)


def _rounds(file: SampleFile) -> Iterator[FileBlock]:
    while True:
        count = 0
        for count, block in enumerate(file.blocks(), 1):
            yield FileBlock(block.samples, None, restarts=count == 1)
        if not count:
            return
