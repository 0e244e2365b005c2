"""The command that shows how a cluster is: `status`."""

import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from streamtrain.commands.options import Addresses, Config, Json, Setting, read_settings
from streamtrain.commands.tables import WIDE, new_table, shown_figures, shown_time
from streamtrain.console import print_json, stopped_by_signals
from streamtrain.errors import StreamtrainError

if TYPE_CHECKING:
    from streamtrain.cluster.overview import Overview

_EVERY = 1.0  # seconds between two looks


def status(
    once: Annotated[bool, typer.Option("--once", help="Show it once, also on a terminal.")] = False,
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Show how the cluster is: shards, workers, servers, figures, lag, checkpoint and publication.

    On a terminal every second, until Ctrl-C. It asks the coordinator, or where there is none the shards, which know
    less. As JSON: what docs/serving.md lists of a cluster.
    """
    from streamtrain.cluster.overview import Overview

    settings = read_settings(config, setting, {"ps.addresses": addresses})
    with Overview.of(settings, os.environ.get("TF_CONFIG")) as overview:
        if json:
            print_json(overview.read())
        elif once or not sys.stdout.isatty():
            found = overview.read()
            width = None if sys.stdout.isatty() else WIDE
            Console(width=width, markup=False, highlight=False).print(shown(found, overview.note))
        else:
            _watch(overview)


def _watch(overview: "Overview") -> None:
    stopped = stopped_by_signals()
    console = Console(markup=False, highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                found: RenderableType = shown(overview.read(), overview.note)
            except StreamtrainError as exc:  # which may be over in a moment
                found = Text(f"{shown_time(time.time())}  {exc}", "red")
            live.update(found, refresh=True)
            if stopped.wait(_EVERY):
                return


def shown(found: dict[str, Any], note: str) -> Group:
    """A status as `Overview.read` gives it, for people."""
    parts: list[RenderableType] = [Text(note, "yellow")] if note else []
    parts += [Text(line) for line in _lines(found)]
    if found["held"]:
        parts.append(Text(f"publications are held back: {found['held']}", "yellow"))
    return Group(*parts, *_tables(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    delay = None if found["watermark"] is None else max(0.0, found["time"] - found["watermark"])
    samples = f"{_count(found['samples'])}, {_count(found['samples_per_s'])} a second"
    yield (
        f"{shown_time(found['time'])} UTC  samples {samples}"
        f"  lag {_count(found['lag'])}  behind the events {'-' if delay is None else f'{delay:,.1f} s'}"
    )
    taken, published = found["checkpoint"], found["publication"]
    checkpoint = "-" if taken is None else f"epoch {taken['epoch']}{_ago(found, taken['at'])}"
    publication = "-" if published is None else f"{published['number']}{_ago(found, published['published'])}"
    letters = found["dead_letters"]
    told = "-" if letters is None else ", ".join(f"{why} {n:,}" for why, n in sorted(letters.items())) or "none"
    yield f"checkpoint {checkpoint}  publication {publication}  dead letters {told}"
    if figures := shown_figures(found["figures"] or {}):
        yield figures


def _ago(found: dict[str, Any], at: float | None) -> str:
    return "" if at is None else f", {max(0.0, found['time'] - at):,.0f} s ago"


def _tables(found: dict[str, Any]) -> Iterator[RenderableType]:
    shards = new_table("shards", ("shard", "address", "state", "samples", "rows", "MB", "epoch"), right=_RIGHT)
    for one in found["shards"]:
        rows = "\n".join(f"{name} {count:,}" for name, count in one.get("rows", {}).items())
        megabytes = f"{one['bytes'] / 1e6:,.1f}" if "bytes" in one else "-"
        samples, epoch = _count(one.get("samples")), _count(one.get("epoch"))
        shards.add_row(str(one["index"]), one["address"], _state(one), samples, rows or "-", megabytes, epoch)
    yield shards
    workers = new_table("workers", ("worker", "partitions", "lag", "samples/s", "seen, s ago"), right=_RIGHT)
    for one in found["workers"]:
        partitions = "-" if one["partitions"] is None else ", ".join(map(str, one["partitions"]))
        seen = _seconds(one["seen"])
        workers.add_row(one["name"], partitions, _count(one["lag"]), _count(one["samples_per_s"]), seen)
    yield workers if found["workers"] else Text("no workers")
    if found["servers"]:
        columns = ("server", "address", "version", "publication", "freshness, ms", "seen, s ago")
        servers = new_table("servers", columns, right=_RIGHT)
        for one in found["servers"]:
            fresh, seen = _count(one.get("freshness_ms")), _seconds(one.get("seen"))
            version, number = str(one.get("version") or "-"), _count(one.get("publication"))
            servers.add_row(one["name"], str(one.get("address") or "-"), version, number, fresh, seen)
        yield servers


def _state(shard: dict[str, Any]) -> Text:
    state, backup = shard["state"], shard.get("backup_in_step")
    is_well = state == "ready" and backup is not False
    style = "" if is_well else "red" if state == "away" else "yellow"
    return Text(state if backup is None else f"{state}, {'backup in step' if backup else 'no backup'}", style)


_RIGHT = ("shard", "samples", "MB", "epoch", "lag", "samples/s", "seen, s ago", "publication", "freshness, ms")


def _count(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else "-"


def _seconds(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, int | float) else "-"
