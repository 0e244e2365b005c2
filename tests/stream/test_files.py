"""Files of samples: what becomes a message, what its key and time are, and what is said of files that are damaged."""

import bz2
import decimal
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtrain.errors import ConfigError
from streamtrain.stream.files import FileSample, SampleFile, limited, repeated
from streamtrain.stream.producer import EventTime

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: bytes(pa.compress(data, "zstd", asbytes=True)),
}
LINES = b"".join(b'{"user":%d,"noise":"%d"}\n' % (i, i * 7919 % 1_000_003) for i in range(60_000))


def samples(file: Path | str, format: Any = None, **options: Any) -> list[FileSample]:
    return [one for block in SampleFile(str(file), format, **options).blocks() for one in block.samples]


def values(file: Path | str, format: Any = None, **options: Any) -> list[bytes]:
    return [value for value, _, _ in samples(file, format, **options)]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# --- JSON lines ---


def test_lines_are_passed_on_as_they_are(tmp_path: Path) -> None:
    content = b'{"a": 1}\r\n\n \t\n{"b":\xff}\nnot json\n{"a"\r:2}  \n{"last":0}'
    file = written(tmp_path / "a.jsonl", content)
    assert values(file) == [b'{"a": 1}', b'{"b":\xff}', b"not json", b'{"a"\r:2}  ', b'{"last":0}']


