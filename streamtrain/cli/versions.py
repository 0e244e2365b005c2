"""Commands about versions and requests: `versions`, `promote`, `rollback`, `label` and `traffic`."""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

import typer
from rich.table import Table

from streamtrain.cli.options import (
    Config,
    Json,
    Setting,
    VersionOrHead,
    Who,
    Why,
    parse_version,
    read_client_settings,
    resolve_actor,
)
from streamtrain.cli.terminal import format_figures, format_time, list_rows, new_table, print_json, show
from streamtrain.errors import ArmNotLoaded, ConfigError, LabelInUse
from streamtrain.store.publication import PROD, Publication

if TYPE_CHECKING:
    from streamtrain.publish.versions import VersionControl
    from streamtrain.settings.load import Settings
    from streamtrain.store.redis.versions import AuditEntry, RedisVersions

HEAD = "head"


class Listing(NamedTuple):
    """What is published of a model.

    Attributes:
        head: the head; None: nothing is published.
        versions: ascending.
        labels: version by label.
        servers: servers that use a version, by version.
        history: changes, newest first.
    """

    head: Publication | None
    versions: list[Publication]
    labels: Mapping[str, int]
    servers: Mapping[int, list[str]]
    history: "list[AuditEntry]"

    @classmethod
    def read(cls, versions: "RedisVersions", changes: int = 0) -> Self:
        """Reads it from Redis, with the newest `changes` of the history."""
        history = versions.history(changes) if changes else []
        return cls(versions.head(), versions.all(), versions.labels(), versions.holders(), history)

    @property
    def served(self) -> int | str | None:
        """The version that is served; "head"; None: nothing."""
        return self.labels.get(PROD) or (None if self.head is None else HEAD)

    def as_json(self, *, with_history: bool) -> dict[str, object]:
        """Values for JSON."""
        values: dict[str, object] = {
            "served": self.served,
            "head": self.head.to_json() if self.head else None,
            "versions": [
                version.to_json() | {"labels": self._labels(version), "servers": self._servers(version)}
                for version in self.versions
            ],
        }
        return values | ({"history": [entry._asdict() for entry in self.history]} if with_history else {})

    def _labels(self, publication: Publication) -> list[str]:
        return sorted(label for label, version in self.labels.items() if version == publication.version)

    def _servers(self, publication: Publication) -> list[str]:
        return sorted(self.servers.get(publication.version or 0, []))

    def table(self, title: str) -> Table:
        """Versions and the head."""
        columns = ("version", "published, UTC", "trained through", "rows", "type", "labels", "servers", "figures")
        table = new_table(title, columns, right=("version", "rows"))
        for publication in [*self.versions, *([self.head] if self.head else [])]:
            is_served = self.served == (publication.version or HEAD)
            table.add_row(
                str(publication.version or HEAD),
                format_time(publication.published),
                format_time(publication.watermark),
                list_rows(publication.rows),
                publication.dtype,
                ", ".join([*self._labels(publication), *(["served"] if is_served else [])]),
                ", ".join(self._servers(publication)),
                format_figures(publication.metrics),
            )
        return table

    def history_table(self) -> Table:
        """Changes, newest first."""
        table = new_table("history", ("when, UTC", "who", "change", "why", "figures"))
        for entry in self.history:
            change, figures = _describe_change(entry), format_figures(entry.metrics)
            table.add_row(format_time(entry.at), entry.who, change, entry.why, figures)
        return table


def _describe_change(entry: "AuditEntry") -> str:
    if entry.what == "traffic":
        return f"traffic: {entry.traffic_was} -> {entry.traffic}"
    if entry.what == "setting":
        return f"{entry.setting_was} -> {entry.setting}"
    if not entry.label:
        return f"{'created' if entry.what == 'version' else 'deleted'} version {entry.version}"
    unset = HEAD if entry.label == PROD else "none"
    before, after = (unset if version is None else str(version) for version in (entry.was, entry.version))
    return f"{entry.label}: {before} -> {after}{' (rollback)' if entry.what == 'rollback' else ''}"


