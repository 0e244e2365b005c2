"""Commands about versions: `versions`, `promote`, `rollback` and `label`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.commands.deeds import Deed, deed
from streamtrain.commands.options import Config, Json, Setting, VersionOrHead, read_settings, version_of
from streamtrain.console import print_json
from streamtrain.errors import ConfigError

if TYPE_CHECKING:
    from streamtrain.cluster.versions import VersionControl

HEAD = "head"


def versions(
    history: Annotated[bool, typer.Option("--history", help="Show what was done to versions, and by whom.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Deeds of the history that are shown, the last first.")] = 100,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Show the versions that are published, and which one is served.

    As JSON: model, served (a version, "head", or null where there is nothing), head, versions; history if asked for.
    """
    settings = read_settings(config, setting, {})
    from streamtrain.cluster.versions import published_model
    from streamtrain.commands import tables
    from streamtrain.store.redis_versions import RedisVersions

    with published_model(settings.publish) as model:
        found = tables.Listing.of(RedisVersions(model), count if history else 0)
    if json:
        print_json({"model": settings.publish.model, **found.as_json(with_history=history)})
    else:
        tables.show(found.history_table() if history else found.table(model.name))


@deed
def promote(
    deed: Deed,
    version: VersionOrHead,
    force: Annotated[bool, typer.Option("--force", help="Even if the gate would hold it back.")] = False,
) -> None:
    """Have all servers serve a version, or the head as it moves.

    The gate holds it back if its figures are worse than those of what is served by more than gate.* allows.
    As JSON: served and was, each a version or "head".
    """
    wanted = version_of(version)
    _change(deed, lambda control: control.promote(wanted, deed.who, deed.why, force=force))


@deed
def rollback(deed: Deed) -> None:
    """Have all servers serve what they did before the last promotion, of what is still there.

    As JSON: served and was, each a version or "head".
    """
    _change(deed, lambda control: control.rollback(deed.who, deed.why))


@deed
def label(
    deed: Deed,
    name: Annotated[str, typer.Argument(metavar="LABEL", help="Such as canary.")],
    version: Annotated[str, typer.Argument(metavar="VERSION|none", help="A version's number, or none.")],
) -> None:
    """Give a version a label, by which servers load it and clients may ask for it; or take the label away.

    What is labelled is not deleted. As JSON: label, and version or null.
    """
    wanted = None if version == "none" else version_of(version)
    if name in ("prod", HEAD):
        raise ConfigError(f"{name} is no label to be given: what is served is changed by promote and rollback")
    if not name.isprintable() or not name.strip():
        raise ConfigError(f"LABEL is a name, not {name!r}")
    if version == HEAD:
        raise ConfigError("the head has no labels: make a version of it, by publish --version")
    from streamtrain.cluster.versions import published_model
    from streamtrain.store.redis_versions import RedisVersions

    with published_model(deed.settings.publish) as model:
        RedisVersions(model).set_label(name, wanted, deed.who, deed.why)
    called = "no version" if wanted is None else f"version {wanted}"
    deed.tell({"label": name, "version": wanted}, f"{model.name}: {name} is {called}")


def _change(deed: Deed, change: Callable[["VersionControl"], int | None]) -> None:
    """Has something else served, and tells it."""
    from streamtrain.cluster.versions import VersionControl, published_model
    from streamtrain.store.gate import Gate
    from streamtrain.store.redis_versions import RedisVersions

    with published_model(deed.settings.publish) as model:
        control = VersionControl(RedisVersions(model), Gate(**dict(deed.settings.gate)))
        was = control.label()
        served = change(control)
    told = f"{model.name}: {_called(served)} is served, before it was {_called(was)}"
    deed.tell({"served": served or HEAD, "was": was or HEAD}, told)


def _called(version: int | None) -> str:
    return "the head" if version is None else f"version {version}"
