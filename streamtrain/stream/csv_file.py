"""CSV files: how one is written, and its rows as JSON.

How it is written is decided by its first MiB: the encoding, comments above the header, what separates columns, spaces
around cells, and columns of numbers with a comma. Everything else a cell decides by itself (docs/produce.md).
"""

import ast
import codecs
import csv as python_csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from streamtrain.errors import ConfigError
from streamtrain.model.features import BLANKS, JSON_NUMBER

BLOCK = 1 << 20
"""Bytes read at once, and of the longest row."""

_NO_HEADER = "the header, which should name the columns, cannot be read"
_SEPARATORS = "\t;|"  # where there is no comma
_COMMENT = "#"
_JUDGED_ROWS = 1000  # by which columns are judged
_LEAST = 4  # bytes that are read at once
_SHOWN = 80  # characters of a row that is refused
_NUMBER = f"^{JSON_NUMBER}$"
_DECIMAL_COMMA = r"^-?([1-9][0-9]{0,2}(\.[0-9]{3})+|[0-9]+)(,[0-9]+)?$"
_THOUSANDS = r"^-?([1-9][0-9]{0,2}(,[0-9]{3})+|[0-9]+)(\.[0-9]+)?$"
_BOOLEAN = r"^(true|false|True|False|TRUE|FALSE)$"
_ARRAY = r"(?s)^\[.*\]$"
_ESCAPED = r'["\\\x00-\x1f]'
_ITEM = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|(-?\d+))(?=[\s\]])""", re.ASCII)
_encode = msgspec.json.encode
_decode = msgspec.json.decode


class Rows(NamedTuple):
    """Messages that follow each other, with the values of the key's and the event time's fields, and `Block.share`."""

    values: list[bytes]
    keys: Sequence[Any] | None = None
    times: Sequence[Any] | None = None
    share: float | None = None


class Rules(NamedTuple):
    """How the cells of columns become JSON: `text` and `lists` of `SampleFile`."""

    text: frozenset[str]
    lists: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        return [*self.text, *self.lists]


class Dialect(NamedTuple):
    """How a file is written.

    Attributes:
        separator: between columns.
        columns: names of all columns, some of which may be empty.
        skipped: lines before the rows.
        has_spaces: whether cells are surrounded by spaces that do not belong to them.
        notations: by name of a column of numbers with a comma, what they look like.
    """

    separator: str
    columns: list[str]
    skipped: int
    has_spaces: bool
    notations: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """Names of the columns that have one, or are the only one without."""
        return list(dict.fromkeys(self.columns))


class Utf8Stream:
    """A stream as UTF-8 without a byte order mark. UTF-16 is converted if it begins with one.

    Args:
        read: reads up to a number of bytes; b"" at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._convert: codecs.IncrementalDecoder | None = None
        head = read(2)
        while len(head) < 3 and (more := read(3 - len(head))):
            head += more
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            self._convert = codecs.getincrementaldecoder("utf-16")()
        self._head = head.removeprefix(codecs.BOM_UTF8)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, 4 or more; b"" at the end."""
        while True:
            head, self._head = self._head[:size], self._head[size:]
            if self._convert is None:
                return head or self._read(size)
            chunk = head or self._read(size // 2)  # of which two become three at most
            text = self._convert.decode(chunk, final=not chunk).encode("utf-8", "surrogatepass")
            if text or not chunk:
                return text


def read_dialect(stream: Utf8Stream) -> Dialect:
    """How a file is written, by its beginning.

    Raises:
        ConfigError: it is not UTF-8, or its columns have no names, or one is repeated.
    """
    text, is_whole = _beginning(stream)
    lines = list(io.StringIO(text, newline=""))
    if not is_whole and len(lines) < 2:
        raise ConfigError(f"{_NO_HEADER}: it has more than {BLOCK:,} bytes")
    start = _header_line(lines)
    separator = _separator(lines[start]) if start < len(lines) else ","
    rows = _head_rows(lines[start:], separator)
    header, used = next(rows, ([], 0))
    if not any(header):
        raise ConfigError(f"{_NO_HEADER}: there is none")
    names = [name.strip() for name in header]
    is_padded = [all(name[:1] == " " for name in header[1:]), all(name[-1:] == " " for name in header[:-1])]
    has_spaces = len(header) > 1 and any(is_padded)
    names = names if has_spaces else header
    repeated = {name for name in names if name and names.count(name) > 1}
    if repeated:
        raise ConfigError(f"the header names {min(repeated)!r} more than once")
    first = [row for row, _ in islice(rows, _JUDGED_ROWS)]
    if first and all(len(row) == len(names) + 1 and not row[-1].strip() for row in first):
        names = [*names, ""]  # a comma at the end of each row, but not of the header
    return Dialect(separator, names, start + used, has_spaces, _notations(names, first, separator))


def _beginning(stream: Utf8Stream) -> tuple[str, bool]:
    """The first MiB, up to the end of a line, and whether that is all."""
    head = b""
    while len(head) < BLOCK and (chunk := stream.read(BLOCK)):
        head += chunk
    is_whole = len(head) < BLOCK
    if not is_whole:
        head = head[: max(head.rfind(b"\n"), head.rfind(b"\r")) + 1] or head
    try:
        return head.decode(), is_whole
    except UnicodeDecodeError as exc:
        near = head[max(0, exc.start - 10) : exc.start + 10].decode("latin1")
        raise ConfigError(
            f"it is not UTF-8: byte 0x{head[exc.start]:02x} at {exc.start:,}, near {near!r} if it is Latin-1; convert "
            "it first, such as with iconv -f latin1 -t utf-8"
        ) from exc


def _header_line(lines: Sequence[str]) -> int:
    """Which line is the header: the first that is neither blank nor a comment.

    A line such as `#user,item` is the header if it has as many columns as what follows it.
    """
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        rest = [one for one in lines[i + 1 :] if one.strip() and not one.startswith(_COMMENT)][:1]
        if line.startswith(_COMMENT) and rest:
            separator = _separator(rest[0])
            is_plain = not line[1:2].strip() or separator not in line
            if is_plain or line.count(separator) != rest[0].count(separator):
                continue
        return i
    return len(lines)


def _separator(line: str) -> str:
    """What separates the names of a header: a comma, or if it has none, the first of the others that it has."""
    unquoted = re.sub(r'"[^"]*"', "", line)
    found = [one for one in _SEPARATORS if one in unquoted]
    return found[0] if found and "," not in unquoted else ","


def _head_rows(lines: Sequence[str], separator: str) -> Iterator[tuple[list[str], int]]:
    """Rows, and how many lines they and those before them have."""
    reader = python_csv.reader(io.StringIO("".join(lines), newline=""), delimiter=separator)
    try:
        for row in reader:
            if row:
                yield row, reader.line_num
    except python_csv.Error:  # such as a quote that is not closed: which row, Arrow says
        return


def _notations(names: Sequence[str], rows: Sequence[Sequence[str]], separator: str) -> dict[str, str]:
    """How numbers are written in columns that hold nothing else, some of them with a comma."""
    kinds = (_THOUSANDS,) if separator == "," else (_DECIMAL_COMMA, _THOUSANDS)  # "1,2" may be two ids
    whole = [row for row in rows if len(row) == len(names)]
    columns = {name: [cell for row in whole if (cell := row[i].strip()) not in BLANKS] for i, name in enumerate(names)}
    found = {}
    for name, cells in columns.items():
        fitting = [kind for kind in kinds if all(re.match(kind, cell) for cell in cells)]
        if fitting and any("," in cell for cell in cells):
            found[name] = fitting[0]
    if _DECIMAL_COMMA in found.values():  # then a point in 1.234 separates thousands
        for name, cells in columns.items():
            if cells and name not in found and all(re.match(_DECIMAL_COMMA, cell) for cell in cells):
                found[name] = _DECIMAL_COMMA
    return found


def read_csv(stream: Utf8Stream, dialect: Dialect, key: str | None, time: str | None, rules: Rules) -> Iterator[Rows]:
    """Rows of CSV, each cell of which is judged by itself.

    Raises:
        ConfigError: a row does not have as many cells as the header, is too long, or a quote is not closed.
    """
    invalid: list[csv.InvalidRow] = []
    counted, last = _QuoteCount(stream), None

    def refuse(row: csv.InvalidRow) -> str:
        invalid.append(row)
        return "error"

    try:
        with _open_csv(counted, dialect, refuse) as reader:
            for batch in reader:
                cells = {name: _cells(batch.column(i), name, dialect, rules) for i, name in enumerate(dialect.columns)}
                fields = [_fields(name, column, rules) for name, column in cells.items()]
                inner = pc.ascii_rtrim(pc.binary_join_element_wise(*fields, ""), ",")
                values = pc.binary_join_element_wise("{", inner, "}", "").cast(pa.binary())
                keys, times = (None if name is None else cells[name].to_pylist() for name in (key, time))
                yield Rows(values.to_numpy(zero_copy_only=False).tolist(), keys, times)
                last = batch.column(len(dialect.columns) - 1)[-1].as_py() if len(batch) else last
    except pa.ArrowInvalid as exc:
        if "straddling" in str(exc):
            raise ConfigError(f"a row has more than {BLOCK:,} bytes; a quote may not be closed") from exc
        if invalid:
            raise ConfigError(_describe_row(invalid[0], dialect)) from exc
        if "Empty CSV file" in str(exc):  # but for the header
            return
        raise
    if counted.quotes % 2 and "\n" in (last or ""):  # rows that the last cell has swallowed
        raise ConfigError("a quote in the last row is not closed")


def _open_csv(
    stream: "_QuoteCount", dialect: Dialect, is_invalid: Callable[[csv.InvalidRow], str]
) -> csv.CSVStreamingReader:
    places = [f"{i}" for i in range(len(dialect.columns))]
    return csv.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=csv.ReadOptions(
            block_size=BLOCK, use_threads=False, column_names=places, skip_rows=dialect.skipped
        ),
        parse_options=csv.ParseOptions(
            delimiter=dialect.separator, newlines_in_values=True, invalid_row_handler=is_invalid
        ),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(places, pa.string()), null_values=[""], strings_can_be_null=True
        ),
    )


class _QuoteCount:
    """A stream that counts the quotes that were read, and reads as much as it is asked for, as Arrow needs it."""

    closed = False

    def __init__(self, stream: Utf8Stream) -> None:
        self._stream = stream
        self.quotes = 0

    def read(self, size: int) -> bytes:
        chunk = self._stream.read(size)
        while 0 < len(chunk) <= size - _LEAST and (more := self._stream.read(size - len(chunk))):
            chunk += more
        self.quotes += chunk.count(b'"')
        return chunk


def _describe_row(row: csv.InvalidRow, dialect: Dialect) -> str:
    text = f"{row.text[:_SHOWN]}…" if len(row.text) > _SHOWN else row.text
    place = "" if row.number is None else f" {row.number - dialect.skipped:,}"
    return (
        f"row{place}, {text!r}, does not have {len(dialect.columns)} columns, as the header has, but "
        f"{row.actual_columns}: it may be cut off, a quote may not be closed, or a text that contains "
        f"{dialect.separator!r} may lack its quotes"
    )


def _cells(cells: pa.StringArray, name: str, dialect: Dialect, rules: Rules) -> pa.StringArray:
    """Cells without the spaces around them, and numbers with a comma as JSON has them."""
    if dialect.has_spaces:
        cells = pc.utf8_trim(cells, " ")
        cells = pc.if_else(pc.equal(cells, ""), None, cells)
    notation = dialect.notations.get(name)
    if notation is None or name in rules.names:
        return cells
    if notation == _THOUSANDS:
        plain = pc.replace_substring(cells, ",", "")
    else:
        plain = pc.replace_substring(pc.replace_substring(cells, ".", ""), ",", ".")
    return pc.if_else(pc.match_substring_regex(cells, notation), plain, cells)


def _fields(name: str, cells: pa.StringArray, rules: Rules) -> pa.StringArray:
    """`"name":value,` for every cell; nothing for one that is empty, but of lists `"name":[],`."""
    if name in rules.lists:
        values = make_lists(name, cells, rules)
    else:
        values = pc.binary_join_element_wise('"', _escape(cells), '"', "")
    if name not in rules.names:
        values = pc.if_else(pc.match_substring_regex(cells, _NUMBER), cells, values)
        values = pc.if_else(pc.match_substring_regex(cells, _BOOLEAN), pc.utf8_lower(cells), values)
        values = _replace_arrays(cells, values)
    return pc.fill_null(pc.binary_join_element_wise(_encode(name).decode() + ":", values, ",", ""), "")


def make_lists(name: str, cells: pa.StringArray, rules: Rules) -> pa.StringArray:
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
    """The values, but arrays where cells are arrays of JSON, or lists as Python or NumPy write them."""
    found = pc.fill_null(pc.match_substring_regex(cells, _ARRAY), False)
    if not pc.any(found).as_py():
        return values
    arrays = pa.array([_array(cell) for cell in cells.filter(found).to_pylist()], pa.string())
    return pc.replace_with_mask(values, found, pc.coalesce(arrays, values.filter(found)))


def _array(cell: str) -> str | None:
    """An array of JSON by itself, or as Python, and so pandas, writes a list, or NumPy an array; None: it is none."""
    try:
        return cell if isinstance(_decode(cell), list) else None
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        items = _numpy_items(cell)
        value = ast.literal_eval(cell) if items is None else items
        return _encode(value).decode() if isinstance(value, list) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _numpy_items(cell: str) -> list[str | int] | None:
    """The elements of `['a' 'b']` or `[1 2]`, which have nothing but space between them; None: it is something else.

    Python would read two texts side by side as one.
    """
    items: list[str | int] = []
    at = 1
    while found := _ITEM.match(cell, at):
        text = next((one for one in found.groups()[:2] if one is not None), None)
        items.append(int(found[3]) if text is None else ast.literal_eval(f"{found[0].strip()}"))
        at = found.end()
    return items if len(items) > 1 and cell[at:].strip() == "]" else None
