"""Loads and checks the settings, from streamtrain.toml, the environment and the command line; the later wins.

The environment is passed in by the command line, which alone reads it.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from streamtrain.address import MASK, redacted
from streamtrain.errors import ConfigError
from streamtrain.settings.groups import GROUPS, KEYS, SECRETS, ConsistencySettings, JoinSettings, Settings
from streamtrain.settings.types import MESSAGES

__all__ = ["DEFAULT_FILE", "PREFIX", "Settings", "load_settings", "settings_without_effect"]

DEFAULT_FILE = Path("streamtrain.toml")
PREFIX = "STREAMTRAIN_"

# Variables that are not settings: the servers that the tests require, which processes started by tests inherit; the
# build of the native core to load (_native/bind_arch.cc); and whether it reads rows by threads (_native/blocks.cc).
_NOT_SETTINGS = frozenset({f"{PREFIX}REQUIRE", f"{PREFIX}ARCH", f"{PREFIX}NO_IO_URING"})

# Variables that Kubernetes sets for a service whose name begins with "streamtrain".
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)


@dataclass(frozen=True)
class _Source:
    """Values by dotted key, and where they come from: "in streamtrain.toml"."""

    where: str
    values: dict[str, Any]
    is_text: bool = False
    prefix: str = ""

    def name(self, key: str) -> str:
        """A key as it is written in the source, and the source; on one line, whatever the key contains."""
        written = self.prefix + key.upper().replace(".", "__") if self.prefix else key
        return " ".join(f"{written} {self.where}".split())


def load_settings(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    base: Path | None = None,
) -> Settings:
    """Loads and checks the settings.

    Args:
        file: TOML; None: ./streamtrain.toml if it exists.
        environment: variables, of which those named like STREAMTRAIN_PS__ADDRESSES count; None: none.
        overrides: values of the command line by dotted key, such as {"ps.sessions": 4}; None leaves a key unset.
        base: TOML with what all of these leave unset; None: the defaults.

    Raises:
        ConfigError: the file cannot be read or is not valid TOML; a key is unknown; a value has the wrong type, is out
            of range or conflicts with another. The message is one line that names key, value and source.
    """
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    sources = [
        *([_read_file(base)] if base else []),
        _read_file(file),
        _Source("in the environment", _read_environment(environment or {}), is_text=True, prefix=PREFIX),
        _Source("on the command line", given, is_text=True),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, _Source] = {}
    for source in sources:
        _refuse_unknown(source)
        _validate(source)
        values |= source.values
        origins |= dict.fromkeys(source.values, source)
    settings = _validate(_Source("in all sources", values, is_text=True))
    _check_staleness(settings.consistency, origins)
    _check_join(settings.join)
    return settings


def _read_file(file: Path | None) -> _Source:
    path = file or DEFAULT_FILE
    where = f"in {path}"
    try:
        tables = tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError as exc:
        if file is None:
            return _Source(where, {})
        raise ConfigError(f"configuration file {path} does not exist") from exc
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # not TOML, or not UTF-8
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if name not in GROUPS:
            values[name] = value
        elif isinstance(value, dict):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            raise ConfigError(f"{name} {where} must be a table, [{name}], not {value!r}")
    return _Source(where, values)


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        name.removeprefix(PREFIX).lower().replace("__", "."): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in _NOT_SETTINGS and not _SERVICE_LINK.search(name)
    }


def _refuse_unknown(source: _Source) -> None:
    for key in source.values:
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {close[0]}?" if close else f"settings are {', '.join(KEYS)}"
            raise ConfigError(f"{source.name(key)} is not a setting; {hint}")


def _validate(source: _Source) -> Settings:
    nested: dict[str, Any] = {}
    for key, value in source.values.items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    try:
        return Settings.model_validate(nested, context={"text": source.is_text})
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        location = error["loc"][:2]
        key = ".".join(map(str, location))
        kind = "dict_type" if len(error["loc"]) > 2 else error["type"]  # of a value in a table
        message = error["msg"].removeprefix("Value error, ").removeprefix(f"{location[-1]} ")
        message = MESSAGES.get(kind) or re.sub(r"^(Input|String) should", "must", message)
        raise ConfigError(f"{source.name(key)} {_with_value(message, key, source.values[key])}") from exc


def _with_value(message: str, key: str, value: object) -> str:
    if key in SECRETS:
        return f"{message}, not {MASK}"
    return redacted(message if ", not " in message else f"{message}, not {value!r}")


_NEEDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("checkpoint.every checkpoint.keep checkpoint.full_every", "checkpoint.url", ()),
    ("publish.cluster publish.dtype publish.log_bytes publish.version_every publish.keep", "publish.url", ()),
    ("gate.auc_drop gate.loss_rise gate.calibration gate.min_samples gate.non_finite", "publish.url", ()),
    ("compare.block compare.keep compare.slices", "publish.url", ()),
    ("ps.backup_patience", "ps.backups", ()),
    ("ps.disk", "ps.memory", ()),
    ("coordinator.listen coordinator.metrics", "coordinator.address", ()),
    ("join.labels join.keep join.metrics", "join.impressions", ()),
    ("stream.late", "stream.late_after", ()),
    ("stream.registry stream.schema_file", "stream.format", ("avro", "protobuf")),
    ("stream.registry_config", "stream.registry", ()),
    ("serve.traffic serve.routing_key", "publish.url", ()),
    ("serve.cache_bytes", "serve.lookup", ("cache", "disk")),
    ("serve.disk", "serve.lookup", ("disk",)),
    ("serve.log_sample serve.log_own_ids", "serve.log", ()),
)
"""Settings, the setting without which they have no effect, and the values that it needs; none: any."""


def settings_without_effect(settings: Settings) -> list[str]:
    """What is set but has no effect, as another setting is missing; in a sentence each."""

    def read(key: str) -> tuple[Any, bool]:
        group, _, name = key.partition(".")
        values = getattr(settings, group)
        return getattr(values, name), name in values.model_fields_set

    found = []
    for keys, needed, values in _NEEDS:
        value, _ = read(needed)
        if value in values if values else value:
            continue
        wanted = f" is {' or '.join(values)}" if values else " is set"
        found += [f"{key} has no effect unless {needed}{wanted}" for key in keys.split() if read(key)[1]]
    if settings.ps.addresses and read("up.ps")[1] and settings.up.ps != len(settings.ps.addresses):
        found.append(f"up.ps has no effect where ps.addresses is set: there are {len(settings.ps.addresses)} shards")
    return found


def _check_staleness(consistency: ConsistencySettings, origins: Mapping[str, _Source]) -> None:
    key, is_bounded = "consistency.staleness", consistency.mode == "bounded"
    if is_bounded and consistency.staleness is None:
        mode = origins["consistency.mode"].name("consistency.mode")
        raise ConfigError(
            f"{mode} is 'bounded', which requires {key}: the number of steps a worker may be ahead of the slowest"
        )
    if not is_bounded and consistency.staleness is not None:
        raise ConfigError(
            f"{origins[key].name(key)} is {consistency.staleness}, but applies only to consistency.mode 'bounded', "
            f"not {consistency.mode!r}; remove it"
        )


def _check_join(join: JoinSettings) -> None:
    given = {"impressions": join.impressions, "outcomes": join.outcomes}
    for name, other in (("impressions", "outcomes"), ("outcomes", "impressions")):
        if given[name] is not None and given[other] is None:
            raise ConfigError(f"join.{name} is set, but join.{other} is not: a join needs both")
    if join.is_configured and join.impressions == join.outcomes:
        raise ConfigError(f"join.impressions and join.outcomes are both {join.outcomes!r}: they must be two topics")
    if join.is_configured and not join.labels:
        raise ConfigError(
            'join.labels is not set: a sample needs a label, such as [join.labels.click] with kinds = ["click"]'
        )
