"""Supervisor: starts the programs of a service on one machine, restarts those that exit, and stops all in order."""

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.service.preload import Preloader, start_preloaded
from streamtrain.service.programs import Program
from streamtrain.shutdown import step

EXIT_CONFIG = 2
"""What a program ends with whose configuration is wrong: to start it again would not help."""

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 15.0
_WRONG_PAUSE = 60.0  # of a program whose configuration has become wrong
_SETTLED = 60.0  # a program that ran for longer restarts after the first pause
_LAST_LINES = 1.0  # seconds for what a program that has ended leaves in its pipe
_LOOK = 1.0  # seconds between checks of the standby
_STANDBY_AFTER = 30.0  # seconds that programs have to start before their standby does
_NEXT_STANDBY_AFTER = 10.0  # the same, of one that has taken a place, which had loaded all but what it works on


class ProgramFailed(ConfigError):
    """A program says that its configuration is wrong."""


class Supervisor:
    """Keeps programs running, from `start` to `stop`.

    If the configuration of a program is wrong when it is first started, that ends all. If it has become wrong by the
    time that the program is restarted, the others run on, and it is tried again once a minute.

    Args:
        programs: names are unique.
        write: is given the name of a program and a line that it wrote, by any thread.
        report: is given the name of a program and what has become of it; None: `write` is.
        must_start: whether it is an error that each program has ended within a minute of its first start.
        has_room: whether there is memory for a standby.
        standby_after: seconds that programs have to start before their standby does.
        preloader: that forks programs to preload; it is closed with this supervisor. None: one of its own.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        write: Callable[[str, str], object],
        *,
        report: Callable[[str, str], object] | None = None,
        must_start: bool = False,
        has_room: Callable[[], bool] = lambda: True,
        standby_after: float = _STANDBY_AFTER,
        preloader: Preloader | None = None,
    ) -> None:
        report = report or write
        self._must_start = must_start
        self._failed = threading.Event()
        first = {program.standby: program for program in reversed(programs) if program.standby}
        preloaded = [program for program in programs if program.preload]
        if preloader is None and preloaded:
            preloader = Preloader(preloaded[0].environment)
        self._preloader = preloader
        self._standbys = {
            name: _Standby(of, write, report, has_room, standby_after, preloader=preloader)
            for name, of in first.items()
        }
        self._write, self._report = write, report
        self._children = [self._make_child(program, self._fail_on) for program in programs]

    def start(self) -> None:
        """Starts all, in the order of their stages; does not wait until they are ready.

        Raises:
            ConfigError: one cannot be run; those before are stopped.
        """
        try:
            for child in sorted(self._children, key=lambda child: child.program.stage):
                child.start()
            for standby in self._standbys.values():
                standby.start()
        except BaseException:
            self.stop()
            raise

    def _make_child(self, program: Program, fail_on: Callable[["_Child", str], object]) -> "_Child":
        standby = self._standbys.get(program.standby or "")
        return _Child(program, self._write, self._report, fail_on, standby, preloader=self._preloader)

    def add(self, program: Program) -> None:
        """Starts one more; the others run on if it cannot be started. Thread-safe.

        Raises:
            ConfigError: it cannot be run.
        """
        child = self._make_child(program, lambda child, reason: None)
        child.start()
        self._children = [*self._children, child]

    def remove(self, name: str) -> None:
        """Stops one, which is not started again. Thread-safe."""
        child = self._child(name)
        self._children = [one for one in self._children if one is not child]
        child.end()
        child.join()

    def update(self, change: Callable[[Program], Program]) -> None:
        """Changes all programs, as they are started the next time. Thread-safe."""
        for child in self._children:
            child.program = change(child.program)
        for standby in self._standbys.values():
            standby.program = change(standby.program)

    def program(self, name: str) -> Program:
        return self._child(name).program

    def _fail_on(self, child: "_Child", reason: str) -> None:
        child.failure = reason
        self._failed.set()

    def wait(self, stopped: threading.Event, every: float = 0.2) -> None:
        """Returns once `stopped` is set; raises what `check` does."""
        while not stopped.wait(every):
            self.check()

    def check(self) -> None:
        """Checks that all programs can continue.

        Raises:
            ProgramFailed: a program ended for its configuration. The others run on: stop them.
            StreamtrainError: no program could start, and one must.
        """
        if self._failed.is_set():
            failed = next(one for one in self._children if one.failure is not None)
            raise ProgramFailed(f"{failed.program.name}: {failed.failure}")
        if self._must_start and all(one.start_failure for one in self._children):
            raise StreamtrainError(f"no process could start: {self._children[0].start_failure}")

    def stop(self) -> None:
        """Stops all, those of the highest stage first, each stage at once."""
        if self._preloader is not None:
            self._preloader.close()
        for standby in self._standbys.values():
            standby.end()
        for stage in sorted({one.program.stage for one in self._children}, reverse=True):
            of_stage = [one for one in self._children if one.program.stage == stage]
            for child in of_stage:
                child.end()
            for child in of_stage:
                with step(child.program.name):
                    child.join()

    def pid(self, name: str) -> int | None:
        """Process of a program, while it has one."""
        return self._child(name).pid

    def starts(self, name: str) -> int:
        """How often a program has been started."""
        return self._child(name).starts

    def _child(self, name: str) -> "_Child":
        return next(one for one in self._children if one.program.name == name)


class _Process:
    """A process of a program, whose lines are written by a thread of their own. It does not outlive the supervisor.

    Args:
        program: what it runs.
        more: further arguments.
        write: is given what it writes.
        name: that stands in front of its lines.
        preloader: that forks it, if the program is one to preload.
        stdin: of it.

    Attributes:
        name: the same; it may change.
        last: line that it wrote.
        process: the process.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        program: Program,
        more: Sequence[str],
        write: Callable[[str, str], object],
        name: str,
        *,
        preloader: Preloader | None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.name, self.last, self._write = name, "", write
        self.process = start_preloaded(
            preloader if program.preload else None,
            [*program.command, *more],
            signal.SIGTERM,
            pass_fds=program.fds,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(program.environment),
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C of the terminal is for the supervisor, which stops all in order
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), name=name, daemon=True)
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self.last = line.rstrip()
                self._write(self.name, self.last)

    def wait(self) -> int:
        """Waits until it has ended and its last lines are written; returns its exit code."""
        code = self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # what was not read of it
                self.process.stdin.close()
        self._reader.join(_LAST_LINES)  # not for ever: a child of it may live on and hold the pipe
        return code


