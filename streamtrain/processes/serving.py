"""The processes that serve predictions: from settings to a running endpoint."""

import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamtrain.address import Hosts, binding, parse_address, parse_listener
from streamtrain.cluster.client import CoordinatorClient, Heartbeat
from streamtrain.cluster.members import SERVER
from streamtrain.disk import RowsOnDisk, rows_folder
from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.memory import has_room_for_standby
from streamtrain.metrics import registry as endpoint
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.processes.server import serve
from streamtrain.ps.rpc.security import Security
from streamtrain.publish.versions import VersionControl
from streamtrain.quality.comparison import ComparisonReader
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.feedback.feedback import make_feedback
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.graph import Graph
from streamtrain.serve.http.app import make_app
from streamtrain.serve.leases import VersionLeases
from streamtrain.serve.predictor import WARM_SIZES
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.serve.service.service import Service, ServingConfig
from streamtrain.service.programs import Program, replicate
from streamtrain.service.supervisor import Supervisor
from streamtrain.settings.groups import PublishSettings, ServeSettings, Settings
from streamtrain.store.checkpoint.source import CheckpointOrigin
from streamtrain.store.publication import PROD, Origin
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.store.redis.traffic import RedisTraffic
from streamtrain.store.redis.versions import RedisVersions
from streamtrain.store.traffic import Arm, Traffic

logger = logging.getLogger(__name__)

_BACKLOG = 2048


@contextmanager
def listening(chosen: ServeSettings) -> Iterator[list[socket.socket]]:
    """Sockets that all processes take connections from: one that dies leaves those that wait to the others.

    The port of gRPC is reserved for them.

    Raises:
        ConfigError: an address is wrong, in use, or not of this machine.
    """
    address = chosen.listen
    place = parse_listener(address, "serve.listen", "predictions")
    sockets: list[socket.socket] = []
    with ExitStack() as stack:
        with binding(address, "serve.listen"):
            resolved = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, where in resolved if place.port else resolved[:1]:
                one = socket.create_server(where[:2], family=family, backlog=_BACKLOG)
                sockets.append(stack.enter_context(one))
        stack.enter_context(_reserved(chosen.grpc_listen))
        yield sockets


@contextmanager
def _reserved(address: str | None) -> Iterator[None]:
    """Keeps the gRPC port for the processes that share it: gRPC takes no sockets that listen already.

    Raises:
        ConfigError: it is in use, or not of this machine.
    """
    if address is None:
        yield
        return
    place = parse_address(address, "serve.grpc_listen", any_port=True)
    if not place.port:  # of one process, whatever it gets
        yield
        return
    with ExitStack() as stack:
        with binding(address, "serve.grpc_listen"):
            family, _, _, _, where = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
            with socket.create_server(where[:2], family=family):
                pass  # else another program that shares the port would get some of the connections
            kept = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            kept.bind(where[:2])
        yield


_LOOKUP_SECONDS = 1.0  # a request waits no longer for rows that are not cached

_PATIENCE = 10.0  # seconds that a process that begins waits for something to serve before it takes requests


@dataclass(frozen=True)
class Seat:
    """The place of a process among several that a supervisor keeps running.

    Attributes:
        sockets: that all of them take connections from.
        index: of this one.
        is_again: whether it takes the place of one that has ended; then it takes requests when it can answer them.
    """

    sockets: Sequence[socket.socket]
    index: int = 0
    is_again: bool = False


Load = Callable[[str | None], Model]
"""Loads the model of a model file; None: of the one that `model` names."""


