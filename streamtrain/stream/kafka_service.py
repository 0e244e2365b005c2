"""What all clients of one Kafka share: their settings, what its errors mean, and whether it is there."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from streamtrain.errors import ConfigError, SourceError, SourceRefused, SourceUnavailable
from streamtrain.stream.kafka_link import Link, Presence, refusal

Option = str | int | float | bool
Key = TypeVar("Key")

PATIENCE = 10.0  # seconds in which a question must be answered
_SECONDS_OF_PAUSE = 0.1
DEFAULTS: dict[str, Option] = {"reconnect.backoff.max.ms": 2000}
RESERVED = {
    "bootstrap.servers": "the stream's address",
    "metadata.broker.list": "the stream's address",
    "client.id": "the job",
    "group.id": "the group",
    "group.instance.id": "no member is known before it comes",
    "group.protocol": "only classic groups tell whose their members are",
    "partition.assignment.strategy": "members keep what they have in a rebalance",
    "enable.auto.commit": "what is learned decides",
    "enable.auto.offset.store": "what is learned decides",
    "auto.offset.reset": "what is skipped is decided elsewhere",
    "enable.partition.eof": "ends are of no interest",
    "enable.idempotence": "no message is written twice",
    "transactional.id": "the writer has no transactions",
    "delivery.report.only.error": "the writer asks for no more",
    **dict.fromkeys(("error_cb", "logger", "on_commit", "on_delivery"), "it is a function"),
}
SECRET = ("password", "secret", "key.pem", "oauthbearer.config", "jaas")

# What brokers say while they start, or hand partitions and groups to each other.
_PASSING = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_CONTROLLER,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)


class Service:
    """A Kafka as its clients know it. Thread-safe.

    Args:
        servers: "host:port[,…]".
        options: any settings of librdkafka but those that the contract decides.

    Raises:
        ConfigError: an option is unknown, or has a bad value.
    """

    def __init__(self, servers: str, options: Mapping[str, Option]) -> None:
        self.name = f"Kafka at {servers}"
        self._servers = servers
        self._options = dict(options)
        for name, why in RESERVED.items():
            if name in options:
                raise ConfigError(f"option {name} of {self.name} cannot be set: {why}")
        self._presence = Presence(self.name)
        self.make(AdminClient, self.link(lambda _: None))  # which checks the options

    @property
    def is_away(self) -> bool:
        """Whether no broker is reached at the moment."""
        return self._presence.is_away

    def link(self, refused: Callable[[SourceRefused], None]) -> Link:
        """Of one client that is about to be made; see Link."""
        return Link(self._presence, refused)

    def make(
        self,
        kind: Callable[..., Any],
        link: Link,
        settings: Mapping[str, Any] = {},
        defaults: Mapping[str, Option] = {},
    ) -> Any:
        """Makes a client.

        Args:
            kind: Consumer, Producer or AdminClient.
            link: hears of its connections.
            settings: those that no option changes.
            defaults: of options.

        Raises:
            ConfigError: an option is unknown, or has a bad value.
        """
        options = {name: _text(value) for name, value in (DEFAULTS | dict(defaults) | self._options).items()}
        try:
            ours = {"bootstrap.servers": self._servers, "error_cb": link.complain, **settings}
            return kind(options | ours, logger=link)
        except (KafkaException, TypeError, ValueError) as exc:
            raise ConfigError(self._blame(exc)) from None  # the cause may show a secret

    def _blame(self, exc: Exception) -> str:
        """Names the option that librdkafka will not have: it knows some by other names, and tells values."""
        said = _reason(exc)
        options = {name: _text(value) for name, value in self._options.items()}
        guilty = [name for name in options if name in said] or [
            name for name, value in options.items() if self._reason_against(name, value) == said
        ]
        if any(value and value in said for name, value in options.items() if any(word in name for word in SECRET)):
            said = "it has a bad value"
        named = f"option {guilty[0]} of {self.name}" if guilty else f"options of {self.name}"
        return f"{named}: {said}"

    def _reason_against(self, name: str, value: str) -> str:
        """What librdkafka has against one option; "" if nothing."""
        try:
            AdminClient({name: value}, logger=self.link(lambda _: None))
        except (KafkaException, TypeError, ValueError) as exc:
            return _reason(exc)
        return ""

    def refusal(self, error: KafkaError) -> SourceRefused | None:
        """What an error means if it does not go away by itself."""
        return refusal(error, self.name)

    def translate(self, error: KafkaError) -> SourceError:
        """What an error means."""
        return self.refusal(error) or SourceUnavailable(f"{self.name} cannot answer: {error.str()}")

    def ask(
        self, question: Callable[[AdminClient], Mapping[Key, Future[Any]]], passing: frozenset[int] = frozenset()
    ) -> dict[Key, Any]:
        """Asks, and waits for all answers; a KafkaError is one, too.

        Args:
            question: asks for the answers.
            passing: codes of errors after which to ask again for a while, beside those that are always of that kind.

        Raises:
            SourceRefused: credentials are refused.
            SourceUnavailable: there are answers missing.
        """
        refusals: list[SourceRefused] = []
        link = self.link(refusals.append)
        admin = self.make(AdminClient, link)
        deadline = time.monotonic() + PATIENCE
        while True:
            answers, missing = _answers(admin, question(admin), refusals, deadline)
            if missing:
                raise SourceUnavailable(f"{self.name} does not answer within {PATIENCE:g} s: {link.reason}")
            codes = {one.code() for one in answers.values() if isinstance(one, KafkaError)}
            if not codes & (_PASSING | passing) or time.monotonic() > deadline:
                return answers
            admin.poll(_SECONDS_OF_PAUSE)


def _answers(
    admin: AdminClient, futures: Mapping[Key, Future[Any]], refusals: list[SourceRefused], deadline: float
) -> tuple[dict[Key, Any], bool]:
    """What is answered by then, and whether something is missing."""
    missing = set(futures.values())
    while missing and time.monotonic() < deadline:
        _, missing = wait(missing, 0.05)
        admin.poll(0)
        for refused in refusals:
            raise refused
    answers = {key: _answer(future) for key, future in futures.items() if future not in missing}
    late = any(isinstance(one, KafkaError) and one.code() == KafkaError._TIMED_OUT for one in answers.values())
    return answers, bool(missing) or late


def _answer(future: Future[Any]) -> Any:
    try:
        return future.result()
    except KafkaException as exc:
        return exc.args[0]


def _text(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reason(exc: Exception) -> str:
    error = exc.args[0] if isinstance(exc, KafkaException) else exc
    return (error.str() if isinstance(error, KafkaError) else str(error)).strip()
