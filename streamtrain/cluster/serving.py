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
from streamtrain.settings import Settings
from streamtrain.store.checkpoint_origin import CheckpointOrigin
from streamtrain.store.gate import Gate
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_origin import RedisOrigin
from streamtrain.store.redis_scripts import PROD
from streamtrain.store.redis_server import RedisServer
from streamtrain.store.redis_versions import RedisVersions


def serve_model(model: Model, settings: Settings) -> None:
    """Serves a model from where it is published, until the process is told to end.

    From `publish.url`; without it, or while it is away at first, from the newest checkpoint at `checkpoint.url`.

    Raises:
        ConfigError: neither is set, or it cannot be served at `serve.listen`.
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
        ConfigError: there is nothing to serve from.
    """
    limit, every, version = settings.serve.resident, settings.publish.every, _version(settings.serve.version)
    checkpoints = CheckpointOrigin(settings.checkpoint.url, model.name) if settings.checkpoint.url else None
    if settings.publish.url:
        server = RedisServer(settings.publish.url, cluster=settings.publish.cluster)
        published = RedisModel(server, settings.publish.model)
        versions = RedisVersions(published)
        holds = Holds(versions, f"{socket.gethostname()}:{os.getpid()}")
        registry = Registry(
            model, RedisOrigin(published), limit=limit, hold=holds.loading, resident_changed=holds.changed
        )
        promoter = VersionControl(versions, Gate(**dict(settings.gate)))
        return Follower(registry, serve=version, promoter=promoter, fallback=checkpoints, holds=holds, every=every)
    if checkpoints:
        return Follower(Registry(model, checkpoints, limit=limit), serve=version, every=every)
    raise ConfigError("there is nothing to serve from: set publish.url, or checkpoint.url")


def _version(text: str) -> Version | None:
    if text == PROD:
        return None
    return HEAD if text == HEAD else int(text)
