"""The intake by itself: what becomes of each message, what is told of it, and what is so after going back."""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import streamtrain as st
from streamtrain.errors import SourceUnavailable, TooManyBadSamples
from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.model.batch import Batch
from streamtrain.model.sampling import Sampling
from streamtrain.ps.clock import Span
from streamtrain.settings.groups import StreamSettings
from streamtrain.stream.buffer import PartitionBuffer
from streamtrain.stream.dead_letters import DeadLetter
from streamtrain.stream.formats.factory import JsonFormat
from streamtrain.testing.stream import MemoryService, MemoryStream
from streamtrain.train.intake import DecodedBatch, StreamIntake

MODEL = st.Model(
    st.Schema(time="ts", features=[st.Categorical("user", 4)]), lambda inputs: None, loss="binary_crossentropy"
)


def message(ts: float, label: int = 0) -> bytes:
    return json.dumps({"ts": ts, "label": label, "user": "u"}).encode()


class Letters:
    """Dead letters that are noted."""

    def __init__(self) -> None:
        self.written: list[DeadLetter] = []
        self.calls: list[str] = []

    def write(self, letter: DeadLetter) -> None:
        self.written.append(letter)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")

    @property
    def of(self) -> list[tuple[int, int, str, str]]:
        return [one[:4] for one in self.written]


class From:
    """A listener that begins where it is told to."""

    def __init__(self, positions: Mapping[int, int]) -> None:
        self._positions = positions

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        return {one: self._positions.get(one, 0) for one in partitions}

    def revoked(self, partitions: Sequence[int]) -> None:
        """Nothing is under way."""

    lost = revoked


class Opened:
    """An intake of messages by partition, each told of at second 10,000, and all that it told."""

    def __init__(self, messages: Mapping[int, list[bytes]], at: float = 10_000, **options: Any) -> None:
        self.letters, self.metrics = Letters(), WorkerMetrics()
        self.stream = MemoryStream("samples", MemoryService())
        self.stream.create(max(messages) + 1)
        for partition, of_partition in messages.items():
            self.stream.add(partition, of_partition, at)
        given: dict[str, Any] = {
            "dead_letters": self.letters,
            "metrics": self.metrics,
            "format": JsonFormat(MODEL),
        } | options
        self.intake = StreamIntake(self.stream, "group", "job", **given)
        self.intake.open(From({}))
        self.intake.poll(100_000, 0)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"streamtrain_worker_{name}", labels) or 0.0


def test_bad_ones_are_told_with_their_place_and_the_others_learned() -> None:
    opened = Opened({0: [message(1), b"{", message(2)], 1: [b'{"ts": 3}', message(4)]})
    taken = opened.intake.read([Span(0, 1, 3), Span(1, 0, 2)])
    assert taken.batch.times.tolist() == [2, 4]
    assert taken.watermarks == {0: 2, 1: 4}
    assert taken.letters == 2
    assert opened.letters.of == [(0, 1, "not_json", ""), (1, 0, "missing_field", "label")]
    assert [one.value for one in opened.letters.written] == [b"{", b'{"ts": 3}']
    assert opened.letters.written[0].detail == "at byte 1, near '{'"
    assert opened.value("bad_samples_total", reason="not_json") == 1
    assert opened.value("dead_letters_total", reason="missing_field") == 1
    assert opened.value("buffered_bytes") == sum(map(len, (message(1), b"{", message(2), b'{"ts": 3}', message(4))))


def test_a_letter_is_written_once_however_often_it_is_read() -> None:
    """Also where all before it is read again, and one after it for the first time."""
    opened = Opened({0: [b"{", message(1), b"[", b"]"], 1: [b"}"]})
    for spans in ([Span(0, 0, 1)], [Span(0, 0, 2)], [Span(0, 0, 3), Span(1, 0, 1)]):
        opened.intake.seek({0: 0, 1: 0}, {}, {})
        opened.intake.read(spans)
    assert [one[:2] for one in opened.letters.of] == [(0, 0), (0, 2), (1, 0)]
    assert opened.intake.read([Span(0, 3, 4)]).letters == 1
    assert [one[:2] for one in opened.letters.of] == [(0, 0), (0, 2), (1, 0), (0, 3)]
    assert opened.value("dead_letters_total", reason="not_json") == 4
    assert opened.intake.read([Span(0, 3, 4)]).letters == 1  # its writing may not have ended yet
    assert len(opened.letters.written) == 4


