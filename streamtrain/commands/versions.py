"""Commands about versions: `versions`, `promote`, `rollback` and `label`."""

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
from streamtrain.errors import ConfigError

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


def label(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    name: Annotated[str, typer.Argument(metavar="LABEL", help="Such as canary.")],
    version: Annotated[str, typer.Argument(metavar="VERSION|none", help="A version's number, or none.")],
    why: Why = "",
    who: Who = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Give a version a label, by which servers load it and clients may ask for it; or take the label away.

    What is labelled is not deleted. As JSON: label, and version or null.
    """
    settings, wanted = read_settings(config, setting, {}), None if version == "none" else version_of(version)
    if name in ("prod", HEAD):
        raise ConfigError(f"{name} is no label to be given: what is served is changed by promote and rollback")
    if not name.isprintable() or not name.strip():
        raise ConfigError(f"LABEL is a name, not {name!r}")
    if version == HEAD:
        raise ConfigError("the head has no labels: make a version of it, by publish --version")
    from streamtrain.cluster.versions import published_model
    from streamtrain.store.redis_versions import RedisVersions

    with published_model(settings.publish) as model:
        RedisVersions(model).set_label(name, wanted, who_of(who), why)
    if json:
        print_json({"label": name, "version": wanted})
    else:
        typer.echo(f"{model.name}: {name} is {'no version' if wanted is None else f'version {wanted}'}")


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
