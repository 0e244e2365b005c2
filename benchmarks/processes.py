"""What the benchmarks of whole clusters share: processes that end with us, and what they use of the machine."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
SLOWEST_START = 180.0  # seconds within which anything is up, also on a machine that others use
_PATIENCE = 30.0  # seconds that a process has to end in order


def end_in_order() -> None:
    """Lets SIGTERM end this process as Ctrl-C does: what it has started is closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Processes:
    """Processes by name, in a temporary folder that goes with them; they are killed if this process is.

    Attributes:
        folder: in which they run; their logs are there.
        readings: by name the lines of JSON that a process has printed, those of `script` only.
    """

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="streamtrain-bench-")
        self.folder = Path(self._temporary.name)
        self.readings: dict[str, list[Any]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._others: dict[str, int] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def settings(self, groups: Mapping[str, Mapping[str, Any]], **top: Any) -> None:
        """Writes streamtrain.toml; values are texts, numbers, truths and lists of them, in TOML as in JSON."""
        lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
        for group, values in groups.items():
            lines += [f"[{group}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        (self.folder / "streamtrain.toml").write_text("\n".join(lines))

    def start(self, name: str, *arguments: str) -> None:
        """A command of streamtrain."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._launch(name, ["-m", "streamtrain", *arguments], log, log)

    def script(self, name: str, *arguments: str) -> None:
        """A script of this folder, whose lines of JSON become `readings`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._launch(name, [str(HERE / arguments[0]), *arguments[1:]], subprocess.PIPE, log)
        self.readings[name] = []
        threading.Thread(target=self._collect, args=(name,), daemon=True).start()

    def _launch(self, name: str, arguments: list[str], stdout: Any, stderr: Any) -> None:
        # Linux kills it when the thread ends that started it: only the main thread may.
        assert threading.current_thread() is threading.main_thread()
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        self._running[name] = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )

    def _collect(self, name: str) -> None:
        out = self._running[name].stdout
        assert out
        for line in out:
            self.readings[name].append(json.loads(line))

    def watch(self, name: str, pid: int | None) -> None:
        """Counts a process that somebody else has started, too."""
        assert pid
        self._others[name] = pid

    def until(self, condition: Callable[[], object], what: str, seconds: float = SLOWEST_START) -> None:
        """Waits for a condition; ends the benchmark if a process ends before, or it takes too long."""
        deadline, pause = time.monotonic() + seconds, threading.Event()
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"{what}: not within {seconds:g} s\n{self.said()}")
            pause.wait(0.05)

    def sleep(self, seconds: float) -> None:
        """Lets them work for so long."""
        threading.Event().wait(seconds)
        self.check()

    def check(self) -> None:
        """Ends the benchmark if a process has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise SystemExit(f"{name} has ended with {process.returncode}\n{self.said()}")

    def said(self) -> str:
        """The ends of all logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: …{log.read_text(errors='replace')[-1500:]}" for log in logs)

    @property
    def pids(self) -> dict[str, int]:
        """Of all, by name."""
        return {name: process.pid for name, process in self._running.items()} | self._others

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU that each has used so far; this process is "benchmark"."""
        return {name: cpu_seconds(pid) for name, pid in {**self.pids, "benchmark": os.getpid()}.items()}

    def memory(self) -> dict[str, int]:
        """Memory of each, MB: shared pages count for a share of them (PSS)."""
        return {name: pss_mb(pid) for name, pid in self.pids.items()}

    def stop(self, *names: str) -> None:
        """Ends some, the last first; those that do not end in order are killed."""
        chosen = [self._running.pop(name) for name in reversed(names) if name in self._running]
        for process in chosen:
            process.terminate()
        for process in chosen:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """Ends all."""
        self.stop(*self._running)
        self._temporary.cleanup()


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that a process has used, in user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_mb(pid: int) -> int:
    """Memory of a process, MB: shared pages count for a share of them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) >> 10
    raise SystemExit("the system does not tell how much memory a process has")


def machine_seconds() -> tuple[float, float]:
    """Seconds for which the machine's cores were busy, and for which they were there, since it started."""
    fields = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), sum(fields) / os.sysconf("SC_CLK_TCK")


class Usage:
    """CPU of processes and of the machine from its making on.

    Args:
        processes: of which.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._cpu, self._machine, self._at = processes.cpu(), machine_seconds(), time.monotonic()

    def cores(self) -> dict[str, float]:
        """Cores that each process has kept busy on average; "machine" is all that ran, by whomever."""
        seconds = time.monotonic() - self._at
        now, machine = self._processes.cpu(), machine_seconds()
        used = {name: now[name] - before for name, before in self._cpu.items() if name in now}
        used["machine"] = machine[0] - self._machine[0]
        return {name: round(one / seconds, 3) for name, one in used.items()}


def child_named(word: str) -> int:
    """The child of this process that runs a program with a word in its command."""
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise SystemExit(f"there is no process of ours that runs {word}")
