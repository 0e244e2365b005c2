"""The command that compares trainer, Redis and servers: `verify`."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from streamtrain.clock import parse_duration
from streamtrain.commands.options import Addresses, Config, Json, Setting, read_settings
from streamtrain.console import load_tensorflow, print_json
from streamtrain.errors import ConfigError, StreamtrainError

if TYPE_CHECKING:
    from streamtrain.cluster.verify_endpoint import Endpoint
    from streamtrain.config import Settings
    from streamtrain.model.model import Model
    from streamtrain.store.origin import Origin

Part = dict[str, Any]


def verify(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    samples: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also predict these by both: JSON lines, CSV, Parquet, or -.")
    ] = None,
    url: Annotated[str, typer.Option(help="The HTTP endpoint.")] = "http://127.0.0.1:8501",
    limit: Annotated[int, typer.Option(min=1, help="Samples that are predicted.")] = 1000,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="By which predictions agree, even if what learns moves on meanwhile.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model: path/to/file.py:name; default: setting model.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Predict by the newest epoch there instead of by shards.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long shards may take.")] = "10m",
    addresses: Addresses = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Compare what shards have learned, what is in Redis, and what a server holds and predicts.

    Training and serving go on. Exit code 0: all that is configured agrees. As JSON: shards, served, samples, agrees.
    """
    settings = read_settings(config, setting, {"model": model, "ps.addresses": addresses})
    from streamtrain.cluster.verify_endpoint import Endpoint

    if checkpoint is not None and samples is None:
        raise ConfigError("--checkpoint is what samples are predicted by: give --samples FILE")
    token = settings.serve.admin_token or settings.serve.read_token
    endpoint = Endpoint(url, token.get_secret_value() if token else None)
    seconds = parse_duration(timeout, "--timeout")
    found = {
        "shards": _tried(lambda: _shards(settings, seconds)),
        "served": _tried(lambda: _served(settings, endpoint)),
        "samples": _tried(lambda: _samples(settings, endpoint, _Asked(samples, limit, tolerance, checkpoint))),
    }
    verdicts = [part["agrees"] for part in found.values() if "passed_over" not in part]
    agrees = bool(verdicts) and False not in verdicts
    if json:
        print_json({**found, "agrees": agrees})
    else:
        from streamtrain.commands.verified import show_parts

        show_parts(found)
    if not agrees:
        raise typer.Exit(1)


def _tried(compare: Callable[[], Part]) -> Part:
    """What came of a part; the others are compared even if it fails."""
    try:
        return compare()
    except ConfigError:
        raise
    except StreamtrainError as exc:
        return {"agrees": False, "failed": str(exc)}


def _shards(settings: "Settings", seconds: float) -> Part:
    from streamtrain.cluster.remote import leader_of
    from streamtrain.cluster.remote import verify as ask

    tf_config = os.environ.get("TF_CONFIG")
    if settings.coordinator.address is None and not settings.ps.addresses and not tf_config:
        return {"passed_over": "neither coordinator.address nor ps.addresses is set"}
    found = ask(leader_of(settings, tf_config), settings.security, timeout=seconds)
    return found.as_json() | {"agrees": found.agrees}


def _served(settings: "Settings", endpoint: "Endpoint") -> Part:
    from streamtrain.cluster.verify_served import compare_served

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
    """Where servers load from; None: it is not set."""
    if settings.publish.url is None:
        yield None
        return
    from streamtrain.cluster.versions import published_model
    from streamtrain.store.redis_origin import RedisOrigin

    with published_model(settings.publish) as model:
        yield RedisOrigin(model)


class _Asked(NamedTuple):
    """What is to be predicted, and by which checkpoint, if not by shards."""

    samples: str | None
    limit: int
    tolerance: float | None
    checkpoint: str | None


def _samples(settings: "Settings", endpoint: "Endpoint", asked: _Asked) -> Part:
    if asked.samples is None:
        return {"passed_over": "--samples is not given"}
    from streamtrain.model.load import load_model, locate_model
    from streamtrain.stream.files import SampleFile

    if settings.model is None:
        raise ConfigError("no model is named: give --model path/to/file.py:name, or set model")
    locate_model(settings.model)
    file = SampleFile(asked.samples)
    load_tensorflow(settings.worker.threads)
    made = load_model(settings.model)
    from streamtrain.cluster.verify_samples import as_json, compare_samples

    messages = islice((message for block in file.blocks() for message, _, _ in block.samples), asked.limit)
    with _trainer(settings, made, asked.checkpoint) as trainer, _origin(settings) as origin:
        found = compare_samples(made, trainer, endpoint, origin, messages, tolerance=asked.tolerance)
    if not found.samples:
        raise ConfigError(f"{asked.samples} has no sample that can be read")
    return as_json(found)


def _trainer(settings: "Settings", model: "Model", checkpoint: str | None) -> Any:
    """What predicts as training does, to be closed."""
    if checkpoint is not None:
        from streamtrain.commands.checkpointed import CheckpointTrainer

        return nullcontext(CheckpointTrainer(checkpoint, model))
    from streamtrain.cluster.remote import cluster_of
    from streamtrain.cluster.verify_trainer import ShardTrainer
    from streamtrain.train.step import Step

    at_once = threading.Event()
    at_once.set()
    addresses = cluster_of(settings, os.environ.get("TF_CONFIG"), at_once).ps
    return closing(ShardTrainer(model, Step(model), addresses, settings))
