"""The command that shows the whole service on real data: `demo`."""

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

from streamtrain.commands.options import LogFormat, Setting, set_up_log, values_of
from streamtrain.console import print_json, stopped_by_signals
from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.logs import line_of

if TYPE_CHECKING:
    from streamtrain.config import Settings

NAME = "flights"

_LAST_LINES = 20


def demo(
    for_: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", help="End so long after the first prediction.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Flights per second.")] = 2000.0,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run the whole service on a year of real flights: will each arrive more than 15 minutes late?

    As `up` does, in a temporary folder, with Kafka where its jars are on this machine, else on the embedded stream; no
    settings but --set count. Each flight happens when it is written to the stream. A visitor asks for predictions
    meanwhile; a version is made, promoted and rolled back. Ends by Ctrl-C, or by --for, not before it was rolled back.

    Ends with a line of JSON: samples, that were learned; samples_per_s, from the first flight on; auc, of the latest
    100,000 samples of each worker, each predicted before it was learned; freshness_ms_p99, from writing a flight to a
    prediction of the head that has learned it, as asked for by x-min-offset for about one flight a second; version,
    that was made.
    """
    from streamtrain.cluster.service import check, programs
    from streamtrain.cluster.sockets import listening
    from streamtrain.cluster.supervisor import Supervisor
    from streamtrain.demo.show import Show

    setting = [*(setting or []), *([f"log.format={log_format}"] if log_format else [])]
    with ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="streamtrain-demo-", ignore_cleanup_errors=True)
        settings, given, completed = _settings(stack.enter_context(folder), setting)
        set_up_log(settings, "demo")
        if not rate > 0:
            raise ConfigError(f"--rate must be above 0 flights per second, not {rate:g}")
        is_json = settings.log.format == "json"
        console = Console(file=_JsonLines(), soft_wrap=True) if is_json else Console(stderr=True, highlight=False)
        check(settings, completed)
        sockets = stack.enter_context(listening(settings.serve.listen))
        stopped = stopped_by_signals()
        log = LogFile(is_json=is_json)
        inherited = {name: of for name, of in os.environ.items() if not name.startswith("STREAMTRAIN_")}
        options = ["--config", os.devnull, *(part for one in setting for part in ("--set", one))]
        supervisor = Supervisor(programs(settings, given, options, inherited, sockets), log.write)
        console.print(f"A year of flights out of New York; log of all processes: {log.path}")
        try:
            supervisor.start()
            figures = Show(settings, console, stopped, supervisor.check).run(rate, for_)
        except StreamtrainError:
            console.print(f"The log ends:\n{log.end()}", markup=False)
            raise
        finally:
            console.print("ends all, workers first")
            supervisor.stop()
    print_json(figures)


def _settings(folder: str, setting: list[str]) -> tuple["Settings", dict[str, str], dict[str, str]]:
    """The settings; all values but those of --set, by key; and of these what was left open."""
    from streamtrain.address import free_port
    from streamtrain.cluster.service import completed
    from streamtrain.embedded.jars import is_resolved

    chosen = values_of(setting)
    if fixed := {"model", "publish.model"} & chosen.keys():
        raise ConfigError(f"{min(fixed)} is not for the demo to set: `streamtrain up` runs models of your own")
    flights = Path(__file__).parents[1] / "demo" / "flights.py"
    own = {
        "model": f"{flights}:model",
        "publish.model": NAME,
        "stream.topic": f"{NAME}-{secrets.token_hex(4)}",
        "worker.batch_size": "64",  # of two workers that learn a mean, twice what its rate is for: see docs/up.md
        "checkpoint.every": "10s",
        "serve.listen": f"127.0.0.1:{free_port(8501)}",
        "serve.admin_token": secrets.token_urlsafe(12),
        "serve.processes": "2",
        "up.data": folder,
    }
    own = {key: value for key, value in own.items() if key not in chosen}

    def read(more: dict[str, str]) -> "Settings":
        from streamtrain.config import load_settings

        return load_settings(Path(os.devnull), {}, chosen | own | more)

    opened = completed(read({}), kafka=is_resolved())
    return read(opened), own | opened, opened


class LogFile:
    """What all processes say, in a file that stays. Thread-safe.

    Args:
        is_json: whether in lines of JSON, as those of the processes are then.
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
            line = line_of(name, line)
        with self._lock:
            self._file.write(f"{line}\n")

    def end(self) -> str:
        """Its last lines."""
        return "\n".join(Path(self.path).read_text().splitlines()[-_LAST_LINES:])


class _JsonLines(io.StringIO):
    """What is shown to people, as lines of JSON on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                sys.stderr.write(f"{line_of('demo', line)}\n")
        return len(text)
