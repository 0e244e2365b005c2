"""What all clients of one Kafka share: settings, the meaning of errors, and whether it is reachable."""

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription

from streamtrain.errors import ConfigError, InstanceFenced, SourceError, SourceRefused, SourceUnavailable, TopicMissing

# Until Kafka counts as unreachable: a connection may end at any time, and be made again.
_SUSPECT_SECONDS = 1.0  # once an attempt to connect has failed
_RECONNECT_SECONDS = 5.0  # otherwise: the next attempt may wait for 1.5 x reconnect.backoff.max.ms
_ENDED = re.compile(r": Disconnected.*\(after \d{4,}ms in state UP")

_CREDENTIALS = "check security.protocol, sasl.mechanism, sasl.username and sasl.password among the options"
_REFUSALS = {
    KafkaError._AUTHENTICATION: _CREDENTIALS,
    KafkaError.SASL_AUTHENTICATION_FAILED: _CREDENTIALS,
    KafkaError.UNSUPPORTED_SASL_MECHANISM: _CREDENTIALS,
    KafkaError.ILLEGAL_SASL_STATE: _CREDENTIALS,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow this user `Describe` on the topic, with `Read` to read it and "
    "`Write` to write it, or use other credentials",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "allow this user `Read` on the group, or use another group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "allow this user `Write` and `Describe` on the transactional id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "allow this user to do that, or have an administrator do it",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "its members use another assignment strategy: use another group",
    KafkaError.INVALID_GROUP_ID: "use another name for the group",
    KafkaError.GROUP_MAX_SIZE_REACHED: "the broker's group.max.size allows no more members",
    KafkaError.INVALID_SESSION_TIMEOUT: "set session.timeout.ms to a value that the brokers allow",
    KafkaError.TOPIC_EXCEPTION: "use another name for the topic",
    KafkaError.POLICY_VIOLATION: "have an administrator create the topic",
    KafkaError.INVALID_REPLICATION_FACTOR: "have an administrator create the topic",
    KafkaError.UNSUPPORTED_VERSION: "brokers must run Kafka 2.4 or newer",
    KafkaError._UNSUPPORTED_FEATURE: "brokers must run Kafka 2.4 or newer",
}
MISSING = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_ID})
logger = logging.getLogger("streamtrain.stream.kafka.stream")


def refusal(error: KafkaError, name: str) -> SourceRefused | None:
    """The meaning of an error that is permanent; None of others.

    Args:
        error: error of a client.
        name: name of the Kafka cluster, for messages.
    """
    if error.code() in MISSING:
        return TopicMissing(f"{name} has no such topic: create it, or check its name ({error.str()})")
    if "group.instance.id" in error.str():
        return InstanceFenced(
            f"{name} refuses: {error.str()}; another process has joined as this instance: stop one of them, or give "
            "each its own instance; if there is no other process, restart this one"
        )
    if error.code() == KafkaError.INVALID_REPLICATION_FACTOR and "fenced" in error.str():
        return None  # brokers that restart, or are too busy to say that they live
    way_out = _REFUSALS.get(error.code())
    if way_out is None and (error.fatal() or error.code() == KafkaError._FATAL):
        way_out = "restart the process"
    return SourceRefused(f"{name} refuses: {error.str()}; {way_out}") if way_out else None


