"""The command that writes a published model to files: `export`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.commands.options import Config, Json, Setting, VersionOrHead, read_settings, version_of
from streamtrain.console import load_tensorflow, print_json
from streamtrain.errors import PublicationCorrupt

if TYPE_CHECKING:
    from streamtrain.config import Settings
    from streamtrain.store.origin import Origin


def export(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    version: VersionOrHead,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="An empty folder, or one to be made: a path or URL.")],
    checkpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Export an epoch of checkpoints there; VERSION is its number.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Also write the graph of the model path/to/file.py:name, for which it is loaded.")
    ] = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Write a version, or the head, to files that need no streamtrain: Parquet, safetensors, SavedModel and Keras.

    manifest.json is written last: without it the export is not complete. As JSON: what is exported, and url.
    """
    settings, wanted = read_settings(config, setting, {}), version_of(version)
    from streamtrain.cluster.exports import Export
    from streamtrain.model.load import load_model, locate_model

    target, made = Export(folder), None
    if model is not None:
        locate_model(model)
    with _origin(settings, checkpoint) as (origin, name):
        found = origin.find(wanted)
        if found is None:
            raise PublicationCorrupt(f"there is no {'head' if wanted is None else f'version {wanted}'} of {name}")
        if model is not None:
            load_tensorflow(settings.worker.threads)
            made = load_model(model)
        done = target.write(origin, found, made)
    if json:
        print_json({**done.as_json(), "url": target.url})
    else:
        rows = ", ".join(f"{count:,} rows of {table}" for table, count in done.rows.items())
        typer.echo(f"{target.url}: {rows}, of {'the head' if wanted is None else f'version {wanted}'} of {name}")


@contextmanager
def _origin(settings: "Settings", checkpoint: str | None) -> Iterator[tuple["Origin", str]]:
    """Where it is exported from, and what that is called in messages."""
    if checkpoint is not None:
        from streamtrain.store.checkpoint_origin import CheckpointOrigin

        saved = CheckpointOrigin(checkpoint, settings.publish.model)
        yield saved, f"the checkpoints at {saved.url}"
        return
    from streamtrain.cluster.versions import published_model
    from streamtrain.store.redis_origin import RedisOrigin

    with published_model(settings.publish) as published:
        yield RedisOrigin(published), published.name
