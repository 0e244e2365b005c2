"""Commands about what is published: `publish` and `export`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.cli.options import (
    NO_CLUSTER,
    Addresses,
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
from streamtrain.cli.terminal import count_rows, format_time, print_json
from streamtrain.cli.versions import describe_version
from streamtrain.durations import parse_duration
from streamtrain.errors import ConfigError, PublicationCorrupt, ShardUnavailable
from streamtrain.service.start_tensorflow import load_tensorflow

if TYPE_CHECKING:
    from streamtrain.settings.load import Settings
    from streamtrain.store.publication import Origin, Publication


def export(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    version: VersionOrHead,
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="Path or URL of a folder that is empty or will be created.")
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Export an epoch of the checkpoints at this URL; VERSION is its number."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Also export the graph of this model, path/to/file.py:name.")
    ] = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Export a version, or the head, to files that do not need streamtrain: Parquet, safetensors, SavedModel and Keras.

    manifest.json is written last: without it the export is incomplete. As JSON: what was exported, and url.
    """
    settings, wanted = read_client_settings(config, setting, {}), parse_version(version)
    from streamtrain.model.loader import load_model, locate_model
    from streamtrain.model.spec import Spec
    from streamtrain.publish.export import Export

    target, made = Export(folder), None
    if model is not None:
        locate_model(model)
    with _origin(settings, checkpoint) as (origin, name):
        publication = origin.find(wanted)
        if publication is None:
            raise PublicationCorrupt(f"there is no {'head' if wanted is None else f'version {wanted}'} of {name}")
        if model is not None:
            load_tensorflow(settings.worker.threads)
            made = load_model(model).with_defaults_of(Spec.from_json(publication.spec))
        done = target.write(origin, publication, made)
    if json:
        print_json({**done.to_json(), "url": target.url})
    else:
        typer.echo(f"exported {describe_version(wanted)} of {name} to {target.url}: {count_rows(done.rows)}")


@contextmanager
def _origin(settings: "Settings", checkpoint: str | None) -> Iterator[tuple["Origin", str]]:
    """Where to export from, and its name in messages."""
    if checkpoint is not None:
        from streamtrain.store.checkpoint.source import CheckpointOrigin

        saved = CheckpointOrigin(checkpoint, settings.publish.model)
        yield saved, f"the checkpoints at {saved.url}"
        return
    from streamtrain.publish.opening import open_published_model
    from streamtrain.store.redis.source import RedisOrigin

    with open_published_model(settings.publish) as published:
        yield RedisOrigin(published), published.name


def publish(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    force: Annotated[bool, typer.Option("--force", help="Publish it even if the quality gate holds it back.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Also create a version of it.")] = False,
    why: Why = "",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Create a version of the newest intact checkpoint at this URL; needs no shards."
        ),
    ] = None,
    who: Who = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Deadline of the publication.")] = "10m",
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Publish what shards have learned now, or create a version of it.

    If no shard answers, --version creates a version of the current head. As JSON: what was published.
    """
    settings, seconds = (
        read_client_settings(config, setting, {"ps.addresses": addresses}),
        parse_duration(timeout, "--timeout"),
    )
    if force and checkpoint is not None:
        raise ConfigError("--force cannot be combined with --checkpoint: the quality gate does not apply to it")
    if checkpoint is not None:
        published = _import_checkpoint(settings, checkpoint, resolve_actor(who), why)
    elif version:
        published = _create_version(settings, resolve_actor(who), why, force=force, seconds=seconds)
    else:
        published = _publish_now(settings, force=force, seconds=seconds)
    if json:
        print_json(published.to_json())
    else:
        typer.echo(_describe(published))


def _import_checkpoint(settings: "Settings", url: str, who: str, why: str) -> "Publication":
    from streamtrain.publish.opening import open_published_model
    from streamtrain.publish.versions import import_checkpoint

    with open_published_model(settings.publish) as model:
        return import_checkpoint(model, url, settings.publish.dtype, who, why)


def _create_version(settings: "Settings", who: str, why: str, *, force: bool, seconds: float) -> "Publication":
    from streamtrain.publish.opening import open_published_model
    from streamtrain.store.redis.versions import RedisVersions

    with open_published_model(settings.publish) as model:
        try:
            _publish_now(settings, force=force, seconds=seconds)
        except (_NoShards, ShardUnavailable) as exc:
            typer.echo(f"creating a version of the current head: {exc}", err=True)
        return RedisVersions(model).make(who, why)


def _publish_now(settings: "Settings", *, force: bool, seconds: float) -> "Publication":
    from streamtrain.cluster.client import CoordinatorClient

    tf_config = os.environ.get("TF_CONFIG")
    if settings.coordinator.address is None and not settings.ps.addresses and not tf_config:
        raise _NoShards(NO_CLUSTER)
    with CoordinatorClient.from_settings(settings, tf_config) as client:
        return client.publish_now(force=force, timeout=seconds)


class _NoShards(ConfigError):
    """No shards are configured."""


def _describe(published: "Publication") -> str:
    name = f"publication {published.number}"
    if published.version is not None:
        name = f"version {published.version} ({name})"
    through = f", trained through {format_time(published.watermark)} UTC" if published.watermark else ""
    return f"{name} of {published.model}: {count_rows(published.rows)}{through}"