def versions(
    history: Annotated[
        bool, typer.Option("--history", help="Show the changes of versions and labels instead.")
    ] = False,
    count: Annotated[int, typer.Option(min=1, help="Changes to show, newest first.")] = 100,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Show the published versions, and which one is served.

    As JSON: model, served (a version, "head", or null if nothing is published), head, versions; with --history also
    history.
    """
    settings = read_client_settings(config, setting, {})
    with _open_versions(settings) as published:
        listing = Listing.read(published, count if history else 0)
        name = published.name
    if json:
        print_json({"model": settings.publish.model, **listing.as_json(with_history=history)})
    else:
        show(listing.history_table() if history else listing.table(name))


def promote(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    version: VersionOrHead,
    force: Annotated[bool, typer.Option("--force", help="Promote it even if the quality gate holds it back.")] = False,
    why: Why = "",
    who: Who = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Have all servers serve a version, or the head as it moves.

    The quality gate holds it back if its figures are worse than those of what is served by more than gate.* allows.

    As JSON: served and was, each a version or "head".
    """
    number, actor = parse_version(version), resolve_actor(who)
    settings = read_client_settings(config, setting, {})
    _change_served(settings, lambda control: control.promote(number, actor, why, force=force), json=json)


def rollback(
    why: Why = "",
    who: Who = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Have all servers serve what they did before the last promotion; versions deleted since are skipped.

    As JSON: served and was, each a version or "head".
    """
    actor = resolve_actor(who)
    settings = read_client_settings(config, setting, {})
    _change_served(settings, lambda control: control.rollback(actor, why), json=json)


def label(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    name: Annotated[str, typer.Argument(metavar="LABEL", help="Name of the label, such as canary.")],
    version: Annotated[
        str, typer.Argument(metavar="VERSION|none", help="Number of a version; none removes the label.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Remove it even if requests are divided by it.")] = False,
    why: Why = "",
    who: Who = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Label a version, so that servers load it and clients can request it by the label; or remove a label.

    A version with a label is not deleted. As JSON: label, and version or null.
    """
    number = None if version == "none" else parse_version(version)
    if name in (PROD, HEAD):
        raise ConfigError(f"label {name} cannot be set: promote and rollback change what is served")
    if version == HEAD:
        raise ConfigError("the head cannot have a label: create a version of it with publish --version")
    settings = read_client_settings(config, setting, {})
    with _open_versions(settings) as published:
        try:
            published.set_label(name, number, resolve_actor(who), why, force=force)
        except LabelInUse as exc:
            raise LabelInUse(f"{exc}, or use --force") from exc
        model = published.name
    if json:
        print_json({"label": name, "version": number})
    else:
        typer.echo(f"{model}: label {name} {'removed' if number is None else f'set to version {number}'}")


def traffic(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    weights: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARM=PERCENT...", help="Weights, which add up to 100; without them the traffic is shown."
        ),
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(help="Arm that gets a copy of all requests; none: no arm does.", metavar="ARM|none")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Even if a living server has not loaded an arm.")] = False,
    why: Why = "",
    who: Who = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Divide the requests for a model among arms, on all its servers at once.

    An arm is prod (what is served), head, a version, a label, another model, or MODEL@LABEL. As JSON: weights, mirror,
    stopped (arms that the watchdog has taken all requests away from, and why) and missing (arms that are not there any
    more).
    """
    given = dict(map(_parse_weight, weights or []))
    if len(given) < len(weights or []):
        raise ConfigError("every arm has one weight")
    settings = read_client_settings(config, setting, {})
    from streamtrain.publish.opening import open_published_model
    from streamtrain.store.redis.traffic import RedisTraffic

    with open_published_model(settings.publish) as model:
        control = RedisTraffic(model)
        now = control.read()
        if given or mirror is not None:
            try:
                now = control.change(given, resolve_actor(who), why, mirror=mirror, force=force)
            except ArmNotLoaded as exc:
                raise ArmNotLoaded(f"{exc}; --force sets it anyway") from exc
        missing = control.missing(now) if now else []
    if json:
        copied = now.mirror.name if now and now.mirror else None
        stopped = dict(now.stopped) if now else {}
        print_json({"weights": now.weights() if now else {}, "mirror": copied, "stopped": stopped, "missing": missing})
    else:
        typer.echo(f"{model.name}: {now or 'all requests go to what is served'}")
        for name, why_stopped in now.stopped if now else ():
            typer.echo(f"the watchdog has taken all requests away from {name}: {why_stopped}")
        for name in missing:
            typer.echo(f"{name} is not there any more: what is served gets its requests")


def _parse_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        percent = float(weight.removesuffix("%"))
    except ValueError:
        percent = None
    if not name or percent is None:
        raise ConfigError(f"a weight is ARM=PERCENT, such as canary=5, not {text!r}")
    return name, percent


def drop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name under which it was published.")],
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Delete all that Redis has of a model that is no longer published, such as a fork that has ended.

    Refused while a cluster publishes it, or a server uses one of its versions. Checkpoints stay. As JSON: dropped.
    """
    settings = read_client_settings(config, setting, {})
    publish = settings.publish.model_copy(update={"model": name})
    with _open_versions(settings.model_copy(update={"publish": publish})) as published:
        published.drop(socket.gethostname())
        model = published.name
    if json:
        print_json({"dropped": name})
    else:
        typer.echo(f"{model}: dropped")


@contextmanager
def _open_versions(settings: "Settings") -> "Iterator[RedisVersions]":
    from streamtrain.publish.opening import open_published_model
    from streamtrain.store.redis.versions import RedisVersions

    with open_published_model(settings.publish) as model:
        yield RedisVersions(model)


def _change_served(settings: "Settings", change: "Callable[[VersionControl], int | None]", *, json: bool) -> None:
    from streamtrain.publish.versions import VersionControl

    with _open_versions(settings) as published:
        control = VersionControl(published, settings.gate)
        was = control.label()
        served = change(control)
        model = published.name
    if json:
        print_json({"served": served or HEAD, "was": was or HEAD})
    else:
        typer.echo(f"{model}: serving {describe_version(served)}, was {describe_version(was)}")


def describe_version(version: int | None) -> str:
    """A version, or the head (None), in a sentence."""
    return "the head" if version is None else f"version {version}"