def serve_model(
    load: Load,
    settings: Settings,
    place: Seat | None = None,
    *,
    standby: Callable[[], int | None] | None = None,
) -> None:
    """Serves a model, or those of `serve.models`, from where they are published, until SIGTERM or SIGINT.

    From `publish.url`; without it, or while it is unreachable at first, from the newest checkpoint at `checkpoint.url`,
    whose rows can only be loaded whole: not if they are to be cached.

    Args:
        load: loads a model file.
        settings: all.
        place: of this process among several; None: it is the only one, and binds `serve.listen`.
        standby: called once all is loaded but what is published; waits for the index of the process that this one
            replaces; None: it is not needed.

    Raises:
        ConfigError: neither is set, rows are to be cached but `publish.url` is not set, or it cannot be served at
            `serve.listen`.
    """
    chosen = settings.serve
    check_serving(settings)
    public = [one for one in (chosen.listen, chosen.grpc_listen) if one and not _is_local(one)]
    if standby is None and (place is None or place.index == 0) and chosen.read_token is None and public:
        logger.warning(
            "anyone who reaches %s may request predictions and read what this process knows: set serve.read_token, or "
            "let only a proxy that authenticates clients reach it",
            " or ".join(public),
        )
    _serve_process(load, settings, place, standby)


def serve_processes(
    settings: Settings, command: Sequence[str], environment: Mapping[str, str], stopped: threading.Event
) -> None:
    """Runs `serve.processes` processes that serve side by side, and restarts those that end, until `stopped` is set.

    Args:
        settings: all.
        command: of one process.
        environment: of the processes.
        stopped: ends them.

    Raises:
        ConfigError: settings are wrong, also if only a process can tell.
        StreamtrainError: no process could start.
    """
    check_serving(settings)
    count, process = settings.serve.processes, settings.log.process or "serve"

    def write(name: str, line: str) -> None:
        sys.stderr.write(f"{line}\n" if settings.log.format == "json" else f"{name:<9} {line}\n")

    with listening(settings.serve) as sockets:
        addresses = ", ".join("{}:{}".format(*one.getsockname()[:2]) for one in sockets)
        logger.info("serving at %s with %d processes", addresses, count)
        standby = "serve" if settings.serve.standby else None
        program = Program("serve", command, environment, standby=standby, preload=True)
        programs = [
            replace(one, command=[*one.command, "--set", f"log.process={process}:{index}"])
            for index, one in enumerate(replicate(program, count, sockets))
        ]
        supervisor = Supervisor(
            programs,
            write,
            report=lambda name, text: logger.warning("%s %s", name, text),
            must_start=True,
            has_room=has_room_for_standby,
        )
        supervisor.start()
        try:
            supervisor.wait(stopped)
        finally:
            supervisor.stop()


def check_serving(settings: Settings) -> None:
    """Whether what is set goes together.

    Raises:
        ConfigError: it does not.
    """
    if not (settings.publish.url or settings.checkpoint.url):
        raise ConfigError("there is nothing to serve from: set publish.url or checkpoint.url")
    if settings.serve.models and not settings.publish.url:
        raise ConfigError("serve.models needs publish.url: the models are read from Redis by name")
    make_feedback(settings)
    if settings.serve.processes > 1:
        _check_several(settings)


def _is_local(listen: str) -> bool:
    return parse_address(listen, "serve.listen", any_port=True).is_local


def _check_several(settings: Settings) -> None:
    chosen = settings.serve
    if chosen.admin_token and not settings.publish.url:
        raise ConfigError(
            "serve.processes with serve.admin_token needs publish.url: a promotion would reach one process only"
        )
    if chosen.grpc_listen and parse_address(chosen.grpc_listen, "serve.grpc_listen", any_port=True).port == 0:
        raise ConfigError("serve.grpc_listen must name a port that several of serve.processes can share, not 0")
    if chosen.metrics and parse_address(chosen.metrics, "serve.metrics", any_port=True).port + chosen.processes > 65536:
        raise ConfigError("serve.metrics must leave a port for each of serve.processes")