@pytest.mark.parametrize("content", [b'[{"a": 1}]', b'\n [\n  {"a": 1},\n  {"a": 2}\n]\n'])
def test_an_array_is_no_lines(tmp_path: Path, content: bytes) -> None:
    file = written(tmp_path / "a.json", content)
    with pytest.raises(ConfigError, match=r"it is one JSON array, not JSON lines: .* jq --compact-output '\.\[\]'"):
        values(file)
    assert values(written(file, b'{"a": 1}\n[2]\n')) == [b'{"a": 1}', b"[2]"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_lines(tmp_path: Path, suffix: str) -> None:
    whole = COMPRESS[suffix](LINES)
    assert values(written(tmp_path / f"a.jsonl.{suffix}", whole)) == LINES.splitlines()
    cut = written(tmp_path / f"cut.jsonl.{suffix}", whole[: len(whole) * 2 // 3])
    with pytest.raises(ConfigError, match=rf"^cannot read {cut}.*(ended before|[Tt]runcated)"):
        values(cut)


def test_a_cut_off_file_says_how_far_it_was_good(tmp_path: Path) -> None:
    whole, cut = gzip.compress(LINES), tmp_path / "cut.jsonl.gz"
    good: list[FileSample] = []
    with pytest.raises(ConfigError, match="after sample ") as caught:
        good.extend(one for block in SampleFile(str(written(cut, whole[:-100]))).blocks() for one in block.samples)
    assert f"after sample {len(good):,}: " in str(caught.value)
    assert [value for value, _, _ in good] == LINES.splitlines()[: len(good)]
    assert len(good) > 10_000


def test_urls(tmp_path: Path) -> None:
    with fsspec.open("memory://files/b.jsonl.gz", "wb") as stream:
        stream.write(gzip.compress(b"{}\n"))
    assert values("memory://files/b.jsonl.gz") == [b"{}"]
    assert values(f"file://{written(tmp_path / 'a.ndjson', b'{}')}") == [b"{}"]


def test_keys_and_times_of_lines(tmp_path: Path) -> None:
    lines = [
        (b'{"ts":1.5,"user":"u\\u00e4"}', 1.5, "uä".encode()),
        (b'{"user":77,"ts":"1970-01-01T01:00:00+01:00"}', 0.0, b"77"),
        (b'{"user":"77","ts":"1970-01-02"}', 86400.0, b"77"),
        (b'{"user":123456789012345678901234567890,"ts":1700000000000}', None, b"123456789012345678901234567890"),
        (b'{"user":1.5,"ts":"soon"}', None, None),
        (b'{"user":["a"],"ts":true}', None, None),
        (b'{"user":null}', None, None),
        (b'{"user":"u","ts":NaN}', None, None),
        (b'{"user":' + b"[" * 100_000, None, None),
        (b'{"user":"\xff","ts":1}', 1.0, None),
        (b'{"user":' + b"7" * 5000 + b"}", None, None),
        (b"[1]", None, None),
    ]
    file = written(tmp_path / "a.jsonl", b"\n".join(line for line, _, _ in lines))
    assert samples(file, key="user", time="ts") == lines


def test_a_field_that_no_line_has(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", b'{"user":1}\n{"user":2}\n')
    with pytest.raises(ConfigError, match="none of the first 2 samples has a field 'usr'"):
        samples(file, key="usr")


def test_endless_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a line has more than 16,777,216 bytes"):
        values(written(tmp_path / "a.jsonl", b"x" * (20 << 20)))


def test_memory_is_bounded(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl.gz", gzip.compress(b'{"a":"%s"}\n' % (b"x" * 1000) * 50_000))
    tracemalloc.start()
    try:
        assert sum(len(block.samples) for block in SampleFile(str(file)).blocks()) == 50_000
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# --- CSV ---


def test_cells(tmp_path: Path) -> None:
    content = (
        b'\xef\xbb\xbfuser,item,"a ""b""",label\r\n'
        b'007,77,"say ""hi"",\n\\\t",True\r\n'
        b"\r\n"
        b",1e3,.5,FALSE\n"
        b",,,\n"
        b'"","-0.50", 1,0x1\n'
    )
    file = written(tmp_path / "a.csv", content)
    expected = [
        b'{"user":"007","item":77,"a \\"b\\"":"say \\"hi\\",\\n\\\\\\t","label":true}',
        b'{"item":1e3,"a \\"b\\"":".5","label":false}',
        b"{}",
        b'{"item":-0.50,"a \\"b\\"":" 1","label":"0x1"}',
    ]
    assert values(file) == expected
    text = values(file, text=["item", "label"])
    assert [json.loads(value).get("item") for value in text] == ["77", "1e3", None, "-0.50"]
    assert [json.loads(value).get("label") for value in text] == ["True", "FALSE", None, "0x1"]


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5))
def test_text_comes_through_unharmed(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    file = tmp_path_factory.getbasetemp() / "text.csv"
    quoted = ("".join(f'"{cell.replace(chr(34), chr(34) * 2)}",' for cell in row) + "1\n" for row in rows)
    file.write_bytes(("a,b,c\n" + "".join(quoted)).encode())
    found = [json.loads(value) for value in values(file, text=["a", "b"])]
    assert [(one.get("a", ""), one.get("b", ""), one["c"]) for one in found] == [(a, b, 1) for a, b in rows]


def test_cells_that_are_lists(tmp_path: Path) -> None:
    content = (
        "genres,tags,both,odd\n"
        'Comedy|Romance,,"[""a"", 7]",[REC]\n'
        "||Drama||,a;b|c,\"['a', 7]\",[]\n"
        ',"say ""hi"";\\n","[1j]",[1\n'
    )
    file = written(tmp_path / "a.csv", content.encode())
    found = [json.loads(value) for value in values(file, lists={"genres": "|", "tags": ";"})]
    assert [one["genres"] for one in found] == [["Comedy", "Romance"], ["Drama"], []]
    assert [one["tags"] for one in found] == [[], ["a", "b|c"], ['say "hi"', "\\n"]]
    assert [one["both"] for one in found] == [["a", 7], ["a", 7], "[1j]"]
    assert [one["odd"] for one in found] == ["[REC]", [], "[1"]
    assert json.loads(values(file, text=["both"])[0])["both"] == '["a", 7]'
    assert json.loads(values(file, text=["both"], lists={"both": ","})[0])["both"] == ['["a"', " 7]"]
    nested = written(tmp_path / "b.csv", b'a,b\n"' + b"[" * 500_000 + b"]" * 500_000 + b'",1\n')
    assert isinstance(json.loads(values(nested)[0])["a"], str)


@given(rows=st.lists(st.lists(CELLS.filter(lambda cell: cell and "|" not in cell), min_size=2), min_size=1, max_size=5))
def test_text_in_lists_comes_through_unharmed(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    cells = ["|".join(row) for row in rows]
    file = tmp_path_factory.getbasetemp() / "lists.csv"
    quoted = "".join(f'"{cell.replace(chr(34), chr(34) * 2)}",1\n' for cell in cells)
    file.write_bytes(f"a,b\n{quoted}".encode())
    assert [json.loads(value)["a"] for value in values(file, text=["a"], lists={"a": "|"})] == rows
    table = parquet(file.with_suffix(".parquet"), pa.table({"a": cells}))
    assert [json.loads(value)["a"] for value in values(table, text=["a"], lists={"a": "|"})] == rows


def test_type_of_a_cell_does_not_depend_on_the_others(tmp_path: Path) -> None:
    rows = 300_000
    file = written(tmp_path / "a.csv", b"id\n" + b"12345\n" * rows + b"x7\n12345678901234567890123\n")
    found = values(file)
    assert found[0] == found[rows - 1] == b'{"id":12345}'
    assert found[rows:] == [b'{"id":"x7"}', b'{"id":12345678901234567890123}']


def test_keys_and_times_of_csv(tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", b"ts,user\n1.5,007\n1970-01-01 00:01:00,\n,77\n")
    found = [(time, key) for _, time, key in samples(file, key="user", time="ts")]
    assert found == [(1.5, b"007"), (60.0, None), (None, b"77")]


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        ("a\tb\tc", '1\t"x\ty"\t2,5', {"a": 1, "b": "x\ty", "c": 2.5}),
        ("a;b;c", "1;x|y;2,x", {"a": 1, "b": "x|y", "c": "2,x"}),
        ('\r\n"a, or so"|b', "1|;", {"a, or so": 1, "b": ";"}),
        ('"a;b",c', "1,2", {"a;b": 1, "c": 2}),
        ('"a;b"', "1", {"a;b": 1}),
        ("a,b;c", "1,2", {"a": 1, "b;c": 2}),
        ("a;b\tc", "1;2\t3", {"a;b": "1;2", "c": 3}),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.tsv.gz"])
def test_what_separates_the_header_separates_all(
    tmp_path: Path, name: str, header: str, row: str, expected: Any
) -> None:
    content = f"\ufeff{header}\n{row}\n".encode()
    file = written(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    assert [json.loads(value) for value in values(file)] == [expected]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"a,b\n" + b"1,2\n" * 300_000 + b"3\n",
            r"after sample \d+,\d+: row 300,001, '3', does not have 2 columns, as the header has, but 1: it may be cut",
        ),
        (b"a,b\n1,2\n3", "row 2, '3', does not have 2 columns"),
        (b'a,b\n1,2\n3,"4\n5,6\n', "a quote in the last row is not closed"),
        (b'a,b\n1,2\n3,"4\n5', "a quote in the last row is not closed"),
        (b'a,b\n1,2\n"3,4\n5,6\n', "row 2, .* does not have 2 columns, as the header has, but 1"),
        (b"a,b\n1,2\n3,4,5\n", "row 2, '3,4,5', does not have 2 columns, as the header has, but 3"),
        (b"a,b\n" + b"1,2\n" * 300_000 + b"3,\xff\n", "after sample .*invalid UTF8"),
        (b'a,b\n1,2\n3,"' + b"x\n" * (2 << 20), "a row has more than 1,048,576 bytes; a quote may not be closed"),
        (b"", "header.* cannot be read"),
        (b"\n\n", "header.* cannot be read"),
        (b"a,b,a\n", "names 'a' more than once"),
        (
            b"a,b\n1,caf\xe9\n",
            r"it is not UTF-8: byte 0xe9 at 9, near 'a,b.n1,café.n' if it is Latin-1; convert it first, .*iconv",
        ),
        (b"a" * (2 << 20), "header.* cannot be read"),
    ],
)
def test_malformed_csv(tmp_path: Path, content: bytes, message: str) -> None:
    file = written(tmp_path / "bad.csv", content)
    with pytest.raises(ConfigError, match=f"^cannot read {file}.*{message}") as caught:
        values(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def of_csv(tmp_path: Path, content: str, encoding: str = "utf-8", **options: Any) -> list[dict[str, Any]]:
    file = written(tmp_path / "world.csv", content.encode(encoding))
    return [json.loads(value) for value in values(file, **options)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_encodings_that_say_what_they_are(tmp_path: Path, encoding: str) -> None:
    rows = [{"a": "é😀" * (i % 3), "b": i} for i in range(1, 30_000)]
    content = "a,b\n" + "".join(f"{row['a']},{row['b']}\n" for row in rows)
    assert of_csv(tmp_path, content, encoding) == [{k: v for k, v in row.items() if v != ""} for row in rows]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file = written(tmp_path / "a.jsonl.gz", gzip.compress(lines.encode(encoding)))
    assert [json.loads(value) for value in values(file)] == rows


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a, b, c\n1, x y , 2\n,  ,3\n", [{"a": 1, "b": "x y", "c": 2}, {"c": 3}]),
        ("a ;b ;c\n1 ;x ;2\n", [{"a": 1, "b": "x", "c": 2}]),
        ("a, b,c\n1, x,2\n", [{"a": 1, " b": " x", "c": 2}]),
    ],
)
def test_spaces_around_all_columns_belong_to_none(tmp_path: Path, content: str, expected: Any) -> None:
    assert of_csv(tmp_path, content) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("# made by a tool; 2024\n#\n\na;b\n1;2\n", [{"a": 1, "b": 2}]),
        ("#a,b\n1,2\n", [{"#a": 1, "b": 2}]),
        ("# a comment, of two parts\r\na,b,c\r\n1,2,3\r\n", [{"a": 1, "b": 2, "c": 3}]),
        ("a,b,\n1,2,\n3,4,\n", [{"a": 1, "b": 2}, {"a": 3, "b": 4}]),
        ("a,b\n1,2,\n3,4,\n", [{"a": 1, "b": 2}, {"a": 3, "b": 4}]),
        ("a,b,,\n1,2,,\n3,4,,\n", [{"a": 1, "b": 2}, {"a": 3, "b": 4}]),
        (",a,b\n0,1,2\n", [{"": 0, "a": 1, "b": 2}]),
        ("a,b\r1,2\r3,4\r", [{"a": 1, "b": 2}, {"a": 3, "b": 4}]),
        ('"a\nc",b\n1,2\n', [{"a\nc": 1, "b": 2}]),
    ],
)
def test_what_stands_around_the_rows(tmp_path: Path, content: str, expected: Any) -> None:
    assert of_csv(tmp_path, content) == expected


def test_numbers_with_a_comma(tmp_path: Path) -> None:
    content = "price;sum;ids;both\n3,5;1.234,50;1,2;a\n-0,25;7;x;1,5\nNA;;3;\n"
    expected = [
        {"price": 3.5, "sum": 1234.5, "ids": "1,2", "both": "a"},
        {"price": -0.25, "sum": 7, "ids": "x", "both": "1,5"},
        {"price": "NA", "ids": 3},
    ]
    assert of_csv(tmp_path, content) == expected
    assert of_csv(tmp_path, content, text=["price"])[0]["price"] == "3,5"
    assert of_csv(tmp_path, "price;count\n1,5;1.200\n2;12.000\n")[0] == {"price": 1.5, "count": 1200}
    assert of_csv(tmp_path, "price;count\n1.5;1.200\n2;12.000\n")[0] == {"price": 1.5, "count": 1.2}
    content = 'price,sum,pair,part\n"1,234","1,234,567.5","1,2",0.125\n7,-12,3,48.137\n'
    assert of_csv(tmp_path, content) == [
        {"price": 1234, "sum": 1234567.5, "pair": "1,2", "part": 0.125},
        {"price": 7, "sum": -12, "pair": 3, "part": 48.137},
    ]
    assert of_csv(tmp_path, "price;part\n1,5;0.125\n2;0.250\n")[0] == {"price": 1.5, "part": 0.125}


def test_arrays_as_numpy_writes_them(tmp_path: Path) -> None:
    content = "tags\n['a' 'b c']\n[1 2 -3]\n\"['a'\n 'b\"\"']\"\n['a']\n[a b]\n['a' b]\n"
    found = [one["tags"] for one in of_csv(tmp_path, content)]
    assert found == [["a", "b c"], [1, 2, -3], ["a", 'b"'], ["a"], "[a b]", "['a' b]"]


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", b"user,item\n1,2\n")
    for options in ({"key": "usr"}, {"time": "usr"}, {"text": ["item", "usr"]}, {"lists": {"usr": "|"}}):
        with pytest.raises(ConfigError, match="missing column 'usr'; the columns are user, item"):
            values(file, **options)
    assert values(written(tmp_path / "b.csv", b"user,item\n"), key="item") == []


# --- several files ---


def parts(folder: Path) -> Path:
    """A folder as Spark leaves it, with a part that has no samples."""
    contents = {
        "day=2/part-10.jsonl": b'{"n":5}\n\n{"n":6}\n',
        "day=2/part-9.jsonl.gz": gzip.compress(b'{"n":4}\n'),
        "day=1/part-0.jsonl": b'\n{"n":1}\n\n{"n":2}\n{"n":3}\n\n',
        "day=1/part-1.jsonl": b"",
        "_SUCCESS": b"",
        "day=1/.part-0.jsonl.crc": b"\xff",
        "_delta_log/0.json": b'{"n":0}',
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def numbers(*urls: Path | str, **options: Any) -> list[int]:
    file = SampleFile([str(one) for one in urls], **options)
    return [json.loads(message)["n"] for message in file.messages()]


def test_folders_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = parts(tmp_path / "clicks.parquet")  # as Spark calls it
    assert numbers(folder) == numbers(f"{folder}/") == numbers(f"{folder}/*") == [1, 2, 3, 4, 5, 6]
    assert numbers(folder / "day=2", folder / "day=1/part-0.jsonl") == [4, 5, 6, 1, 2, 3]
    assert numbers(f"{folder}/**/*.jsonl") == [1, 2, 3, 5, 6]
    monkeypatch.chdir(folder)
    assert numbers("day=?") == numbers(".") == [1, 2, 3, 4, 5, 6]
    written(folder / "what[1].jsonl", b'{"n":7}')
    assert numbers("what[1].jsonl") == [7]  # the file itself, though it looks like a pattern


def test_folders_and_patterns_of_urls(tmp_path: Path) -> None:
    for name in ("a/2.jsonl", "a/10.jsonl", "a/_temporary/1.jsonl", "b.jsonl"):
        with fsspec.open(f"memory://folders/{name}", "wb") as stream:
            stream.write(b'{"n":%d}' % len(name))
    assert numbers("memory://folders/a") == numbers("memory://folders/a/*.jsonl") == [9, 10]
    assert numbers("memory://folders/b.jsonl", f"file://{parts(tmp_path)}/day=2") == [7, 4, 5, 6]


def test_where_a_sample_of_several_files_stands(tmp_path: Path) -> None:
    file = SampleFile(str(parts(tmp_path)))
    shares = [block.share for block in file.blocks()]
    assert shares == [0.25, 0.75, 1.0]
    assert [file.place(i) for i in range(6)] == [
        *(f"line {line} of {tmp_path}/day=1/part-0.jsonl" for line in (2, 4, 5)),
        f"line 1 of {tmp_path}/day=2/part-9.jsonl.gz",
        *(f"line {line} of {tmp_path}/day=2/part-10.jsonl" for line in (1, 3)),
    ]
    file = SampleFile([str(written(tmp_path / f"{name}.csv", b"n\n1\n2\n")) for name in "ab"])
    assert len([*file.messages()]) == 4
    assert file.place(2) == f"row 1 of {tmp_path}/b.csv"
    assert file.name == f"{tmp_path}/a.csv and 1 more"


def test_files_of_several_columns_have_what_they_have(tmp_path: Path) -> None:
    urls = [str(written(tmp_path / "a.csv", b"n,m\n1,2\n")), str(written(tmp_path / "b.csv", b"m;n\n3;4,5\n"))]
    assert [json.loads(one) for one in SampleFile(urls).messages()] == [{"n": 1, "m": 2}, {"m": 3, "n": 4.5}]


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["empty"], "^there are no files of samples: empty$"),
        (["*.nothing"], r"^there are no files of samples: \*\.nothing$"),
        (["mixed"], r"^mixed/a\.csv is csv by its name and mixed/b\.jsonl jsonl: .*'folder/\*\.csv'$"),
        (["odd"], r"^cannot tell the format of odd/README\.md from its name: use --format .*'folder/\*\.csv'$"),
        (["-", "mixed/a.csv"], "^standard input cannot be one of several files$"),
        (["gone://bucket/a.csv/"], "^cannot list gone://bucket/a.csv/: .*gone"),
    ],
)
def test_files_that_are_no_samples(
    urls: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mixed/a.csv", "mixed/b.jsonl", "odd/README.md", "odd/b.csv", "empty/_SUCCESS"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    with pytest.raises(ConfigError, match=message):
        SampleFile(urls)


def test_a_part_that_is_damaged_is_named(tmp_path: Path) -> None:
    written(tmp_path / "1.csv", b"n\n1\n")
    written(tmp_path / "2.csv", b"n\n1\n2,3\n")
    with pytest.raises(ConfigError, match=rf"^cannot read {tmp_path}/2\.csv: row 2, '2,3'"):
        values(tmp_path)


# --- Parquet ---


def parquet(path: Path, table: pa.Table, **options: Any) -> Path:
    pq.write_table(table, path, **options)
    return path


def test_types_of_parquet(tmp_path: Path) -> None:
    table = pa.table(
        {
            "ts": [datetime(2024, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC), None],
            "ns": pa.array([1_700_000_000_123_456_789, 0], pa.timestamp("ns")),
            "day": [date(1970, 1, 2), None],
            "user": [5, None],
            "ids": [["a", "b"], []],
            "numbers": [[1, 2], None],
            "price": [1.5, float("nan")],
            "seen": [True, False],
            "raw": [b"x", None],
            "kind": pa.array(["k", "l"]).dictionary_encode(),
            "cost": [decimal.Decimal("1.50"), None],
            "big": pa.array([2**64 - 1, 0], pa.uint64()),
        }
    )
    first, second = (json.loads(value) for value in values(parquet(tmp_path / "a.parquet", table)))
    assert first == {
        "ts": 1704067200.25,
        "ns": pytest.approx(1_700_000_000.123456, abs=1e-6),
        "day": 86400,
        "user": 5,
        "ids": ["a", "b"],
        "numbers": [1, 2],
        "price": 1.5,
        "seen": True,
        "raw": "x",
        "kind": "k",
        "cost": 1.5,
        "big": 2**64 - 1,
    }
    assert {name for name, value in second.items() if value is None} == {"ts", "day", "user", "numbers", "price"} | {
        "raw",
        "cost",
    }


def test_ids_that_pandas_made_floats(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.pq", pa.table({"user": [123456789012.0, float("nan"), None], "item": [7, 8, 9]}))
    found = [json.loads(value) for value in values(file, text=["user", "item"])]
    assert found == [{"user": u, "item": i} for u, i in (("123456789012", "7"), (None, "8"), (None, "9"))]
    file = parquet(tmp_path / "b.pq", pa.table({"user": [1.5]}))
    with pytest.raises(ConfigError, match="column 'user', of type double, cannot be converted"):
        values(file, text=["user"])


def test_bytes_that_are_no_text_are_missing(tmp_path: Path) -> None:
    file = parquet(tmp_path / "bytes.parquet", pa.table({"a": pa.array([b"x", b"\xff", None]), "b": [1, 2, 3]}))
    assert [json.loads(value) for value in values(file)] == [
        *({"a": "x", "b": 1}, {"a": None, "b": 2}, {"a": None, "b": 3}),
    ]


def test_lists_of_parquet(tmp_path: Path) -> None:
    columns = {"genres": ["a|b", None, "['c', 7]"], "ids": [["x|y"], [], None], "number": [12.0, 3.0, None]}
    file = parquet(tmp_path / "a.parquet", pa.table(columns))
    lists = {"genres": "|", "ids": "|", "number": "|"}
    assert [json.loads(value) for value in values(file, lists=lists)] == [
        {"genres": ["a", "b"], "ids": ["x|y"], "number": ["12"]},
        {"genres": [], "ids": [], "number": ["3"]},
        {"genres": ["c", 7], "ids": None, "number": []},
    ]
    assert json.loads(values(file, text=["genres"], lists=lists)[2])["genres"] == ["['c', 7]"]


def test_many_row_groups_with_keys_and_times(tmp_path: Path) -> None:
    count = 10_000
    table = pa.table({"ts": pa.array(range(count), pa.timestamp("s")), "user": range(count)})
    file = SampleFile(str(parquet(tmp_path / "a.parquet", table, row_group_size=1000)), key="user", time="ts")
    blocks = list(file.blocks())
    assert [one for block in blocks for one in block.samples] == [
        (b'{"ts":%d.0,"user":%d}' % (i, i), float(i), b"%d" % i) for i in range(count)
    ]
    shares = [block.share or 0 for block in blocks]
    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[-1] == 1


def test_what_is_no_parquet(tmp_path: Path) -> None:
    good = parquet(tmp_path / "a.parquet", pa.table({"a": range(1000)})).read_bytes()
    for content in (b"", b"a,b\n1,2\n" * 10, good[: len(good) // 2], good[:8] + b"\0" * 64 + good[72:]):
        with pytest.raises(ConfigError, match=f"^cannot read {tmp_path}/bad.parquet: "):
            values(written(tmp_path / "bad.parquet", content))
    with pytest.raises(ConfigError, match="missing column 'b'; the columns are a"):
        values(parquet(tmp_path / "b.parquet", pa.table({"a": [1]})), key="b")


def test_text_and_lists_of_json_lines(tmp_path: Path) -> None:
    lines = [
        b'{"genres":"Comedy|Romance", "id": 12.0,"n": 12345678901234567890123, "x": 0.10 }',
        b'{ "genres": ["a"],"id": "7"}',
        b'{"genres":"","id":true,"genres":"say \\"hi\\"|b"}',
        b'{"genres":"\\ud800","id":1.5}',
        b'{"genres":null,"id":null}',
        b'{"genres":7,"id":[1],"n":-0}',
        b"[1]",
        b"{",
        b'{"genres":"\xff"}',
        b"{}",
    ]
    file = written(tmp_path / "a.jsonl", b"\n".join(lines))
    assert values(file, text=["id", "n"], lists={"genres": "|"}) == [
        b'{"genres":["Comedy","Romance"],"id":"12","n":"12345678901234567890123","x":0.10}',
        lines[1],
        b'{"genres":["say \\"hi\\"","b"],"id":"true"}',
        *lines[3:5],
        b'{"genres":["7"],"id":[1],"n":"0"}',
        *lines[6:],
    ]
    with pytest.raises(ConfigError, match=r"none of the first 9 samples has a field 'x y'"):
        values(file, lists={"x y": "|"})


# --- all ---


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("nowhere.jsonl", {}, "cannot read nowhere.jsonl: No such file or directory"),
        ("samples.txt", {}, "cannot tell the format of samples.txt from its name: use --format"),
        ("samples.jsonl", {"format": "json"}, "must be one of jsonl, csv, parquet, not 'json'"),
        ("-", {"format": "parquet"}, "standard input is read as JSON lines"),
        ("-", {"format": "csv"}, "standard input is read as JSON lines"),
        ("nowhere://user:secret@host/a.csv", {}, r"cannot list nowhere://\*\*\*@host/a.csv: Protocol not known"),
    ],
)
def test_what_is_wrong_is_said(file: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        samples(file, **options)


def test_limit(tmp_path: Path) -> None:
    file = SampleFile(str(written(tmp_path / "a.jsonl", LINES)))
    for most in (1, 59_999, 60_000, 60_001):
        assert sum(len(block.samples) for block in limited(file.blocks(), most)) == min(most, 60_000)


def test_rounds_go_on_in_event_time(tmp_path: Path) -> None:
    file = SampleFile(str(written(tmp_path / "a.jsonl", b'{"t":10}\n{}\n{"t":30}\n{"t":20}\n')), time="t")
    blocks, pace = list(limited(repeated(file), 12)), EventTime(1, 100)
    due = []
    for block in blocks:
        if block.restarts:
            pace.restart()
        due += [pace.due(time) for _, time, _ in block.samples]
    assert due == [0, 0, 20, 20, 20, 20, 40, 40, 40, 40, 60, 60]


def test_nothing_is_not_repeated_for_ever(tmp_path: Path) -> None:
    assert list(repeated(SampleFile(str(written(tmp_path / "a.jsonl", b"\n"))))) == []
    with pytest.raises(ConfigError, match="standard input cannot be repeated"):
        repeated(SampleFile("-"))


def test_places_count_lines_and_rows(tmp_path: Path) -> None:
    lines = SampleFile(str(written(tmp_path / "a.jsonl", b"\n{}\n \n\n{}\n{}\n" + LINES)))
    assert [*lines.opened()][:3] == [b"{}"] * 3
    assert [lines.place(i) for i in (0, 1, 2, 3, 60_002)] == ["line 2", "line 5", "line 6", "line 7", "line 60,006"]
    table = SampleFile(str(written(tmp_path / "a.csv", b"user\nu1\nu2\n")))
    assert [*table.messages()] == [b'{"user":"u1"}', b'{"user":"u2"}']
    assert table.place(1) == "row 2"
    with pytest.raises(ConfigError, match="has no samples"):
        SampleFile(str(written(tmp_path / "b.jsonl", b"\n\n"))).opened()
