"""Opens what publish.url names: a server, dictionaries, a published model."""

from collections.abc import Iterator
from contextlib import contextmanager

from streamtrain.errors import ConfigError
from streamtrain.settings.groups import PublishSettings
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer


def open_redis(settings: PublishSettings) -> RedisServer | None:
    """The Redis to which the model is published; None: publish.url is not set."""
    return RedisServer(settings.url, cluster=settings.cluster) if settings.url else None


def open_dictionaries(redis: RedisServer, settings: PublishSettings) -> RedisDictionaries:
    """The dictionaries of the published model."""
    return RedisDictionaries(RedisModel(redis, settings.model), log_bytes=settings.log_bytes)


@contextmanager
def open_published_model(settings: PublishSettings) -> Iterator[RedisModel]:
    """The model in Redis that settings name; its connections end with the block.

    Raises:
        ConfigError: they name none.
    """
    if settings.url is None:
        raise ConfigError(
            "publish.url is not set, and `streamtrain up` does not run in this folder: "
            "give --set publish.url=redis://host:port"
        )
    server = RedisServer(settings.url, cluster=settings.cluster)
    try:
        yield RedisModel(server, settings.model)
    finally:
        server.close()
