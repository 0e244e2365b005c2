"""What a client of Kafka says of its connections: who is refused for good, and whether Kafka is there at all."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from streamtrain.errors import SourceRefused, TopicMissing

_SECONDS_OF_DOUBT = 1.0  # before Kafka is called away: a connection may end at any time, and another be made

_CREDENTIALS = "check security.protocol, sasl.mechanism, sasl.username and sasl.password among the options"
_REFUSALS = {
    KafkaError._AUTHENTICATION: _CREDENTIALS,
    KafkaError.SASL_AUTHENTICATION_FAILED: _CREDENTIALS,
    KafkaError.UNSUPPORTED_SASL_MECHANISM: _CREDENTIALS,
    KafkaError.ILLEGAL_SASL_STATE: _CREDENTIALS,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "let this user read and write the topic, or take another's credentials",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "let this user read as the group, or take another group",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "let this user do that to the cluster, or have an administrator do it",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "others read as the group that share in another way: take another group",
    KafkaError.INVALID_GROUP_ID: "take another name for the group",
    KafkaError.GROUP_MAX_SIZE_REACHED: "the broker's group.max.size allows no more members",
    KafkaError.INVALID_SESSION_TIMEOUT: "set session.timeout.ms to what the brokers allow",
    KafkaError.TOPIC_EXCEPTION: "take another name for the topic",
    KafkaError.POLICY_VIOLATION: "have an administrator make the topic",
    KafkaError.INVALID_REPLICATION_FACTOR: "have an administrator make the topic",
    KafkaError.UNSUPPORTED_VERSION: "brokers of Kafka 2.4 or newer are needed",
    KafkaError._UNSUPPORTED_FEATURE: "brokers of Kafka 2.4 or newer are needed",
}
MISSING = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_ID})
logger = logging.getLogger("streamtrain.stream.kafka")


def refusal(error: KafkaError, name: str) -> SourceRefused | None:
    """What an error means if it does not go away by itself.

    Args:
        error: some client's.
        name: whose client it is, as people know it.
    """
    if error.code() in MISSING:
        return TopicMissing(f"{name} has no such topic: create it, or check its name ({error.str()})")
    way_out = _REFUSALS.get(error.code())
    if way_out is None and error.fatal():
        way_out = "start again"
    return SourceRefused(f"{name} refuses: {error.str()}; {way_out}") if way_out else None


class Presence:
    """Whether Kafka is there, as all of its clients see it. Thread-safe.

    Args:
        name: whose, as people know it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._away: set[object] = set()

    @property
    def is_away(self) -> bool:
        """Whether some client says so."""
        return bool(self._away)

    def away(self, client: object, reason: str) -> None:
        """A client says that it reaches no broker."""
        with self._lock:
            if not self._away:
                logger.warning("%s is away: %s", self.name, reason)
            self._away.add(client)

    def back(self, client: object) -> None:
        """A client says that it reaches a broker: once all do that did not, it is back."""
        with self._lock:
            if self._away == {client}:
                logger.info("%s is back", self.name)
            self._away.discard(client)

    def forget(self, client: object) -> None:
        """A client is closed."""
        with self._lock:
            self._away.discard(client)


class Link:
    """Hears what one client says of its connections: as its logger, and as its error_cb.

    Args:
        presence: of whose client it is.
        refused: is told what does not go away by itself, from within the client's poll.

    Attributes:
        reason: why it was last not connected.
    """

    def __init__(self, presence: Presence, refused: Callable[[SourceRefused], None]) -> None:
        self.reason = "no reason known"
        self._presence = presence
        self._refused = refused
        self._in_doubt_since: float | None = None

    def log(self, _: int, form: str, facility: str, *line: str) -> None:
        """Takes librdkafka's own lines, however bad it thinks they are: what matters comes as an error as well."""
        logger.debug(form, facility, *line)
        if facility == "FAIL":
            self.reason = line[-1].partition("]: ")[2]

    def complain(self, error: KafkaError) -> None:
        """Takes an error of the client."""
        if refused := refusal(error, self._presence.name):
            self._refused(refused)
        elif error.code() == KafkaError._ALL_BROKERS_DOWN and self._in_doubt_since is None:
            self._in_doubt_since = time.monotonic()

    def look(self, client: Any, topic: str, seconds: float) -> float:
        """Asks the brokers for anything, if the client complained: it does so also when it is connected again at once.

        Args:
            client: the Consumer or Producer.
            topic: one to ask for.
            seconds: how long to wait for an answer.

        Returns:
            Seconds that may have passed.
        """
        if self._in_doubt_since is None:
            return 0.0
        try:
            client.list_topics(topic, timeout=seconds)
        except KafkaException:
            if time.monotonic() - self._in_doubt_since > _SECONDS_OF_DOUBT:
                self._presence.away(self, self.reason)
        else:
            self._in_doubt_since = None
            self._presence.back(self)
        return seconds

    def close(self) -> None:
        """The client is closed."""
        self._presence.forget(self)
