"""Processes of a benchmark: they are started, watched and always stopped; what they use; free ports."""

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

import psutil

from streamtrain.address import free_port

BENCHMARKS = Path(__file__).parent.parent
SLOWEST_START = 180.0  # seconds within which anything starts, also on a busy machine
_STOP_TIMEOUT = 30.0  # seconds between SIGTERM and SIGKILL


def exit_on_sigterm() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, so that what it has started is stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody listens on."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return [*ports]


def free_addresses(count: int) -> list[str]:
    """Different addresses, host and port, that nobody listens on."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


class Processes:
    """Named processes in a temporary folder, which is removed with them. They are killed if this process dies.

    Attributes:
        folder: their working directory, with streamtrain.toml and a log for each of them.
        readings: the lines of JSON that a process started by `script` has printed, by name.
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
        """Writes streamtrain.toml; values must be strings, numbers, booleans or lists of them."""
        lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
        for group, values in groups.items():
            lines += [f"[{group}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        (self.folder / "streamtrain.toml").write_text("\n".join(lines))

    def start(self, name: str, *arguments: str) -> None:
        """Starts a streamtrain command."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._launch(name, ["-m", "streamtrain", *arguments], log, log)

    def start_shards(self, count: int) -> None:
        """Starts the parameter servers ps0, ps1 and so on."""
        for i in range(count):
            self.start(f"ps{i}", "ps", "--index", str(i))

    def script(self, name: str, module: str, *arguments: object) -> None:
        """Starts a module of the benchmarks, whose lines of JSON become `readings`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._launch(name, ["-m", module, *map(str, arguments)], subprocess.PIPE, log)
        self.readings[name] = []
        threading.Thread(target=self._collect, args=(name,), daemon=True).start()

    def _launch(self, name: str, arguments: list[str], stdout: Any, stderr: Any) -> None:
        # Linux signals the child when the thread that started it ends, so only the main thread may do so.
        assert threading.current_thread() is threading.main_thread()
        path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
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
        """Includes a process that was started elsewhere in `cpu` and `memory`."""
        assert pid
        self._others[name] = pid

    def wait_until(self, condition: Callable[[], object], failure: str, seconds: float = SLOWEST_START) -> None:
        """Waits for a condition; ends the benchmark if a process exits before, or after `seconds`."""
        deadline, pause = time.monotonic() + seconds, threading.Event()
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"{failure} within {seconds:g} s\n{self.logs()}")
            pause.wait(0.05)

    def sleep(self, seconds: float) -> None:
        """Lets them run for some seconds."""
        threading.Event().wait(seconds)
        self.check()

    def check(self) -> None:
        """Ends the benchmark if a process has exited."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise SystemExit(f"{name} exited with {process.returncode}\n{self.logs()}")

    def logs(self) -> str:
        """The last lines of all logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: …{log.read_text(errors='replace')[-1500:]}" for log in logs)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in self._running.items()} | self._others

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU that each has used so far; this process is called "benchmark"."""
        return {name: cpu_seconds(pid) for name, pid in {**self.pids, "benchmark": os.getpid()}.items()}

    def memory(self) -> dict[str, int]:
        """Proportional set size (PSS) of each, MB."""
        return {name: pss_mb(pid) for name, pid in self.pids.items()}

    def stop(self, *names: str) -> None:
        """Stops some, the last first; those that ignore SIGTERM are killed."""
        chosen = [self._running.pop(name) for name in reversed(names) if name in self._running]
        for process in chosen:
            process.terminate()
        for process in chosen:
            try:
                process.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """Stops all and removes the folder."""
        self.stop(*self._running)
        self._temporary.cleanup()


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_mb(pid: int) -> int:
    """Proportional set size of a process, MB: shared pages are divided among those that share them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) >> 10
    raise SystemExit(f"/proc/{pid}/smaps_rollup has no Pss")


def memory_of(field: str, pid: int | str = "self") -> int:
    """Bytes of a field of /proc/PID/status: VmRSS is resident now, VmHWM the peak. 0 if the kernel does not have it."""
    with open(f"/proc/{pid}/status") as status:
        return next((int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:")), 0)


def machine_seconds() -> tuple[float, float]:
    """Seconds for which cores were busy, and seconds of all cores, since the machine started."""
    fields = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), sum(fields) / os.sysconf("SC_CLK_TCK")


class Usage:
    """CPU of processes and of the machine since this object was made."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._cpu, self._machine, self._at = processes.cpu(), machine_seconds(), time.monotonic()

    def seconds(self) -> dict[str, float]:
        """Seconds of CPU by process; "machine" is everything that ran."""
        now, machine = self._processes.cpu(), machine_seconds()
        used = {name: now[name] - before for name, before in self._cpu.items() if name in now}
        return used | {"machine": machine[0] - self._machine[0]}

    def cores(self) -> dict[str, float]:
        """Cores kept busy on average, by process."""
        seconds = time.monotonic() - self._at
        return {name: round(one / seconds, 3) for name, one in self.seconds().items()}


def child_named(word: str) -> int:
    """The child of this process whose command line contains a word."""
    for child in psutil.Process().children():
        if any(word in argument for argument in child.cmdline()):
            return child.pid
    raise SystemExit(f"no child process runs {word}")