def test_without_letters_bad_ones_are_counted_only() -> None:
    opened = Opened({0: [b"{"]}, dead_letters=None)
    assert opened.intake.read([Span(0, 0, 1)]).letters == 1
    opened.intake.flush_dead_letters()
    opened.intake.close()
    assert opened.value("bad_samples_total", reason="not_json") == 1
    assert opened.value("dead_letters_total", reason="not_json") == 0
    assert opened.letters.calls == []


@pytest.mark.parametrize(("is_dead", "learned"), [(True, [100, 70, 69.5]), (False, [100, 70, 69, 69.5])])
def test_late_ones_by_the_watermark_before_each(
    is_dead: bool, learned: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    opened = Opened(
        {0: [message(ts) for ts in (100, 70, 69, 69.5)]},
        policy=StreamSettings(late_after=30.5, late="dead" if is_dead else "learn"),
    )
    taken = opened.intake.read([Span(0, 0, 4)])
    assert taken.batch.times.tolist() == learned
    assert taken.watermarks == {0: 100 - 30.5 / 256}  # a little less, as one is late
    assert opened.value("late_samples_total") == 1
    assert opened.letters.of == ([(0, 2, "late", "")] if is_dead else [])
    assert taken.letters == is_dead
    said = "1 samples were more than 30.5 s late, and are learned anyway"
    assert (said in caplog.text) != is_dead


def test_late_after_may_be_zero(caplog: pytest.LogCaptureFixture) -> None:
    policy = StreamSettings.model_construct(late_after=0.0, late="learn")
    opened = Opened({0: [message(7), message(7), message(6)]}, policy=policy)
    assert len(opened.intake.read([Span(0, 0, 3)]).batch) == 3
    assert "1 samples were more than 0 s late" in caplog.text


def test_watermarks_go_on_and_back_with_the_position() -> None:
    opened = Opened({0: [message(100), message(50), b"{"], 1: [message(7)]}, policy=StreamSettings(late_after=10))
    opened.intake.seek({0: 0}, {0: 95.0}, {})
    assert opened.intake.read([Span(0, 0, 1)]).watermarks == {0: 100}
    assert opened.intake.read([Span(0, 1, 2)]).letters == 1
    assert opened.intake.read([Span(0, 2, 3), Span(1, 0, 1)]).watermarks == {0: 100 - 10 / 256, 1: 7}
    given = {0: 55.0}
    opened.intake.seek({0: 1}, given, {})
    assert opened.intake.read([Span(0, 1, 2)]).batch.times.tolist() == [50]
    assert opened.intake.read([Span(0, 2, 3), Span(1, 0, 1)]).watermarks == {0: 55, 1: 7}
    assert given == {0: 55.0}


def test_late_and_bad_ones_are_told_in_their_order() -> None:
    opened = Opened({0: [b"{", message(100), message(1), b"["]}, policy=StreamSettings(late_after=10))
    opened.intake.read([Span(0, 0, 4)])
    assert opened.letters.of == [(0, 0, "not_json", ""), (0, 2, "late", ""), (0, 3, "not_json", "")]


def test_what_is_of_the_future_is_refused_and_counts_as_bad() -> None:
    log = [message(10_050), message(10_051), b"{", message(9)]
    opened = Opened({0: log}, policy=StreamSettings(future_after=50))
    taken = opened.intake.read([Span(0, 0, 4)])
    assert taken.batch.times.tolist() == [10_050, 9]
    assert taken.watermarks == {0: 10_050}
    assert opened.letters.of == [(0, 1, "future", ""), (0, 2, "not_json", "")]
    broken = Opened({0: [message(99_999)] * 10_000}, policy=StreamSettings(max_bad_ratio=0.5, future_after=50))
    with pytest.raises(TooManyBadSamples):
        broken.intake.read([Span(0, 0, 10_000)])
    assert broken.letters.written == []


def test_the_error_of_a_broken_stream_names_the_last_bad_message() -> None:
    nameless, named = b"{", b'{"ts": 3}'
    for first, last, reason in ((nameless, named, "missing_field in field 'label'"), (named, nameless, "not_json")):
        log = {0: [first] * 4000, 1: [first] * 3000, 2: [first] * 3000 + [last] + [message(1)] * 5, 3: [message(1)] * 9}
        broken = Opened(log, policy=StreamSettings(max_bad_ratio=0.5))
        with pytest.raises(TooManyBadSamples, match=rf", such as offset 3000 of partition 2: {reason}; at most 50%"):
            broken.intake.read([Span(one, 0, len(log[one])) for one in log])


def test_times_of_the_log_are_not_rounded_to_seconds() -> None:
    opened = Opened({0: [message(10_050.5), message(10_050.6)]}, 10_000.5, policy=StreamSettings(future_after=50))
    assert opened.intake.read([Span(0, 0, 2)]).batch.times.tolist() == [10_050.5]


@pytest.mark.parametrize(("at", "future"), [(10_000.0, [0]), (0.0, [0]), (-0.001, []), (-1.0, [])])
def test_the_clock_decides_only_where_the_log_has_no_time(at: float, future: list[int]) -> None:
    opened = Opened({0: [message(90_000)]}, at, policy=StreamSettings(future_after=50), now=lambda: 89_950.0)
    opened.intake.read([Span(0, 0, 1)])
    assert [one.offset for one in opened.letters.written] == future


def test_a_model_that_learns_from_a_part() -> None:
    sampling = Sampling({0: 0.25})
    opened = Opened({0: [b"{", *[message(9)] * 99], 1: [message(9)] * 50}, sampling=sampling)
    taken = opened.intake.read([Span(0, 0, 100), Span(1, 10, 50)])
    places = np.array([(0, at) for at in range(1, 100)] + [(1, at) for at in range(10, 50)])
    kept = sampling.keep(np.zeros(139, np.float32), places[:, 0], places[:, 1])
    assert len(taken.batch) == kept.sum()
    assert opened.value("sampled_out_samples_total") == 139 - kept.sum()
    assert len(opened.intake.read([Span(0, 0, 1)]).batch) == 0


class Away:
    """A format whose registry is away at first, and says so."""

    def __init__(self, times: int) -> None:
        self._times, self._format = times, JsonFormat(MODEL)

    def decode(self, messages: Sequence[bytes]) -> tuple[Batch, list[Any]]:
        self._times -= 1
        if self._times >= 0:
            raise SourceUnavailable("the registry is away")
        return self._format.decode(messages)


def test_it_waits_for_the_registry_until_it_is_stopped() -> None:
    assert len(Opened({0: [message(1)]}, format=Away(1)).intake.read([Span(0, 0, 1)]).batch) == 1
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(SourceUnavailable):
        Opened({0: [message(1)]}, format=Away(1), stopped=stopped).intake.read([Span(0, 0, 1)])


def test_refusals_are_logged_seldom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    opened = Opened({0: [b"{", b"{", b'{"ts": 3}']})
    opened.intake.read([Span(0, 0, 3)])
    assert [one.getMessage() for one in caplog.records] == [
        "refused 1 messages: not_json; the last one is offset 0 of partition 0",
        "refused 1 messages: missing_field in field 'label'; the last one is offset 2 of partition 0",
    ]
    assert [one.batch for one in caplog.records] == ["0:0-0", "0:2-2"]  # type: ignore[attr-defined]


def test_what_was_deleted_is_counted_once() -> None:
    opened = Opened({0: [message(1)] * 5}, buffer=PartitionBuffer(skip_gone=True))
    opened.stream.add(0, [message(2)] * 5)
    opened.stream.delete(0, 8)
    for _ in range(3):
        opened.intake.poll(10, 0)
    assert opened.value("skipped_samples_total") == 3
    opened.stream.add(0, [message(3)] * 4)
    opened.stream.delete(0, 12)
    for _ in range(3):
        opened.intake.poll(10, 0)
    assert opened.value("skipped_samples_total") == 5
    assert opened.intake.reach(0, 5, 10) == 14
    assert opened.intake.count(0, 5, 20) == 4


def test_what_is_learned_is_released_committed_and_no_lag() -> None:
    opened = Opened({0: [message(1)] * 3, 1: []})
    opened.stream.add(0, [message(1)] * 2)
    assert not opened.intake.finished()
    assert opened.intake.idle() == {1}
    opened.intake.commit({0: 2})
    assert opened.stream.committed("group") == {0: 2}
    assert opened.value("lag_messages", partition="0") == 2
    opened.intake.release([Span(0, 0, 2)])
    assert opened.intake.count(0, 0, 9) == 1
    opened.intake.poll(10, 0)
    opened.intake.release([Span(0, 2, 5)])
    assert opened.intake.idle() == {0, 1}
    opened.stream.unreachable = True
    assert opened.intake.idle() == frozenset()
    opened.stream.end()
    assert opened.intake.finished()


def test_going_back_reads_again_what_was_released() -> None:
    opened = Opened({0: [message(1), message(2), message(3)]})
    opened.intake.read([Span(0, 0, 2)])
    opened.intake.release([Span(0, 0, 2)])
    opened.intake.seek({0: 1}, {}, {})
    opened.intake.poll(10, 0)
    assert opened.intake.read([Span(0, 1, 3)]).batch.times.tolist() == [2, 3]


def test_what_holds_unless_it_is_said() -> None:
    assert StreamSettings() == StreamSettings(late_after=None, late="dead", max_bad_ratio=0.1, future_after=86_400.0)
    taken = Opened({0: [b"{"]}).intake.read([Span(0, 0, 1)])
    assert taken.watermarks == {0: 0.0}
    assert DecodedBatch(taken.batch, {}).letters == 0
    with pytest.raises(ValidationError, match="frozen"):
        StreamSettings().late_after = 1.0
    opened = Opened({0: [message(1e11)]}, policy=StreamSettings(future_after=None))
    assert len(opened.intake.read([Span(0, 0, 1)]).batch) == 1


LOG = {
    0: [message(100), b"{", message(110), message(5), message(120)],
    1: [message(200), b"[", message(210)],
    2: [b"{", message(300), message(310), b"{", message(290), message(305)],
    3: [message(400)],
}
"""The fourth of partition 0 and the fifth of 2 are late by more than 15 s."""


def opened_log() -> Opened:
    return Opened(LOG, policy=StreamSettings(late_after=15))


def contents(taken: DecodedBatch) -> tuple[object, ...]:
    assert taken.origins is not None
    return (taken.batch.times.tolist(), dict(taken.watermarks), *(column.tolist() for column in taken.origins))


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [
        ([0, 1], [Span(0, 0, 4)], [Span(0, 4, 5), Span(1, 0, 3)]),
        ([1, 0], [Span(1, 0, 3)], [Span(0, 0, 5)]),
        ([3, 2], [Span(3, 0, 1), Span(2, 0, 2)], [Span(2, 2, 6)]),
        ([2, 3], [Span(2, 0, 5)], [Span(2, 5, 6), Span(3, 0, 1)]),
        ([0, 1, 2, 3], [Span(0, 0, 5), Span(1, 0, 2)], [Span(1, 2, 3), Span(2, 0, 6), Span(3, 0, 1)]),
        ([3, 2, 1, 0], [Span(3, 0, 1), Span(2, 0, 6)], [Span(1, 0, 3), Span(0, 0, 5)]),
        ([2, 0, 3, 1], [Span(2, 0, 6), Span(0, 0, 2)], [Span(0, 2, 5), Span(3, 0, 1), Span(1, 0, 3)]),
        ([2], [Span(2, 0, 2)], [Span(2, 2, 6)]),
    ],
)
def test_halves_equal_two_separate_reads(order: list[int], first: list[Span], second: list[Span]) -> None:
    spans = [Span(one, 0, len(LOG[one])) for one in order]
    taken = opened_log().intake.read(spans)
    (spans_before, before), (spans_after, after) = taken.split(spans)
    assert (spans_before, spans_after) == (first, second)
    by_itself = opened_log().intake
    expected = by_itself.read(first)
    assert contents(before) == contents(expected)
    ended = {span.partition for span in first} - {span.partition for span in second}
    assert before.refusals == {one: expected.refusals[one] for one in ended}
    expected = by_itself.read(second)
    assert contents(after) == contents(expected)
    assert after.refusals == expected.refusals
    assert (before.letters, after.letters) == (taken.letters, 0)  # buried before either counts


def test_bury_waits_for_letters_and_close_ends_all() -> None:
    opened = Opened({0: [b"{"]})
    opened.intake.flush_dead_letters()
    opened.intake.close()
    assert opened.letters.calls == ["flush", "close"]
    opened.stream.create(1)
    with_others = opened.stream.source("group", "another job", From({}))  # as nobody of this one is left
    with_others.close()