class _Standby:
    """The spare process of programs that are alike. Thread-safe.

    Args:
        program: the first of them.
        write: is given what it writes.
        report: is given what has become of it.
        has_room: whether there is memory for it.
        after: seconds between the start of programs and that of the first one, and between one that ends by itself and
            the next; `_NEXT_STANDBY_AFTER` at most once one has taken a place.
        preloader: that forks it, if the program is one to preload.
    """

    def __init__(
        self,
        program: Program,
        write: Callable[[str, str], object],
        report: Callable[[str, str], object],
        has_room: Callable[[], bool],
        after: float,
        *,
        preloader: Preloader | None,
    ) -> None:
        self._preloader = preloader
        self.program, self._write, self._report = program, write, report
        self._has_room, self._after = has_room, after
        self._name = f"{program.standby}-standby"
        self._changed = threading.Condition()
        self._process: _Process | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        """Starts the processes, one after another."""
        was_reported, after = False, self._after
        with self._changed:
            while not self._changed.wait_for(lambda: self._ending, after):
                if not self._has_room():
                    if not was_reported:
                        self._report(self._name, "waits for free memory before it starts")
                    was_reported = True
                    continue
                try:
                    self._process = _Process(
                        self.program,
                        ["--standby"],
                        self._write,
                        self._name,
                        preloader=self._preloader,
                        stdin=subprocess.PIPE,
                    )
                except OSError as exc:
                    self._report(self._name, f"cannot be started: {exc}")
                    break
                while not self._changed.wait_for(self._is_gone, _LOOK):
                    pass
                ended, self._process = self._process, None
                after = self._after if ended is not None else min(self._after, _NEXT_STANDBY_AFTER)
                if ended is not None:
                    ended.wait()

    def _is_gone(self) -> bool:
        """Whether the spare is gone: it took a place, has ended or is to end."""
        return self._ending or self._process is None or self._process.process.poll() is not None

    def take(self, program: Program) -> _Process | None:
        """The spare, which takes the place of a program; None: there is none."""
        with self._changed:
            taken, self._process = self._process, None
            self._changed.notify_all()
            if taken is None or self._ending:
                return None
            assert taken.process.stdin is not None
            taken.name = program.name
            try:
                taken.process.stdin.write(f"{program.instance or program.name}\n")
                taken.process.stdin.flush()
            except OSError:  # it has ended meanwhile
                taken.wait()
                return None
            return taken

    def end(self) -> None:
        """Ends the spare; none takes a place from now on."""
        with self._changed:
            self._ending = True
            unused, self._process = self._process, None
            self._changed.notify_all()
        if unused is not None:
            unused.process.kill()
            unused.wait()
        if self._thread.ident is not None:
            self._thread.join()


