"""`up` and `demo`: the whole service on one machine, on data of one's own or on a year of flights; `scale`, `drain`."""

import io
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from streamtrain.address import redacted
from streamtrain.cli.options import (
    Config,
    Json,
    LearnedTopic,
    Listen,
    LogFormat,
    ModelSetting,
    Setting,
    parse_assignments,
    read_client_settings,
    read_settings,
    require_model,
    set_up_process_log,
    warn_without_effect,
)
from streamtrain.cli.terminal import print_json
from streamtrain.durations import parse_duration, parse_size
from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.logs import counted, json_line
from streamtrain.service.service_file import CHECKPOINTS, find_service
from streamtrain.service.start_tensorflow import load_tensorflow
from streamtrain.shutdown import stop_on_signals

if TYPE_CHECKING:
    from streamtrain.cluster.client import CoordinatorClient
    from streamtrain.service.preload import Preloader
    from streamtrain.settings.load import Settings


_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_POLL_SECONDS = 0.5
_STEP_SECONDS = 0.2
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
    from streamtrain.memory import has_room_for_standby
    from streamtrain.processes.serving import listening
    from streamtrain.service.local import check, fill_local_defaults, kept_secrets
    from streamtrain.service.preload import Preloader
    from streamtrain.service.programs import programs
    from streamtrain.service.scaling import ServiceScaler
    from streamtrain.service.supervisor import Supervisor

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
                with ServiceScaler(settings, [*defaults], supervisor, file, log.write):
                    supervisor.wait(stopped)
                log.write("up", "stopping all processes, workers first")
            finally:
                supervisor.stop()


def scale(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    ps: Annotated[
        str, typer.Option(metavar="N|ADDRESSES", help="Number of shards; or all addresses: host:port,…")
    ] = "",
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Number of workers, of a service that up runs.")
    ] = None,
    backups: Annotated[
        str, typer.Option(metavar="ADDRESSES", help="Of the backups of all shards, in order, where they have some.")
    ] = "",
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Deadline, where addresses are given.")] = "10m",
    rate: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes that each shard reads in a second at most, such as 50MB.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it would take, and change nothing.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Give up a change that is under way.")] = False,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Change the number of shards, or of workers, while the service runs; all other processes stay.

    A service that up runs starts and ends shards itself: give their number. Elsewhere, start new ones with ps --spare
    first, and give the addresses of all shards that are to hold the rows. Those that are left out hold none afterwards.
    Backups are copied anew. On a terminal, each step is printed.

    As JSON: shards, the addresses; of a dry run: shards, next, rows, bytes, bytes_each, bytes_meanwhile.
    """
    from streamtrain.ps.nodes.topology import Cluster

    settings = read_client_settings(config, setting, {})
    if cancel:
        with _coordinator(settings) as client:
            client.cancel_scale()
        return
    if not ps and workers is None:
        raise ConfigError("--ps or --workers is required: the number of shards, or the addresses of all, or of workers")
    addresses = () if not ps or ps.isdecimal() else Cluster.of_addresses(ps).ps
    if workers is not None and (addresses or dry_run):
        raise ConfigError("--workers is for a service that up runs: elsewhere, start and stop workers as you like")
    limit = parse_size(rate, "--rate") if rate else 0.0
    of_backups = Cluster.of_addresses(backups).ps if backups else ()
    if of_backups and not addresses:
        raise ConfigError("--backups goes with the addresses of all shards: --ps ADDRESSES")
    if dry_run:
        _show_estimate(settings, len(addresses) or int(ps), json=json)
        return
    with _showing_steps(settings) if sys.stderr.isatty() else nullcontext():
        if addresses:
            with _coordinator(settings) as client:
                seconds = parse_duration(timeout, "--timeout")
                shards = list(client.scale(addresses, of_backups, rate=limit, timeout=seconds).shards)
        else:
            shards = _ask_up(settings, int(ps) if ps else None, limit, workers)
    if json:
        print_json({"shards": shards})
    else:
        typer.echo(f"{counted(len(shards), 'shard')}: {', '.join(shards)}")


def drain(  # typer makes options of them; nobody calls it with positions
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Of the shard, as the cluster knows it.")],
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Deadline.")] = "10m",
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Move the rows of a shard to the others while the service runs, before its machine is taken away.

    Its process holds no shard afterwards, and can be stopped; nor does that of its backup, if it has one.

    As JSON: shards, the addresses of those that are left.
    """
    from streamtrain.settings.load import load_settings

    settings = read_client_settings(config, setting, {})
    service = find_service(Path(settings.up.data))
    with _coordinator(settings) as client, _showing_steps(settings) if sys.stderr.isatty() else nullcontext():
        before = client.slots()
        pairs = [before.pair(i) or (one,) for i, one in enumerate(before.shards)]
        left = [pair for pair in pairs if address not in pair]
        if len(left) == len(pairs):
            raise ConfigError(f"{address} is none of the shards, which are {', '.join(before.shards)}")
        if not left:
            raise ConfigError(f"{address} is the only shard: start another with ps --spare, and give it to scale --ps")
        if service is not None and service.is_running and address in load_settings(service.path).ps.addresses:
            raise ConfigError(f"{address} is a shard of up, which starts and ends them: scale --ps {len(left)}")
        firsts, seconds = [one for one, *_ in left], [one for _, *others in left for one in others]
        shards = client.scale(firsts, seconds, timeout=parse_duration(timeout, "--timeout")).shards
    if json:
        print_json({"shards": shards})
    else:
        staying = f"{counted(len(shards), 'shard')}: {', '.join(shards)}"
        typer.echo(f"{address} holds no rows any more and can be stopped; {staying}")


