"""`demo`: the whole service on real data."""

import io
import os
import secrets
import sys
import tempfile
import threading
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from streamtrain.cli.options import LogFormat, Setting, parse_assignments, set_up_process_log
from streamtrain.cli.terminal import print_json
from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.logs import json_line
from streamtrain.shutdown import stop_on_signals

if TYPE_CHECKING:
    from streamtrain.settings.load import Settings

NAME = "flights"

_LAST_LINES = 20


def demo(
    for_: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", help="Stop this long after the first prediction.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Flights per second.")] = 2000.0,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run the whole service on a year of real flights: will a flight arrive more than 15 minutes late?

    Works like `up`, in a temporary folder, on Kafka if its jars are on this machine, else on the embedded stream. Of
    settings, only --set is used. Flights happen when they are written to the stream, while a simulated client requests
    predictions; a version is made, promoted and rolled back. Stops on Ctrl-C or --for, but not before the rollback.

    Ends with a line of JSON: samples learned; samples_per_s since the first flight; auc of the latest 100,000 samples
    of each worker, predicted before they were learned; freshness_ms_p99, from writing a flight to a prediction by a
    head that has learned it (x-min-offset), for about one flight a second; version, the number of the version made.
    """
    from streamtrain.demo.show import Show
    from streamtrain.demo.stream import find_flights
    from streamtrain.processes.local import check, kept_secrets, programs
    from streamtrain.processes.memory import has_room_for_standby
    from streamtrain.processes.serving import listening
    from streamtrain.processes.supervisor import Supervisor

    setting = [*(setting or []), *([f"log.format={log_format}"] if log_format else [])]
    with ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="streamtrain-demo-", ignore_cleanup_errors=True)
        settings, given, defaults = _settings(stack.enter_context(folder), setting)
        set_up_process_log(settings, "demo")
        find_flights()
        if not rate > 0:
            raise ConfigError(f"--rate must be above 0 flights per second, not {rate:g}")
        is_json = settings.log.format == "json"
        console = Console(file=_JsonLines(), soft_wrap=True) if is_json else Console(stderr=True, highlight=False)
        check(settings, defaults)
        sockets = stack.enter_context(listening(settings.serve))
        stopped = stop_on_signals()
        log = LogFile(is_json=is_json)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STREAMTRAIN_")}
        inherited["TMPDIR"] = folder.name  # TensorFlow leaves files there if its process is killed
        file = stack.enter_context(kept_secrets(settings, defaults))
        kept = [text for text in setting if text.partition("=")[0] not in defaults]
        options = ["--config", os.devnull, *(part for text in kept for part in ("--set", text))]
        processes = programs(settings, given, options, inherited, sockets)
        supervisor = Supervisor(processes, log.write, has_room=has_room_for_standby)
        console.print(f"streaming a year of flights out of New York; log of all processes: {log.path}")
        console.print(f"run commands with its settings: streamtrain status --config {file}", markup=False)
        try:
            supervisor.start()
            figures = Show(settings, console, stopped, supervisor.check).run(rate, for_)
        except StreamtrainError:
            console.print(f"the last lines of the log:\n{log.end()}", markup=False)
            raise
        finally:
            console.print("stopping all processes, workers first")
            supervisor.stop()
    print_json(figures)


def _settings(folder: str, setting: list[str]) -> tuple["Settings", dict[str, str], dict[str, str]]:
    """The settings; by key, the values that --set does not give; and those among them that are local defaults."""
    from streamtrain.address import reserve_port
    from streamtrain.embedded.jars import find_jars
    from streamtrain.processes.local import fill_local_defaults

    chosen = parse_assignments(setting)
    if fixed := {"model", "publish.model"} & chosen.keys():
        raise ConfigError(f"the demo does not take {min(fixed)}: run your own models with streamtrain up")
    flights = Path(__file__).parents[1] / "demo" / "flights.py"
    own = {
        "model": f"{flights}:model",
        "publish.model": NAME,
        "stream.topic": f"{NAME}-{secrets.token_hex(4)}",
        "checkpoint.every": "10s",
        "serve.listen": f"127.0.0.1:{reserve_port(8501)}",
        "serve.admin_token": secrets.token_urlsafe(12),
        "serve.processes": "2",
        "up.data": folder,
    }
    own = {key: value for key, value in own.items() if key not in chosen}

    def read(more: dict[str, str]) -> "Settings":
        from streamtrain.settings.load import load_settings

        return load_settings(Path(os.devnull), {}, chosen | own | more)

    settings = read({})
    defaults = fill_local_defaults(settings, kafka=find_jars(settings.up.kafka) is not None)
    return read(defaults), own | defaults, defaults


class LogFile:
    """The log of all processes, in a file that is kept. Thread-safe.

    Args:
        is_json: whether its lines are JSON, like those of the processes.
    """

    def __init__(self, *, is_json: bool = False) -> None:
        self._is_json = is_json
        number, self.path = tempfile.mkstemp(prefix="streamtrain-demo-", suffix=".log")
        self._file = os.fdopen(number, "w", buffering=1)
        self._lock = threading.Lock()

    def write(self, name: str, line: str) -> None:
        """Writes a line of a process."""
        if not self._is_json:
            line = f"{datetime.now():%H:%M:%S} {name:<11} {line}"
        elif not line.startswith("{"):
            line = json_line(name, line)
        with self._lock:
            self._file.write(f"{line}\n")

    def end(self) -> str:
        """Its last lines."""
        return "\n".join(Path(self.path).read_text().splitlines()[-_LAST_LINES:])


class _JsonLines(io.StringIO):
    """Output for people, as lines of JSON on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._partial = ""

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            if line.strip():
                sys.stderr.write(f"{json_line('demo', line)}\n")
        return len(text)
