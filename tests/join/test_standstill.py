"""`streamtrain join` on a real Kafka goes on: with messages of any size, open transactions, more partitions."""

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from streamtrain.embedded.kafka import Broker
from streamtrain.errors import SourceError
from streamtrain.join import buffer
from streamtrain.join import joiner as joiner_module
from streamtrain.join.joiner import Joiner
from streamtrain.join.partition import JoinedPartition
from streamtrain.settings.load import load_settings
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.standstill import StandstillWatch
from tests.join.topics import BEGIN, Topics
from tests.join.topics import joiner as joining
from tests.patience import PATIENCE, until

SHORT = 'wait = "2s"\ngrace = "1s"\nidle = "500ms"\n[join.labels.click]\nkinds = ["click"]\n'
LARGEST = 1_048_588 - 200  # that a topic takes by default, less what frames it


@pytest.fixture
def topics(kafka: Broker) -> Topics:
    return Topics(kafka.servers)


def impression(name: str, size: int = 0, at: float = BEGIN) -> dict[str, object]:
    return {"id": name, "time": at, "text": "x" * size}


def click(name: str, at: float = BEGIN + 1) -> dict[str, object]:
    return {"id": name, "time": at, "kind": "click"}


def labels(topics: Topics) -> dict[str, int]:
    """The label of each sample, by id."""
    return {of["id"]: of["click"] for of in (json.loads(one.value) for one in topics.read(topics.samples.topic))}


def letters(topics: Topics, stream: KafkaStream) -> list[tuple[str, int, int, int]]:
    """Reason, offset, bytes kept and bytes there were, of each dead letter."""
    return [
        (
            one.headers["reason"].decode(),
            int(one.headers["offset"]),
            len(one.value),
            int(one.headers.get("truncated_from", len(one.value))),
        )
        for one in topics.read(f"{stream.topic}.dead")
    ]


