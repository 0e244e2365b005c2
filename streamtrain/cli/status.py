"""What the coordinator is asked for: `status`, `set` (learning rates) and `forget` (ids)."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from streamtrain.cli.options import (
    NO_CLUSTER,
    Addresses,
    Config,
    Json,
    Setting,
    Who,
    Why,
    read_client_settings,
    resolve_actor,
)
from streamtrain.cli.terminal import (
    format_count,
    format_figures,
    format_span,
    format_time,
    list_rows,
    new_table,
    print_json,
    show,
)
from streamtrain.durations import parse_duration
from streamtrain.errors import ConfigError, ShardRefused, StreamtrainError
from streamtrain.logs import counted
from streamtrain.shutdown import stop_on_signals

if TYPE_CHECKING:
    from streamtrain.cluster.client import CoordinatorClient
    from streamtrain.cluster.status_reader import StatusReader
    from streamtrain.settings.groups import Settings

_EVERY = 1.0  # seconds between updates
_DEFAULT = "default"
_SET_SECONDS = 600.0  # for the checkpoint that has the rates
_RATE = ".rate"


def status(
    once: Annotated[bool, typer.Option("--once", help="Print the status once, also on a terminal.")] = False,
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Show the status of the cluster: shards, workers, servers, quality, lag, checkpoint and publication.

    On a terminal it is updated every second, until Ctrl-C. While the coordinator does not answer, the shards are asked,
    which know less. As JSON: the fields of a cluster's status, see docs/serving.md.
    """
    from streamtrain.cluster.status_reader import StatusReader

    settings = read_client_settings(config, setting, {"ps.addresses": addresses})
    with StatusReader.from_settings(settings, os.environ.get("TF_CONFIG")) as reader:
        if json:
            print_json(reader.read())
        elif once or not sys.stdout.isatty():
            show(render_status(reader.read(), reader.note))
        else:
            _watch(reader)


