"""The file of a running service: `up` keeps all its settings there, and commands that are run in its folder find it.

It is locked while the service runs, so one that a killed `up` has left behind is not taken for a running service.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import SecretStr

from streamtrain.errors import ConfigError
from streamtrain.settings.groups import GROUPS, Settings

NAME = "service.toml"

CHECKPOINTS = "checkpoints"
"""Subfolder of the checkpoints of a service, unless checkpoint.url is set."""

ADDRESSES = ("stream.url", "publish.url", "ps.addresses", "ps.backups", "coordinator.address")
"""Settings that say which service is meant."""


class ServiceFile(NamedTuple):
    """The file of a service.

    Attributes:
        path: of the file.
        process: id of the process of `up`; None: not known.
        is_running: whether that process runs.
    """

    path: Path
    process: int | None
    is_running: bool

    def __str__(self) -> str:
        return f"{self.path.parent}" if self.process is None else f"{self.path.parent} (process {self.process})"


def find_service(folder: Path) -> ServiceFile | None:
    """The service of a folder; None: the folder has no file of one, or it belongs to another user."""
    path = folder / NAME
    try:
        with path.open("rb") as file:
            header = re.match(rb"# process (\d+):", file.readline(100))
            return ServiceFile(path, int(header[1]) if header else None, _is_locked(file.fileno()))
    except OSError:
        return None


def refuse_second(folder: Path) -> None:
    """Whether a service may be started in a folder.

    Raises:
        ConfigError: one runs there.
    """
    service = find_service(folder)
    if service is not None and service.is_running:
        raise ConfigError(
            f"`streamtrain up` already runs in {service}: stop it first, or set up.data to another folder; "
            "`streamtrain scale` changes its numbers of shards and workers while it runs"
        )


@contextmanager
def kept_service_file(settings: Settings, folder: Path) -> Iterator[Path]:
    """Writes the file of a service, for its user alone, and holds its lock; the file is deleted with the block.

    Args:
        settings: of the service; secrets are written in the clear.
        folder: of the service.

    Raises:
        ConfigError: another service runs there.
        OSError: the file cannot be written.
    """
    refuse_second(folder)
    path = folder / NAME
    with write_private(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for commands that look at it at this moment
        title = f"process {os.getpid()}: settings of a running service; deleted when it stops"
        os.write(file, to_toml(settings, title).encode())
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def rewrite_service_file(settings: Settings, path: Path) -> None:
    """Replaces what the file of this service says, while it is locked."""
    with path.open("r+b") as file:
        title = file.readline()
        text = to_toml(settings).encode()
        file.write(text)
        file.truncate(len(title) + len(text))


@contextmanager
def write_private(path: Path) -> Iterator[int]:
    """Opens a new file that only this user can read."""
    path.unlink(missing_ok=True)  # an existing one may be open to others
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def differing_address(settings: Settings, service: Settings) -> str | None:
    """The first setting by which another service is meant; None: there is none."""
    for key in ADDRESSES:
        group, _, name = key.partition(".")
        chosen, running = getattr(settings, group), getattr(service, group)
        if name in chosen.model_fields_set and getattr(chosen, name) != getattr(running, name):
            return key
    return None


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def to_toml(settings: Settings, *comments: str) -> str:
    """What was set, secrets in the clear, as a file of settings that begins with comments."""
    lines = [f"# {comment}" for comment in comments]
    if settings.model:
        lines.append(f"model = {_toml_value(settings.model)}")
    for group in sorted(GROUPS):
        values = getattr(settings, group).model_dump(exclude_unset=True, exclude_none=True)
        if values:
            lines += ["", f"[{group}]", *(f"{name} = {_toml_value(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    """What JSON writes of texts, numbers, truths and lists is TOML, too."""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml_value(one)}' for key, one in value.items())}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
