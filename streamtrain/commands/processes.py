"""Commands that run a process of a cluster: `ps`, `worker`, `coordinator` and `serve`."""

import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.commands.options import Addresses, Config, LogFormat, Setting, Workers, read_settings, set_up_log
from streamtrain.console import load_tensorflow, stopped_by_signals
from streamtrain.errors import ConfigError

if TYPE_CHECKING:
    from streamtrain.config import Settings
    from streamtrain.model.model import Model


def ps(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    index: Annotated[int | None, typer.Option(help="Which shard this is, from 0; default: as TF_CONFIG says.")] = None,
    addresses: Addresses = None,
    listen: Annotated[str | None, typer.Option(help="Address to listen at, if it is not the shard's own.")] = None,
    workers: Workers = None,
    backup: Annotated[bool, typer.Option("--backup", help="Run it at its address of ps.backups.")] = False,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run a parameter server: one shard of the embedding tables and dense parameters.

    It takes its model from the first worker, or from its newest checkpoint. Shard 0 has all shards take checkpoints.
    """
    from streamtrain.cluster.process import PsProcess
    from streamtrain.cluster.remote import cluster_of

    settings = read_settings(
        config, setting, {"ps.addresses": addresses, "ps.listen": listen, "log.format": log_format}
    )
    set_up_log(settings, "ps")
    stopped = stopped_by_signals()
    cluster = cluster_of(settings, os.environ.get("TF_CONFIG"), stopped)
    if index is None:
        if cluster.task is None or cluster.task.type != "ps":
            raise ConfigError("--index is not given, and TF_CONFIG does not make this process a ps")
        index = cluster.task.index
    set_up_log(settings, f"ps:{index}")
    process = PsProcess(index, cluster.ps, settings, workers or cluster.workers or 1, backup=backup)
    process.run(stopped)


def worker(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    model: Annotated[str | None, typer.Option(help="The model: path/to/file.py:name; default: setting model.")] = None,
    addresses: Addresses = None,
    topic: Annotated[str | None, typer.Option(help="What is learned; default: setting stream.topic.")] = None,
    shard: Annotated[int | None, typer.Option(help="Also serve this shard, in the same process.")] = None,
    workers: Workers = None,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run a worker: learn a topic, together with the other workers of its group.

    SIGTERM and SIGINT end it once what is under way is learned. Nothing is lost if it is killed.
    """
    from streamtrain.cluster.remote import cluster_of

    settings = read_settings(
        config, setting, {"model": model, "ps.addresses": addresses, "stream.topic": topic, "log.format": log_format}
    )
    set_up_log(settings, "worker")
    stopped = stopped_by_signals()
    cluster = cluster_of(settings, os.environ.get("TF_CONFIG"), stopped)
    made = _load_model(settings, settings.worker.threads)
    from streamtrain.cluster.worker import WorkerProcess
    from streamtrain.model.spec import Spec
    from streamtrain.train.step import Step

    count = workers or cluster.workers or 1
    process = WorkerProcess(made, Step(made), Spec.of(made), cluster.ps, settings, shard=shard, workers=count)
    process.run(stopped)


def coordinator(
    addresses: Addresses = None,
    listen: Annotated[str | None, typer.Option(help="Address to listen at, if it is not coordinator.address.")] = None,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run the coordinator: it knows the whole cluster, and sees to its checkpoints, publications and versions.

    While it is away, training and serving go on. SIGTERM and SIGINT end it after a last checkpoint.
    """
    from streamtrain.cluster.coordinator_process import CoordinatorProcess
    from streamtrain.cluster.membership import Cluster

    settings = read_settings(
        config, setting, {"ps.addresses": addresses, "coordinator.listen": listen, "log.format": log_format}
    )
    set_up_log(settings, "coordinator")
    cluster = Cluster.of(settings.ps.addresses, os.environ.get("TF_CONFIG"))
    CoordinatorProcess(cluster.ps, settings).run(stopped_by_signals())


def serve(  # noqa: PLR0917  # as of worker
    model: Annotated[str | None, typer.Option(help="The model: path/to/file.py:name; default: setting model.")] = None,
    listen: Annotated[str | None, typer.Option(help="Address of the HTTP endpoint; default 127.0.0.1:8501.")] = None,
    fd: Annotated[list[int] | None, typer.Option(help="Serve at this inherited socket, which listens already.")] = None,
    index: Annotated[int, typer.Option(hidden=True)] = 0,
    again: Annotated[bool, typer.Option(hidden=True)] = False,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Serve predictions over HTTP: TensorFlow Serving's REST API, and the Open Inference Protocol.

    From where parameter servers publish (publish.url), following what they learn; or from a checkpoint.
    """
    settings = read_settings(config, setting, {"model": model, "serve.listen": listen, "log.format": log_format})
    set_up_log(settings, "serve")
    from streamtrain.cluster.serving import Place, serve_model

    place = Place([_inherited(one) for one in fd], index, again) if fd else None
    serve_model(partial(_load_model, settings, settings.serve.threads), settings, place)


def _inherited(fd: int) -> socket.socket:
    try:
        found = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigError(f"--fd {fd} is no socket: {exc.strerror}") from exc
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.close()
        raise ConfigError(f"--fd {fd} is a socket that does not listen")
    return found


def _load_model(settings: "Settings", threads: int) -> "Model":
    from streamtrain.model.load import load_model, locate_model

    if settings.model is None:
        raise ConfigError("no model is named: give --model path/to/file.py:name, or set model")
    locate_model(settings.model)
    load_tensorflow(threads)
    return load_model(settings.model)
