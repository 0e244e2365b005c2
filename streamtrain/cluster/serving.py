"""The process that serves predictions: from settings to a running endpoint."""

from streamtrain.errors import ConfigError
from streamtrain.model.model import Model
from streamtrain.serve.app import make_app, serve
from streamtrain.serve.follower import Follower
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.settings import Settings
from streamtrain.store.checkpoint_origin import CheckpointOrigin
from streamtrain.store.origin import Origin
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_origin import RedisOrigin
from streamtrain.store.redis_server import RedisServer


def serve_model(model: Model, settings: Settings) -> None:
    """Serves a model from where it is published, until the process is told to end.

    From `publish.url`; without it, or while it is away at first, from the newest checkpoint at `checkpoint.url`.

    Raises:
        ConfigError: neither is set, or it cannot be served at `serve.listen`.
    """
    checkpoints = CheckpointOrigin(settings.checkpoint.url, model.name) if settings.checkpoint.url else None
    origin: Origin
    if settings.publish.url:
        server = RedisServer(settings.publish.url, cluster=settings.publish.cluster)
        origin, fallback = RedisOrigin(RedisModel(server, settings.publish.model)), checkpoints
    elif checkpoints:
        origin, fallback = checkpoints, None
    else:
        raise ConfigError("there is nothing to serve from: set publish.url, or checkpoint.url")
    chosen = settings.serve
    registry = Registry(model, origin, limit=chosen.resident)
    version = HEAD if chosen.version == HEAD else int(chosen.version)
    token = chosen.admin_token.get_secret_value() if chosen.admin_token else None
    app = make_app(
        registry,
        Follower(registry, serve=version, fallback=fallback, every=settings.publish.every),
        admin_token=token,
        max_batch=chosen.max_batch,
        max_queue=chosen.max_queue,
    )
    serve(app, chosen.listen)
