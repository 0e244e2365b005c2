"""`up`: the whole service on one machine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from streamtrain.address import redacted
from streamtrain.cli.options import (
    Config,
    LearnedTopic,
    Listen,
    LogFormat,
    ModelSetting,
    Setting,
    read_settings,
    require_model,
    set_up_process_log,
    warn_without_effect,
)
from streamtrain.cli.terminal import load_tensorflow
from streamtrain.errors import ConfigError
from streamtrain.logs import json_line
from streamtrain.settings.service_file import CHECKPOINTS
from streamtrain.shutdown import stop_on_signals

if TYPE_CHECKING:
    from streamtrain.processes.preload import Preloader
    from streamtrain.settings.load import Settings

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_POLL_SECONDS = 0.5
_ERROR = "streamtrain: "


def up(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    model: ModelSetting = None,
    topic: LearnedTopic = None,
    listen: Listen = None,
    check_only: Annotated[
        bool,
        typer.Option("--check", help="Check settings, and whether the model fits what is learned; start nothing."),
    ] = False,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run the whole service on this machine: shards, workers, serving, and Kafka and Redis unless their URLs are set.

    Processes that crash are restarted. Ctrl-C lets workers finish their batches, then stops everything. Commands that
    are run in the same folder, such as status and publish, find the service.
    """
    from streamtrain.embedded.jars import find_jars
    from streamtrain.processes.local import check, fill_local_defaults, kept_secrets, programs
    from streamtrain.processes.memory import has_room_for_standby
    from streamtrain.processes.preload import Preloader
    from streamtrain.processes.serving import listening
    from streamtrain.processes.supervisor import Supervisor

    overrides: dict[str, object] = {
        "model": model,
        "stream.topic": topic,
        "serve.listen": listen,
        "log.format": log_format,
    }
    settings = read_settings(config, setting, overrides)
    if check_only:
        require_model(settings)
        _check_model(settings)
        return
    set_up_process_log(settings, "up")
    require_model(settings)
    warn_without_effect(settings, "up")
    defaults = fill_local_defaults(settings, kafka=find_jars(settings.up.kafka) is not None)
    settings = read_settings(config, setting, overrides | defaults)
    check(settings, defaults)
    log = JsonLog() if settings.log.format == "json" else Log(Console(highlight=False, soft_wrap=True))
    with closing(Preloader(os.environ | {"PYTHONUNBUFFERED": "1"})) as preloader:
        for line in _check_model_apart(settings, config, setting, preloader):
            log.write("up", line)

        given = {key: str(value) for key, value in overrides.items() if value is not None} | defaults
        stopped = stop_on_signals()
        with listening(settings.serve) as sockets, kept_secrets(settings, defaults) as file:
            kept = [text for text in setting or [] if text.partition("=")[0] not in defaults]
            options = ["--config", str(config)] if config else []
            options += [part for text in kept for part in ("--set", text)]
            supervisor = Supervisor(
                programs(settings, given, options, os.environ, sockets),
                log.write,
                has_room=has_room_for_standby,
                preloader=preloader,
            )
            for line in _describe(settings, defaults, file):
                log.write("up", line)
            supervisor.start()
            threading.Thread(target=_log_when_ready, args=(settings.serve.listen, log, stopped), daemon=True).start()
            try:
                supervisor.wait(stopped)
                log.write("up", "stopping all processes, workers first")
            finally:
                supervisor.stop()


def _check_model(settings: "Settings") -> None:
    """Builds the model, and compares it with the newest checkpoint.

    Raises:
        ConfigError: it cannot be built, or does not fit.
    """
    from streamtrain.model.loader import load_model
    from streamtrain.model.spec import Spec
    from streamtrain.processes.local import newest_spec

    url = settings.checkpoint.url or str(Path(settings.up.data, CHECKPOINTS).resolve())
    location = require_model(settings)
    load_tensorflow(settings.worker.threads)
    spec = Spec.of(load_model(location))
    learned = newest_spec(url)
    if learned is None:
        typer.echo(f"the model can be built; there is no checkpoint at {redacted(url)} yet, so a new run will begin")
        return
    held, where = learned
    held.check_fit(spec, where)
    typer.echo(f"the model fits {where}")
    for one in held.overridden(spec):
        typer.echo(f"stays as the run began, {one} as in the model file")


def _check_model_apart(
    settings: "Settings", config: Path | None, setting: list[str] | None, preloader: "Preloader"
) -> list[str]:
    """Checks a model that may continue a run, in a process of its own, so that TensorFlow's memory is free again.

    A first start needs no check: processes that cannot build the model end the service at once.

    Returns:
        What of the model file is not in force.

    Raises:
        ConfigError: it cannot be built, or does not fit.
    """
    from streamtrain.processes.local import newest_spec
    from streamtrain.processes.preload import start_preloaded

    assert settings.checkpoint.url is not None
    if newest_spec(settings.checkpoint.url) is None:
        return []
    command = [sys.executable, "-m", "streamtrain", "up", "--check", "--model", str(settings.model)]
    command += ["--config", str(config)] if config else []
    command += [part for text in setting or [] for part in ("--set", text)]
    pipe = subprocess.PIPE
    with start_preloaded(
        preloader, command, signal.SIGTERM, stdout=pipe, stderr=pipe, text=True, errors="replace"
    ) as process:
        out, error = process.communicate()
    if process.returncode:
        said = [line for line in error.splitlines() if line.startswith(_ERROR)]
        raise ConfigError(said[-1].removeprefix(_ERROR) if said else f"the model cannot be checked: {error}")
    return list(out.splitlines()[1:])


def _describe(settings: "Settings", defaults: dict[str, str], file: Path) -> Iterator[str]:
    """Which parts are embedded and which are given, and how commands find them."""
    stream, redis = (
        f"{url} ({'embedded' if key in defaults else f'not embedded: {key} is set'})"
        for key, url in (("stream.url", settings.stream.url), ("publish.url", settings.publish.url))
    )
    yield redacted(f"stream {stream}; publishing to {redis}; data in {settings.up.data}")
    found = "commands that you run in this folder find this service; elsewhere, "
    if Path(read_settings(None, None, {}).up.data).resolve() != file.parent.resolve():
        found = "to reach this service, "
    yield f"{found}run them with --config {file.resolve()}; it contains secrets, and only you can read it"


def _log_when_ready(listen: str, log: "Log", stopped: threading.Event) -> None:
    from streamtrain.serve.client import Endpoint

    with Endpoint(f"http://{listen}") as endpoint:
        while not stopped.wait(_POLL_SECONDS):
            if endpoint.is_ready():
                url = endpoint.url
                log.write("up", f"serving predictions at {url}; console: {url}/; API: {url}/docs")
                break


class Log:
    """One log of all processes; each line begins with the name of its process. Thread-safe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours: dict[str, str] = {}
        self._lock = threading.Lock()

    def write(self, name: str, line: str) -> None:
        """Writes a line of a process."""
        with self._lock:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            self._console.print(Text.assemble((f"{name:<9}", colour), " ", line))


class JsonLog(Log):
    """One log of all processes as lines of JSON; text from processes becomes messages."""

    def __init__(self) -> None:
        super().__init__(Console(stderr=True))

    def write(self, name: str, line: str) -> None:
        """Writes a line of a process."""
        if not line.startswith("{"):
            line = json_line(name, line)
        with self._lock:
            print(line, flush=True)
