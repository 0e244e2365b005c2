"""Commands about checkpoints: `checkpoint`, `restore`, `plan`, `evolve` and `fork`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from streamtrain.cli.options import (
    NO_CLUSTER,
    Addresses,
    Config,
    Json,
    ModelSetting,
    Setting,
    load_required_model,
    parse_assignments,
    parse_number,
    read_client_settings,
    read_settings,
    require_model,
)
from streamtrain.cli.terminal import list_rows, new_table, print_json, show
from streamtrain.durations import parse_duration
from streamtrain.errors import ConfigError
from streamtrain.service.service_file import CHECKPOINTS, differing_address, find_service

if TYPE_CHECKING:
    from streamtrain.checkpoint.evolution import Evolution
    from streamtrain.checkpoint.restore import Listed, Restored
    from streamtrain.service.fork import Forked, Parent
    from streamtrain.settings.load import Settings

Source = Annotated[
    str | None, typer.Option("--from", metavar="DIRECTORY", help="A checkpoint; default: the newest at checkpoint.url.")
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="drop|truncate|meaning",
        help="Allow to drop rows of removed tables, to truncate rows, or to change what a feature means.",
    ),
]


def checkpoint(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    full: Annotated[bool, typer.Option("--full", help="Write all rows, even if a delta would do.")] = False,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Deadline of the checkpoint.")] = "10m",
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Take a checkpoint now, and wait for it.

    As JSON: epoch, kind (full or delta), aligned, pause_ms (how long pushes were held back), seconds.
    """
    settings = read_client_settings(config, setting, {"ps.addresses": addresses})
    seconds = parse_duration(timeout, "--timeout")
    tf_config = os.environ.get("TF_CONFIG")
    if settings.coordinator.address is None and not settings.ps.addresses and not tf_config:
        raise ConfigError(NO_CLUSTER)
    from streamtrain.cluster.client import CoordinatorClient

    with CoordinatorClient.from_settings(settings, tf_config) as client:
        taken = client.checkpoint(full=full, timeout=seconds)
    if json:
        print_json(dict(vars(taken)))
    else:
        aligned = "" if taken.aligned else "; shards are at different clocks"
        typer.echo(
            f"checkpoint {taken.epoch} committed ({taken.kind}, paused {taken.pause_ms:.1f} ms, "
            f"took {taken.seconds:.2f} s){aligned}"
        )


