"""Folders for rows that have no room in memory."""

import os
import resource
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from streamtrain.errors import ConfigError

_FILES = 65_536


class RowsOnDisk(NamedTuple):
    """Where rows are that have no room in memory.

    Attributes:
        memory: bytes that all rows may take in memory, with their indexes.
        folder: of the others. Files there have no names: they go with the process.
    """

    memory: int
    folder: str


def rows_folder(folder: str | None, setting: str) -> str:
    """A folder for rows on disk; None: that for temporary files.

    Args:
        folder: the value of a setting.
        setting: its name, for errors.

    Raises:
        ConfigError: no files can be made there, or they would be in memory.
    """
    found = folder or tempfile.gettempdir()
    try:
        tempfile.TemporaryFile(dir=found).close()
    except OSError as exc:
        raise ConfigError(f"{setting}: no files for rows can be made in {found}: {exc.strerror}") from exc
    allow_files()
    if (kind := file_system(found)) in {"tmpfs", "ramfs"}:
        raise ConfigError(f"{found} is itself in memory ({kind}); set {setting} to a folder on a disk")
    return found


def allow_files() -> None:
    """Raises the number of files that this process may have open, as far as allowed: each holds 64 MiB of rows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def file_system(folder: str) -> str:
    """The type of the file system of a folder, such as "ext4"; "": unknown."""
    try:
        device = os.stat(folder).st_dev
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((line[line.index("-") + 1] for line in reversed(mounts) if line[2] == number), "")
