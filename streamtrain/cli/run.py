"""Commands that run one process of a cluster: `ps`, `worker`, `coordinator`, `join` and `serve`."""

import os
import selectors
import socket
import string
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.cli.options import (
    Addresses,
    Config,
    LearnedTopic,
    Listen,
    LogFormat,
    ModelSetting,
    Setting,
    Workers,
    load_required_model,
    read_settings,
    set_up_process_log,
    warn_without_effect,
)
from streamtrain.errors import ConfigError, ModelMismatch
from streamtrain.shutdown import SHUTDOWN_SECONDS, stop_on_signals

_POLL_SECONDS = 0.5

if TYPE_CHECKING:
    from streamtrain.model.model import Model
    from streamtrain.settings.groups import Settings
    from streamtrain.train.warmup import Warmup


def ps(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    index: Annotated[
        int | None, typer.Option(help="Index of the shard, from 0; default: from TF_CONFIG, else by the host's name.")
    ] = None,
    addresses: Addresses = None,
    listen: Annotated[str | None, typer.Option(help="Address to bind, if it differs from the shard's address.")] = None,
    workers: Workers = None,
    backup: Annotated[
        bool, typer.Option("--backup", help="Run the shard's backup, at its address in ps.backups.")
    ] = False,
    spare: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Hold no shard yet: wait at this address for `streamtrain scale`."),
    ] = None,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run a parameter server: one shard of the embedding tables and dense parameters.

    The model comes from the first worker or the newest checkpoint. Shard 0 coordinates unless a coordinator is set.

    Without --index, it is the shard of whose address, or of whose backup's, the host has the name of this host.
    """
    from streamtrain.cluster.client import resolve_cluster
    from streamtrain.processes.ps import PsProcess

    settings = read_settings(
        config, setting, {"ps.addresses": addresses, "ps.listen": listen, "log.format": log_format}
    )
    set_up_process_log(settings, "ps")
    stopped = stop_on_signals(SHUTDOWN_SECONDS)
    if spare is not None:
        from streamtrain.ps.nodes.topology import Cluster

        PsProcess(None, Cluster.of_addresses(spare).ps, settings, workers or 1).run(stopped)
        return
    cluster, settings = resolve_cluster(settings, os.environ.get("TF_CONFIG"), stopped)
    if index is None:
        index, backup = cluster.own_place(socket.gethostname(), settings.ps.backups, backup=backup)
    set_up_process_log(settings, f"ps:{index}")
    warn_without_effect(settings, "checkpoint", "publish", "ps")
    process = PsProcess(index, cluster.ps, settings, workers or cluster.workers or 1, backup=backup)
    process.run(stopped)


def worker(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    model: ModelSetting = None,
    addresses: Addresses = None,
    topic: LearnedTopic = None,
    shard: Annotated[int | None, typer.Option(help="Also run this shard, in the same process.")] = None,
    workers: Workers = None,
    instance: Annotated[
        str | None,
        typer.Option(help="Static membership: name in the consumer group, unique on this host."),
    ] = None,
    standby: Annotated[bool, typer.Option("--standby", hidden=True)] = False,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run a worker: learn a topic, together with the other workers of its consumer group.

    SIGTERM and SIGINT stop it once batches in progress are learned. Nothing is lost if it is killed.
    """
    from streamtrain.cluster.client import resolve_cluster

    settings = read_settings(
        config, setting, {"model": model, "ps.addresses": addresses, "stream.topic": topic, "log.format": log_format}
    )
    set_up_process_log(settings, "worker")
    stopped = stop_on_signals(settings.worker.drain + 10)
    if not standby:
        warn_without_effect(settings, "stream")
    cluster, settings = resolve_cluster(settings, os.environ.get("TF_CONFIG"), stopped)
    made = load_required_model(settings, settings.worker.threads)
    from streamtrain.model.spec import Spec
    from streamtrain.processes.worker import WorkerProcess, warm_up
    from streamtrain.train.step import Step

    step = Step(made)
    warmup = warm_up(made, step, settings) if standby else None
    if standby:
        instance = _await_instance(stopped)
        if instance is None:
            return
        _log_as(settings, instance)

    def run(made: "Model", step: Step, warmup: "Warmup | None") -> None:
        count, spec = workers or cluster.workers or 1, Spec.of(made)
        WorkerProcess(
            *(made, step, spec, cluster.ps, settings), shard=shard, workers=count, instance=instance, warmup=warmup
        ).run(stopped)

    try:
        run(made, step, warmup)
    except ModelMismatch as exc:
        begun = made.with_defaults_of(Spec.from_json(exc.learned))
        if begun is made:
            raise
        run(begun, Step(begun), None)


