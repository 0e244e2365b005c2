"""Reads the settings: once, checked at once.

They come from streamtrain.toml, from variables of the environment and from the command line, of which the later wins.
Whoever reads the environment hands it in.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from streamtrain.errors import ConfigError
from streamtrain.setting_types import MASK, mask_credentials
from streamtrain.settings import GROUPS, KEYS, SECRETS, ConsistencySettings, Settings

__all__ = ["DEFAULT_FILE", "PREFIX", "Settings", "load_settings"]

DEFAULT_FILE = Path("streamtrain.toml")
PREFIX = "STREAMTRAIN_"

_FOR_TESTS = f"{PREFIX}REQUIRE"  # the servers without which tests fail; whom they start inherits it

# What Kubernetes puts into the environment for a service whose name begins with "streamtrain".
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)


@dataclass(frozen=True)
class _Source:
    """Values by dotted key, and where they come from: "in streamtrain.toml"."""

    where: str
    values: dict[str, Any]
    text: bool = False
    prefix: str = ""

    def name(self, key: str) -> str:
        written = self.prefix + key.upper().replace(".", "__") if self.prefix else key
        return " ".join(f"{written} {self.where}".split())


def load_settings(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Reads the settings, and checks them.

    Args:
        file: TOML; None: ./streamtrain.toml if there is one.
        environment: variables, of which those named like STREAMTRAIN_PS__ADDRESSES count; None: none.
        overrides: values of the command line by dotted key, such as {"ps.sessions": 4}; None leaves a key alone.

    Raises:
        ConfigError: the file cannot be read or is no TOML; a key is unknown, a value is of a wrong type or wrong, or
            two do not go together. One line that names key, value and source.
    """
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    sources = [
        _of_file(file),
        _Source("in the environment", _of_environment(environment or {}), text=True, prefix=PREFIX),
        _Source("on the command line", given, text=True),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, _Source] = {}
    for source in sources:
        _refuse_unknown(source)
        _validated(source.values, source)
        values |= source.values
        origins |= dict.fromkeys(source.values, source)
    settings = _validated(values, _Source("in all sources", values, text=True))
    _check_staleness(settings.consistency, origins)
    return settings


def _of_file(file: Path | None) -> _Source:
    path = file or DEFAULT_FILE
    where = f"in {path}"
    try:
        tables = tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError as exc:
        if file is None:
            return _Source(where, {})
        raise ConfigError(f"there is no configuration file {path}") from exc
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # what is no TOML, and what is no UTF-8
        raise ConfigError(f"{path} is no TOML: {exc}") from exc
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if name not in GROUPS:
            values[name] = value
        elif isinstance(value, dict):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            raise ConfigError(f"{name} {where} must be a table, [{name}], not {value!r}")
    return _Source(where, values)


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = [name for name in environment if name.startswith(PREFIX) and name != _FOR_TESTS]
    return {
        name.removeprefix(PREFIX).lower().replace("__", "."): environment[name]
        for name in names
        if not _SERVICE_LINK.search(name)
    }


def _refuse_unknown(source: _Source) -> None:
    for key in source.values:
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(KEYS)}"
            raise ConfigError(f"{source.name(key)} is no setting{hint}")


def _validated(values: Mapping[str, Any], source: _Source) -> Settings:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    try:
        return Settings.model_validate(nested, context={"text": source.text})
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        key = ".".join(str(part) for part in error["loc"][:2])
        raise ConfigError(f"{source.name(key)} {_reason(error['msg'], key, values[key])}") from exc


def _reason(message: str, key: str, value: object) -> str:
    """Pydantic's message, or that of a parser here, as the end of a sentence that begins with the key."""
    message = message.removeprefix("Value error, ").removeprefix(f"{key.rpartition('.')[2]} ")
    message = message.replace("Input should", "must", 1)
    if key in SECRETS:
        return f"{message}, not {MASK}"
    return mask_credentials(message if ", not " in message else f"{message}, not {value!r}")


def _check_staleness(consistency: ConsistencySettings, origins: Mapping[str, _Source]) -> None:
    key, is_bounded = "consistency.staleness", consistency.mode == "bounded"
    if is_bounded and consistency.staleness is None:
        mode = origins["consistency.mode"].name("consistency.mode")
        raise ConfigError(f"{mode} is 'bounded', which needs {key}: steps that a worker may be ahead of the slowest")
    if not is_bounded and consistency.staleness is not None:
        raise ConfigError(
            f"{origins[key].name(key)} is {consistency.staleness}, but is for consistency.mode 'bounded' only, "
            f"not {consistency.mode!r}; leave it out"
        )
