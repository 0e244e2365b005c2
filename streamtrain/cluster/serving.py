"""The process that serves predictions: from settings to a running endpoint."""

import os
import socket

from streamtrain.cluster.versions import VersionControl
from streamtrain.errors import ConfigError
from streamtrain.model.model import Model
from streamtrain.serve.app import make_app, serve
from streamtrain.serve.follower import Follower
from streamtrain.serve.holds import Holds
from streamtrain.serve.registry import HEAD, Registry, Version
from streamtrain.serve.watchdog import Watch
from streamtrain.settings import PublishSettings, Settings
from streamtrain.store.checkpoint_origin import CheckpointOrigin
from streamtrain.store.gate import Gate
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_origin import RedisOrigin
from streamtrain.store.redis_scripts import PROD
from streamtrain.store.redis_server import RedisServer
from streamtrain.store.redis_versions import RedisVersions

_LOOKUP_SECONDS = 1.0  # a request waits no longer for rows that are not cached


def serve_model(model: Model, settings: Settings) -> None:
    """Serves a model from where it is published, until the process is told to end.

    From `publish.url`; without it, or while it is away at first, from the newest checkpoint at `checkpoint.url`, whose
    rows can only be loaded whole: not if they are to be cached.

    Raises:
        ConfigError: neither is set, rows are to be cached but `publish.url` is not set, or it cannot be served at
            `serve.listen`.
    """
    chosen = settings.serve
    follower = follow(model, settings)
    app = make_app(
        follower.registry,
        follower,
        admin_token=chosen.admin_token.get_secret_value() if chosen.admin_token else None,
        max_batch=chosen.max_batch,
        max_queue=chosen.max_queue,
        watch=Watch(**dict(settings.watchdog)),
    )
    serve(app, chosen.listen)


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
        holds = Holds(versions, f"{socket.gethostname()}:{os.getpid()}")
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
