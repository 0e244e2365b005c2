"""Work that is repeated: periodic tasks, and calls that are retried."""

import logging
import threading
import time

import pytest

from streamtrain.errors import OriginUnavailable, ShardUnavailable, SourceUnavailable
from streamtrain.periodic import Backoff, FailureLog, PeriodicTask, retry
from tests.patience import PATIENCE

AWAY = OriginUnavailable("away")


class Outcomes:
    """A function that raises, or returns, one outcome after another; the last one for ever."""

    def __init__(self, *outcomes: float | Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.calls = 0
        self.called = threading.Condition()

    def __call__(self) -> float | None:
        with self.called:
            self.calls += 1
            self.called.notify_all()
        outcome = self.outcomes[0] if len(self.outcomes) == 1 else self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def wait(self, calls: int) -> None:
        with self.called:
            assert self.called.wait_for(lambda: self.calls >= calls, PATIENCE)


def test_it_runs_every_so_often_or_as_its_function_says() -> None:
    task = PeriodicTask("test", Outcomes(None, 7.0, 0.0, None), 3.0)
    assert [task.run_once() for _ in range(4)] == [3.0, 7.0, 0.0, 3.0]


def test_pauses_grow_while_it_fails_and_begin_anew_after_a_success() -> None:
    task = PeriodicTask("test", Outcomes(AWAY, AWAY, AWAY, AWAY, None, AWAY), 1.0, backoff=Backoff(1.0, 5.0))
    pauses = [task.run_once() for _ in range(6)]
    for pause, longest in zip(pauses, [1.0, 2.0, 4.0, 5.0, 1.0, 1.0], strict=True):
        assert longest / 2 <= pause <= longest


def test_the_backoff_may_depend_on_the_error() -> None:
    def backoff(exc: Exception) -> Backoff:
        return Backoff(8.0, 8.0) if isinstance(exc, ValueError) else Backoff(0.5, 0.5)

    task = PeriodicTask("test", Outcomes(AWAY, ValueError("else")), 1.0, backoff=backoff)
    assert task.run_once() <= 0.5
    assert task.run_once() >= 4.0


def test_a_failure_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streamtrain")
    reasons = ["away for 1 s", "away for 22 s", "refuses"]
    task = PeriodicTask("test", Outcomes(*map(OriginUnavailable, reasons), None, None), 1.0, subject="publishing")
    seen = []
    for _ in range(5):
        task.run_once()
        seen.append(task.trouble)
    assert seen == [*reasons, "", ""]
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [
        ("publishing failed, retrying: away for 1 s", None),
        ("publishing failed, retrying: refuses", None),
        ("publishing works again", None),
    ]


def test_what_nobody_expects_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    PeriodicTask("test", Outcomes(ValueError("no idea")), 1.0).run_once()
    (record,) = caplog.records
    assert "ValueError: no idea" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ValueError


def test_without_a_subject_expected_failures_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    task = PeriodicTask("test", Outcomes(AWAY, None), 1.0)
    task.run_once()
    task.run_once()
    assert not caplog.records


def test_the_outcome_of_every_run_is_observed() -> None:
    seen: list[tuple[Exception | None, str]] = []
    task = PeriodicTask("test", Outcomes(None, AWAY, None), 1.0, observe=lambda e: seen.append((e, task.trouble)))
    for _ in range(3):
        task.run_once()
    assert seen == [(None, ""), (AWAY, "away"), (None, "")]


def test_its_thread_survives_every_error() -> None:
    run = Outcomes(ValueError("one"), OriginUnavailable("two"), MemoryError("three"), None)
    with PeriodicTask("test", run, 0.001):
        run.wait(6)


def test_closing_and_waking_interrupt_a_pause() -> None:
    run = Outcomes(None)
    with PeriodicTask("test", run, 3600.0) as task:
        run.wait(1)
        task.wake()
        run.wait(2)
        task.close()
    assert run.calls == 2
    assert task.closing.is_set()


def test_waking_it_does_not_cut_the_pause_after_a_failure() -> None:
    run = Outcomes(AWAY)
    with PeriodicTask("test", run, 3600.0) as task:
        run.wait(1)
        task.wake()
        time.sleep(0.05)
        assert run.calls == 1


def test_a_delay_comes_before_the_first_run() -> None:
    run = Outcomes(None)
    with PeriodicTask("test", run, 3600.0, delay=3600.0) as task:
        time.sleep(0.05)
        assert run.calls == 0
        task.wake()
        run.wait(1)


def test_its_function_may_end_it() -> None:
    ended = threading.Event()

    def run() -> None:
        task.stop()
        ended.set()

    task = PeriodicTask("test", run, 0.0, delay=0.01)
    task.start()
    assert ended.wait(PATIENCE)
    task.close()


def test_one_that_never_began_can_be_closed() -> None:
    PeriodicTask("test", Outcomes(None), 1.0).close()


# Which failures are logged.


def lines(*failures: tuple[float, str]) -> list[str]:
    """What is logged of failures, each with the second at which it happens."""
    times = iter([at for at, _ in failures])
    log = FailureLog(lambda: next(times))
    return [log.line(reason) for _, reason in failures]


def test_a_failure_is_logged_again_after_ten_minutes_with_a_count() -> None:
    assert lines(*((at, "h:1 refuses") for at in (0.0, 1.0, 599.0, 600.0, 601.0, 1200.0))) == [
        "h:1 refuses",
        "",
        "",
        "h:1 refuses (3 failures since the last such line)",
        "",
        "h:1 refuses (2 failures since the last such line)",
    ]


def test_a_failure_in_other_words_is_logged_at_once_and_one_that_comes_back_after_a_minute() -> None:
    failures = ((at, f"h:1 {'is silent' if at % 2 else 'refuses'}") for at in range(62))
    assert [line for line in lines(*failures) if line] == [
        "h:1 refuses",
        "h:1 is silent",
        "h:1 refuses (59 failures since the last such line)",
        "h:1 is silent",
    ]


def test_a_failure_that_moves_to_another_port_is_logged_within_a_minute() -> None:
    assert lines(
        (0, "h:1 refuses"), (1, "h:2 refuses"), (59, "h:2 refuses"), (60, "h:2 refuses"), (70, "h:2 refuses")
    ) == [
        "h:1 refuses",
        "",
        "",
        "h:2 refuses (3 failures since the last such line)",
        "",
    ]
    assert lines((0, "epoch 1 is damaged"), (60, "epoch 2 is damaged")) == ["epoch 1 is damaged", "epoch 2 is damaged"]


def test_a_duration_that_grows_does_not_make_another_failure() -> None:
    reasons = [
        "no answer within 1 s",
        "no answer within 2.5 s",
        "no answer within 90000ms",
        "no answer within 4 seconds",
    ]
    assert lines((0, reasons[0]), (60, reasons[1])) == [reasons[0], ""]
    assert lines((0, reasons[2]), (60, reasons[2].replace("90", "91"))) == [reasons[2], ""]
    assert lines((0, reasons[3]), (60, reasons[3].replace("4", "5"))) == [reasons[3], ""]


def test_after_a_success_a_failure_is_new() -> None:
    log = FailureLog(lambda: 0.0)
    assert not log.end()
    assert [log.line("away"), log.line("away")] == ["away", ""]
    assert log.end()
    assert not log.end()
    assert log.line("away") == "away"


# Retry.


def test_what_fails_is_called_again_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    away = [ShardUnavailable(f"away for {seconds} s") for seconds in range(3)]
    run = Outcomes(*away, SourceUnavailable("refuses"), 5.0)
    backoff = Backoff(0.001, 0.002)
    assert retry(run, (ShardUnavailable, SourceUnavailable), threading.Event(), backoff=backoff) == 5.0
    assert run.calls == 5
    assert [record.getMessage() for record in caplog.records] == ["away for 0 s; retrying", "refuses; retrying"]


def test_other_errors_are_raised_at_once() -> None:
    run = Outcomes(ShardUnavailable("away"), ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        retry(run, ShardUnavailable, threading.Event(), backoff=Backoff(0.001, 0.001))
    assert run.calls == 2


def test_stopping_ends_the_pause_and_raises_the_last_error() -> None:
    stopped, run = threading.Event(), Outcomes(AWAY)
    threading.Timer(0.05, stopped.set).start()
    with pytest.raises(OriginUnavailable, match="away"):
        retry(run, OriginUnavailable, stopped, backoff=Backoff(3600.0, 3600.0))
    with pytest.raises(OriginUnavailable):  # it is called once, also where it is stopped already
        retry(run, OriginUnavailable, stopped)
    assert run.calls == 2


def test_it_gives_up_after_a_time() -> None:
    run = Outcomes(AWAY)
    with pytest.raises(OriginUnavailable, match="away"):
        retry(run, OriginUnavailable, threading.Event(), backoff=Backoff(0.2, 0.2), give_up=1.0)
    assert 2 <= run.calls <= 12
