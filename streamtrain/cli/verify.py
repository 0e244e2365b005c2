"""`verify`: compare shards, Redis and a server."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamtrain.cli.options import (
    Addresses,
    Config,
    FileFormat,
    Json,
    ListColumns,
    ModelSetting,
    Setting,
    TextColumns,
    read_client_settings,
    require_model,
    sample_file,
)
from streamtrain.cli.terminal import count_rows, new_table, print_json, show
from streamtrain.durations import parse_duration
from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.service.start_tensorflow import load_tensorflow

if TYPE_CHECKING:
    from streamtrain.model.model import Model
    from streamtrain.serve.client import Endpoint
    from streamtrain.settings.load import Settings
    from streamtrain.store.publication import Origin
    from streamtrain.stream.files import SampleFile
    from streamtrain.verify.samples import TrainingPredictor

Row = tuple[str, str]


def show_parts(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the result of each part."""
    table = new_table("verify", ("compared", "what", "result"))
    rows = {"shards": _shards_rows, "served": _served_rows, "samples": _samples_rows}
    names = {"shards": "shards and Redis", "served": "Redis and server", "samples": "trainer and server"}
    for part, result in parts.items():
        if "passed_over" in result:
            table.add_row(names[part], "", f"not compared: {result['passed_over']}")
        elif "failed" in result:
            table.add_row(names[part], "", f"FAILED: {result['failed']}")
        else:
            for row in rows[part](result):
                table.add_row(names[part], *row)
    show(table)


def _shards_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    for name, one in found["tables"].items():
        what = f"publication {found['publication']}, table {name}: {one['rows']:,} rows in {one['buckets']:,} buckets"
        left_out = f"; {one['changing']:,} changing keys skipped" if one["changing"] else ""
        faults = [*one["first"]]
        if one["differing"] > len(faults):
            faults.append(f"and {one['differing'] - len(faults):,} more buckets")
        if one["published"] != one["there"]:
            faults.append(f"Redis has {one['there']:,} rows, the publication declares {one['published']:,}")
        yield what + left_out, _result(faults)


def _served_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    if not found["loaded"]:
        yield "", "DIFFERS: the server has not loaded anything"
    for one in found["loaded"]:
        name = "head" if one["name"] == "head" else f"version {one['name']}"
        yield (
            f"{name} (publication {one['publication']}): {count_rows(one['rows'])}",
            _result([one["fault"]] if one["fault"] else []),
        )


def _samples_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    refused = f", {found['refused']:,} unreadable" if found["refused"] else ""
    largest, mean = found["largest"], found["mean"]
    apart = (
        "some predictions are not finite"
        if largest is None
        else f"differ by at most {largest:.2g}, {mean:.2g} on average"
    )
    what = f"{found['samples']:,} samples{refused}: {apart}"
    for label, (trainer, server) in found["auc"].items():
        if trainer is not None and server is not None:
            what += f"; AUC of {label}: {trainer:.5f} and {server:.5f}"
    if found["tolerance"] is None:
        yield (
            what,
            "not judged: trainer and server have learned different samples; use --tolerance to judge nevertheless",
        )
    else:
        yield what, _result([] if found["agrees"] else [f"by more than {found['tolerance']:g}"])


def _result(faults: list[str]) -> str:
    return f"DIFFERS: {'; '.join(faults)}" if faults else "equal"


Part = dict[str, Any]


