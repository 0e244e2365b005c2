"""Processes with exactly the rights that SECURITY.md lists, and with each one taken away: an error names it."""

import threading
import uuid
from collections.abc import Callable
from contextlib import closing, suppress

import pytest

from streamtrain.embedded.kafka import Broker
from streamtrain.errors import SourceError, TopicMissing
from streamtrain.join.joiner import Joiner
from streamtrain.settings.groups import Settings
from streamtrain.stream.dead_letters import SUFFIX, DeadLetter, DeadLetters, read_dead_letters, replay_dead_letters
from streamtrain.stream.kafka.appender import KafkaAppender
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.opening import wait_for_topic
from tests.patience import until
from tests.stream.kinds import KAFKA_OPTIONS, fill
from tests.stream.members import Member, group_of
from tests.stream.servers import Right, allow, as_user


class Place:
    """Topics of a test, and a user who may do with them what the test says."""

    def __init__(self, kafka: Broker) -> None:
        self.kafka, self.topic = kafka, f"rights-{uuid.uuid4().hex[:8]}"
        self.options = KAFKA_OPTIONS | as_user("cy")
        self.mine = KafkaStream(kafka.servers, self.topic, KAFKA_OPTIONS)
        self.theirs = KafkaStream(kafka.secured, self.topic, self.options)

    def allow(self, rights: set[Right]) -> None:
        """Allows these, and nothing else: no other test has these names."""
        allow(self.kafka.servers, "cy", rights)

    def count(self, topic: str) -> int:
        """Messages that are committed."""
        stream = self.mine.of(topic)
        with suppress(TopicMissing):
            return len(list(stream.records(stream.bounds())))
        return 0


def topics(operation: str, *names: str) -> set[Right]:
    return {("TOPIC", name, operation) for name in names}


def worker_rights(place: Place) -> set[Right]:
    dead = place.topic + SUFFIX
    group: Right = ("GROUP", group_of(place.mine), "Read")
    return {group} | topics("Read", place.topic) | topics("Write", dead) | topics("Create", dead)


def worker(place: Place) -> None:
    """Reads, commits, and writes a dead letter."""
    place.mine.create(1)
    fill(place.mine, {0: 5})
    assert wait_for_topic(place.theirs, 0, threading.Event())
    with Member(place.theirs) as member:
        member.take_until(lambda m: m.count == 5)
    letters = DeadLetters(place.theirs, threading.Event())
    with closing(letters):
        letters.write(DeadLetter(0, 3, "not_json", "", b"x"))
        letters.flush()
    until(lambda: place.count(place.topic + SUFFIX) == 1)


def replay_rights(place: Place) -> set[Right]:
    both = (place.topic, place.topic + SUFFIX)
    return topics("Read", *both) | topics("Write", *both)


def replay(place: Place) -> None:
    """Puts a dead letter back."""
    place.mine.create(1)
    letters = DeadLetters(place.mine, threading.Event())
    with closing(letters):
        letters.write(DeadLetter(0, 3, "not_json", "", b"x"))
        letters.flush()
    dead = place.theirs.of(place.topic + SUFFIX)
    replay_dead_letters(place.theirs, dead, lambda: list(read_dead_letters(place.theirs, dead)))
    assert place.count(place.topic) == 1


def log_rights(place: Place) -> set[Right]:
    return topics("Write", place.topic) | topics("Create", place.topic)


def log(place: Place) -> None:
    """Writes what a server logs."""
    reports: list[object] = []
    with closing(KafkaAppender(place.theirs, 1)) as appender:
        appender.start()
        until(lambda: appender.wait_open(0.1) or "refuses" in appender.trouble)
        appender.append(b"value", b"key", reports.append)
        until(lambda: reports)
    if isinstance(reports[0], SourceError):
        raise reports[0]


def join_rights(place: Place) -> set[Right]:
    inputs = (f"{place.topic}.impressions", f"{place.topic}.outcomes")
    written = [place.topic, f"{inputs[1]}.late", f"{inputs[1]}.orphaned", *(topic + SUFFIX for topic in inputs)]
    ids = {("TRANSACTIONAL_ID", f"{place.topic}.join.*", "Write"), ("GROUP", f"{place.topic}.join", "Read")}
    return ids | topics("Read", *inputs) | topics("Write", *written) | topics("Create", *written)


def join(place: Place) -> None:
    """Joins an impression and an outcome, and makes a dead letter."""
    inputs = [place.mine.of(f"{place.topic}.{kind}") for kind in ("impressions", "outcomes")]
    for stream in inputs:
        stream.create(1)
        with closing(stream.writer()) as writer:
            writer.write(b'{"id": "a", "time": 100, "kind": "click"}', partition=0)
            writer.write(b"no json", partition=0)
            writer.flush(60)
    names = {"impressions": inputs[0].topic, "outcomes": inputs[1].topic}
    joiner = Joiner(
        Settings.model_validate(
            {
                "stream": {
                    "url": f"kafka://{place.kafka.secured}",
                    "topic": place.topic,
                    "group": place.topic,
                    "kafka": place.options,
                },
                "join": names | {"labels": {"click": {"kinds": ["click"]}}, "commit_every": 0.1},
            }
        )
    )
    stopped, errors = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            joiner.run(stopped)
        except SourceError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: errors or place.count(place.topic) == place.count(inputs[0].topic + SUFFIX) == 1)
    stopped.set()
    thread.join()
    if errors:
        raise errors[0]


PROCESSES: dict[Callable[[Place], None], Callable[[Place], set[Right]]] = {
    worker: worker_rights,
    replay: replay_rights,
    log: log_rights,
    join: join_rights,
}


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.__name__)
def test_the_listed_rights_are_enough(kafka: Broker, process: Callable[[Place], None]) -> None:
    place = Place(kafka)
    place.allow(PROCESSES[process](place))
    process(place)


@pytest.mark.parametrize("process", [worker, join], ids=lambda process: process.__name__)
def test_none_may_create_what_exists(kafka: Broker, process: Callable[[Place], None]) -> None:
    place = Place(kafka)
    rights = PROCESSES[process](place)
    for _, name, operation in rights:
        if operation == "Create":
            place.mine.of(name).create(1)
    place.allow({one for one in rights if one[2] != "Create"})
    process(place)


MISSING = [
    (worker, "Read", ""),
    (worker, "Read", "group"),
    (worker, "Write", ".dead"),
    (worker, "Create", ".dead"),
    (replay, "Write", ""),
    (replay, "Write", ".dead"),
    (log, "Write", ""),
    (log, "Create", ""),
    (join, "Read", ".impressions"),
    (join, "Read", ".outcomes"),
    (join, "Read", "group"),
    (join, "Write", ".join.*"),
    (join, "Write", ""),
    (join, "Write", ".outcomes.late"),
    (join, "Write", ".impressions.dead"),
    (join, "Create", ".outcomes.orphaned"),
]


@pytest.mark.parametrize(("process", "operation", "of"), MISSING)
def test_a_right_that_is_missing_is_named(
    kafka: Broker, process: Callable[[Place], None], operation: str, of: str
) -> None:
    place = Place(kafka)
    rights = PROCESSES[process](place)
    missing = {
        one
        for one in rights
        if one[2] == operation and (one[0] == "GROUP" if of == "group" else one[1] == place.topic + of)
    }
    assert len(missing) == 1
    place.allow(rights - missing)
    with pytest.raises(SourceError, match=f"`{operation}`") as told:
        process(place)
    assert "\n" not in str(told.value)
