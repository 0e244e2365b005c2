"""Pauses: the partitions of a consumer that are not fetched, known in one place."""

from collections.abc import Iterable

from confluent_kafka import Consumer, TopicPartition

Place = tuple[str, int]
"""Topic and partition."""


class Pauses:
    """What a consumer is told not to fetch.

    librdkafka keeps a pause where a partition goes to another member and comes back, so each is taken back before its
    partition goes.

    Args:
        consumer: nobody else pauses or resumes its partitions.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._paused: frozenset[Place] = frozenset()

    def set(self, wanted: Iterable[Place]) -> None:
        """Pauses exactly these partitions of the assignment; all others are fetched."""
        now = frozenset(wanted)
        if more := now - self._paused:
            self._consumer.pause(_partitions(more))
        if fewer := self._paused - now:
            self._consumer.resume(_partitions(fewer))
        self._paused = now

    def renew(self, partitions: Iterable[Place]) -> None:
        """Pauses those again that are paused: they have just been assigned anew."""
        if paused := self._paused.intersection(partitions):
            self._consumer.pause(_partitions(paused))

    def forget(self, partitions: Iterable[Place]) -> None:
        """Partitions are about to be taken away."""
        self.set(self._paused.difference(partitions))


def _partitions(of: Iterable[Place]) -> list[TopicPartition]:
    return [TopicPartition(*one) for one in sorted(of)]
