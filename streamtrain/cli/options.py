"""Options that several commands share, and what they are resolved to: settings, versions, actors."""

import getpass
import logging
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from streamtrain.errors import ConfigError
from streamtrain.logs import set_up_logs

if TYPE_CHECKING:
    from streamtrain.model.model import Model as LoadedModel
    from streamtrain.settings.load import Settings
    from streamtrain.stream.event_times import EventTimes
    from streamtrain.stream.files import SampleFile

Config = Annotated[Path | None, typer.Option(help="Settings file; default: streamtrain.toml, if it exists.")]
Setting = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as worker.batch_size=512.")
]
LogFormat = Annotated[
    str | None, typer.Option(metavar="text|json", help="Format of log lines; default: setting log.format.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON, for scripts.")]

Addresses = Annotated[
    str | None, typer.Option("--ps", help="Addresses of all shards, in order of their index: host:port,…")
]
Workers = Annotated[int | None, typer.Option(help="Number of workers that bulk consistency waits for at the start.")]
Url = Annotated[str | None, typer.Option(help="URL of the stream: kafka://host:port,… or redis://…")]
Listen = Annotated[str | None, typer.Option(help="Address of the HTTP endpoint; default: 127.0.0.1:8501.")]
LearnedTopic = Annotated[str | None, typer.Option("--topic", help="Topic to learn; default: setting stream.topic.")]

Model = Annotated[str, typer.Option(help="The model: path/to/file.py:name.")]
ModelSetting = Annotated[
    str | None, typer.Option("--model", help="The model: path/to/file.py:name; default: setting model.")
]
SampleUrls = Annotated[
    list[str],
    typer.Argument(
        metavar="FILES...",
        help="Paths or URLs of the samples: JSON lines, CSV or Parquet, folders or patterns of them; - is standard "
        "input, as JSON lines.",
    ),
]
Threads = Annotated[int, typer.Option(min=0, help="TensorFlow threads; 0: one per core.")]
BatchSize = Annotated[int, typer.Option(help="Samples that are pulled at once.")]
MaxBadRatio = Annotated[
    float, typer.Option(min=0, max=1, help="Share of refused samples, over 10,000, above which the command stops.")
]
FileFormat = Annotated[
    str | None, typer.Option("--format", help="jsonl, csv or parquet; default: by the file's extension.")
]
TextColumns = Annotated[
    str, typer.Option(metavar="FIELDS", help="Fields that are text even if they look like numbers or lists: user,item")
]
ListColumns = Annotated[
    str,
    typer.Option(
        metavar="FIELDS",
        help="Fields whose texts are lists separated by |, or by what follows =, such as genres,tags=;",
    ),
]

Who = Annotated[str | None, typer.Option(help="Author of the change, for the history; default: user@host.")]
Why = Annotated[str, typer.Option(help="Reason for the change, for the history.")]
VersionOrHead = Annotated[str, typer.Argument(metavar="VERSION|head", help="Number of a version, or head.")]

NO_CLUSTER = (
    "neither coordinator.address nor ps.addresses is set, and `streamtrain up` does not run in this folder: "
    "give --ps host:port,…"
)

logger = logging.getLogger(__name__)


class Command(TyperCommand):
    """A command with its docstring as help: paragraphs are kept, and lines are as long as the terminal has room for."""

    def __init__(self, *args: Any, help: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, help=help and re.sub(r"(?<!\n)\n(?!\n)", " ", help), **kwargs)


_NUMBER = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)


def parse_number(text: str, argument: str, alternative: str) -> int | None:
    """A number from 1, or None for the alternative: "head" for a VERSION, "newest" for an EPOCH.

    Raises:
        ConfigError: text is neither.
    """
    if text == alternative:
        return None
    if not _NUMBER.fullmatch(text):
        raise ConfigError(f"{argument} must be a number from 1, or {alternative}, not {text!r}")
    return int(text)


def parse_version(text: str) -> int | None:
    """The number of a version; None: the head."""
    return parse_number(text, "VERSION", "head")


