"""The processes that serve predictions: from settings to a running endpoint."""

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamtrain.address import parse_address
from streamtrain.cluster.coordinator import SERVER
from streamtrain.cluster.coordinator_client import Beats, CoordinatorClient
from streamtrain.cluster.siblings import Siblings
from streamtrain.cluster.sockets import listening
from streamtrain.cluster.versions import VersionControl
from streamtrain.errors import ConfigError
from streamtrain.logs import set_up_logs
from streamtrain.metrics import endpoint
from streamtrain.model.model import Model
from streamtrain.ps.security import Security
from streamtrain.serve.app import make_app, serve
from streamtrain.serve.connection import Connections
from streamtrain.serve.follower import Follower
from streamtrain.serve.holds import Holds
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.serve.service import Limits
from streamtrain.serve.watchdog import Watch
from streamtrain.settings import PublishSettings, Settings
from streamtrain.store.checkpoint_origin import CheckpointOrigin
from streamtrain.store.gate import Gate
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_origin import RedisOrigin
from streamtrain.store.redis_scripts import PROD
from streamtrain.store.redis_server import RedisServer
from streamtrain.store.redis_versions import RedisVersions

logger = logging.getLogger(__name__)

_LOOKUP_SECONDS = 1.0  # a request waits no longer for rows that are not cached

_PATIENCE = 10.0  # seconds that processes that begin together wait for something to serve


@dataclass(frozen=True)
class Place:
    """A place among processes that whoever has started them keeps running.

    Attributes:
        sockets: that all of them take connections from.
        index: of this one.
        is_again: whether it takes the place of one that has ended; then it takes requests when it can answer them.
    """

    sockets: Sequence[socket.socket]
    index: int = 0
    is_again: bool = False


def serve_model(load: Callable[[], Model], settings: Settings, place: Place | None = None) -> None:
    """Serves a model from where it is published, until the process is told to end.

    From `publish.url`; without it, or while it is away at first, from the newest checkpoint at `checkpoint.url`, whose
    rows can only be loaded whole: not if they are to be cached.

    Args:
        load: loads the model, in each process; pickled if there are several.
        settings: all.
        place: where this process stands, if others see to the rest; None: it binds `serve.listen`, and starts
            `serve.processes`.

    Raises:
        ConfigError: neither is set, rows are to be cached but `publish.url` is not set, or it cannot be served at
            `serve.listen`.
        StreamtrainError: there are several processes, and none could start.
    """
    chosen = settings.serve
    if not (settings.publish.url or settings.checkpoint.url):
        raise ConfigError("there is nothing to serve from: set publish.url, or checkpoint.url")
    if chosen.processes > 1:
        _check_several(settings)
    if place is not None:
        _Process(load, settings, place.sockets)(place.index, place.is_again, lambda: None)
        return
    if chosen.processes == 1:
        _Process(load, settings)(0, False, lambda: None)
        return
    with listening(chosen.listen) as sockets:
        at = ", ".join("{}:{}".format(*one.getsockname()[:2]) for one in sockets)
        logger.info("%d processes serve at %s", chosen.processes, at)
        log = partial(set_up_logs, settings.log.format, settings.log.level, settings.log.process or "serve")
        Siblings(_Process(load, settings, sockets), chosen.processes, log=log).run()


def _check_several(settings: Settings) -> None:
    chosen = settings.serve
    if chosen.admin_token and not settings.publish.url:
        raise ConfigError(
            "serve.processes with serve.admin_token needs publish.url: a promotion would reach one process only"
        )
    if chosen.metrics and parse_address(chosen.metrics, "serve.metrics", any_port=True).port + chosen.processes > 65536:
        raise ConfigError("serve.metrics must leave a port for each of serve.processes")