def restore(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    epoch: Annotated[
        str | None, typer.Argument(metavar="EPOCH|newest", help="Number of an epoch, or the newest intact one.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the epochs instead; reads all their files.")] = False,
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Have a stopped cluster start from an epoch: later epochs are moved to a folder next to it.

    Refused while a shard answers. As JSON: epoch, moved (epochs set aside), aside (where they are, or null).
    With --list: url, and epochs, each with epoch, kind, base, rows, bytes and fault ("": intact).
    """
    from streamtrain.checkpoint import restore as restoring

    settings = _with_checkpoints_of_up(read_client_settings(config, setting, {"ps.addresses": addresses}))
    if show_list == (epoch is not None):
        raise ConfigError("give an EPOCH to restore, newest, or --list to list the epochs")
    if show_list:
        epochs = restoring.open_epochs(settings)
        listed = restoring.listed(epochs)
        if json:
            print_json({"url": epochs.url, "epochs": [row._asdict() for row in listed]})
        else:
            show(_table(epochs.url, listed))
        return
    number = parse_number(epoch or "", "EPOCH", "newest")
    restored = restoring.restore(settings, os.environ.get("TF_CONFIG"), number)
    if json:
        print_json(restored._asdict())
    else:
        typer.echo(_describe(restored))


def _with_checkpoints_of_up(settings: "Settings") -> "Settings":
    """With the checkpoints of the `up` that ran in this folder, if none are set."""
    own = Path(settings.up.data, CHECKPOINTS).resolve()
    if settings.checkpoint.url is not None or not own.is_dir():
        return settings
    return settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"url": str(own)})})


def plan(
    model: ModelSetting = None,
    source: Source = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Show what a changed model keeps of what was learned; nothing is changed.

    As JSON: changes, each with part, name, action (kept, new, changed, reset or dropped), detail and needs (what
    `streamtrain evolve` must be allowed, or "").
    """
    from streamtrain.checkpoint import evolve as evolving

    settings = _with_checkpoints_of_up(read_client_settings(config, setting, {"model": model}))
    evolution = evolving.plan(settings, load_required_model(settings, 1), source)
    if json:
        print_json({"changes": [one._asdict() for one in evolution.changes]})
        return
    show(_plan_table(evolution))
    needs = sorted({one.needs for one in evolution.changes if one.needs})
    if needs:
        typer.echo(f"to apply this: streamtrain evolve {' '.join(f'--allow {one}' for one in needs)}")
    elif not evolution.is_needed:
        typer.echo("the model fits what was learned: it can be used as it is")


def evolve(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    model: ModelSetting = None,
    source: Source = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Another place for checkpoints, where a cluster of its own begins."),
    ] = None,
    allow: Allow = None,
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Give what a stopped cluster has learned to a changed model: rows, weights and optimizer state that fit are kept.

    Writes a new checkpoint, from which shards start with the changed model and continue the stream where the old one
    stopped. The checkpoints before it stay: `streamtrain restore` goes back. See what it does with `streamtrain plan`.

    As JSON: url, epoch, rows by table, seconds.
    """
    from streamtrain.checkpoint import evolve as evolving

    settings = read_client_settings(config, setting, {"model": model, "ps.addresses": addresses})
    settings = _with_checkpoints_of_up(settings)
    made = load_required_model(settings, 1)
    evolved = evolving.evolve(
        settings, os.environ.get("TF_CONFIG"), made, source=source, to=to, allow=tuple(allow or ())
    )
    if json:
        print_json(evolved._asdict())
        return
    rows = ", ".join(f"{table} {count:,}" for table, count in evolved.rows.items())
    typer.echo(
        f"checkpoint {evolved.epoch} of the changed model committed to {evolved.url} (rows: {rows or 'none'}; took "
        f"{evolved.seconds:.2f} s); shards start from it"
    )


def fork(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the fork: of its folder, and of its model in URLs.")],
    model: ModelSetting = None,
    since: Annotated[
        str, typer.Option("--from", metavar="now|EPOCH|DURATION", help="What it begins with, such as 7d.")
    ] = "now",
    allow: Allow = None,
    json: Json = False,
    config: Config = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the fork.")
    ] = None,
) -> None:
    """Prepare a fork: a changed model that begins with what a running cluster has learned, and learns in parallel.

    Takes a checkpoint of the cluster, gives what fits to the changed model, and writes the settings of the fork to the
    new folder NAME: `cd NAME && streamtrain up` runs it. The cluster keeps running. With --from EPOCH the fork begins
    with that checkpoint; with --from DURATION, with the newest one that is at least that old or, if there is none,
    without rows at the samples of that time.

    As JSON: file, url, epoch, start, rows by table, pause_ms, seconds.
    """
    from streamtrain.service import fork as forking

    parent = _read_parent(config)
    settings = parent.settings if model is None else parent.settings.model_copy(update={"model": model})
    location = require_model(settings)
    forked = forking.fork(
        parent,
        name,
        lambda: load_required_model(settings, 1),
        location=location,
        since=since,
        given=parse_assignments(setting),
        allow=tuple(allow or ()),
        show=lambda evolution: None if json or not evolution.is_needed else show(_plan_table(evolution)),
    )
    if json:
        print_json(forked._asdict() | {"file": str(forked.file)})
        return
    typer.echo(_describe_fork(name, forked, is_up=parent.chosen is not None))


def _read_parent(config: Path | None) -> "Parent":
    """The cluster of a settings file, or the `up` that runs in this folder.

    Raises:
        ConfigError: there is none.
    """
    from streamtrain.service.fork import Parent
    from streamtrain.settings.load import load_settings

    settings, chosen = read_client_settings(config, None, {}), read_settings(config, None, {})
    tf_config = os.environ.get("TF_CONFIG")
    service = find_service(Path(settings.up.data)) or (find_service(config.parent) if config else None)
    if service and service.is_running and differing_address(settings, load_settings(service.path)) is None:
        return Parent(_with_checkpoints_of_up(settings), chosen, tf_config)
    if settings.coordinator.address is None and not settings.ps.addresses and not tf_config:
        raise ConfigError(NO_CLUSTER)
    return Parent(settings, None, tf_config)


def _describe_fork(name: str, forked: "Forked", *, is_up: bool) -> str:
    rows = ", ".join(f"{table} {count:,}" for table, count in forked.rows.items())
    begins = (
        f"without rows at the samples of {forked.start}"
        if forked.epoch is None
        else f"with epoch {forked.epoch} (rows: {rows or 'none'})"
    )
    paused = "" if forked.pause_ms is None else f"; training was paused for {forked.pause_ms:.1f} ms"
    run = f"cd {name} && streamtrain up" if is_up else f"start its processes with --config {forked.file}"
    return f"fork {name} begins {begins}{paused}; took {forked.seconds:.2f} s; to run it: {run}"


def _plan_table(evolution: "Evolution") -> Table:
    table = new_table("what the changed model keeps", ("part", "name", "action", "detail", "needs"))
    for one in evolution.changes:
        table.add_row(one.part, one.name, one.action, one.detail, f"--allow {one.needs}" if one.needs else "")
    return table


def _describe(restored: "Restored") -> str:
    if restored.aside is None:
        return f"shards start from epoch {restored.epoch}, which is the newest"
    moved = ", ".join(map(str, restored.moved))
    return (
        f"shards start from epoch {restored.epoch}; moved epochs {moved} to {restored.aside}; to undo, move them back "
        "before shards start"
    )


def _table(url: str, epochs: "list[Listed]") -> Table:
    table = new_table(url, ("epoch", "kind", "rows", "MB", "state"), right=("epoch", "MB"))
    for row in epochs:
        kind = "-" if row.kind is None else row.kind if row.base is None else f"{row.kind} on {row.base}"
        rows, megabytes = list_rows(row.rows or {}), f"{row.bytes / 1e6:,.1f}"
        table.add_row(str(row.epoch), kind, rows, megabytes, row.fault or "intact")
    return table