class Availability:
    """Whether Kafka is reachable for all of its clients. Thread-safe.

    Args:
        name: name of the Kafka cluster, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._unreachable: set[object] = set()

    @property
    def is_unreachable(self) -> bool:
        """Whether a client reaches no broker."""
        return bool(self._unreachable)

    def mark_unreachable(self, client: object, reason: str) -> None:
        """A client reaches no broker."""
        with self._lock:
            if not self._unreachable:
                logger.warning("%s is unreachable: %s", self.name, reason)
            self._unreachable.add(client)

    def mark_reachable(self, client: object) -> None:
        """A client reaches a broker again."""
        with self._lock:
            if self._unreachable == {client}:
                logger.info("%s is reachable again", self.name)
            self._unreachable.discard(client)

    def forget(self, client: object) -> None:
        """A client is closed."""
        with self._lock:
            self._unreachable.discard(client)


class ConnectionMonitor:
    """Watches the connections of one client, as its logger and its error_cb.

    Args:
        availability: whether Kafka can be reached.
        refused: called with permanent errors, from within the client's poll.
        ignored: codes of errors that do not matter to the client.

    Attributes:
        reason: reason for the last failed connection.
        last_failure: when the client last failed to connect, by the monotonic clock; a connection that only ended, as
            idle ones do, is not a failure.
    """

    def __init__(
        self,
        availability: Availability,
        refused: Callable[[SourceRefused], None],
        ignored: frozenset[int] = frozenset(),
    ) -> None:
        self.reason = "no reason known"
        self._availability = availability
        self._refused, self._ignored = refused, ignored
        self._suspect_since: float | None = None
        self.last_failure = -math.inf

    def log(self, _: int, form: str, facility: str, *line: str) -> None:
        """Logs librdkafka's own lines at debug level: what matters comes as an error as well."""
        logger.debug(form, facility, *line)
        if facility == "FAIL":
            self.reason = line[-1].partition("]: ")[2]
            if not self._has_only_ended():
                self.last_failure = time.monotonic()

    def _has_only_ended(self) -> bool:
        """Whether the last connection was in use for a second at least; one that a broker refuses ends at once."""
        return _ENDED.search(self.reason) is not None

    def on_error(self, error: KafkaError) -> None:
        """Handles an error of the client."""
        if error.code() in self._ignored:
            return
        if refused := refusal(error, self._availability.name):
            self._refused(refused)
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._suspect_since = self._suspect_since or time.monotonic()

    def probe(self, client: Any, topic: str, seconds: float) -> float:
        """Requests metadata if all brokers were down: the client reports that also when it reconnects at once.

        Args:
            client: the Consumer or Producer.
            topic: topic to request.
            seconds: maximum wait for an answer.

        Returns:
            Seconds that may have passed.
        """
        if self._suspect_since is None:
            return 0.0
        try:
            client.list_topics(topic, timeout=seconds)
        except KafkaException:
            # The report may be of an earlier outage: what counts is whether a connection has failed since.
            grace = _SUSPECT_SECONDS if self.last_failure >= self._suspect_since else _RECONNECT_SECONDS
            if time.monotonic() - self._suspect_since > grace:
                self._availability.mark_unreachable(self, self.reason)
        else:
            self._suspect_since = None
            self._availability.mark_reachable(self)
        return seconds

    def close(self) -> None:
        """The client is closed."""
        self._availability.forget(self)


Option = str | int | float | bool
Key = TypeVar("Key")

REQUEST_SECONDS = 30.0  # in which a request must be answered: a busy broker takes its time
_CONNECT_AGAIN_SECONDS = 10.0  # the same, once a connection has failed
_RETRY_SECONDS = 0.1
_ASK_SECONDS = 1.0  # until an error is looked for that has another way
_CONNECT_SECONDS = 1.0
_GROUP_SECONDS = 3600.0  # in which a group must be described: the most that librdkafka permits
_REUSE_SECONDS = 2.0  # in which a client that has answered before must answer again, before a new one is made
DEFAULTS: dict[str, Option] = {"reconnect.backoff.max.ms": 2000}
RESERVED = {
    "bootstrap.servers": "the stream's address",
    "metadata.broker.list": "the stream's address",
    "client.id": "the job",
    "group.id": "the group",
    "group.instance.id": "each member has its own: worker --instance",
    "group.protocol": "only classic groups show which job their members belong to",
    "partition.assignment.strategy": "members keep their partitions in a rebalance",
    "enable.auto.commit": "offsets are committed once they are learned",
    "enable.auto.offset.store": "offsets are committed once they are learned",
    "auto.offset.reset": "stream.gone decides what is skipped",
    "enable.partition.eof": "the lag is computed from it",
    "enable.idempotence": "messages must not be written twice",
    "transactional.id": "the writer does not use transactions",
    "delivery.report.only.error": "the writer needs errors only",
    **dict.fromkeys(("error_cb", "logger", "on_commit", "on_delivery"), "it must be a function"),
}
SECRET = ("password", "secret", "key.pem", "oauthbearer.config", "jaas")

# Errors of brokers that start, or hand partitions and groups to each other.
_TRANSIENT = frozenset(
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
        KafkaError._DESTROY_BROKER,  # of a client that reconnects
    }
)


class _AdminClient(NamedTuple):
    """An admin client with its monitor, and the permanent errors that this has seen.

    Attributes:
        admin: the client.
        monitor: watches its connections.
        refusals: permanent errors.
    """

    admin: AdminClient
    monitor: ConnectionMonitor
    refusals: list[SourceRefused]


