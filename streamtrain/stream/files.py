"""Files of samples: read in blocks, so that memory stays bounded whatever their size.

They are JSON lines, CSV or Parquet; on disk, at any URL that fsspec knows, or standard input; compressed or not.
docs/produce.md says how each becomes messages. Whatever reading raises becomes a ConfigError that names the file.
"""

import math
import os
import re
import select
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import IO, Any, NamedTuple, TypeVar

import fsspec
import msgspec
import pyarrow as pa
from fsspec.core import get_compression
from fsspec.implementations.local import LocalFileSystem

from streamtrain.errors import ConfigError
from streamtrain.stream.files_arrow import Rows, csv_rows, parquet_rows

Sample = tuple[bytes, float | None, bytes | None]
"""A message, its event time in seconds since the epoch, and the key that decides about its partition."""

FORMATS = ("jsonl", "csv", "parquet")
STDIN = "-"

T = TypeVar("T")

_SUFFIXES = {"jsonl": "jsonl", "ndjson": "jsonl", "csv": "csv", "parquet": "parquet", "pq": "parquet"}
_COMPRESSED = re.compile(r"\.(gz|bz2|xz|zst)$")
_BLOCK = 1 << 20  # bytes read at once
_LONGEST = 16 << 20  # bytes of a line; a longer one is no message
_EARLIEST, _LATEST = -62_135_596_800, 253_402_300_800  # years 0001 to 9999, as in samples


class Block(NamedTuple):
    """Samples that follow each other.

    Attributes:
        samples: in order of the file.
        share: of the file that is read after these, 0 to 1; None: unknown.
    """

    samples: list[Sample]
    share: float | None


class SampleFile:
    """A file of samples.

    Args:
        url: a path, a URL that fsspec knows, or "-", standard input.
        format: one of `FORMATS`; None: as the name says, and JSON lines on standard input.
        key: field whose value is the key of a message; None: they have none.
        time: field with the event time, in seconds or ISO 8601; None: they have none.
        text: columns of CSV and Parquet whose values are text, also where they look like numbers.

    Raises:
        ConfigError: the name does not tell the format, or the arguments do not fit it.
    """

    def __init__(
        self,
        url: str,
        format: str | None = None,
        *,
        key: str | None = None,
        time: str | None = None,
        text: Collection[str] = (),
    ) -> None:
        self.url = url
        self.name = "standard input" if url == STDIN else re.sub(r"//[^/@]*@", "//", url)
        self.format = format or self._format()
        self._key, self._time, self._text = key, time, frozenset(text)
        if self.format not in FORMATS:
            raise ConfigError(f"samples are {', '.join(FORMATS)}, not {self.format!r}")
        if self._text and self.format == "jsonl":
            raise ConfigError("columns can be declared text in CSV and Parquet only: JSON says itself what is text")
        if url == STDIN and self.format == "parquet":
            raise ConfigError("Parquet is not read from front to back, so it cannot come from standard input")
        self._input = _Input() if url == STDIN else None

    def close(self) -> None:
        """Ends the waiting for standard input, which may never have more. May be called from any thread."""
        if self._input:
            self._input.end()

    def _format(self) -> str:
        if self.url == STDIN:
            return "jsonl"
        suffix = _COMPRESSED.sub("", self.url.lower()).rpartition(".")[2]
        if suffix not in _SUFFIXES:
            raise ConfigError(f"the name of {self.name} does not tell its format: say {', '.join(FORMATS)}")
        return _SUFFIXES[suffix]

    def blocks(self) -> Iterator[Block]:
        """All samples, once.

        Raises:
            ConfigError: the file is missing, cut off, or not what its format says; the message says where.
        """
        seen = 0
        try:
            with ExitStack() as stack:
                for rows in filter(lambda rows: rows.values, self._rows(stack)):
                    seen += len(rows.values)
                    keys, times = _each(key_of, rows.keys, rows.values), _each(seconds_of, rows.times, rows.values)
                    yield Block(list(zip(rows.values, times, keys, strict=True)), rows.share)
        except Exception as exc:  # decoders and the clients of object stores have errors of their own
            place = f" after sample {seen:,}" if seen else ""
            raise ConfigError(f"cannot read {self.name}{place}: {_reason(exc)}") from exc

    def _rows(self, stack: ExitStack) -> Iterator[Rows]:
        raw: Any = self._input or stack.enter_context(_open(self.url))
        size = getattr(raw, "size", None)
        if self.format == "parquet":
            yield from parquet_rows(raw, self._key, self._time, self._text)
            return
        stream = _unpacked(raw, self.url, stack)
        if self.format == "csv":
            found = csv_rows(stream, self._key, self._time, self._text)
        else:
            found = json_rows(stream, self._key, self._time, checked=self.url != STDIN)
        for rows in found:
            yield rows._replace(share=min(1.0, raw.tell() / size) if size else None)