def _watch(reader: "StatusReader") -> None:
    stopped = stop_on_signals()
    console = Console(markup=False, highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                status: RenderableType = render_status(reader.read(), reader.note)
            except StreamtrainError as exc:  # may be temporary
                status = Text(f"{format_time(time.time())}  {exc}", "red")
            live.update(status, refresh=True)
            if stopped.wait(_EVERY):
                return


def render_status(status: dict[str, Any], note: str) -> Group:
    """A status from `StatusReader.read`, for people."""
    parts: list[RenderableType] = [Text(note, "yellow")] if note else []
    parts += [Text(line) for line in _lines(status)]
    if status["held"]:
        parts.append(Text(f"publications held back: {status['held']}", "yellow"))
    return Group(*parts, *_tables(status))


def _lines(status: dict[str, Any]) -> Iterator[str]:
    samples = f"{format_count(status['samples'])}, {format_count(status['samples_per_s'])}/s"
    yield (
        f"{format_time(status['time'])} UTC  samples {samples}"
        f"  lag {format_count(status['lag'])}  event delay {_format_delay(status, 'watermark')}"
        f"  log delay {_format_delay(status, 'log_time')}"
    )
    taken, published = status["checkpoint"], status["publication"]
    checkpoint = "-" if taken is None else f"epoch {taken['epoch']}{_ago(status, taken['at'])}"
    publication = "-" if published is None else f"{published['number']}{_ago(status, published['published'])}"
    letters = status["dead_letters"]
    counts = ", ".join(f"{reason} {count:,}" for reason, count in sorted((letters or {}).items())) or "none"
    dead_letters = "-" if letters is None else counts
    yield f"checkpoint {checkpoint}  publication {publication}  dead letters {dead_letters}"
    rates = status.get("rates") or {}
    changed = [
        f"{name}.rate {of['rate']:g} ({of['initial']:g})" for name, of in rates.items() if of["rate"] != of["initial"]
    ]
    if changed:
        yield f"set, instead of the model file's: {', '.join(changed)}"
    if figures := format_figures(status["figures"] or {}):
        yield figures
    yield from _proposed(status)
    if scaling := status.get("scaling"):
        span = format_span(status["time"] - scaling["since"])
        rows = f" ({scaling['rows']:,} of {scaling['total']:,})" if scaling["total"] else ""
        shards = len(status["shards"])
        become = "becomes" if shards == 1 else "become"
        yield f"{counted(shards, 'shard')} {become} {scaling['shards']}: {scaling['step']}{rows}, for {span}"


def _proposed(status: dict[str, Any]) -> Iterator[str]:
    proposal = status.get("proposal")
    if not proposal or not proposal["why"]:
        return
    now = {"shards": len(status["shards"]), "workers": len(status["workers"])}
    changed = [(counted(proposal[name], name.removesuffix("s")), n) for name, n in now.items() if proposal[name] != n]
    better = [f"{many} instead of {before}" for many, before in changed]
    yield f"proposed: {' and '.join(better) or 'no other numbers'}: {'; '.join(proposal['why'])}"


def _format_delay(status: dict[str, Any], since: str) -> str:
    at = status.get(since)
    return "-" if at is None else format_span(status["time"] - at)


def _ago(status: dict[str, Any], at: float | None) -> str:
    return "" if at is None else f", {format_span(status['time'] - at)} ago"


def _tables(status: dict[str, Any]) -> Iterator[RenderableType]:
    shards = new_table("shards", ("shard", "address", "state", "samples", "rows", "MB", "epoch"), right=_RIGHT)
    for shard in status["shards"]:
        rows, megabytes = list_rows(shard.get("rows", {})), f"{shard['bytes'] / 1e6:,.1f}" if "bytes" in shard else "-"
        samples, epoch = format_count(shard.get("samples")), format_count(shard.get("epoch"))
        shards.add_row(str(shard["index"]), shard["address"], _state(shard), samples, rows, megabytes, epoch)
    yield shards
    workers = new_table(
        "workers",
        ("worker", "partitions", "lag", "samples/s", "samples/batch", "waits for", "last seen, s"),
        right=_RIGHT,
    )
    for worker in status["workers"]:
        partitions = Text("-" if worker["partitions"] is None else ", ".join(map(str, worker["partitions"])))
        if worker.get("stalled"):
            partitions.append(f"; {', '.join(map(str, worker['stalled']))} stands still", "red")
        seen = _seconds(worker["seen"])
        counts = (format_count(worker[name]) for name in ("lag", "samples_per_s", "samples_per_batch"))
        waits = [(worker.get(f"waits_for_{what}"), what) for what in ("samples", "shards")]
        waiting = ", ".join(f"{what} {share:.0%}" for share, what in waits if share is not None) or "-"
        workers.add_row(worker["name"], partitions, *counts, waiting, seen)
    yield workers if status["workers"] else Text("no workers")
    if status["servers"]:
        columns = ("server", "address", "version", "publication", "freshness", "last seen, s")
        servers = new_table("servers", columns, right=_RIGHT)
        for server in status["servers"]:
            fresh, seen = format_span(server.get("freshness_ms"), 1e-3), _seconds(server.get("seen"))
            version, number = str(server.get("version") or "-"), format_count(server.get("publication"))
            servers.add_row(server["name"], str(server.get("address") or "-"), version, number, fresh, seen)
        yield servers


def _state(shard: dict[str, Any]) -> Text:
    state, backup = shard["state"], shard.get("backup_in_step")
    is_healthy = state == "ready" and backup is not False
    style = "" if is_healthy else "red" if state == "away" else "yellow"
    return Text(state if backup is None else f"{state}, {'backup in step' if backup else 'no backup'}", style)


_RIGHT = ("shard", "samples", "MB", "epoch", "lag", "samples/s", "last seen, s", "publication", "freshness")


def _seconds(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, int | float) else "-"


def set_(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    rates: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME.rate=VALUE...",
            help="embedding_optimizer.rate or dense_optimizer.rate, and a number, or default: as the run began. "
            "Without any, the rates are shown.",
        ),
    ] = None,
    why: Why = "",
    who: Who = None,
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Set learning rates of a running cluster, from the next batches on and without a restart.

    They stay set across restarts of all processes: a checkpoint with them is taken at once. As JSON: rates, by name
    with rate, was and initial, and epoch.
    """
    changes = dict(map(_parse_rate, rates or []))
    if len(changes) < len(rates or []):
        raise ConfigError("every rate has one value")
    settings = read_client_settings(config, setting, {"ps.addresses": addresses})
    with _open_coordinator(settings) as client:
        try:
            found = client.set_rates(changes, resolve_actor(who), why, timeout=_SET_SECONDS)
        except ShardRefused as exc:
            if exc.reason == "malformed":
                raise ConfigError(str(exc)) from exc
            raise
    if json:
        print_json(found)
    else:
        for line in describe_rates(found, is_changed=bool(changes)):
            typer.echo(line)


@contextmanager
def _open_coordinator(settings: "Settings") -> Iterator["CoordinatorClient"]:
    tf_config = os.environ.get("TF_CONFIG")
    if settings.coordinator.address is None and not settings.ps.addresses and not tf_config:
        raise ConfigError(NO_CLUSTER)
    from streamtrain.cluster.client import CoordinatorClient

    with CoordinatorClient.from_settings(settings, tf_config) as client:
        yield client


def _parse_rate(text: str) -> tuple[str, float | None]:
    name, _, value = text.partition("=")
    try:
        rate = None if value == _DEFAULT else float(value)
    except ValueError:
        rate = 0.0
    if not name.endswith(_RATE) or (rate is not None and not rate > 0):
        raise ConfigError(
            f"a rate is NAME.rate=VALUE with a number > 0, such as dense_optimizer.rate=0.001, not {text!r}"
        )
    return name.removesuffix(_RATE), rate


def describe_rates(found: dict[str, Any], *, is_changed: bool) -> list[str]:
    """Learning rates that a cluster has told, for people."""
    lines = []
    for name, of in found["rates"].items():
        was = f", was {of['was']:g}" if of["was"] != of["rate"] else ""
        initial = f" (the run began with {of['initial']:g})" if of["initial"] != of["rate"] else ""
        lines.append(f"{name}.rate is {of['rate']:g}{was}{initial}")
    if is_changed and found["epoch"] is None:
        lines.append("no checkpoint has the rates yet: should shard 0 restart before the next one, they are lost")
    return lines


def forget(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="FEATURE=ID...", help="Whose rows are deleted, such as user=u1.", show_default=False),
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="More of them, one a line; -: standard input.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Deadline; it takes a full checkpoint.")] = "1h",
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Delete the rows of ids, and of crosses with them, and print a receipt that says what may still hold something.

    Shards and backups, Redis' head and servers that follow it, and a new full checkpoint are without them afterwards.
    Training and serving continue. May be repeated. The exit code is 1 if rows are there again at the end, as samples of
    these ids still come. As JSON: time, ids, rows, again, checkpoint, publication, servers, remains.
    """
    given = [*(ids or []), *(_read_lines(file) if file else [])]
    if not given:
        raise ConfigError("give ids to forget, such as user=u1, or --file")
    settings, seconds = (
        read_client_settings(config, setting, {"ps.addresses": addresses}),
        parse_duration(timeout, "--timeout"),
    )
    with _open_coordinator(settings) as client:
        try:
            receipt = client.forget([_parse_id(one) for one in given], timeout=seconds)
        except ShardRefused as exc:
            raise ConfigError(str(exc)) from exc
    if json:
        print_json(receipt)
    else:
        for line in describe_receipt(receipt):
            typer.echo(line)
    if any(receipt["again"].values()):
        raise typer.Exit(1)


