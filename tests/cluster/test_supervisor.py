"""The supervisor, with real programs."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamtrain.cluster.supervisor import Program, ProgramFailed, Supervisor
from streamtrain.errors import ConfigError

SECONDS = 30.0
LIVES = "import signal, sys; print('up', flush=True); signal.sigwait([signal.SIGTERM]); print('down', flush=True)"
CATCHES = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"


class Log:
    """What programs wrote."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._changed = threading.Condition()

    def write(self, name: str, line: str) -> None:
        with self._changed:
            self.lines.append((name, line))
            self._changed.notify_all()

    def until(self, condition: Callable[[list[tuple[str, str]]], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.lines), SECONDS), self.lines

    def of(self, name: str) -> list[str]:
        return [line for of, line in self.lines if of == name]


@pytest.fixture
def log() -> Log:
    return Log()


Supervise = Callable[..., Supervisor]


@pytest.fixture
def supervise(log: Log) -> Iterator[Supervise]:
    made: list[Supervisor] = []

    def make(*programs: Program) -> Supervisor:
        made.append(Supervisor(programs, log.write))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.stop()


def python(name: str, code: str, stage: int = 0, drain: float = SECONDS) -> Program:
    return Program(name, [sys.executable, "-c", CATCHES + code], dict(os.environ), stage, drain)


def test_programs_start_and_stop_in_the_order_of_their_stages(supervise: Supervise, log: Log) -> None:
    supervisor = supervise(python("last", LIVES, 2), python("first", LIVES, 0), python("middle", LIVES, 1))
    log.until(lambda lines: len(lines) == 3)
    supervisor.stop()
    assert log.lines[3:] == [("last", "down"), ("middle", "down"), ("first", "down")]


def test_what_is_killed_starts_again(supervise: Supervise, log: Log) -> None:
    supervisor = supervise(python("a", LIVES), python("b", LIVES))
    log.until(lambda lines: len(lines) == 2)
    first = supervisor.pid("a")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    log.until(lambda _: log.of("a") == ["up", "was killed by SIGKILL; starts again in 0.5 s", "up"])
    assert supervisor.pid("a") not in (first, None)
    assert (supervisor.starts("a"), supervisor.starts("b")) == (2, 1)


def test_what_keeps_failing_is_started_less_and_less_often(supervise: Supervise, log: Log) -> None:
    supervise(python("a", "raise SystemExit('no')"))
    log.until(lambda lines: len(lines) >= 6)
    pauses = [f"ended with exit code 1; starts again in {pause} s" for pause in ("0.5", "1", "2")]
    assert log.of("a")[:6] == ["no", pauses[0], "no", pauses[1], "no", pauses[2]]


def test_a_wrong_configuration_is_told_and_not_tried_again(supervise: Supervise, log: Log) -> None:
    code = "print('streamtrain: no such model'); raise SystemExit(2)"
    supervisor = supervise(python("a", code), python("b", LIVES))
    with pytest.raises(ProgramFailed, match=r"^a: no such model$"):
        supervisor.wait(threading.Event())
    assert supervisor.starts("a") == 1
    assert supervisor.pid("b") is not None


def test_what_does_not_end_in_time_is_killed(supervise: Supervise, log: Log) -> None:
    supervisor = supervise(python("a", "import time; print('up', flush=True); time.sleep(600)", drain=0.2))
    log.until(lambda lines: lines)
    pid = supervisor.pid("a")
    supervisor.stop()
    assert log.of("a") == ["up", "does not end within 0.2 s: killed"]
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_program_that_is_not_there_stops_the_others(log: Log) -> None:
    missing = Program("b", ["/no/such/program"], dict(os.environ), stage=1)
    supervisor = Supervisor([python("a", LIVES), missing], log.write)
    with pytest.raises(ConfigError, match="there is no program /no/such/program"):
        supervisor.start()
    assert supervisor.pid("a") is None


def test_no_program_outlives_a_supervisor_that_is_killed() -> None:
    code = f"""
import threading
from streamtrain.cluster.supervisor import Program, Supervisor
import os, sys
Supervisor([Program("a", [sys.executable, "-c", {LIVES!r}], dict(os.environ))], lambda *_: None).start()
threading.Event().wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + SECONDS
        while not (children := _children(process.pid)):
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
    while any(_alive(child) for child in children):
        assert time.monotonic() < deadline


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    found = " ".join(path.read_text() for path in tasks.glob("*/children"))
    return [int(one) for one in found.split() if b"sigwait" in Path(f"/proc/{one}/cmdline").read_bytes()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