def _await_instance(stopped: threading.Event) -> str | None:
    """Name of the worker that a standby is to replace, from standard input; None: it was not needed."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while not stopped.is_set():
            if selector.select(_POLL_SECONDS):
                return sys.stdin.readline().strip() or None
    return None


def _log_as(settings: "Settings", process: str) -> None:
    """Has a standby log under the name of the process that it replaces."""
    set_up_process_log(
        settings.model_copy(update={"log": settings.log.model_copy(update={"process": process})}), process
    )


def coordinator(
    addresses: Addresses = None,
    listen: Annotated[str | None, typer.Option(help="Address to bind, if it differs from coordinator.address.")] = None,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run the coordinator, which takes checkpoints, publishes, makes versions and knows the status of the cluster.

    Training and serving continue without it. SIGTERM and SIGINT stop it after a last checkpoint.
    """
    from streamtrain.processes.coordinator import CoordinatorProcess
    from streamtrain.ps.nodes.topology import Cluster

    settings = read_settings(
        config, setting, {"ps.addresses": addresses, "coordinator.listen": listen, "log.format": log_format}
    )
    set_up_process_log(settings, "coordinator")
    warn_without_effect(settings, "coordinator", "gate", "publish", "checkpoint")
    cluster = Cluster.of(settings.ps.addresses, os.environ.get("TF_CONFIG"))
    CoordinatorProcess(cluster.ps, settings).run(stop_on_signals(SHUTDOWN_SECONDS))


def join(
    instance: Annotated[
        str | None,
        typer.Option(help="Static membership: name in the consumer group, unique on this host."),
    ] = None,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Join impressions and outcomes to samples, together with the other joiners of the group.

    SIGTERM and SIGINT stop it. Nothing is lost or written twice if it is killed.
    """
    from streamtrain.processes.join import JoinProcess

    settings = read_settings(config, setting, {"log.format": log_format})
    set_up_process_log(settings, "join")
    stopped = stop_on_signals(SHUTDOWN_SECONDS)
    warn_without_effect(settings, "join")
    if instance is not None:
        instance = f"{socket.gethostname()}-{instance}"
    JoinProcess(settings, instance).run(stopped)


def serve(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    model: ModelSetting = None,
    listen: Listen = None,
    fd: Annotated[list[int] | None, typer.Option(help="Inherited listening socket to serve at.")] = None,
    index: Annotated[int, typer.Option(hidden=True)] = 0,
    again: Annotated[bool, typer.Option(hidden=True)] = False,
    standby: Annotated[bool, typer.Option("--standby", hidden=True)] = False,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Serve predictions over HTTP: TensorFlow Serving's REST API, and the Open Inference Protocol.

    Follows what shards publish (publish.url), or serves a checkpoint (checkpoint.url).
    """
    settings = read_settings(config, setting, {"model": model, "serve.listen": listen, "log.format": log_format})
    set_up_process_log(settings, "serve")
    if index == 0 and not standby:
        warn_without_effect(settings, "serve")
    from streamtrain.processes.serving import Seat, serve_model, serve_processes

    if settings.serve.processes > 1 and not fd:
        command = [sys.executable, "-m", "streamtrain", "serve"]
        for option, value in {"model": model, "listen": listen, "config": config, "log-format": log_format}.items():
            command += [] if value is None else [f"--{option}", str(value)]
        command += [word for text in setting or [] for word in ("--set", text)]
        serve_processes(settings, command, os.environ | {"PYTHONUNBUFFERED": "1"}, stop_on_signals())
        return
    place = Seat([_inherit_socket(number) for number in fd], index, again or standby) if fd else None

    def load(file: str | None) -> "Model":
        wanted = settings.model_copy(update={"model": file}) if file else settings
        return load_required_model(wanted, settings.serve.threads)

    serve_model(load, settings, place, standby=partial(_await_index, settings) if standby else None)


def _await_index(settings: "Settings") -> int | None:
    """Index of the serving process that a standby is to replace, from standard input; None: it was not needed."""
    name = sys.stdin.readline().strip()
    if not name:
        return None
    index = name[len(name.rstrip(string.digits)) :]
    _log_as(settings, (settings.log.process or name).rstrip(string.digits) + index)
    return int(index or 0)


def _inherit_socket(fd: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigError(f"--fd {fd} is not a socket: {exc.strerror}") from exc
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise ConfigError(f"--fd {fd} is not a listening socket")
    return listener