def verify(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also compare predictions of these: JSON lines, CSV, Parquet, or - for stdin."
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="URL of the HTTP endpoint; default: at setting serve.listen.")] = None,
    format_: FileFormat = None,
    text: TextColumns = "",
    lists: ListColumns = "",
    limit: Annotated[int, typer.Option(min=1, help="Samples to predict.")] = 1000,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Largest difference of predictions; also judges while training continues."),
    ] = None,
    model: ModelSetting = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Predict by the newest checkpoint at this URL instead of by shards."),
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Deadline of the comparison by shards.")] = "10m",
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Compare what shards have learned, what is in Redis, and what a server has loaded and predicts.

    Training and serving continue. The exit code is 0 if everything configured agrees. As JSON: shards, served, samples,
    agrees.
    """
    settings = read_client_settings(config, setting, {"model": model, "ps.addresses": addresses})
    from streamtrain.serve.client import Endpoint

    if checkpoint is not None and samples is None:
        raise ConfigError("--checkpoint requires --samples FILE")
    if samples is None and (format_ or text or lists):
        raise ConfigError("--format, --text and --lists require --samples FILE")
    file = None if samples is None else sample_file(samples, format_, text, lists)
    token = settings.serve.admin_token or settings.serve.read_token
    seconds = parse_duration(timeout, "--timeout")
    with Endpoint(url or f"http://{settings.serve.listen}", token.get_secret_value() if token else None) as endpoint:
        parts = {
            "shards": _run_part(lambda: _compare_shards(settings, seconds)),
            "served": _run_part(lambda: _compare_served(settings, endpoint)),
            "samples": _run_part(
                lambda: _compare_samples(
                    settings, endpoint, file, limit=limit, tolerance=tolerance, checkpoint=checkpoint
                )
            ),
        }
    verdicts = [part["agrees"] for part in parts.values() if "passed_over" not in part]
    agrees = bool(verdicts) and False not in verdicts
    if json:
        print_json({**parts, "agrees": agrees})
    else:
        show_parts(parts)
    if not agrees:
        raise typer.Exit(1)


def _run_part(compare: Callable[[], Part]) -> Part:
    """The result of a part; if it fails, the others are compared nevertheless."""
    try:
        return compare()
    except ConfigError:
        raise
    except StreamtrainError as exc:
        return {"agrees": False, "failed": str(exc)}


def _compare_shards(settings: "Settings", seconds: float) -> Part:
    from streamtrain.cluster.client import CoordinatorClient

    tf_config = os.environ.get("TF_CONFIG")
    if settings.coordinator.address is None and not settings.ps.addresses and not tf_config:
        return {"passed_over": "neither coordinator.address nor ps.addresses is set"}
    with CoordinatorClient.from_settings(settings, tf_config) as client:
        found = client.verify(timeout=seconds)
    return found.to_json() | {"agrees": found.agrees}


def _compare_served(settings: "Settings", endpoint: "Endpoint") -> Part:
    from streamtrain.verify.served import compare_served

    if settings.serve.admin_token is None:
        return {"passed_over": "serve.admin_token is not set"}
    with _origin(settings) as origin:
        if origin is None:
            return {"passed_over": "publish.url is not set"}
        found = compare_served(endpoint, endpoint.model(), origin)
    loaded = [one._asdict() for one in found]
    return {"loaded": loaded, "agrees": bool(found) and all(one.agrees for one in found)}


@contextmanager
def _origin(settings: "Settings") -> Iterator["Origin | None"]:
    """Where servers load from; None: publish.url is not set."""
    if settings.publish.url is None:
        yield None
        return
    from streamtrain.publish.opening import open_published_model
    from streamtrain.store.redis.source import RedisOrigin

    with open_published_model(settings.publish) as model:
        yield RedisOrigin(model)


def _compare_samples(
    settings: "Settings",
    endpoint: "Endpoint",
    file: "SampleFile | None",
    *,
    limit: int,
    tolerance: float | None,
    checkpoint: str | None,
) -> Part:
    if file is None:
        return {"passed_over": "--samples is not given"}
    from streamtrain.model.loader import load_model
    from streamtrain.model.spec import Spec

    location = require_model(settings)
    load_tensorflow(settings.worker.threads)
    made = load_model(location)
    from streamtrain.verify.samples import compare_samples

    messages = islice(file.messages(), limit)
    with _origin(settings) as origin, ExitStack() as stack:
        if origin and (published := origin.find(None)):
            made = made.with_defaults_of(Spec.from_json(published.spec))
        trainer = stack.enter_context(_trainer(settings, made, checkpoint))
        found = compare_samples(made, trainer, endpoint, origin, messages, tolerance=tolerance)
    if not found.samples:
        raise ConfigError(f"{file.name} has no readable sample")
    return found.to_json()


def _trainer(settings: "Settings", model: "Model", checkpoint: str | None) -> "TrainingPredictor":
    from streamtrain.cluster.client import known_shards
    from streamtrain.train.step import Step
    from streamtrain.verify.samples import CheckpointTrainer, ShardTrainer

    if checkpoint is not None:
        return CheckpointTrainer(checkpoint, model)
    shard_map = known_shards(settings, os.environ.get("TF_CONFIG"))
    return ShardTrainer(model, Step(model), shard_map, settings)