class _Child:
    """One program. Its thread starts it, waits for it and restarts it."""

    def __init__(
        self,
        program: Program,
        write: Callable[[str, str], object],
        report: Callable[[str, str], object],
        fail_on: Callable[["_Child", str], object],
        standby: _Standby | None,
        *,
        preloader: Preloader | None,
    ) -> None:
        self.program = program
        self._standby = standby
        self._preloader = preloader if program.preload else None
        self.starts = 0
        self.failure: str | None = None  # why it cannot run as it is configured
        self.start_failure = ""  # how its first run ended soon
        self._write, self._report = write, report
        self._fail_on = fail_on
        self._lock = threading.Lock()  # between starting it again and ending it
        self._ending = threading.Event()
        self._started = threading.Event()
        self._process: _Process | None = None
        self._error: ConfigError | None = None
        self._thread = threading.Thread(target=self._run, name=program.name, daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process.process if self._process else None
        return process.pid if process and process.poll() is None else None

    def start(self) -> None:
        if shutil.which(self.program.command[0]) is None:
            raise ConfigError(f"{self.program.name} cannot be started: {self.program.command[0]} was not found")
        self._thread.start()
        if self._preloader is None:  # others need not wait until TensorFlow is loaded
            self._started.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        with self._lock:
            self._ending.set()
            if self._process and self._process.process.poll() is None:
                self._process.process.send_signal(signal.SIGTERM)

    def join(self) -> None:
        if self._thread.ident is None:
            return
        self._thread.join(self.program.drain)
        if self._thread.is_alive() and self._process:
            self._report(self.program.name, f"did not end within {self.program.drain:g} s; killing it")
            self._process.process.kill()
            self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        if self._preloader is not None:
            self._preloader.wait_ready()
        process = self._launch()
        while process is not None:
            began = time.monotonic()
            code = process.wait()
            if self._ending.is_set():
                return
            has_settled, is_wrong = time.monotonic() - began > _SETTLED, code == EXIT_CONFIG
            if self.starts == 1 and not has_settled:
                self.start_failure = f"{self.program.name} {_ended(code)}: {_message(process.last)}"
                if is_wrong:
                    self._fail_on(self, _message(process.last) or "its configuration is wrong")
                    return
            process = None if is_wrong else self._replace()
            if process is not None:
                self._report(self.program.name, f"{_ended(code)}; its standby takes over")
                continue
            pause = _WRONG_PAUSE if is_wrong else _FIRST_PAUSE if has_settled else pause
            others = ": its configuration is wrong now, the other processes continue" if is_wrong else ""
            self._report(self.program.name, f"{_ended(code)}{others}; restarting in {pause:g} s")
            self._ending.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            process = self._launch()

    def _replace(self) -> _Process | None:
        with self._lock:
            process = self._standby.take(self.program) if self._standby and not self._ending.is_set() else None
            if process is not None:
                self._process = process
                self.starts += 1
            return process

    def _launch(self) -> _Process | None:
        with self._lock:
            if self._ending.is_set():
                return None
            more = self.program.again if self.starts else ()
            try:
                self._process = _Process(self.program, more, self._write, self.program.name, preloader=self._preloader)
            except OSError as exc:
                self._error = ConfigError(f"{self.program.name} cannot be started: {exc}")
                return None
            finally:
                self._started.set()
            self.starts += 1
            return self._process


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _message(line: str) -> str:
    """The message in a line of a log, as text or JSON."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line.removeprefix("streamtrain: ")
