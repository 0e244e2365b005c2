"""The stream that the settings name."""

from collections.abc import Iterator
from contextlib import contextmanager

from streamtrain.address import parse_address
from streamtrain.errors import ConfigError, TopicMissing
from streamtrain.setting_types import mask_credentials
from streamtrain.settings import StreamSettings
from streamtrain.stream.source import Stream, Writer

_KAFKA_PORT = 9092
_KNOWN = "kafka://host:port,… or redis://, rediss://, unix://"


def open_stream(settings: StreamSettings) -> Stream:
    """The stream at `settings.url`; its service is not asked for anything yet.

    Raises:
        ConfigError: `stream.url` is none that we know, or `stream.topic` is missing.
    """
    if settings.topic is None:
        raise ConfigError("stream.topic is not set: name it there, or with --topic")
    scheme, separator, rest = settings.url.partition("://")
    if separator and scheme == "kafka":
        from streamtrain.stream.kafka import KafkaStream

        return KafkaStream(_servers(rest), settings.topic, settings.kafka)
    if separator and scheme in ("redis", "rediss", "unix"):
        from streamtrain.stream.redis_streams import RedisStream

        return RedisStream(settings.url, settings.topic)
    raise ConfigError(f"stream.url must be {_KNOWN}, not {mask_credentials(settings.url)!r}")


def _servers(text: str) -> str:
    """Kafka's bootstrap servers, each with its port."""
    if "@" in text:
        raise ConfigError(
            "stream.url of Kafka holds no credentials: these are settings of stream.kafka, as sasl.password"
        )
    addresses = []
    for server in text.rstrip("/").split(","):
        has_port = ":" in server.rpartition("]")[2]
        address = parse_address(server.strip() if has_port else f"{server.strip()}:{_KAFKA_PORT}", "stream.url")
        addresses.append(str(address))
    return ",".join(addresses)


@contextmanager
def open_writer(settings: StreamSettings) -> Iterator[Writer]:
    """A writer to the topic of the settings, which is made if they say so.

    Raises:
        ConfigError: as `open_stream`.
        TopicMissing: there is no such topic; the message says how to make it.
        SourceError: as of `Stream.writer`.
    """
    stream = open_stream(settings)
    if settings.create:
        stream.create(settings.create)
    try:
        writer = stream.writer()
    except TopicMissing as exc:
        raise TopicMissing(f"{exc}; --create PARTITIONS makes it") from exc
    try:
        yield writer
    finally:
        writer.close()
