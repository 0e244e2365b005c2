"""Writes a topic of Kafka."""

import threading
from collections.abc import Mapping
from itertools import count

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streamtrain.errors import SourceRefused, WriteFailed
from streamtrain.stream.kafka.client import KafkaService, Option

DEFAULTS: dict[str, Option] = {
    "linger.ms": 5,
    "partitioner": "murmur2_random",  # of a key as Kafka's own clients do it
}
_MIN_BYTES, _MAX_BYTES = 1000, 1_000_000_000  # that librdkafka takes for message.max.bytes
_FRAME_BYTES = 200  # more than a batch of one message and the message itself have around key, value and headers
_HEADER_BYTES = 10  # more than there is around a header
_PROBE_SECONDS = 0.1
_QUEUE_FULL_SECONDS = 0.01
CLOSE_SECONDS = 5.0
"""How long closing waits for a thread in librdkafka: as it waits by the wall clock, a clock that is set back makes its
waits as much longer (https://github.com/confluentinc/librdkafka/issues/2145)."""


def allowed_bytes(max_bytes: int) -> int:
    """The nearest value that librdkafka takes for message.max.bytes."""
    return min(max(max_bytes, _MIN_BYTES), _MAX_BYTES)


def max_value_bytes(max_bytes: int, key: bytes | None = None, headers: Mapping[str, bytes] = {}) -> int:
    """The most bytes of a value in a message with this key and these headers, where a topic takes so large ones."""
    overhead = sum(len(name.encode()) + len(content) + _HEADER_BYTES for name, content in headers.items())
    return max(0, max_bytes - _FRAME_BYTES - len(key or b"") - overhead)


class KafkaWriter:
    """An idempotent producer.

    Args:
        service: Kafka.
        topic: its name.
        partitions: number of its partitions.
        max_bytes: maximum size of a message, by the topic's settings; the option message.max.bytes may lower it.
    """

    def __init__(self, service: KafkaService, topic: str, partitions: int, max_bytes: int) -> None:
        self._service = service
        self._topic = topic
        self.partitions = partitions
        max_bytes = allowed_bytes(max_bytes)
        self._max_bytes = min(max_bytes, int(service.option("message.max.bytes", max_bytes)))
        self._turn = count()
        self._failure: WriteFailed | None = None
        self._monitor = service.monitor(self._fail)
        self._closed = threading.Event()
        self._producer: Producer = service.create_client(
            Producer,
            self._monitor,
            {
                "enable.idempotence": True,
                "delivery.report.only.error": True,
                "on_delivery": self._on_delivery,
            },
            DEFAULTS | {"message.max.bytes": max_bytes},
        )
        # Polls for failures and outages also while nothing is written.
        self._thread = threading.Thread(target=self._poll, name=f"writer of {topic}", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._closed.is_set():
            self._monitor.probe(self._producer, self._topic, _PROBE_SECONDS)
            self._producer.poll(_PROBE_SECONDS)

    def _on_delivery(self, error: KafkaError | None, _: Message | None = None) -> None:
        if error is not None:
            self._fail(self._service.refusal(error) or error.str())

    def _fail(self, why: SourceRefused | str) -> None:
        self._failure = WriteFailed(f"cannot write to topic {self._topic} of {self._service.name}: {why}")

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    def max_value_bytes(self, key: bytes | None = None, headers: Mapping[str, bytes] = {}) -> int:
        return max_value_bytes(self._max_bytes, key, headers)

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        """With both a partition and a key, the partition decides."""
        if self._closed.is_set():
            raise WriteFailed(f"the writer of topic {self._topic} is closed")
        if partition is None:
            partition = next(self._turn) % self.partitions if key is None else -1
        while True:
            self._raise_failure()
            try:
                self._producer.produce(self._topic, value, key, partition, headers=list(headers.items()))
                return
            except BufferError:
                self._producer.poll(_QUEUE_FULL_SECONDS)
            except KafkaException as exc:
                self._on_delivery(exc.args[0])

    def flush(self, seconds: float) -> int:
        self._raise_failure()
        missing = self._producer.flush(seconds)
        self._raise_failure()
        return missing

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)
        self._producer.purge()
        self._producer.poll(0)
        self._monitor.close()
