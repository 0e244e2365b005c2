"""What a worker says of its lag, its dead letters and its gradients: when it begins and ends, not all the time."""

import logging
import re

import pytest

from streamtrain.metrics.worker import WorkerMetrics
from streamtrain.ps.clock import Span
from streamtrain.ps.push import PushStats
from streamtrain.settings.groups import StreamSettings
from streamtrain.testing.stream import MemoryStream
from streamtrain.train.intake import LagMonitor
from streamtrain.train.loop import LoopStats
from tests.train.test_loop import Running, counted, dead_offsets, message


def said(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == f"streamtrain.train.{logger}"]


def test_falling_behind_is_said_once_and_so_is_catching_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streamtrain")
    now = 0.0
    behind = LagMonitor(lambda: now)

    def minute(lag: int) -> None:
        nonlocal now
        for _ in range(6):
            now += 10.0
            behind.observe(lag)

    for lag in range(0, 9_000, 1_000):
        minute(lag)
    assert said(caplog, "intake") == []  # it grows, and is little still
    for lag in (10_000, 11_000, 12_000):
        minute(lag)
    assert said(caplog, "intake") == ["falling behind: the lag has grown for 9 minutes, to 10000 messages"]
    minute(11_000)
    minute(10_000)
    assert said(caplog, "intake")[1:] == ["catching up: the lag is down to 11000 messages"]
    for lag in (50_000, 40_000, 50_000, 40_000, 50_000):
        minute(lag)  # up and down
    assert len(said(caplog, "intake")) == 2


def test_messages_that_are_refused_are_said_once_with_an_example(caplog: pytest.LogCaptureFixture) -> None:
    stream = MemoryStream.of({0: [message(1), b"{", b"no", message(2), b"{}"], 1: [], 2: []})
    with counted() as where:
        assert Running(where, stream).join().failure is None
    assert dead_offsets(stream)[0] == [1, 2, 4]
    lines = said(caplog, "intake")
    assert len(lines) == len({line.partition(": ")[2].split()[0] for line in lines})  # one of each reason
    assert lines[0] == "refused 1 messages: not_json; the last one is offset 1 of partition 0"
    assert next(one.__dict__["batch"] for one in caplog.records if "refused" in one.getMessage()) == "0:1-1"


def test_late_samples_that_are_learned_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    stream = MemoryStream.of({0: [message(1000), *(message(i) for i in range(200))], 1: [], 2: []})
    with counted() as where:
        done = Running(where, stream, rules=StreamSettings(late_after=50, late="learn")).join()
        assert done.failure is None
    (line,) = said(caplog, "intake")
    assert re.fullmatch(r"\d+ samples were more than 50 s late, and are learned anyway", line)


def test_gradients_that_are_not_finite_are_said_once_with_their_offsets(caplog: pytest.LogCaptureFixture) -> None:
    tally = LoopStats(WorkerMetrics(), None, None)
    for batch in range(20):
        tally.answered(PushStats(non_finite_rows=3), [Span(1, batch * 10, batch * 10 + 10)])
    (line,) = said(caplog, "loop")
    assert line.startswith("dropped gradients that are not finite, of 1 batches; of the last: 3 of rows, 0 of dense")
    assert line.endswith("offsets 0 to 9 of partition 1")
    assert caplog.records[-1].__dict__["batch"] == "1:0-9"
    assert tally.stats.non_finite_rows == 60
