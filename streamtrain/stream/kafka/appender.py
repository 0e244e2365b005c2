"""Appends messages to a topic of Kafka without waiting, and says of each where it is, or why it is not."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streamtrain.errors import SourceRefused, SourceUnavailable, TopicMissing, WriteFailed
from streamtrain.periodic import FailureLog
from streamtrain.stream.kafka.client import Option
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.kafka.writer import CLOSE_SECONDS, DEFAULTS, allowed_bytes

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_RETRY_SECONDS = 2.0  # between attempts to open the topic


class Appended(NamedTuple):
    """Where a message is."""

    partition: int
    offset: int


Report = Callable[[Appended | WriteFailed], object]
"""Called with where a message is, or why it is not known to be written; in a thread of the appender."""


class KafkaAppender:
    """An idempotent producer, which opens in the background once started: nothing waits for Kafka. Thread-safe.

    Partitions are chosen as `KafkaWriter` does it, so messages with the same key are in the same partition of topics
    with as many partitions.

    Args:
        stream: the topic.
        create: number of partitions to create it with if it is missing; 0: it is created elsewhere.
        options: defaults of librdkafka's options.
    """

    def __init__(self, stream: KafkaStream, create: int = 0, options: Mapping[str, Option] = {}) -> None:
        self.name = stream.name
        self._stream, self._create, self._options = stream, create, dict(options)
        self._producer: Producer | None = None
        self._why = f"{self.name} is not open yet"
        self._opened, self._closed = threading.Event(), threading.Event()
        self._monitor = stream.service.monitor(self._refused)
        self._thread = threading.Thread(target=self._run, name=f"appender of {stream.topic}", daemon=True)

    @property
    def is_reachable(self) -> bool:
        """Whether the topic is open, and Kafka is not known to be away."""
        return self._opened.is_set() and not self._stream.unreachable

    @property
    def trouble(self) -> str:
        """Why it is not reachable; "" if it is."""
        if not self._opened.is_set():
            return self._why
        return f"{self.name} cannot be reached" if self._stream.unreachable else ""

    def start(self) -> None:
        """Begins to open the topic."""
        self._thread.start()

    def wait_open(self, seconds: float) -> bool:
        """Whether the topic is open; waits for up to `seconds`."""
        return self._opened.wait(seconds)

    def append(self, value: bytes, key: bytes, report: Report) -> None:
        """Queues a message.

        Raises:
            WriteFailed: it is not queued; `report` will not be called.
        """
        producer = self._producer
        if producer is None:
            raise WriteFailed(self._why)

        def deliver(error: KafkaError | None, message: Message) -> None:
            if error is None:
                report(Appended(int(message.partition() or 0), int(message.offset() or 0)))
            else:
                report(self._failure(error))

        try:
            producer.produce(self._stream.topic, value, key, on_delivery=deliver)
        except BufferError as exc:
            raise WriteFailed(f"too many messages wait to be written to {self.name}") from exc
        except KafkaException as exc:
            raise self._failure(exc.args[0]) from exc

    def flush(self, seconds: float) -> None:
        """Waits for messages to be written, up to `seconds`."""
        if self._producer is not None:
            self._producer.flush(seconds)

    def close(self) -> None:
        """Gives up on messages that are not written; each of them is reported. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
        if self._producer is not None:
            self._producer.purge()
            self._producer.flush(_POLL_SECONDS)
        self._monitor.close()

    def _run(self) -> None:
        failures = FailureLog()
        while not self._closed.is_set():
            try:
                self._open()
                break
            except (TopicMissing, SourceUnavailable, SourceRefused) as exc:
                self._why = str(exc)
                if line := failures.line(str(exc)):
                    logger.warning("cannot write to %s: %s", self.name, line)
                self._closed.wait(_RETRY_SECONDS)
        producer = self._producer
        while producer is not None and not self._closed.is_set():
            self._monitor.probe(producer, self._stream.topic, _POLL_SECONDS)
            producer.poll(_POLL_SECONDS)

    def _open(self) -> None:
        if self._create:
            self._stream.create(self._create)
        self._stream.bounds()
        self._producer = self._stream.service.create_client(
            Producer,
            self._monitor,
            {"enable.idempotence": True},
            DEFAULTS | self._options | {"message.max.bytes": allowed_bytes(self._stream.max_message_bytes())},
        )
        self._opened.set()

    def _failure(self, error: KafkaError) -> WriteFailed:
        why = self._stream.service.refusal(error) or error.str()
        return WriteFailed(f"cannot write to {self.name}: {why}")

    def _refused(self, why: SourceRefused) -> None:
        logger.warning("cannot write to %s: %s", self.name, why)
