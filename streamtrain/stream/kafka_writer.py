"""Writes a topic of Kafka."""

import threading
from collections.abc import Mapping
from itertools import count

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streamtrain.errors import SourceRefused, WriteFailed
from streamtrain.stream.kafka_service import Option, Service

DEFAULTS: dict[str, Option] = {
    "linger.ms": 5,
    "partitioner": "murmur2_random",  # of a key as Kafka's own clients do it
}
_SECONDS_OF_LOOK = 0.1
_SECONDS_OF_ROOM = 0.01


class KafkaWriter:
    """See Writer.

    Args:
        service: whose topic it is.
        topic: its name.
        partitions: how many it has.
    """

    def __init__(self, service: Service, topic: str, partitions: int) -> None:
        self._service = service
        self._topic = topic
        self._partitions = partitions
        self._turn = count()
        self._failure: WriteFailed | None = None
        self._link = service.link(self._fail)
        self._closed = threading.Event()
        self._producer: Producer = service.make(
            Producer,
            self._link,
            {
                "enable.idempotence": True,
                "delivery.report.only.error": True,
                "on_delivery": self._on_delivery,
            },
            DEFAULTS,
        )
        # Failures and outages are heard of also while nobody writes.
        self._ear = threading.Thread(target=self._listen, name=f"writer of {topic}", daemon=True)
        self._ear.start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            self._link.look(self._producer, self._topic, _SECONDS_OF_LOOK)
            self._producer.poll(_SECONDS_OF_LOOK)

    def _on_delivery(self, error: KafkaError | None, _: Message | None = None) -> None:
        if error is not None:
            self._fail(self._service.refusal(error) or error.str())

    def _fail(self, why: SourceRefused | str) -> None:
        self._failure = WriteFailed(f"topic {self._topic} of {self._service.name} cannot be written: {why}")

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        """See Writer. With both a partition and a key the key is only noted."""
        if self._closed.is_set():
            raise WriteFailed(f"the writer of topic {self._topic} is closed")
        if partition is None:
            partition = next(self._turn) % self._partitions if key is None else -1
        while True:
            self._raise_failure()
            try:
                self._producer.produce(self._topic, value, key, partition, headers=list(headers.items()))
                return
            except BufferError:
                self._producer.poll(_SECONDS_OF_ROOM)
            except KafkaException as exc:
                self._on_delivery(exc.args[0])

    def flush(self, seconds: float) -> int:
        """See Writer."""
        self._raise_failure()
        missing = self._producer.flush(seconds)
        self._raise_failure()
        return missing

    def close(self) -> None:
        """See Writer."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._ear.join()
        self._producer.purge()
        self._producer.poll(0)
        self._link.close()