class _Input:
    """Standard input, without a buffer, which would wait until it is full; `end` ends it early."""

    def __init__(self) -> None:
        self._ended, self._end = os.pipe()

    def read(self, size: int) -> bytes:
        ready, _, _ = select.select([0, self._ended], [], [])
        return b"" if self._ended in ready else os.read(0, size)

    def end(self) -> None:
        os.write(self._end, b".")

    def __del__(self) -> None:
        os.close(self._ended)
        os.close(self._end)


def _open(url: str) -> Any:
    if not re.search("::|://", url):
        return LocalFileSystem().open(url, "rb")
    fs, path = fsspec.core.url_to_fs(url)
    return fs.open(path, "rb")


def _unpacked(raw: Any, url: str, stack: ExitStack) -> Any:
    if url.lower().endswith(".zst"):  # fsspec needs another package for it
        return stack.enter_context(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
    kind = get_compression(url, "infer")
    return stack.enter_context(fsspec.compression.compr[kind](raw, mode="rb")) if kind else raw


def _each(convert: Callable[[Any], T | None], found: Sequence[Any] | None, values: list[bytes]) -> list[T | None]:
    return [None] * len(values) if found is None else [convert(one) for one in found]


def json_rows(stream: IO[bytes], key: str | None, time: str | None, *, checked: bool) -> Iterator[Rows]:
    """Lines as they are, whether they are JSON or not; those that are blank are left out.

    Args:
        stream: what to read.
        key: field of the keys; None: there are none.
        time: field of the event times; None: there are none.
        checked: whether it is an error if none of the first lines has these fields.

    Raises:
        ConfigError: a line is far too long, or none of the first lines has a field.
    """
    read_key, read_time = _field(key), _field(time)
    for lines in _lines(stream):
        values = [line for line in lines if line and not line.isspace()]
        rows = Rows(values, read_key and [*map(read_key, values)], read_time and [*map(read_time, values)])
        for name, found in ((key, rows.keys), (time, rows.times)):
            if checked and found and all(one is None for one in found):
                raise ConfigError(f"none of the first {len(found):,} samples has a field {name!r}")
        checked = checked and not values
        yield rows


def _lines(stream: IO[bytes]) -> Iterator[list[bytes]]:
    rest = b""
    while chunk := stream.read(_BLOCK):
        lines = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        rest = lines.pop()
        if len(rest) > _LONGEST:
            raise ConfigError(f"a line has more than {_LONGEST:,} bytes: these are no JSON lines")
        yield lines
    yield [rest]


def _field(name: str | None) -> Callable[[bytes], int | float | str | None] | None:
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
            return None  # what is wrong with it is for those to say who learn from it

    return read


def key_of(value: Any) -> bytes | None:
    """The key of a message by the value of a field: the text of an id, the same for 77 and "77"; None: it is no id.

    >>> key_of(77)
    b'77'
    """
    if isinstance(value, str):
        return value.encode()
    return b"%d" % value if isinstance(value, int) and not isinstance(value, bool) else None


def seconds_of(value: Any) -> float | None:
    """Seconds since the epoch by a number or ISO 8601 text, UTC where it says nothing; None: it is no time.

    >>> seconds_of("1970-01-01T00:01")
    60.0
    """
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        try:
            when = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            return None
        seconds = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return seconds if math.isfinite(seconds) and _EARLIEST <= seconds < _LATEST else None


def limited(blocks: Iterable[Block], most: int) -> Iterator[Block]:
    """The first `most` samples."""
    for block in blocks:
        yield block._replace(samples=block.samples[:most])
        most -= len(block.samples)
        if most <= 0:
            return


def repeated(file: SampleFile) -> Iterator[Block]:
    """All samples again and again, with event times that go on: each round begins when the one before has ended.

    Raises:
        ConfigError: it is standard input; else as `SampleFile.blocks`.
    """
    if file.url == STDIN:
        raise ConfigError("standard input cannot be repeated")
    return _rounds(file)


def _rounds(file: SampleFile) -> Iterator[Block]:
    latest: float | None = None  # event time of the rounds before
    while True:
        newest, shift, is_empty = latest, None, True
        for samples, _ in file.blocks():
            is_empty = False
            times = [time for _, time, _ in samples if time is not None]
            if times:
                if shift is None:
                    shift = 0.0 if latest is None else latest - times[0]
                newest = max(times) + shift if newest is None else max(newest, max(times) + shift)
            yield Block([_later(one, shift) for one in samples] if shift else samples, None)
        if is_empty:
            return
        latest = newest


def _later(sample: Sample, seconds: float) -> Sample:
    value, time, key = sample
    return value, None if time is None else time + seconds, key


def _reason(exc: Exception) -> str:
    text = (isinstance(exc, OSError) and exc.strerror) or str(exc) or type(exc).__name__
    return " ".join(text.split())[:500]
