"""Opens streams by their settings; waits for topics, creates them, and finds where a new run begins."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from streamtrain.address import parse_address, redacted
from streamtrain.errors import ConfigError, SourceError, SourceRefused, SourceUnavailable, TopicMissing
from streamtrain.periodic import PeriodicTask, retry
from streamtrain.settings.groups import StreamSettings
from streamtrain.stream.source import Stream, Writer

logger = logging.getLogger(__name__)

_KAFKA_PORT = 9092
_KNOWN = "kafka://host:port,… or redis://, rediss://, unix://"


def open_stream(settings: StreamSettings, instance: str | None = None) -> Stream:
    """The stream at `settings.url`, without connecting to its service yet.

    Args:
        settings: the stream's settings.
        instance: static membership of its group members (Kafka's group.instance.id).

    Raises:
        ConfigError: `stream.url` is invalid, or `stream.topic` is missing.
    """
    if settings.topic is None:
        raise ConfigError("stream.topic is not set: set it, or use --topic")
    scheme, separator, rest = settings.url.partition("://")
    if separator and scheme == "kafka":
        from streamtrain.stream.kafka.stream import KafkaStream

        return KafkaStream(_servers(rest), settings.topic, settings.kafka, instance=instance)
    if separator and scheme in ("redis", "rediss", "unix"):
        from streamtrain.stream.redis.stream import RedisStream

        return RedisStream(settings.url, settings.topic, instance=instance)
    raise ConfigError(f"stream.url must be {_KNOWN}, not {redacted(settings.url)!r}")


def topic_settings(settings: StreamSettings, address: str, key: str) -> StreamSettings:
    """The settings of another topic of the stream's service.

    Args:
        settings: of the stream.
        address: "kafka://host:port/topic", or the name of a topic at `settings.url`.
        key: of the setting with the address, for errors.

    Raises:
        ConfigError: the address is invalid.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        return settings.model_copy(update={"topic": address})
    server, _, topic = rest.partition("/")
    if scheme != "kafka" or not server or not topic or "/" in topic:
        raise ConfigError(f'{key} must be "kafka://host:port/topic" or the name of a topic, not {redacted(address)!r}')
    return settings.model_copy(update={"url": f"kafka://{server}", "topic": topic})


def _servers(text: str) -> str:
    """Kafka's bootstrap servers, each with its port."""
    if "@" in text:
        raise ConfigError(
            "stream.url of Kafka must not contain credentials: set them in stream.kafka, such as sasl.password"
        )
    addresses = []
    for server in text.rstrip("/").split(","):
        has_port = ":" in server.rpartition("]")[2]
        address = parse_address(server.strip() if has_port else f"{server.strip()}:{_KAFKA_PORT}", "stream.url")
        addresses.append(str(address))
    return ",".join(addresses)


@contextmanager
def open_writer(settings: StreamSettings) -> Iterator[Writer]:
    """A writer to the topic of the settings, which is created if `stream.create` says so.

    Raises:
        ConfigError: as `open_stream`.
        TopicMissing: the topic does not exist; the message says how to create it.
        SourceError: as `Stream.writer`.
    """
    stream = open_stream(settings)
    if settings.create:
        stream.create(settings.create)
    try:
        writer = stream.writer()
    except TopicMissing as exc:
        raise TopicMissing(f"{exc}; create it with --create PARTITIONS") from exc
    try:
        yield writer
    finally:
        writer.close()


CHECK_SECONDS = 5.0
"""Between two checks of the topic's identity."""


def wait_for_topic(stream: Stream, create: int, stopped: threading.Event) -> bool:
    """Waits until the topic exists, or creates it; logs once what it waits for.

    Args:
        stream: the topic.
        create: number of partitions to create it with; 0: it is created elsewhere.
        stopped: ends the waiting.

    Returns:
        Whether the topic exists; False only if `stopped` is set.

    Raises:
        SourceRefused: the service refuses the credentials.
    """

    def ensure() -> None:
        try:
            stream.bounds()
        except TopicMissing as exc:
            if not create:
                raise TopicMissing(f"{exc}; waiting until it is created (stream.create creates it here)") from exc
            stream.create(create)
            logger.info("created %s with %d partitions", stream.name, create)

    try:
        retry(ensure, (TopicMissing, SourceUnavailable), stopped)
    except (TopicMissing, SourceUnavailable):
        return False
    return True


def topic_recreated(stream: Stream, learned: str, identity: str) -> SourceRefused:
    """The error for a topic whose identity is not that of the one that was learned."""
    return SourceRefused(
        f"{stream.name} has been deleted and created again, or is another topic: its identity is {identity}, "
        f"but the shards have learned {learned}. To learn it from stream.start, start the shards without checkpoints "
        "(with another checkpoint.url, or an empty one). If its samples have the same offsets as before, as in a copy, "
        f'set stream.topic_id = "{identity}" to resume where learning stopped'
    )


class TopicWatch:
    """Checks from time to time, in a thread, that the topic has not been deleted and created again.

    Without it a worker would read on in a new topic that has grown past the clock in the meantime.

    Args:
        stream: the topic.
        learned: its identity when learning began; "": the service has none, and nothing is checked.
        stop: called once the identity is another.
    """

    def __init__(self, stream: Stream, learned: str, stop: Callable[[], object]) -> None:
        self._stream, self._learned, self._stop = stream, learned, stop
        self._failure: SourceRefused | None = None
        self._task = PeriodicTask("topic", self._check_identity, CHECK_SECONDS, delay=CHECK_SECONDS)

    def __enter__(self) -> "TopicWatch":
        if self._learned:
            self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.stop()

    def check_now(self) -> None:
        """Checks the identity once."""
        try:
            identity = self._stream.identity() if self._learned else ""
        except SourceError as exc:  # the reader of the topic handles it
            logger.debug("%s", exc)
            return
        if identity not in {"", self._learned}:
            self._failure = topic_recreated(self._stream, self._learned, identity)

    def check(self) -> None:
        """Raises SourceRefused once the identity is another."""
        if self._failure is not None:
            raise self._failure

    def _check_identity(self) -> None:
        if not self._stream.unreachable:
            self.check_now()
        if self._failure is not None:
            self._task.stop()
            self._stop()


def resolve_start_offsets(stream: Stream, start: str, group: str) -> dict[int, int]:
    """Offsets at which a new run begins, by partition.

    Args:
        stream: the topic.
        start: "earliest", "latest", "committed" (earliest where nothing is committed), or an ISO 8601 time.
        group: consumer group whose committed positions are used.
    """
    bounds = stream.bounds()
    earliest = {partition: of.low for partition, of in bounds.items()}
    if start == "earliest":
        return earliest
    if start == "latest":
        return {partition: of.high for partition, of in bounds.items()}
    if start == "committed":
        committed = stream.committed(group)
        return earliest | {p: at for p, at in committed.items() if p in bounds and at >= bounds[p].low}
    return stream.at(datetime.fromisoformat(start).timestamp())
