"""Commands about versions: `versions`, `promote` and `rollback`."""

from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.commands.options import (
    Config,
    Json,
    Setting,
    VersionOrHead,
    Who,
    Why,
    read_settings,
    version_of,
    who_of,
)
from streamtrain.console import print_json

if TYPE_CHECKING:
    from streamtrain.cluster.versions import VersionControl
    from streamtrain.config import Settings
    from streamtrain.store.redis_model import RedisModel

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


def promote(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    version: VersionOrHead,
    why: Why = "",
    force: Annotated[bool, typer.Option("--force", help="Even if the gate would hold it back.")] = False,
    who: Who = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Have all servers serve a version, or the head as it moves.

    The gate holds it back if its figures are worse than those of what is served by more than gate.* allows.
    As JSON: served and was, each a version or "head".
    """
    settings, wanted = read_settings(config, setting, {}), version_of(version)
    from streamtrain.cluster.versions import published_model

    with published_model(settings.publish) as model:
        control = _control(model, settings)
        was = control.label()
        served = control.promote(wanted, who_of(who), why, force=force)
    _tell(model, served, was, json)


def rollback(
    why: Why = "",
    who: Who = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Have all servers serve what they did before the last promotion, of what is still there.

    As JSON: served and was, each a version or "head".
    """
    settings = read_settings(config, setting, {})
    from streamtrain.cluster.versions import published_model

    with published_model(settings.publish) as model:
        control = _control(model, settings)
        was = control.label()
        served = control.rollback(who_of(who), why)
    _tell(model, served, was, json)


def _control(model: "RedisModel", settings: "Settings") -> "VersionControl":
    from streamtrain.cluster.versions import VersionControl
    from streamtrain.store.gate import Gate
    from streamtrain.store.redis_versions import RedisVersions

    return VersionControl(RedisVersions(model), Gate(**dict(settings.gate)))


def _tell(model: "RedisModel", served: int | None, was: int | None, json: bool) -> None:
    if json:
        print_json({"served": served or HEAD, "was": was or HEAD})
    else:
        typer.echo(f"{model.name}: {_called(served)} is served, before it was {_called(was)}")


def _called(version: int | None) -> str:
    return "the head" if version is None else f"version {version}"
