"""What several commands take, and what becomes of it: options, and settings with the environment."""

import getpass
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.errors import ConfigError
from streamtrain.logs import set_up_logs

if TYPE_CHECKING:
    from streamtrain.config import Settings

Config = Annotated[Path | None, typer.Option(help="Settings; default: streamtrain.toml, if there is one.")]
Setting = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as worker.batch_size=512.")
]
Addresses = Annotated[
    str | None, typer.Option("--ps", help="Addresses of all shards, in order of their index: host:port,…")
]
Workers = Annotated[int | None, typer.Option(help="Workers that bulk consistency waits for in the beginning.")]

LogFormat = Annotated[
    str | None, typer.Option(metavar="text|json", help="Lines of the log; default: setting log.format.")
]

Json = Annotated[bool, typer.Option("--json", help="Print a line of JSON, for scripts.")]
Who = Annotated[str | None, typer.Option(help="Who does it, for the history; default: user@host.")]
Why = Annotated[str, typer.Option(help="Why, for the history.")]
VersionOrHead = Annotated[str, typer.Argument(metavar="VERSION|head", help="A version's number, or head.")]

_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)


def version_of(text: str) -> int | None:
    """The version that is named; None: the head.

    Raises:
        ConfigError: it is neither.
    """
    if text == "head":
        return None
    if not _VERSION.fullmatch(text):
        raise ConfigError(f"VERSION is a number from 1, or head, not {text!r}")
    return int(text)


def who_of(given: str | None) -> str:
    """Who does what is asked for, as given, or else who runs the command."""
    if given is not None:
        return given
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def read_settings(config: Path | None, setting: list[str] | None, overrides: dict[str, object]) -> "Settings":
    """The settings of a command.

    Args:
        config: the file that it was given.
        setting: what it was given with --set.
        overrides: what its other options say, by key; None leaves a key alone.

    Raises:
        ConfigError: a setting is wrong.
    """
    from streamtrain.config import load_settings

    given = {key: value for key, value in overrides.items() if value is not None}
    return load_settings(config, os.environ, values_of(setting) | given)


def set_up_log(settings: "Settings", process: str, index: int | None = None) -> None:
    """Has a long-running command say what happens, as set.

    Args:
        settings: all.
        process: what it is called, unless that is set.
        index: which of several of that name; None: there is one.
    """
    set_up_logs(settings.log.format, settings.log.level, settings.log.process or process, index)


def values_of(setting: list[str] | None) -> dict[str, object]:
    """What --set was given, by key.

    Raises:
        ConfigError: it is no KEY=VALUE.
    """
    return dict(_key_value(one) for one in setting or [])


def _key_value(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set takes KEY=VALUE, not {text!r}")
    return key, value