def split_names(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


LIST_SEPARATOR = "|"
"""What separates the elements of lists unless `--lists` says otherwise."""


def split_lists(text: str) -> dict[str, str]:
    """The separator of each column of "genres,tags=;".

    Raises:
        ConfigError: a separator is not one character, or one that JSON needs.

    >>> split_lists("genres,tags=;,words= ")
    {'genres': '|', 'tags': ';', 'words': ' '}
    """
    separators = {}
    for item in text.split(","):
        name, given, separator = item.partition("=")
        if name.strip():
            separators[name.strip()] = separator if given else LIST_SEPARATOR
    wrong = [one for one in separators.values() if len(one) != 1 or one.isalnum() or one in '"\\[],' or ord(one) < 32]
    if wrong:
        raise ConfigError(
            "--lists: a separator is one character, and no letter, digit, tab, comma or any of "
            f'" \\ [ ], not {wrong[0]!r}; an example: genres,tags=;'
        )
    return separators


def sample_file(
    url: str | list[str],
    format_: str | None,
    text: str,
    lists: str,
    *,
    key: str | None = None,
    time: str | None = None,
    times: "EventTimes | None" = None,
) -> "SampleFile":
    """The files that `FileFormat`, `TextColumns` and `ListColumns` describe; the rest as of SampleFile.

    Raises:
        ConfigError: as SampleFile; or `lists` is malformed.
    """
    from streamtrain.stream.files import SampleFile

    return SampleFile(url, format_, key=key, time=time, times=times, text=split_names(text), lists=split_lists(lists))


def resolve_actor(who: str | None) -> str:
    """The author of a change: as given, else the user that runs the command."""
    if who is not None:
        return who
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def read_settings(config: Path | None, setting: list[str] | None, overrides: dict[str, object]) -> "Settings":
    """The settings of a command, from its file, the environment, --set and its other options.

    Args:
        config: settings file.
        setting: values of --set.
        overrides: values of other options by key; None leaves a key unset.

    Raises:
        ConfigError: a setting is wrong.
    """
    from streamtrain.settings.load import load_settings

    given = {key: value for key, value in overrides.items() if value is not None}
    settings = load_settings(config, os.environ, parse_assignments(setting) | given)
    _use_registry(settings)
    return settings


def _use_registry(settings: "Settings") -> None:
    """Where processes are known by name, this one looks them up from now on."""
    addresses = [*settings.ps.addresses, *settings.ps.backups, settings.coordinator.address or ""]
    if settings.publish.url is None or not any(one.startswith("registry:") for one in addresses):
        return
    from streamtrain.ps.rpc.registry import use_registry
    from streamtrain.store.redis.registry import RedisRegistry

    use_registry(RedisRegistry(settings.publish.url, settings.publish.model, cluster=settings.publish.cluster))


def read_client_settings(config: Path | None, setting: list[str] | None, overrides: dict[str, object]) -> "Settings":
    """The settings of a command that reaches a cluster: what is not set is that of `up`, if it runs in this folder.

    If an address that is set, or the shards of TF_CONFIG, name another cluster, nothing of `up` is used, and a line on
    standard error says so.

    Raises:
        ConfigError: as `read_settings`.
    """
    from streamtrain.service.service_file import differing_address, find_service
    from streamtrain.settings.load import load_settings

    settings = read_settings(config, setting, overrides)
    service = find_service(Path(settings.up.data))
    if service is None:
        return settings
    if not service.is_running:
        typer.echo(f"ignoring {service.path}: the service of {service} has ended", err=True)
        return settings
    other = "TF_CONFIG" if os.environ.get("TF_CONFIG") else differing_address(settings, load_settings(service.path))
    if other is not None:
        typer.echo(f"ignoring the service that runs in {service}: {other} is set to another one", err=True)
        return settings
    given = {key: value for key, value in overrides.items() if value is not None}
    settings = load_settings(config, os.environ, parse_assignments(setting) | given, base=service.path)
    _use_registry(settings)
    return settings


def parse_assignments(setting: list[str] | None) -> dict[str, object]:
    """Values of --set KEY=VALUE by key.

    Raises:
        ConfigError: one has no "=".
    """
    values: dict[str, object] = {}
    for text in setting or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set takes KEY=VALUE, not {text!r}")
        values[key] = value
    return values


def require_model(settings: "Settings") -> str:
    """The model that settings name, once its file is found.

    Raises:
        ConfigError: no model is set, or it is not there.
    """
    from streamtrain.model.loader import locate_model

    if settings.model is None:
        raise ConfigError("no model is set: give --model path/to/file.py:name, or set model")
    locate_model(settings.model)
    return settings.model


def load_required_model(settings: "Settings", threads: int) -> "LoadedModel":
    """The model that settings name, with TensorFlow loaded for `threads` threads.

    Raises:
        ConfigError: no model is set, it is not there, or its file fails.
    """
    from streamtrain.model.loader import load_model
    from streamtrain.service.start_tensorflow import load_tensorflow

    location = require_model(settings)
    load_tensorflow(threads)
    return load_model(location)


def set_up_process_log(settings: "Settings", process: str, index: int | None = None) -> None:
    """Configures the log of a long-running command, whose name is `process` unless log.process is set."""
    set_up_logs(settings.log.format, settings.log.level, settings.log.process or process, index)


def warn_without_effect(settings: "Settings", *groups: str) -> None:
    """Logs which settings of these groups, the concern of a process, are set but have no effect."""
    from streamtrain.settings.load import settings_without_effect

    for sentence in settings_without_effect(settings):
        if sentence.partition(".")[0] in groups:
            logger.warning("%s", sentence)
