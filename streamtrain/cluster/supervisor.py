"""Supervisor: the programs of a service on one machine, started again when they end, and stopped in order."""

import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from streamtrain.errors import ConfigError

EXIT_CONFIG = 2
"""What a program ends with whose configuration is wrong: to start it again would not help."""

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 15.0
_SETTLED = 60.0  # a program that has run for so long starts with the first pause again
_LAST_LINES = 1.0  # seconds for what a program that has ended leaves in its pipe


class ProgramFailed(ConfigError):
    """A program says that its configuration is wrong."""


@dataclass(frozen=True)
class Program:
    """A program that is kept running.

    Attributes:
        name: stands in front of its lines.
        command: path and arguments.
        environment: all of it.
        stage: programs of a lower stage are started first and stopped last.
        drain: seconds that it has to end by itself, before it is killed.
        again: more arguments for when it is started again.
        fds: file descriptors that it inherits.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    stage: int = 0
    drain: float = 45.0
    again: Sequence[str] = ()
    fds: Sequence[int] = ()


class Supervisor:
    """Keeps programs running, from `start` to `stop`.

    Args:
        programs: names are unique.
        write: is given the name of a program and a line that it wrote, by any thread.
    """

    def __init__(self, programs: Sequence[Program], write: Callable[[str, str], object]) -> None:
        self._failed = threading.Event()
        self._keepers = [_Keeper(program, write, self._failed.set) for program in programs]

    def start(self) -> None:
        """Starts all, in the order of their stages; does not wait until they are ready.

        Raises:
            ConfigError: one cannot be run; those before are stopped.
        """
        try:
            for keeper in sorted(self._keepers, key=lambda one: one.program.stage):
                keeper.start()
        except BaseException:
            self.stop()
            raise

    def wait(self, stopped: threading.Event, every: float = 0.2) -> None:
        """Returns once `stopped` is set; raises what `check` does."""
        while not stopped.wait(every):
            self.check()

    def check(self) -> None:
        """Whether all can go on.

        Raises:
            ProgramFailed: a program ended for its configuration. The others run on: stop them.
        """
        if self._failed.is_set():
            failed = next(one for one in self._keepers if one.failure is not None)
            raise ProgramFailed(f"{failed.program.name}: {failed.failure}")

    def stop(self) -> None:
        """Stops all, those of the highest stage first, each stage at once."""
        for stage in sorted({one.program.stage for one in self._keepers}, reverse=True):
            of_stage = [one for one in self._keepers if one.program.stage == stage]
            for keeper in of_stage:
                keeper.end()
            for keeper in of_stage:
                keeper.join()

    def pid(self, name: str) -> int | None:
        """Process of a program, while it has one."""
        return self._keeper(name).pid

    def starts(self, name: str) -> int:
        """How often a program has been started."""
        return self._keeper(name).starts

    def _keeper(self, name: str) -> "_Keeper":
        return next(one for one in self._keepers if one.program.name == name)


class _Keeper:
    """One program. Its thread starts it, waits for it and starts it again.

    Linux ends a program when the thread that has started it ends: so none is left if this process is killed.
    """

    def __init__(self, program: Program, write: Callable[[str, str], object], failed: Callable[[], object]) -> None:
        self.program = program
        self.starts = 0
        self.failure: str | None = None
        self._write = write
        self._tell_failed = failed
        self._lock = threading.Lock()  # between starting it again and ending it
        self._ending = threading.Event()
        self._started = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._error: ConfigError | None = None
        self._last = ""
        self._thread = threading.Thread(target=self._run, name=program.name, daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process and process.poll() is None else None

    def start(self) -> None:
        if shutil.which(self.program.command[0]) is None:
            raise ConfigError(f"{self.program.name} cannot be started: there is no program {self.program.command[0]}")
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        with self._lock:
            self._ending.set()
            if self._process and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def join(self) -> None:
        if self._thread.ident is None:
            return
        self._thread.join(self.program.drain)
        if self._thread.is_alive() and self._process:
            self._write(self.program.name, f"does not end within {self.program.drain:g} s: killed")
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while (process := self._launch()) is not None:
            began = time.monotonic()
            reader = threading.Thread(target=self._read, args=(process.stdout,), name=self.program.name, daemon=True)
            reader.start()
            code = process.wait()
            reader.join(_LAST_LINES)  # not for ever: a child of it may live on and hold the pipe
            if self._ending.is_set():
                return
            if code == EXIT_CONFIG:
                self.failure = self._last.removeprefix("streamtrain: ") or "its configuration is wrong"
                self._tell_failed()
                return
            pause = _FIRST_PAUSE if time.monotonic() - began > _SETTLED else pause
            self._write(self.program.name, f"{_ended(code)}; starts again in {pause:g} s")
            self._ending.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _launch(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._ending.is_set():
                return None
            command = [*self.program.command, *(self.program.again if self.starts else ())]
            try:
                self._process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "TERM", *command],
                    pass_fds=self.program.fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=dict(self.program.environment),
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C of the terminal is for the supervisor, which stops all in order
                )
            except OSError as exc:
                self._error = ConfigError(f"{self.program.name} cannot be started: {exc}")
                return None
            finally:
                self._started.set()
            self.starts += 1
            return self._process

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._last = line.rstrip()
                self._write(self.program.name, self._last)


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