def _serve_process(
    load: Load, settings: Settings, place: Seat | None, standby: Callable[[], int | None] | None
) -> None:
    chosen, index = settings.serve, place.index if place else 0
    followers, failed = follow_all(load, settings)
    follower, *others = followers
    cluster = _coordinator(settings)
    app = make_app(
        follower.registry,
        follower,
        _config(settings, place, failed),
        cluster=cluster,
        others=others,
        traffic=_controls(settings, followers),
        feedback=make_feedback(settings),
        comparisons=_comparisons(settings.publish),
    )
    if standby is not None:
        for one in followers:
            one.registry.graph.warm(WARM_SIZES)
        taken = standby()
        if taken is None:
            return
        index = taken
    with contextlib.ExitStack() as stack:
        if cluster is not None:
            stack.enter_context(
                Heartbeat(cluster, SERVER, f"{_name()}:{index}", partial(_about, chosen.listen, follower))
            )
        if chosen.metrics:
            base = parse_address(chosen.metrics, "serve.metrics", any_port=True)
            address = replace(base, port=base.port + index if base.port else 0)
            metrics = endpoint.serve(
                str(address), app.state.service.metrics.registry, partial(_not_ready, app.state.service)
            )
            stack.callback(metrics.close)
        serve(app, chosen.listen, place.sockets if place else None)


def _not_ready(service: Service) -> str:
    try:
        service.check_ready()
    except HTTPError as exc:
        return str(exc)
    return ""


def _config(settings: Settings, place: Seat | None, failed: Mapping[str, str]) -> ServingConfig:
    """One that takes the place of another takes requests only when it can answer them; others wait for that a while."""
    chosen = settings.serve
    return ServingConfig(
        admin_token=chosen.admin_token.get_secret_value() if chosen.admin_token else None,
        read_token=chosen.read_token.get_secret_value() if chosen.read_token else None,
        hosts=Hosts(chosen.listen, chosen.hosts),
        max_requests=chosen.max_requests,
        max_connections=chosen.max_connections,
        receive_timeout=chosen.receive_timeout,
        max_batch=chosen.max_batch,
        max_queue=chosen.max_queue,
        max_wait=chosen.max_wait,
        watchdog=settings.watchdog,
        startup_timeout=math.inf if place is not None and place.is_again else _PATIENCE,
        grpc_listen=chosen.grpc_listen,
        grpc_shares_port=place is not None,
        failed=failed,
        traffic=_initial_traffic(settings),
        traffic_every=settings.publish.every,
        routing_key=chosen.routing_key,
    )


def _controls(settings: Settings, followers: Sequence[RegistryUpdater]) -> dict[str, RedisTraffic]:
    """Controls of the traffic of each model, by the name under which it is served."""
    if not settings.publish.url:
        return {}
    names = [one.registry.model.name for one in followers]
    published = names if settings.serve.models else [settings.publish.model]
    return {
        name: RedisTraffic(_model(settings.publish.model_copy(update={"model": of})))
        for name, of in zip(names, published, strict=True)
    }


def _comparisons(settings: PublishSettings) -> ComparisonReader | None:
    return ComparisonReader(RedisServer(settings.url, cluster=settings.cluster)) if settings.url else None


def _initial_traffic(settings: Settings) -> Traffic | None:
    weights, models = settings.serve.traffic, settings.serve.models
    if not weights:
        return None
    own = next(iter(models), settings.publish.model)
    arms = []
    for name, weight in weights.items():
        model, _, at = name.rpartition("@")
        if not model:
            model, at = (name, PROD) if name in models and name != own else (own, name)
        arms.append((Arm(name, model, at), weight))
    return Traffic(tuple(arms))


def _coordinator(settings: Settings) -> CoordinatorClient | None:
    address = settings.coordinator.address
    if address is None:
        return None
    return CoordinatorClient([address], Security.from_settings(settings.security))


def _name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _about(address: str, follower: RegistryUpdater) -> dict[str, Any]:
    """The state of a server that its heartbeats carry."""
    served = follower.registry.served
    if served is None:
        return {"address": address, "version": None, "publication": None, "watermark": None, "freshness_ms": None}
    watermark = served.publication.watermark or None
    freshness = 1000 * (time.time() - watermark) if watermark else None
    return {
        "address": address,
        "version": served.name,
        "publication": served.publication.number,
        "watermark": watermark,
        "freshness_ms": freshness,
    }


