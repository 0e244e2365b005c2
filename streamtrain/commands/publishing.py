"""The command that publishes: `publish`."""

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.clock import parse_duration
from streamtrain.commands.options import Addresses, Config, Json, Setting, Who, Why, read_settings, who_of
from streamtrain.console import print_json
from streamtrain.errors import ConfigError, ShardUnavailable

if TYPE_CHECKING:
    from streamtrain.config import Settings
    from streamtrain.store.origin import Publication


def publish(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    force: Annotated[bool, typer.Option("--force", help="Even if the gate would hold it back.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Make a version of the head, which stays as it is.")
    ] = False,
    why: Why = "",
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Make a version of the newest good epoch there; needs no trainer."),
    ] = None,
    who: Who = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long shard 0 may take.")] = "10m",
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Publish now what shards have learned, or make a version of it.

    Where no shards answer, a version is of the head as it stands. As JSON: what was published.
    """
    settings, seconds = (
        read_settings(config, setting, {"ps.addresses": addresses}),
        parse_duration(timeout, "--timeout"),
    )
    if force and checkpoint is not None:
        raise ConfigError("--force is about what shards have learned, and does not go with --checkpoint")
    if checkpoint is not None:
        published = _of_checkpoint(settings, checkpoint, who_of(who), why)
    elif version:
        published = _version(settings, who_of(who), why, force=force, seconds=seconds)
    else:
        published = _now(settings, force=force, seconds=seconds)
    if json:
        print_json(published.as_json())
    else:
        typer.echo(_told(published))


def _of_checkpoint(settings: "Settings", url: str, who: str, why: str) -> "Publication":
    from streamtrain.cluster.versions import published_model, version_of_checkpoint

    with published_model(settings.publish) as model:
        return version_of_checkpoint(model, url, settings.publish.dtype, who, why)


def _version(settings: "Settings", who: str, why: str, *, force: bool, seconds: float) -> "Publication":
    from streamtrain.cluster.versions import published_model
    from streamtrain.store.redis_versions import RedisVersions

    with published_model(settings.publish) as model:
        try:
            _now(settings, force=force, seconds=seconds)
        except (_NoShards, ShardUnavailable) as exc:
            typer.echo(f"the version is of the head as it stands: {exc}", err=True)
        return RedisVersions(model).make(who, why)


def _now(settings: "Settings", *, force: bool, seconds: float) -> "Publication":
    from streamtrain.cluster.remote import leader_of, publish_now

    tf_config = os.environ.get("TF_CONFIG")
    if settings.coordinator.address is None and not settings.ps.addresses and not tf_config:
        raise _NoShards("neither coordinator.address nor ps.addresses is set: give --ps host:port,…")
    return publish_now(leader_of(settings, tf_config), settings.security, force=force, timeout=seconds)


class _NoShards(ConfigError):
    """No shards are configured."""


def _told(published: "Publication") -> str:
    name = f"publication {published.number}"
    if published.version is not None:
        name = f"version {published.version} ({name})"
    rows = ", ".join(f"{count:,} rows of {table}" for table, count in published.rows.items())
    learned = datetime.fromtimestamp(published.watermark, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    through = f", trained through {learned} UTC" if published.watermark else ""
    return f"{name} of {published.model}: {rows}{through}"
