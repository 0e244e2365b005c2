"""Files of samples: read in blocks, so that memory stays bounded whatever their size.

They are JSON lines, CSV or Parquet, on disk or at any URL that fsspec knows, one or several one after another; or JSON
lines on standard input.
docs/produce.md says how rows become messages. Whatever reading raises becomes a ConfigError that names the file.
"""

import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import IO, Any, NamedTuple, TypeVar

import fsspec
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.core import get_compression

from streamtrain.address import redacted
from streamtrain.errors import ConfigError
from streamtrain.stream.csv_file import BLOCK, Rows, Rules, Utf8Stream, make_lists, read_csv, read_dialect
from streamtrain.stream.event_times import EventTimes
from streamtrain.stream.file_names import FORMATS, STDIN, find_files, format_of, open_local_or_remote, shown
from streamtrain.stream.json_lines import convert, field_reader, read_lines

FileSample = tuple[bytes, float | None, bytes | None]
"""A message, its event time in seconds since the epoch, and the key that decides its partition."""

T = TypeVar("T")

_ROWS = 4096  # of Parquet converted at once
_encode = msgspec.json.Encoder(decimal_format="number").encode


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


class SampleFile:
    """A file of samples, or several as if they were one, which one iteration at a time reads.

    Args:
        url: a path, a URL that fsspec knows, a folder or a pattern of either (`find_files`), or "-", standard input;
            or several of them.
        format: one of `FORMATS`; None: by the files' names.
        key: field whose value is the key of a message; None: messages have no key.
        time: field with the event time; None: messages have no event time.
        times: how it says the time.
        text: columns or fields whose values are text, also where they are or look like numbers or arrays.
        lists: columns or fields of text whose values are lists, by name the character that separates the elements.

    Raises:
        ConfigError: the format does not follow from the names, or the arguments do not fit it; or no file is found.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        format: str | None = None,
        *,
        key: str | None = None,
        time: str | None = None,
        times: EventTimes | None = None,
        text: Collection[str] = (),
        lists: Mapping[str, str] | None = None,
    ) -> None:
        self._urls = [url] if isinstance(url, str) else [*url]
        self.name = shown(self._urls[0]) + (f" and {len(self._urls) - 1:,} more" if self._urls[1:] else "")
        self._files = find_files(self._urls)
        self.format = format or format_of(self._files)
        self._key, self._time, self.rules = key, time, Rules(frozenset(text), lists or {})
        self._times = times or EventTimes()
        self._begun: list[_Begun] = []
        self._blanks = array("q")  # by blank line, the number of samples before it
        if self.format not in FORMATS:
            raise ConfigError(f"the format of samples must be one of {', '.join(FORMATS)}, not {self.format!r}")
        if self.is_stdin and self.format != "jsonl":
            raise ConfigError(f"standard input is read as JSON lines: write {self.format} to a file first")

    @property
    def is_stdin(self) -> bool:
        """Whether it is standard input, which can be read once."""
        return STDIN in self._files

    def read_as(self, text: Collection[str], lists: Mapping[str, str]) -> "SampleFile":
        """The same file, of which further columns are text or lists; those that were named stay as they are."""
        return SampleFile(
            self._urls,
            self.format,
            key=self._key,
            time=self._time,
            times=self._times,
            text=self.rules.text | {one for one in text if one not in self.rules.lists},
            lists={**lists, **self.rules.lists},
        )

    def blocks(self) -> Iterator[FileBlock]:
        """All samples, once.

        Raises:
            ConfigError: the file is missing, cut off, or not of its format; the message says where.
        """
        self._begun, self._blanks = [], array("q")
        total = 0
        for i, url in enumerate(self._files):
            self._begun.append(_Begun(url, total, len(self._blanks)))
            for block in self._blocks(url):
                total += len(block.samples)
                share = None if block.share is None else (i + block.share) / len(self._files)
                yield block._replace(share=share)

    def _blocks(self, url: str) -> Iterator[FileBlock]:
        count = 0
        try:
            with ExitStack() as stack:
                for rows in filter(lambda rows: rows.values, self._rows(url, stack)):
                    count += len(rows.values)
                    keys = _each(parse_key, rows.keys, rows.values)
                    times = _each(self._times.read, rows.times, rows.values)
                    yield FileBlock(list(zip(rows.values, times, keys, strict=True)), rows.share)
        except Exception as exc:  # decoders and the clients of object stores have errors of their own
            place = f" after sample {count:,}" if count else ""
            raise ConfigError(f"cannot read {shown(url)}{place}: {_reason(exc)}") from exc

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
        """Where a sample that has been read stands, such as "line 17", by its index from 0."""
        begun = self._begun[max(0, bisect_right(self._begun, index, key=lambda one: one.samples) - 1)]
        row = index - begun.samples + 1
        of = f" of {shown(begun.url)}" if len(self._files) > 1 else ""
        if self.format != "jsonl":
            return f"row {row:,}{of}"
        return f"line {row + bisect_right(self._blanks, index, begun.blanks) - begun.blanks:,}{of}"

    def _rows(self, url: str, stack: ExitStack) -> Iterator[Rows]:
        if url == STDIN:
            yield from self._json_rows(Utf8Stream(lambda size: os.read(0, size)).read, checked=False)
            return
        raw, stream = _open(url, stack, is_text=self.format != "parquet")
        size = getattr(raw, "size", None)
        if self.format == "parquet":
            yield from _parquet_rows(raw, self._key, self._time, self.rules)
            return
        if self.format == "csv":
            with ExitStack() as start:
                dialect = read_dialect(_open(url, start, is_text=True)[1])
            _check_columns(dialect.names, [self._key, self._time, *self.rules.names])
            rows = read_csv(stream, dialect, self._key, self._time, self.rules)
        else:
            rows = self._json_rows(stream.read, checked=True)
        for each in rows:
            yield each._replace(share=min(1.0, raw.tell() / size) if size else None)

    def _json_rows(self, read: Callable[[int], bytes], *, checked: bool) -> Iterator[Rows]:
        """Lines, whether they are JSON or not, but blank ones; as they are, but for what `text` and `lists` name.

        Args:
            read: reads up to a number of bytes.
            checked: whether it is an error if the first line is the beginning of an array, or none of the first lines
                has one of the fields that are named.
        """
        read_key, read_time = field_reader(self._key), field_reader(self._time)
        count = self._begun[-1].samples
        for lines in read_lines(read):
            values = [line for line in lines if line and not line.isspace()]
            if checked and values and values[0].lstrip().startswith(b"["):
                raise ConfigError(
                    "it is one JSON array, not JSON lines: write each sample to a line of its own, such as with "
                    "jq --compact-output '.[]'"
                )
            if len(values) < len(lines):
                self._note_blanks(lines, count)
            count += len(values)
            if self.rules.names:
                values = convert(values, self.rules, checked=checked and bool(values))
            rows = Rows(values, read_key and [*map(read_key, values)], read_time and [*map(read_time, values)])
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


class _Begun(NamedTuple):
    """A file that has been begun, and the samples and blank lines of those before it."""

    url: str
    samples: int
    blanks: int


def _open(url: str, stack: ExitStack, *, is_text: bool) -> tuple[Any, Any]:
    """The file as it is, and uncompressed; as UTF-8 if it is text."""
    raw = stack.enter_context(open_local_or_remote(url))
    stream = raw
    if url.lower().endswith(".zst"):  # fsspec needs another package for it
        stream = stack.enter_context(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
    elif kind := get_compression(url, "infer"):
        stream = stack.enter_context(fsspec.compression.compr[kind](raw, mode="rb"))
    return raw, Utf8Stream(stream.read) if is_text else stream


def _each(convert: Callable[[Any], T | None], values: Sequence[Any] | None, messages: list[bytes]) -> list[T | None]:
    return [None] * len(messages) if values is None else [convert(value) for value in values]


def _reason(exc: Exception) -> str:
    text = (isinstance(exc, OSError) and exc.strerror) or str(exc) or type(exc).__name__
    return redacted(" ".join(text.split())[:500])


def _check_columns(names: list[str], wanted: list[str | None]) -> None:
    for name in wanted:
        if name is not None and name not in names:
            raise ConfigError(f"missing column {name!r}; the columns are {', '.join(names)}")


def _parquet_rows(stream: IO[bytes], key: str | None, time: str | None, rules: Rules) -> Iterator[Rows]:
    with pq.ParquetFile(stream, pre_buffer=False, buffer_size=BLOCK) as file:
        names, total, done = file.schema_arrow.names, file.metadata.num_rows, 0
        _check_columns(names, [key, time, *rules.names])
        for batch in file.iter_batches(_ROWS):
            columns = [_parquet_values(name, column, rules) for name, column in zip(names, batch.columns, strict=True)]
            values = [_encode(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
            by_name = dict(zip(names, columns, strict=True))
            done += len(values)
            yield Rows(values, by_name.get(key or ""), by_name.get(time or ""), done / total)


def _parquet_values(name: str, column: pa.Array, rules: Rules) -> list[Any]:
    """Values as JSON is to have them."""
    if name in rules.lists and not pa.types.is_nested(column.type):
        cells = _parquet_column(name, column, is_text=True)
        return [msgspec.Raw(value.encode()) for value in make_lists(name, cells, rules).to_pylist()]
    return _parquet_column(name, column, is_text=name in rules.text).to_pylist()  # type: ignore[no-any-return]


def _parquet_column(name: str, column: pa.Array, *, is_text: bool) -> pa.Array:
    kind = column.type
    try:
        if is_text and pa.types.is_floating(kind):  # what pandas makes of integers with gaps
            column = pc.if_else(pc.is_nan(column), None, column).cast(pa.int64())
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            try:
                return column.cast(pa.string())
            except pa.ArrowInvalid:
                return pa.array([_text(value) for value in column.to_pylist()], pa.string())
        if is_text:
            return column.cast(pa.list_(pa.string()) if pa.types.is_nested(kind) else pa.string())
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            microseconds = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
            return pc.divide(microseconds.cast(pa.float64(), safe=False), 1e6)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
        raise ConfigError(f"column {name!r}, of type {kind}, cannot be converted: {exc}") from exc
    return column


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None  # no field that is read can hold it


def parse_key(value: Any) -> bytes | None:
    """The key of a message by the value of a field: the text of an id, the same for 77 and "77"; None: it is not an id.

    >>> parse_key(77)
    b'77'
    """
    if isinstance(value, str):
        return value.encode()
    return b"%d" % value if isinstance(value, int) and not isinstance(value, bool) else None


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
    if file.is_stdin:
        raise ConfigError("standard input cannot be repeated")
    return _rounds(file)


def _rounds(file: SampleFile) -> Iterator[FileBlock]:
    while True:
        count = 0
        for count, block in enumerate(file.blocks(), 1):
            yield FileBlock(block.samples, None, restarts=count == 1)
        if not count:
            return
