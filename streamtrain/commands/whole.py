"""The command that runs the whole service on one machine: `up`."""

import os
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from streamtrain.commands.options import Config, LogFormat, Setting, read_settings, set_up_log
from streamtrain.console import stopped_by_signals
from streamtrain.errors import ConfigError
from streamtrain.logs import line_of

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_ASK_SECONDS = 0.5


def up(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    model: Annotated[str | None, typer.Option(help="The model: path/to/file.py:name; default: setting model.")] = None,
    topic: Annotated[str | None, typer.Option(help="What is learned; default: setting stream.topic.")] = None,
    listen: Annotated[str | None, typer.Option(help="Address of the HTTP endpoint; default 127.0.0.1:8501.")] = None,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run the whole service on this machine: shards, workers, serving, and Kafka and Redis unless they are given.

    What ends is started again. Ctrl-C lets workers finish what is under way, then ends all.
    """
    from streamtrain.cluster.service import check, completed, programs
    from streamtrain.cluster.sockets import listening
    from streamtrain.cluster.supervisor import Supervisor
    from streamtrain.embedded.jars import is_resolved
    from streamtrain.model.load import locate_model

    overrides: dict[str, object] = {
        "model": model,
        "stream.topic": topic,
        "serve.listen": listen,
        "log.format": log_format,
    }
    settings = read_settings(config, setting, overrides)
    set_up_log(settings, "up")
    if settings.model is None:
        raise ConfigError("no model is named: give --model path/to/file.py:name, or set model")
    locate_model(settings.model)
    given = completed(settings, kafka=is_resolved())
    settings = read_settings(config, setting, overrides | given)
    check(settings, given)

    said = {key: str(value) for key, value in overrides.items() if value is not None} | given
    stopped = stopped_by_signals()
    log = JsonLog() if settings.log.format == "json" else Log(Console(highlight=False, soft_wrap=True))
    with listening(settings.serve.listen) as sockets:
        options = _options(config, setting)
        supervisor = Supervisor(programs(settings, said, options, os.environ, sockets), log.write)
        places = f"stream {settings.stream.url}, publishing to {settings.publish.url}, data in {settings.up.data}"
        log.write("up", places)
        supervisor.start()
        threading.Thread(target=_tell_when_ready, args=(settings.serve.listen, log, stopped), daemon=True).start()
        try:
            supervisor.wait(stopped)
            log.write("up", "ends all, workers first")
        finally:
            supervisor.stop()


def _options(config: Path | None, setting: list[str] | None) -> list[str]:
    return [*(["--config", str(config)] if config else []), *(part for one in setting or [] for part in ("--set", one))]


def _tell_when_ready(listen: str, log: "Log", stopped: threading.Event) -> None:
    from streamtrain.demo.endpoint import Endpoint

    url, endpoint = f"http://{listen}", Endpoint(listen, "model")
    while not stopped.wait(_ASK_SECONDS):
        if endpoint.is_ready():
            log.write("up", f"predictions are served at {url}; its console: {url}/; its API: {url}/docs")
            break
    endpoint.close()


class Log:
    """One log of all processes, each line behind the name of its process. Thread-safe."""

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
    """The same as lines of JSON: those of processes that are objects already as they are, others as messages."""

    def __init__(self) -> None:
        super().__init__(Console(stderr=True))

    def write(self, name: str, line: str) -> None:
        """Writes a line of a process."""
        if not line.startswith("{"):
            line = line_of(name, line)
        with self._lock:
            print(line, flush=True)