def _ask_up(settings: "Settings", shards: int | None, rate: float, workers: int | None) -> list[str]:
    from streamtrain.service.scaling import ask

    service = find_service(Path(settings.up.data))
    if service is None or not service.is_running:
        raise ConfigError(
            f"no service of up runs in {settings.up.data}: set --set up.data=…, or give the addresses of all shards"
        )
    return ask(service, shards, rate, workers=workers)


def _coordinator(settings: "Settings") -> "CoordinatorClient":
    from streamtrain.cluster.client import CoordinatorClient

    if settings.coordinator.address is None:
        raise ConfigError("coordinator.address is not set: it is the coordinator that changes the number of shards")
    return CoordinatorClient.from_settings(settings)


def _show_estimate(settings: "Settings", count: int, *, json: bool) -> None:
    from streamtrain.cluster.scaling import MOST_SHARDS, Estimate

    if not 1 <= count <= MOST_SHARDS:
        raise ConfigError(f"--ps must be 1 to {MOST_SHARDS} shards, not {count}")
    with _coordinator(settings) as client:
        found = Estimate.of(client.status(), count)
    if json:
        print_json(found._asdict())
        return
    megabytes = {name: f"{of / 1e6:,.1f} MB" for name, of in found._asdict().items()}
    typer.echo(f"{found.shards} shards hold {found.rows:,} rows, {megabytes['bytes']}")
    typer.echo(f"{count} shards would hold {found.rows // count:,} rows each, {megabytes['bytes_each']}")
    typer.echo(f"until they do, a shard that stays needs up to {megabytes['bytes_meanwhile']}")


@contextmanager
def _showing_steps(settings: "Settings") -> Iterator[None]:
    """Prints the steps of a change of shards, until the block ends."""
    from streamtrain.cluster.scaling import progress_of

    ended = threading.Event()

    def show() -> None:
        shown = None
        with suppress(ConfigError), _coordinator(settings) as client:
            while not ended.wait(_STEP_SECONDS):
                with suppress(StreamtrainError):
                    scaling = client.status().get("scaling")
                    if scaling and (said := progress_of(scaling)) != shown:
                        shown = said
                        typer.echo(said, err=True)

    thread = threading.Thread(target=show, name="steps", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _check_model(settings: "Settings") -> None:
    """Builds the model, and compares it with the newest checkpoint.

    Raises:
        ConfigError: it cannot be built, or does not fit.
    """
    from streamtrain.model.loader import load_model
    from streamtrain.model.spec import Spec
    from streamtrain.service.local import newest_spec

    url = settings.checkpoint.url or str(Path(settings.up.data, CHECKPOINTS).resolve())
    location = require_model(settings)
    load_tensorflow(settings.worker.threads)
    made, learned = load_model(location), newest_spec(url)
    if learned is None:
        Spec.of(made)
        typer.echo(f"the model can be built; there is no checkpoint at {redacted(url)} yet, so a new run will begin")
        return
    held, where = learned
    spec = Spec.of(made.with_defaults_of(held))
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
    from streamtrain.service.local import newest_spec
    from streamtrain.service.preload import start_preloaded

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
    from streamtrain.memory import has_room_for_standby
    from streamtrain.processes.serving import listening
    from streamtrain.service.local import check, kept_secrets
    from streamtrain.service.programs import programs
    from streamtrain.service.supervisor import Supervisor

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
    from streamtrain.service.local import fill_local_defaults

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
