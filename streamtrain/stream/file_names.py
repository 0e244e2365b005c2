"""Which files of samples are meant, by paths, URLs, folders and patterns, and their format by their names."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from streamtrain.address import redacted
from streamtrain.errors import ConfigError

FORMATS = ("jsonl", "csv", "parquet")
STDIN = "-"

_SUFFIXES = {
    **dict.fromkeys(("jsonl", "ndjson", "json"), "jsonl"),
    **dict.fromkeys(("csv", "tsv"), "csv"),
    **dict.fromkeys(("parquet", "pq"), "parquet"),
}
_COMPRESSED = re.compile(r"\.(gz|bz2|xz|zst)$")
_PATTERN = re.compile(r"[*?[]")


def find_files(urls: Sequence[str]) -> list[str]:
    """The files that paths and URLs stand for, in this order.

    A folder stands for all files in it and its folders, and a pattern, such as `clicks/*.csv`, for those that it
    matches: by name, where numbers count as such, so that 2 is before 10. Names that begin with `.` or `_` are left
    out: Spark and Hadoop leave marks behind that are called so. What is not there stands for itself.

    Raises:
        ConfigError: a folder or pattern has no files or cannot be listed; or standard input is not the only file.
    """
    found = [file for url in urls for file in _find(url)]
    if STDIN in found and len(found) > 1:
        raise ConfigError("standard input cannot be one of several files")
    return found


def format_of(files: Sequence[str]) -> str:
    """The one of `FORMATS` that the names of files have in common; that of standard input is JSON lines.

    Raises:
        ConfigError: a name has none, or two of them differ.
    """
    first = "jsonl" if files[0] == STDIN else _format(files[0])
    for file in files:
        found = "jsonl" if file == STDIN else _format(file)
        if found is None:
            advice = f"use --format {'|'.join(FORMATS)}"
            if len(files) > 1:
                advice += ", or a pattern that leaves it out, such as 'folder/*.csv'"
            raise ConfigError(f"cannot tell the format of {shown(file)} from its name: {advice}")
        if found != first:
            raise ConfigError(
                f"{shown(files[0])} is {first} by its name and {shown(file)} {found}: read files of one format at a "
                "time, such as with a pattern, 'folder/*.csv'"
            )
    return first or FORMATS[0]


def shown(url: str) -> str:
    """How messages call a file."""
    return "standard input" if url == STDIN else redacted(url)


def open_local_or_remote(url: str) -> Any:
    """The bytes of a file at a path or URL."""
    if re.search("::|://", url):
        fs, path = fsspec.core.url_to_fs(url)
        return fs.open(path, "rb")
    return LocalFileSystem().open(url, "rb")


def _format(url: str) -> str | None:
    return _SUFFIXES.get(_COMPRESSED.sub("", url.lower()).rpartition(".")[2])


def _find(url: str) -> list[str]:
    if url == STDIN or url.startswith(("http:", "https:")) or "::" in url:  # which have no folders and patterns
        return [url]
    is_local = "://" not in url
    try:
        fs, path = (LocalFileSystem(), url) if is_local else fsspec.core.url_to_fs(url)
        match = _PATTERN.search(path)
        if match and not fs.exists(path):
            under = path[: match.start()].rpartition("/")[0]
            names = {name for one in fs.glob(path) for name in fs.find(one)}
        elif (is_local or _format(url) is None) and fs.isdir(path):
            under, names = path.rstrip("/"), set(fs.find(path))
        else:
            return [url]
    except Exception as exc:  # the clients of object stores have errors of their own
        raise ConfigError(f"cannot list {redacted(url)}: {exc or type(exc).__name__}") from exc
    start = os.path.abspath(under) if is_local else under
    inner = [os.path.relpath(name, start) for name in names]
    found = sorted((one for one in inner if not re.search(r"(^|/)[._]", one)), key=lambda one: [*_parts(one)])
    if not found:
        raise ConfigError(f"there are no files of samples: {redacted(url)}")
    paths = [os.path.join(under, one) for one in found]
    return paths if is_local else [fs.unstrip_protocol(one) for one in paths]


def _parts(name: str) -> Iterator[tuple[int, str]]:
    """Numbers and texts, which compare with each other."""
    for text in re.findall(r"\d+|\D+", name):
        yield (int(text), "") if text.isdecimal() else (-1, text)