def _read_lines(file: str) -> list[str]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file} cannot be read: {exc}") from exc
    return [line for line in text.splitlines() if line]


def _parse_id(text: str) -> tuple[str, str]:
    feature, separator, one = text.partition("=")
    if not feature or not separator:
        raise ConfigError(f"{text!r} is no FEATURE=ID, such as user=u1")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{text!r} is not UTF-8, as all ids are") from exc
    return feature, one


def describe_receipt(receipt: dict[str, Any]) -> list[str]:
    """A receipt, for people."""
    gone = ", ".join(f"{n:,} of table {table}" for table, n in receipt["rows"].items() if n)
    ids = f"{len(receipt['ids']):,} ids" if len(receipt["ids"]) > 1 else receipt["ids"][0]
    lines = [f"{ids}: {gone or 'no'} rows deleted from shards and their backups"]
    if receipt["publication"] is not None:
        lines.append(f"Redis and servers that follow it: without them from publication {receipt['publication']:,} on")
    behind = [name for name, has in receipt["servers"].items() if has is None or has < receipt["publication"]]
    lines += [f"server {name} does not have that publication yet" for name in behind]
    if receipt["checkpoint"] is not None:
        lines.append(f"checkpoints: without them from epoch {receipt['checkpoint']:,} on")
    lines += [f"left: {one['where']}: {one['what']}, until {one['until']}" for one in receipt["remains"]]
    back = ", ".join(f"{n:,} of table {table}" for table, n in receipt["again"].items() if n)
    if back:
        lines.append(
            f"there again: {back}; samples were learned meanwhile, or a shard has restarted: run the command again"
        )
    return lines
