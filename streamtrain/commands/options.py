"""What several commands take, and what becomes of it: options, and settings with the environment."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.errors import ConfigError

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
    return load_settings(config, os.environ, dict(_key_value(one) for one in setting or []) | given)


def _key_value(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set takes KEY=VALUE, not {text!r}")
    return key, value
