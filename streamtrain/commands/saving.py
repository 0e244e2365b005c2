"""Commands about checkpoints: `checkpoint` and `restore`."""

import os
import re
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from streamtrain.clock import parse_duration
from streamtrain.commands.options import Addresses, Config, Json, Setting, read_settings
from streamtrain.commands.tables import new_table, show
from streamtrain.console import print_json
from streamtrain.errors import ConfigError

if TYPE_CHECKING:
    from streamtrain.cluster.restoring import Listed, Restored

_NUMBER = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)


def checkpoint(
    full: Annotated[bool, typer.Option("--full", help="All rows, also where those that changed would do.")] = False,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long it may take.")] = "10m",
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Take a checkpoint now, and wait for it. It needs a coordinator.

    As JSON: epoch, kind (full or delta), aligned, pause_ms (for which pushes were held back), seconds.
    """
    settings, seconds = read_settings(config, setting, {}), parse_duration(timeout, "--timeout")
    if settings.coordinator.address is None:
        raise ConfigError(
            "coordinator.address is not set: only a coordinator takes checkpoints on demand (streamtrain coordinator); "
            "without one shard 0 takes them every checkpoint.every"
        )
    from streamtrain.cluster.remote import take_checkpoint

    taken = take_checkpoint(settings.coordinator.address, settings.security, full=full, timeout=seconds)
    if json:
        print_json(dict(vars(taken)))
    else:
        aligned = "" if taken.aligned else "; its shards are at different clocks"
        typer.echo(
            f"epoch {taken.epoch}, {taken.kind}: pushes were held back for {taken.pause_ms:.1f} ms, "
            f"all of it took {taken.seconds:.2f} s{aligned}"
        )


def restore(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    epoch: Annotated[
        str | None, typer.Argument(metavar="EPOCH|newest", help="An epoch's number, or the newest good one.")
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show the epochs that are there instead; reads all their files.")
    ] = False,
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Have a stopped cluster start from an epoch: later ones are set aside, in a folder beside it.

    Refused while a shard answers. As JSON: epoch, moved (epochs that were set aside), aside (where they are, or null).
    With --list: url, and epochs, each with epoch, kind, base, rows, bytes and fault ("": it is good).
    """
    from streamtrain.cluster import restoring

    settings = read_settings(config, setting, {"ps.addresses": addresses})
    if show_list == (epoch is not None):
        raise ConfigError("say which EPOCH to go back to, newest, or --list to see those that are there")
    if show_list:
        epochs = restoring.epochs_of(settings)
        found = restoring.listed(epochs)
        if json:
            print_json({"url": epochs.url, "epochs": [one._asdict() for one in found]})
        else:
            show(_table(epochs.url, found))
        return
    if epoch != "newest" and not _NUMBER.fullmatch(epoch or ""):
        raise ConfigError(f"EPOCH is a number from 1, or newest, not {epoch!r}")
    wanted = None if epoch is None or epoch == "newest" else int(epoch)
    restored = restoring.restore(settings, os.environ.get("TF_CONFIG"), wanted)
    if json:
        print_json(restored._asdict())
    else:
        typer.echo(_told(restored))


def _told(restored: "Restored") -> str:
    if restored.aside is None:
        return f"shards start from epoch {restored.epoch}; there is no later one"
    moved = ", ".join(map(str, restored.moved))
    return (
        f"shards start from epoch {restored.epoch}; set aside: {moved}, in {restored.aside}; to undo it, move what is "
        "in there back before they start"
    )


def _table(url: str, epochs: "list[Listed]") -> Table:
    table = new_table(url, ("epoch", "kind", "rows", "MB", "state"), right=("epoch", "MB"))
    for one in epochs:
        kind = "-" if one.kind is None else one.kind if one.base is None else f"{one.kind} on {one.base}"
        rows = "-" if one.rows is None else "\n".join(f"{name} {count:,}" for name, count in one.rows.items())
        table.add_row(str(one.epoch), kind, rows, f"{one.bytes / 1e6:,.1f}", one.fault or "good")
    return table
