"""The supervisor, with real programs."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.service.programs import Program, replicate
from streamtrain.service.supervisor import ProgramFailed, Supervisor
from tests.children import children
from tests.patience import PATIENCE, until

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
            assert self._changed.wait_for(lambda: condition(self.lines), PATIENCE), self.lines

    def of(self, name: str) -> list[str]:
        return [line for of, line in self.lines if of == name]


@pytest.fixture
def log() -> Log:
    return Log()


Supervise = Callable[..., Supervisor]


@pytest.fixture
def supervise(log: Log) -> Iterator[Supervise]:
    made: list[Supervisor] = []

    def make(*programs: Program, **options: Any) -> Supervisor:
        made.append(Supervisor(programs, log.write, **options))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.stop()


def python(name: str, code: str, stage: int = 0, drain: float = PATIENCE) -> Program:
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
    log.until(lambda _: log.of("a") == ["up", "was killed by SIGKILL; restarting in 0.1 s", "up"])
    assert supervisor.pid("a") not in (first, None)
    assert (supervisor.starts("a"), supervisor.starts("b")) == (2, 1)


def test_what_keeps_failing_is_started_less_and_less_often(supervise: Supervise, log: Log) -> None:
    supervise(python("a", "raise SystemExit('no')"))
    log.until(lambda lines: len(lines) >= 6)
    pauses = [f"ended with exit code 1; restarting in {pause} s" for pause in ("0.1", "0.2", "0.4")]
    assert log.of("a")[:6] == ["no", pauses[0], "no", pauses[1], "no", pauses[2]]


def test_a_wrong_configuration_is_told_and_not_tried_again(supervise: Supervise, log: Log) -> None:
    code = "print('streamtrain: no such model'); raise SystemExit(2)"
    supervisor = supervise(python("a", code), python("b", LIVES))
    with pytest.raises(ProgramFailed, match=r"^a: no such model$"):
        supervisor.wait(threading.Event())
    assert supervisor.starts("a") == 1
    assert supervisor.pid("b") is not None


@pytest.mark.parametrize("code", ["print('streamtrain: away'); raise SystemExit(1)", "print('away'); os.abort()"])
def test_it_is_an_error_if_none_starts_that_must(supervise: Supervise, code: str) -> None:
    supervisor = supervise(python("a", f"import os; {code}"), python("b", f"import os; {code}"), must_start=True)
    with pytest.raises(StreamtrainError, match=r"^no process could start: a (ended|was killed) .*: away$"):
        supervisor.wait(threading.Event())


def test_one_that_starts_is_enough(supervise: Supervise, log: Log) -> None:
    supervisor = supervise(python("a", "raise SystemExit(1)"), python("b", LIVES), must_start=True)
    log.until(lambda _: log.of("a") and log.of("b") == ["up"])
    supervisor.check()


def test_what_has_become_of_programs_is_reported_apart_from_what_they_write(supervise: Supervise, log: Log) -> None:
    reports = Log()
    supervise(python("a", 'print(\'{"message": "x"}\'); raise SystemExit(1)'), report=reports.write)
    reports.until(lambda lines: lines == [("a", "ended with exit code 1; restarting in 0.1 s")])
    assert log.of("a") == ['{"message": "x"}']


def test_a_configuration_that_becomes_wrong_does_not_end_those_that_have_started(
    supervise: Supervise, log: Log, tmp_path: Path
) -> None:
    mark = str(tmp_path / "started")
    code = f"import os; raise SystemExit(2 if os.path.exists({mark!r}) else open({mark!r}, 'w') and 1)"
    said = "ended with exit code 2: its configuration is wrong now, the other processes continue; restarting in 60 s"
    for must_start in (False, True):
        Path(mark).unlink(missing_ok=True)
        supervisor = supervise(python("a", code), python("b", LIVES), must_start=must_start)
        times = must_start + 1
        log.until(lambda _: log.of("a").count(said) == times)  # noqa: B023  # it is called at once
        supervisor.check()
        assert (supervisor.pid("a"), supervisor.starts("a")) == (None, 2)
        assert supervisor.pid("b") is not None


def test_copies_share_their_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        program = Program("serve", ["serve"], drain=3.0)
        copies = replicate(program, 2, [one])
        fd = str(one.fileno())
        assert [(copy.name, copy.command, copy.fds, copy.again, copy.drain) for copy in copies] == [
            (f"serve{index}", ["serve", "--fd", fd, "--index", str(index)], (one.fileno(),), ("--again",), 3.0)
            for index in range(2)
        ]
        assert [copy.name for copy in replicate(program, 1, [one])] == ["serve"]


def test_what_does_not_end_in_time_is_killed(supervise: Supervise, log: Log) -> None:
    supervisor = supervise(python("a", "import time; print('up', flush=True); time.sleep(600)", drain=0.2))
    log.until(lambda lines: lines)
    pid = supervisor.pid("a")
    supervisor.stop()
    assert log.of("a") == ["up", "did not end within 0.2 s; killing it"]
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


WAITS = "import sys; print('has', *sys.argv[1:], flush=True); " + (
    "name = sys.stdin.readline().strip() if '--standby' in sys.argv else 'none'; print('is', name, flush=True); "
    "name or sys.exit(); import signal; signal.sigwait([signal.SIGTERM]); print('down', flush=True)"
)


def alike(name: str, code: str = WAITS) -> Program:
    return replace(python(name, code), standby="twins")


def test_a_standby_takes_the_place_of_whichever_dies_first_and_the_next_one_follows(log: Log) -> None:
    known = replace(alike("b"), instance="b of this host")
    supervisor = Supervisor([alike("a"), known], log.write, standby_after=0.1)
    supervisor.start()
    try:
        for taken in (1, 2):
            log.until(lambda _: log.of("twins-standby") == ["has --standby"] * taken)  # noqa: B023
            pid = supervisor.pid("b")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            for line in (
                "was killed by SIGKILL; its standby takes over",
                "is b of this host",
            ):  # in any order: two threads log
                log.until(lambda _: log.of("b").count(line) == taken)  # noqa: B023
            assert supervisor.pid("b") not in (None, pid)
            assert supervisor.starts("b") == 1 + taken
        log.until(lambda _: len(log.of("twins-standby")) == 3)
    finally:
        supervisor.stop()
    assert log.of("a") == ["has", "is none", "down"]
    assert log.of("b")[-1] == "down"
    assert log.of("twins-standby") == ["has --standby"] * 3, "the one that was not needed took nobody's place"


def test_without_a_standby_or_if_it_has_died_itself_a_program_is_started_anew(log: Log) -> None:
    """And a standby that dies is followed by another."""
    room = threading.Event()
    dies = "import os, sys; '--standby' in sys.argv and (os.close(0), print('dies', flush=True), os.abort());" + WAITS
    supervisor = Supervisor([alike("a", dies)], log.write, has_room=room.is_set, standby_after=2.0)
    supervisor.start()
    try:
        log.until(lambda _: log.of("a")[-1:] == ["is none"])
        log.until(lambda _: log.of("twins-standby") == ["waits for free memory before it starts"])
        room.set()
        log.until(lambda _: log.of("twins-standby").count("dies") == 2)
        pid = supervisor.pid("a")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        log.until(lambda _: log.of("a")[2:] == ["was killed by SIGKILL; restarting in 0.1 s", "has", "is none"])
    finally:
        supervisor.stop()


def test_a_program_that_is_not_there_stops_the_others(log: Log) -> None:
    missing = Program("b", ["/no/such/program"], dict(os.environ), stage=1)
    supervisor = Supervisor([python("a", LIVES), missing], log.write)
    with pytest.raises(ConfigError, match="/no/such/program was not found"):
        supervisor.start()
    assert supervisor.pid("a") is None


@pytest.mark.parametrize(("standby", "processes"), [(None, 1), ("twins", 2)])
def test_no_program_outlives_a_supervisor_that_is_killed(standby: str | None, processes: int) -> None:
    """Nor does a standby."""
    code = f"""
import threading
from streamtrain.service.supervisor import Program, Supervisor
import os, sys
one = Program("a", [sys.executable, "-c", {LIVES!r}], dict(os.environ), standby={standby!r})
Supervisor([one], lambda *_: None, standby_after=0.0).start()
threading.Event().wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: len(_sleeping(process.pid)) >= processes)
        left = _sleeping(process.pid)
    finally:
        process.kill()
        process.wait()
    until(lambda: not any(_alive(child) for child in left))


def _sleeping(pid: int) -> list[int]:
    return [child for child, command in children(pid).items() if "sigwait" in " ".join(command)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