@pytest.mark.parametrize("limit", ["of the input", "by default", "unreadable"])
def test_messages_of_any_size_are_joined_or_dead_letters(limit: str, topics: Topics, tmp_path: Path) -> None:
    """A topic that the joiner creates takes what its inputs take; one that was there may take less."""
    if limit == "by default":
        topics.samples.create(topics.partitions)
        topics.samples.of(f"{topics.impressions.topic}.dead").create(topics.partitions)
    elif limit == "unreadable":
        topics.samples.create(topics.partitions, 300_000)
        topics.samples.of(f"{topics.impressions.topic}.dead").create(topics.partitions, 200_000)
    large = impression("large", LARGEST - 40)
    topics.write(topics.impressions, [impression("a"), large, impression("b")], lambda _: 0)
    topics.write_raw(topics.impressions, b"no json" * (LARGEST // 7))
    topics.write(topics.impressions, [impression("c")], lambda _: 0)
    topics.write(topics.outcomes, [click("a"), click("c")], lambda _: 0)
    settings = topics.settings(tmp_path, SHORT)
    if limit == "unreadable":  # as if it could not be read: the default of clients is assumed
        text = settings.read_text().replace("[stream.kafka]\n", '[stream.kafka]\n"message.max.bytes" = 1000000\n')
        settings.write_text(text)
    with joining(settings):
        until(lambda: len(topics.read(topics.samples.topic)) == (4 if limit == "of the input" else 3))
        until(lambda: len(letters(topics, topics.impressions)) == (1 if limit == "of the input" else 2))
    wanted = {"a": 1, "b": 0, "c": 1} | ({"large": 0} if limit == "of the input" else {})
    assert labels(topics) == wanted
    found = letters(topics, topics.impressions)
    assert ("not_json", 3) in [one[:2] for one in found]
    if limit != "of the input":
        assert ("too_large", 1, len(json.dumps(large))) in [(*one[:2], one[3]) for one in found]
    assert sum(kept for _, _, kept, _ in found) > 100_000


def test_a_limit_that_is_lowered_is_learned_from_the_refusal(topics: Topics, tmp_path: Path) -> None:
    """As one that the joiner may not read; the transaction that held the message is tried again without it."""
    later = BEGIN + 1000  # than what idle logs come to meanwhile
    with joining(topics.settings(tmp_path, SHORT)):
        topics.write(topics.impressions, [impression("a")], lambda _: 0)
        until(lambda: labels(topics) == {"a": 0})
        resource = ConfigResource(ConfigResource.Type.TOPIC, topics.samples.topic)
        lowered = ConfigEntry("max.message.bytes", "50000", incremental_operation=AlterConfigOpType.SET)
        resource.add_incremental_config(lowered)
        admin = AdminClient({"bootstrap.servers": topics.servers})
        (altered,) = admin.incremental_alter_configs([resource]).values()
        altered.result(60)
        topics.write(topics.impressions, [impression("large", 100_000, later), impression("b", at=later)], lambda _: 0)
        until(lambda: labels(topics) == {"a": 0, "b": 0})
    assert [one[:2] for one in letters(topics, topics.impressions)] == [("too_large", 1)]


def test_an_open_transaction_is_not_the_end(topics: Topics, tmp_path: Path) -> None:
    """What is in it was written in time, however long it takes; and its log goes on when it ends."""
    topics.write(topics.impressions, [impression("a"), impression("b")], lambda _: 0)
    with joining(topics.settings(tmp_path, SHORT)):
        with topics.transaction(topics.outcomes, [click("a")]):
            topics.write(topics.impressions, [impression("later", at=BEGIN + 30)], lambda _: 0)
            until(lambda: topics.impressions.committed(topics.group).get(0) == 3)
            time.sleep(4)  # far beyond idle and wait: that nothing comes of it takes time to see
            assert labels(topics) == {}
        until(lambda: labels(topics) == {"a": 1, "b": 0, "later": 0})
        with topics.transaction(topics.impressions, [impression("c", at=BEGIN + 1000)]):
            topics.write(topics.outcomes, [click("x", BEGIN + 2000)], lambda _: 0)
            time.sleep(4)
        until(lambda: labels(topics).get("c") == 0)
    assert letters(topics, topics.impressions) == []


def recreate(topics: Topics, stream: KafkaStream) -> None:
    """Deletes a topic, and creates it again."""
    admin, before = AdminClient({"bootstrap.servers": topics.servers}), stream.identity()
    admin.delete_topics([stream.topic])[stream.topic].result(60)

    def is_another() -> bool:
        try:
            stream.create(topics.partitions)
            return stream.identity() not in ("", before)
        except SourceError:
            return False

    until(is_another)


@pytest.mark.parametrize("which", ["impressions", "outcomes"])
def test_a_topic_that_is_created_again_is_not_the_one_that_was_joined(
    which: str, topics: Topics, tmp_path: Path
) -> None:
    """Its offsets are those of other messages: without a word, those before the old position were never joined."""
    settings = topics.settings(tmp_path, SHORT.replace('grace = "1s"', 'grace = "1h"'))  # impressions are kept so long
    topics.write(topics.impressions, [impression(f"a{i}") for i in range(10)], lambda _: 0)
    topics.write(topics.outcomes, [click(f"a{i}") for i in range(10)], lambda _: 0)
    anew = topics.impressions if which == "impressions" else topics.outcomes
    said = f"topic {anew.topic} has been deleted and created again"
    with joining(settings, stderr=subprocess.PIPE) as process:
        until(lambda: len(labels(topics)) == 10)
        until(lambda: topics.outcomes.committed(topics.group).get(0) == 10)
        recreate(topics, anew)
        later = BEGIN + 1000  # than what idle logs come to meanwhile
        topics.write(topics.impressions, [impression(f"b{i}", at=later) for i in range(15)], lambda _: 0)
        topics.write(topics.outcomes, [click(f"b{i}", later + 1) for i in range(15)], lambda _: 0)
        assert process.wait(PATIENCE) != 0
    with joining(settings, stderr=subprocess.PIPE) as process:
        assert process.wait(PATIENCE) != 0
        assert process.stderr is not None
        assert said in process.stderr.read().decode()
    assert len(labels(topics)) == 10
    admin = AdminClient({"bootstrap.servers": topics.servers})
    start = [TopicPartition(anew.topic, p, 0) for p in range(topics.partitions)]
    (reset,) = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(topics.group, start)]).values()
    reset.result(60)
    wanted = {f"{of}{i}": 1 for of, n in (("a", 10), ("b", 15)) for i in range(n)}
    with (tmp_path / "log").open("wb") as log, joining(settings, stderr=log.fileno()):
        until(
            lambda: labels(topics) == wanted,
            told=lambda: (
                f"{labels(topics)}; {topics.impressions.committed(topics.group)}, "
                f"{topics.outcomes.committed(topics.group)}"
            ),
        )
    assert len(topics.read(topics.samples.topic)) == len(wanted)  # each of them once
    line = f"the offset of {topics.outcomes.topic} has been reset to 0, so impressions 0 to 9, which"
    assert (line in (tmp_path / "log").read_text()) == (which == "outcomes")