class KafkaService:
    """Kafka, for all of its clients. Thread-safe.

    One admin client sends all requests: every eighth new one would wait one to three seconds for its first answer.

    Args:
        servers: "host:port[,…]".
        options: any settings of librdkafka but those that the contract decides.

    Raises:
        ConfigError: an option is unknown, or has a bad value.
    """

    def __init__(self, servers: str, options: Mapping[str, Option]) -> None:
        self.name = f"Kafka at {servers}"
        self.servers = servers
        self._options = dict(options)
        for name, why in RESERVED.items():
            if name in options:
                raise ConfigError(f"option {name} of {self.name} cannot be set: {why}")
        self._availability = Availability(self.name)
        self._lock = threading.Lock()
        self._admin: _AdminClient | None = None
        self._unanswered: list[tuple[_AdminClient, list[Future[Any]]]] = []  # clients that are not used any more
        # They ask for what a group has committed; by group.
        self._readers: dict[str, tuple[Consumer, ConnectionMonitor]] = {}
        self._reading = threading.Lock()
        self.create_client(AdminClient, self.monitor(lambda _: None))  # which checks the options

    @property
    def is_unreachable(self) -> bool:
        """Whether no broker is reachable."""
        return self._availability.is_unreachable

    def monitor(
        self, refused: Callable[[SourceRefused], None], ignored: frozenset[int] = frozenset()
    ) -> ConnectionMonitor:
        """The monitor of a client that is about to be created; arguments as of `ConnectionMonitor`."""
        return ConnectionMonitor(self._availability, refused, ignored)

    def create_client(
        self,
        kind: Callable[..., Any],
        monitor: ConnectionMonitor,
        settings: Mapping[str, Any] = {},
        defaults: Mapping[str, Option] = {},
    ) -> Any:
        """Creates a client.

        Args:
            kind: Consumer, Producer or AdminClient.
            monitor: watches its connections.
            settings: settings that options cannot change.
            defaults: defaults of options.

        Raises:
            ConfigError: an option is unknown, or has a bad value.
        """
        options = {name: _text(value) for name, value in (DEFAULTS | dict(defaults) | self._options).items()}
        try:
            ours = {"bootstrap.servers": self.servers, "error_cb": monitor.on_error, **settings}
            return kind(options | ours, logger=monitor)
        except (KafkaException, TypeError, ValueError) as exc:
            raise ConfigError(self._describe_config_error(exc)) from None  # the cause may show a secret

    def _describe_config_error(self, exc: Exception) -> str:
        """Names the option that librdkafka refuses: it knows some by other names, and shows values."""
        reason = _reason(exc)
        options = {name: _text(value) for name, value in self._options.items()}
        culprits = [name for name in options if name in reason] or [
            name for name, value in options.items() if self._reason_against(name, value) == reason
        ]
        if any(value and value in reason for name, value in options.items() if any(word in name for word in SECRET)):
            reason = "invalid value"
        named = f"option {culprits[0]} of {self.name}" if culprits else f"options of {self.name}"
        return f"{named}: {reason}"

    def _reason_against(self, name: str, value: str) -> str:
        """Why librdkafka refuses one option; "" if it does not."""
        try:
            AdminClient({name: value}, logger=self.monitor(lambda _: None))
        except (KafkaException, TypeError, ValueError) as exc:
            return _reason(exc)
        return ""

    def option(self, name: str, default: Option) -> Option:
        """An option, or a default."""
        return self._options.get(name, default)

    def refusal(self, error: KafkaError) -> SourceRefused | None:
        """The meaning of an error that is permanent; None of others."""
        return refusal(error, self.name)

    def translate(self, error: KafkaError) -> SourceError:
        """The meaning of an error."""
        return self.refusal(error) or SourceUnavailable(f"request to {self.name} failed: {error.str()}")

    def call(
        self, question: Callable[[AdminClient], Mapping[Key, Future[Any]]], transient: frozenset[int] = frozenset()
    ) -> dict[Key, Any]:
        """Sends admin requests, and waits for all answers; a KafkaError is one, too.

        Args:
            question: sends the requests.
            transient: codes of errors after which to retry for a while, in addition to the usual ones.

        Raises:
            SourceRefused: credentials are refused.
            SourceUnavailable: not all requests were answered in time.
        """
        begun = time.monotonic()
        admin_client, is_new = self._connected_admin()
        if not is_new:  # its broker may have restarted since, which it notices late
            with contextlib.suppress(SourceUnavailable):
                return self._call(admin_client, question, transient, begun, min(_REUSE_SECONDS, REQUEST_SECONDS))
            admin_client, _ = self._connected_admin()
        return self._call(admin_client, question, transient, begun, REQUEST_SECONDS)

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """What a group has committed of partitions, with its metadata; offsets below 0 where it has not.

        A consumer asks that is no member. An admin client could, too, but librdkafka ends the process with SIGSEGV if a
        broker answers that it is not the group's coordinator, as one that has just started may (its issue 5040).

        Raises:
            SourceRefused: the group is refused.
            SourceUnavailable: not answered in time.
        """
        with self._reading:
            if group not in self._readers:
                # What an open transaction is about to commit would be waited for.
                settings = {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_uncommitted"}
                monitor = self.monitor(lambda _: None)
                self._readers[group] = self.create_client(Consumer, monitor, settings), monitor
            try:
                return self._ask(*self._readers[group], partitions)
            except SourceError:
                self._readers.pop(group)[0].close()
                raise

    def _ask(
        self, reader: Consumer, monitor: ConnectionMonitor, partitions: Sequence[TopicPartition]
    ) -> list[TopicPartition]:
        """What has been committed. That the group is refused is told where messages are, and not to who asks."""
        begun = time.monotonic()
        while True:
            try:
                found: list[TopicPartition] = reader.committed([*partitions], timeout=_ASK_SECONDS)
                for one in found:
                    if one.error is not None:
                        raise KafkaException(one.error)
                return found
            except KafkaException as exc:
                said = reader.poll(_RETRY_SECONDS)
                told = said.error() if said is not None else None
                error = told if told is not None and self.refusal(told) else exc.args[0]
                if error.code() not in (KafkaError._TIMED_OUT, KafkaError._WAIT_COORD, *_TRANSIENT):
                    raise self.translate(error) from exc
                limit = _limit(monitor, begun, REQUEST_SECONDS)
                if time.monotonic() > begun + limit:
                    raise self._unanswered_within(limit, monitor) from exc

    def describe_group(self, group: str, topic: str) -> ConsumerGroupDescription | KafkaError:
        """A consumer group, or the error that its coordinator answers.

        librdkafka up to 2.16 ends the process with SIGABRT when the coordinator of a group comes back after such a
        request has timed out ("Assertion `eonce->refcnt > 0' failed"). So this one has an hour, and is sent only
        once the coordinator has answered another question: otherwise each call would leave a client that waits for it.

        Args:
            group: its id.
            topic: any that can be described; of its partition 0 is asked what the group has committed.

        Raises:
            SourceRefused: the group, the topic or the credentials are refused.
            SourceUnavailable: not answered in time.
        """
        self.committed(group, [TopicPartition(topic, 0)])
        asked = self.call(lambda admin: admin.describe_consumer_groups([group], request_timeout=_GROUP_SECONDS))
        answer: ConsumerGroupDescription | KafkaError = asked[group]
        return answer

    def _unanswered_within(self, seconds: float, monitor: ConnectionMonitor) -> SourceUnavailable:
        return SourceUnavailable(f"{self.name} does not answer within {seconds:g} s: {monitor.reason}")

    def _call(
        self,
        admin_client: _AdminClient,
        question: Callable[[AdminClient], Mapping[Key, Future[Any]]],
        transient: frozenset[int],
        begun: float,
        patience: float,
    ) -> dict[Key, Any]:
        """Like `call`, by one client, which is not used again if that fails.

        It is kept until its requests are answered, or have timed out: librdkafka 2.16 may abort the process when a
        client goes whose broker is away, for the reason of `describe_group`.
        """
        admin, monitor, refusals = admin_client
        asked: Mapping[Key, Future[Any]] = {}

        def limit() -> float:
            return _limit(monitor, begun, patience)

        try:
            while True:
                asked = question(admin)
                answers, missing = _answers(admin, asked, refusals, lambda: time.monotonic() > begun + limit())
                if missing:
                    raise self._unanswered_within(limit(), monitor)
                codes = {one.code() for one in answers.values() if isinstance(one, KafkaError)}
                if not codes & (_TRANSIENT | transient) or time.monotonic() > begun + limit():
                    return answers
                admin.poll(_RETRY_SECONDS)
        except BaseException:
            with self._lock:
                self._admin = None if self._admin is admin_client else self._admin
                before, self._unanswered = self._unanswered, []
                for client, futures in [*before, (admin_client, [*asked.values()])]:
                    if not all(future.done() for future in futures):
                        self._unanswered.append((client, futures))
            raise

    def _connected_admin(self) -> tuple[_AdminClient, bool]:
        """The admin client, which is connected if the brokers are reachable; and whether it is new."""
        with self._lock:
            admin_client = self._admin
        if admin_client is not None:
            return admin_client, False
        refusals: list[SourceRefused] = []
        monitor = self.monitor(refusals.append)
        admin_client = _AdminClient(self.create_client(AdminClient, monitor), monitor, refusals)
        # What is asked before it is connected is not sent once it is, but when librdkafka looks again, seconds later.
        with contextlib.suppress(KafkaException):  # then the question has the same trouble, and tells it
            admin_client.admin.list_topics(timeout=_CONNECT_SECONDS)
        with self._lock:
            self._admin = self._admin or admin_client
            return self._admin, True


def _limit(monitor: ConnectionMonitor, begun: float, patience: float) -> float:
    """In how many seconds a question must be answered: fewer, if a connection has failed since it was asked."""
    return min(patience, _CONNECT_AGAIN_SECONDS) if monitor.last_failure > begun else patience


def _answers(
    admin: AdminClient,
    futures: Mapping[Key, Future[Any]],
    refusals: list[SourceRefused],
    is_late: Callable[[], bool],
) -> tuple[dict[Key, Any], bool]:
    """What is answered in time, and whether something is missing."""
    missing = set(futures.values())
    while missing and not is_late():
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