def follow_all(load: Load, settings: Settings) -> tuple[list[RegistryUpdater], dict[str, str]]:
    """The updaters of all models to serve, and why others cannot be, by name.

    Raises:
        ConfigError: none can be served.
    """
    names = settings.serve.models
    if not names:
        return [follow(_as_begun(load(None), settings), settings)], {}
    followers: list[RegistryUpdater] = []
    failed: dict[str, str] = {}
    loaded: dict[str, tuple[Model, Graph]] = {}  # models of one file differ in their rows and weights alone
    for name, file in names.items():
        try:
            publish = settings.publish.model_copy(update={"model": name})
            checkpoint = settings.checkpoint.model_copy(update={"url": None})  # whose rows may be another model's
            one = settings.model_copy(update={"publish": publish, "checkpoint": checkpoint})
            if file not in loaded:
                model = _as_begun(load(file or None), one)
                loaded[file] = model, Graph(model)
            model, graph = loaded[file]
            followers.append(follow(model.named(name), one, graph))
        except ConfigError as exc:
            failed[name] = str(exc)
            logger.error("model %s cannot be served: %s", name, exc)
    if not followers:
        raise ConfigError(f"none of serve.models can be served: {'; '.join(failed.values())}")
    return followers, failed


def _as_begun(model: Model, settings: Settings) -> Model:
    """The model, with the defaults with which what it is to serve began, if that can be read now."""
    origins: list[Origin] = []
    if settings.publish.url:
        origins.append(RedisOrigin(_model(settings.publish, timeout=_LOOKUP_SECONDS)))
    if settings.checkpoint.url:
        origins.append(CheckpointOrigin(settings.checkpoint.url, model.name))
    for origin in origins:
        try:
            found = origin.find(None)
        except StreamtrainError as exc:  # said where it is followed
            logger.debug("%s", exc)
        else:
            if found:
                return model.with_defaults_of(Spec.from_json(found.spec))
    return model


def follow(model: Model, settings: Settings, graph: Graph | None = None) -> RegistryUpdater:
    """A registry with its updater, as configured; not started yet. `check_serving` has passed.

    Args:
        model: that is served.
        settings: of the process.
        graph: of the model, if there is one already; else it is traced, which takes most of a process's start.

    Raises:
        ConfigError: there is no Redis in which rows can be looked up, or no disk for them.
    """
    chosen, every, version = settings.serve, settings.publish.every, _version(settings.serve.version)
    caches = chosen.lookup == "cache"
    disk = None
    if chosen.lookup == "disk":
        disk = RowsOnDisk(chosen.cache_bytes, rows_folder(chosen.disk, "serve.disk"))
    checkpoints = CheckpointOrigin(settings.checkpoint.url, model.name) if settings.checkpoint.url else None
    if settings.publish.url:
        published = _model(settings.publish)
        versions = RedisVersions(published)
        leases = VersionLeases(versions, _name())
        registry = Registry(
            model,
            RedisOrigin(published, _model(settings.publish, timeout=_LOOKUP_SECONDS)),
            limit=chosen.resident,
            hold=leases.loading,
            cache_bytes=chosen.cache_bytes if caches else None,
            disk=disk,
            resident_changed=leases.changed,
            graph=graph,
        )
        promoter = VersionControl(versions, settings.gate)
        fallback = None if caches else checkpoints
        return RegistryUpdater(
            registry, serve=version, promoter=promoter, fallback=fallback, leases=leases, every=every
        )
    if caches:
        raise ConfigError("serve.lookup = cache looks rows up in Redis: set publish.url")
    assert checkpoints is not None  # else `check_serving` has raised
    registry = Registry(model, checkpoints, limit=chosen.resident, disk=disk, graph=graph)
    return RegistryUpdater(registry, serve=version, every=every)


def _version(text: str) -> Version | None:
    if text == PROD:
        return None
    return HEAD if text == HEAD else int(text)


def _model(settings: PublishSettings, **options: float) -> RedisModel:
    assert settings.url is not None
    return RedisModel(RedisServer(settings.url, cluster=settings.cluster, **options), settings.model)