@dataclass(frozen=True)
class _Process:
    """What one process does. One that takes the place of another takes requests only when it can answer them."""

    load: Callable[[], Model]
    settings: Settings
    sockets: Sequence[socket.socket] | None = None

    def __call__(self, index: int, is_again: bool, started: Callable[[], None]) -> None:
        chosen = self.settings.serve
        follower = follow(self.load(), self.settings)
        cluster = _coordinator(self.settings)
        app = make_app(
            follower.registry,
            follower,
            admin_token=chosen.admin_token.get_secret_value() if chosen.admin_token else None,
            read_token=chosen.read_token.get_secret_value() if chosen.read_token else None,
            limits=Limits(requests=chosen.max_requests),
            connections=Connections(chosen.max_connections, chosen.receive_timeout),
            max_batch=chosen.max_batch,
            max_queue=chosen.max_queue,
            max_wait=chosen.max_wait,
            watch=Watch(**dict(self.settings.watchdog)),
            patience=math.inf if is_again else 0.0 if self.sockets is None else _PATIENCE,
            cluster=cluster,
        )
        with contextlib.ExitStack() as stack:
            if cluster is not None:
                stack.enter_context(
                    Beats(cluster, SERVER, f"{_name()}:{index}", partial(_about, chosen.listen, follower))
                )
            if chosen.metrics:
                place = parse_address(chosen.metrics, "serve.metrics", any_port=True)
                address = replace(place, port=place.port + index if place.port else 0)
                metrics = endpoint.serve(str(address), app.state.service.metrics.registry)
                stack.callback(metrics.close)
            started()
            serve(app, chosen.listen, self.sockets)


def _coordinator(settings: Settings) -> CoordinatorClient | None:
    address = settings.coordinator.address
    if address is None:
        return None
    return CoordinatorClient(address, Security.read(**settings.security.arguments()))


def _name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _about(address: str, follower: Follower) -> dict[str, Any]:
    """What the coordinator is told of a server."""
    served = follower.registry.served
    if served is None:
        return {"address": address, "version": None, "publication": None, "freshness_ms": None}
    watermark = served.publication.watermark
    freshness = 1000 * (time.time() - watermark) if watermark else None
    return {
        "address": address,
        "version": served.name,
        "publication": served.publication.number,
        "freshness_ms": freshness,
    }


def follow(model: Model, settings: Settings) -> Follower:
    """A registry with what keeps it up, as set; it begins when it is started.

    Raises:
        ConfigError: there is nothing to serve from, or no Redis in which rows can be looked up.
    """
    chosen, every, version = settings.serve, settings.publish.every, _version(settings.serve.version)
    caches = chosen.lookup == "cache"
    checkpoints = CheckpointOrigin(settings.checkpoint.url, model.name) if settings.checkpoint.url else None
    if settings.publish.url:
        published = _model(settings.publish)
        versions = RedisVersions(published)
        holds = Holds(versions, _name())
        registry = Registry(
            model,
            RedisOrigin(published, _model(settings.publish, timeout=_LOOKUP_SECONDS)),
            limit=chosen.resident,
            hold=holds.loading,
            cache_bytes=chosen.cache_bytes if caches else None,
            resident_changed=holds.changed,
        )
        promoter = VersionControl(versions, Gate(**dict(settings.gate)))
        fallback = None if caches else checkpoints
        return Follower(registry, serve=version, promoter=promoter, fallback=fallback, holds=holds, every=every)
    if caches:
        raise ConfigError("serve.lookup = cache looks rows up in Redis: set publish.url")
    if checkpoints:
        return Follower(Registry(model, checkpoints, limit=chosen.resident), serve=version, every=every)
    raise ConfigError("there is nothing to serve from: set publish.url, or checkpoint.url")


def _version(text: str) -> Version | None:
    if text == PROD:
        return None
    return HEAD if text == HEAD else int(text)


def _model(settings: PublishSettings, **options: float) -> RedisModel:
    assert settings.url is not None
    return RedisModel(RedisServer(settings.url, cluster=settings.cluster, **options), settings.model)
