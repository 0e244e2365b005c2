"""Replacement of a checkpoint by a newer one at the same path: only once that is complete."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamtrain.errors import CheckpointError
from streamtrain.store.files import Directory, sync
from streamtrain.store.manifest import MANIFEST


@contextmanager
def replacing(url: str | Path) -> Iterator[Directory]:
    """Gives a new directory to write a checkpoint to, which is at `url` when the block ends without an error.

    A checkpoint that is there already is replaced if `url` is local. Elsewhere directories cannot be renamed, so `url`
    must be unused.

    Raises:
        CheckpointError: there is something that is not replaced, or it cannot be replaced.
    """
    directory = Directory(url)
    if directory.local is None:
        if directory.names():
            raise CheckpointError(f"there is something at {directory.url} already; choose another place")
        with _deleted_on_failure(directory):
            yield directory
        return
    path = directory.local.resolve()
    with directory.writing(""):
        if path.exists() and not (path / MANIFEST).is_file():
            raise CheckpointError(f"{path} exists and is no checkpoint; choose another path")
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield Directory(unfinished)
        with directory.writing(""):
            _replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def hint(directory: Directory) -> str:
    """Where the checkpoint is that a writer, stopped in the midst of replacing it, has left aside; "" if nowhere."""
    path = directory.local and directory.local.resolve()
    if path and path.name and (_aside(path) / MANIFEST).is_file():
        return f"; its writer was stopped, and the one before it is at {_aside(path)}"
    return ""


@contextmanager
def _deleted_on_failure(directory: Directory) -> Iterator[None]:
    try:
        yield
    except BaseException:
        directory.delete_all()
        raise


def _aside(path: Path) -> Path:
    """Where the checkpoint that was at `path` is while a new one takes its place."""
    return path.with_name(f".{path.name}.old")


def _replace(new: Path, path: Path) -> None:
    """Puts a complete directory in the place of an older one, which is dropped only then."""
    old = _aside(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    try:
        new.rename(path)
        sync(path.parent)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