def test_it_goes_on_with_more_partitions(topics: Topics, tmp_path: Path) -> None:
    """Also of the topics that it writes."""
    with joining(topics.settings(tmp_path, SHORT)) as process:
        topics.write(topics.impressions, [impression("a")], lambda _: 0)
        topics.write(topics.outcomes, [click("a")], lambda _: 0)
        until(lambda: labels(topics) == {"a": 1})
        for stream in (topics.outcomes, topics.impressions):
            topics.grow(stream, 4)
        topics.write(topics.impressions, [impression("b", at=BEGIN + 2)], lambda _: 3)
        topics.write(topics.outcomes, [click("b", BEGIN + 3), click("nobody", BEGIN + 9)], lambda _: 3)
        topics.write(topics.impressions, [impression("c", at=BEGIN + 12)], lambda _: 3)
        until(lambda: labels(topics) == {"a": 1, "b": 1, "c": 0})
        assert process.poll() is None
    assert topics.samples.partition_count() == 4
    assert topics.samples.of(f"{topics.outcomes.topic}.orphaned").partition_count() == 4
    topics.grow(topics.outcomes, 5)
    with joining(topics.settings(tmp_path, SHORT), stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert f"topic {topics.outcomes.topic} of Kafka".encode() in said
    assert b"has 5 partitions, but topic" in said


@contextmanager
def running(topics: Topics, folder: Path) -> Iterator[Joiner]:
    """A joiner in a thread."""
    joiner = Joiner(load_settings(topics.settings(folder, SHORT)))
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        ran = threads.submit(joiner.run, stopped)
        try:
            yield joiner
        finally:
            stopped.set()
        ran.result(PATIENCE)


def test_it_waits_while_topics_get_more_partitions_one_after_the_other(
    topics: Topics, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it has joined before, here as if for an hour."""
    topics.write(topics.impressions, [impression("a")], lambda _: 0)
    with running(topics, tmp_path):
        until(lambda: labels(topics) == {"a": 0})
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
        monkeypatch.setattr(joiner_module, "time", later)
        topics.grow(topics.outcomes, 4)
        until(lambda: "waiting for topics that are being given more partitions" in caplog.text)
        topics.grow(topics.impressions, 4)
        topics.write(topics.impressions, [impression("b", at=BEGIN + 9)], lambda _: 3)
        topics.write(topics.outcomes, [click("b", BEGIN + 10), click("nobody", BEGIN + 99)], lambda _: 3)
        topics.write(topics.impressions, [impression("later", at=BEGIN + 99)], lambda _: 3)
        until(lambda: labels(topics).get("b") == 1)


def test_a_first_commit_by_another_member_is_no_topic_made_anew(
    topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come between the two questions for what is committed of both topics."""
    topics.write(topics.impressions, [impression("a")], lambda _: 0)
    with running(topics, tmp_path):
        until(lambda: labels(topics) == {"a": 0})
    committed = KafkaStream.committed
    # Of the impressions: when it looks at the topics, and for the first of the two questions.
    none: Iterator[dict[int, int]] = iter([{}, {}])

    def asked_in_between(self: KafkaStream, group: str) -> dict[int, int]:
        found = committed(self, group)
        return next(none, found) if self.topic == topics.impressions.topic else found

    monkeypatch.setattr(KafkaStream, "committed", asked_in_between)
    with running(topics, tmp_path):
        topics.write(topics.impressions, [impression("b", at=BEGIN + 9)], lambda _: 0)
        until(lambda: labels(topics) == {"a": 0, "b": 0})
    assert not [*none]


def test_of_two_of_an_instance_the_earlier_one_ends(topics: Topics, tmp_path: Path) -> None:
    settings = topics.settings(tmp_path, SHORT)
    with joining(settings, "--instance", "a", stderr=subprocess.PIPE) as first:
        topics.write(topics.impressions, [impression("a")], lambda _: 0)
        until(lambda: labels(topics) == {"a": 0})
        with joining(settings, "--instance", "a") as second:
            _, said = first.communicate(timeout=PATIENCE)
            assert first.returncode == 1
            assert b"another process has joined group" in said
            topics.write(topics.impressions, [impression("b", at=BEGIN + 1000)], lambda _: 0)
            until(lambda: labels(topics) == {"a": 0, "b": 0})
            assert second.poll() is None


def test_a_partition_that_stands_still_is_joined_by_a_new_client(topics: Topics, tmp_path: Path) -> None:
    """Here because somebody else has paused it."""
    joiner = Joiner(load_settings(topics.settings(tmp_path, SHORT)))
    joiner.standstill = StandstillWatch(joiner._ends, str, seconds=1.0)
    stopped = threading.Event()
    thread = threading.Thread(target=joiner.run, args=(stopped,))
    thread.start()
    try:
        topics.write(topics.impressions, [impression("a")], lambda _: 0)
        until(lambda: labels(topics) == {"a": 0})
        joiner._consumer.pause(joiner._consumer.assignment())
        topics.write(topics.impressions, [impression("b", at=BEGIN + 1000)], lambda _: 0)
        until(lambda: labels(topics) == {"a": 0, "b": 0})
        assert joiner.totals.restarts >= joiner.standstill.total >= 1
    finally:
        stopped.set()
        thread.join()


def test_what_comes_at_once_may_take_longer_than_a_transaction(
    topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it could not be written in less than four seconds: the time of a transaction grows until it can."""
    write, tried = Joiner._write_transaction, list[float]()

    def write_slowly(self: Joiner, dirty: Sequence[JoinedPartition]) -> None:
        tried.append(self._transaction_seconds)
        if max(tried) < 4:
            threading.Event().wait(self._transaction_seconds * 0.7)
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        write(self, dirty)

    monkeypatch.setattr(joiner_module, "_TRANSACTION_SECONDS", 1.0)
    monkeypatch.setattr(Joiner, "_write_transaction", write_slowly)
    topics.write(topics.impressions, [impression("a"), impression("b")], lambda _: 0)
    joiner = Joiner(load_settings(topics.settings(tmp_path, SHORT)))
    stopped = threading.Event()
    thread = threading.Thread(target=joiner.run, args=(stopped,))
    thread.start()
    try:
        until(lambda: len(topics.read(topics.samples.topic)) == 2)
        assert tried[:3] == [1.0, 2.0, 4.0]
        assert joiner.totals.restarts >= 2
    finally:
        stopped.set()
        thread.join()


def test_a_full_disk_is_waited_for_and_nothing_is_lost(
    topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three impressions of 5,000 bytes, but nothing fits into memory, and the disk is full for the first four times."""
    tried, file = list[int](), tempfile.TemporaryFile

    def first_full(**options: Any) -> IO[bytes]:
        tried.append(1)
        return open("/dev/full", "r+b", buffering=0) if len(tried) <= 4 else file(**options)

    monkeypatch.setattr(buffer, "_WRITE", 1000)
    monkeypatch.setattr(tempfile, "TemporaryFile", first_full)
    topics.write(topics.impressions, [impression(name, 5000) for name in "abc"], lambda _: 0)
    topics.write(topics.outcomes, [click("b")], lambda _: 0)
    joiner = Joiner(load_settings(topics.settings(tmp_path, f"memory_bytes = 1\n{SHORT}")))
    stopped = threading.Event()
    thread = threading.Thread(target=joiner.run, args=(stopped,))
    thread.start()
    try:
        until(lambda: labels(topics) == {"a": 0, "b": 1, "c": 0})
        assert len(topics.read(topics.samples.topic)) == 3
        assert "No space left on device; give join.folder more room" in caplog.text
    finally:
        stopped.set()
        thread.join()
