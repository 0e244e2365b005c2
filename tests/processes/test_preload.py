"""The preloader, with real commands that it forks."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamtrain.service.preload import CannotFork, Preloader, start_preloaded
from streamtrain.service.programs import Program
from streamtrain.service.supervisor import Supervisor
from tests.children import children
from tests.patience import PATIENCE, until

COMMAND = [sys.executable, "-m", "streamtrain"]
MODEL = """
import json, os, random, signal, sys, tempfile
import keras, numpy, tensorflow
import streamtrain as st

@tensorflow.function(jit_compile=True)
def doubled(x):
    return x * 2

print(json.dumps({
    "cwd": os.getcwd(),
    "argv": sys.argv[1:],
    "environment": dict(os.environ),
    "inherited": tensorflow.constant([os.environ["ONLY"]]).numpy()[0].decode(),
    "doubled": float(doubled(tensorflow.constant(3.0))),
    "random": [random.random(), float(numpy.random.rand())],
    "sockets": [fd for fd in map(str, range(3, 1000)) if os.path.exists("/proc/self/fd/" + fd)
                and os.readlink("/proc/self/fd/" + fd).startswith("socket:")],
    "pipe": os.read(int(os.environ["PIPE"]), 100).decode() if "PIPE" in os.environ else None,
    "stdin": sys.stdin.read() if "STDIN" in os.environ else None,
    "session": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "temporary": tempfile.gettempdir(),
    "default": [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGHUP, signal.SIGUSR1)],
    "command": open("/proc/self/cmdline").read().replace(chr(0), " ").strip(),
}), flush=True)
if "WAIT" in os.environ:
    signal.pause()
raise SystemExit(7)
"""


NESTED = """
import json, os, signal, subprocess, sys
import psutil
from streamtrain.service import preload

given = preload._handed_on.pid
command = psutil.Process(given).cmdline()
nested = preload.Preloader(os.environ)
with nested.fork([sys.executable, "-m", "streamtrain", "--version"], signal.SIGTERM, stdout=subprocess.PIPE) as process:
    said = process.communicate()[0].decode()
pid = nested.pid
os.kill(pid, signal.SIGKILL)
try:
    while True:
        nested.fork([sys.executable, "-m", "streamtrain", "--version"], signal.SIGTERM).wait()
except preload.CannotFork as exc:
    again = nested.pid
nested.close()
print(json.dumps({
    "parent": psutil.Process().ppid(), "given": given, "command": command, "pid": pid, "said": said,
    "code": process.returncode, "again": again, "left": [one.pid for one in psutil.Process().children()],
}), flush=True)
raise SystemExit(7)
"""


@pytest.fixture(scope="module")
def preloader() -> Iterator[Preloader]:
    one = Preloader(os.environ, hands_on=True)
    yield one
    one.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tells.py").write_text(MODEL)
    return tmp_path


def tell(preloader: Preloader, folder: Path, /, environment: dict[str, str], **options: Any) -> "subprocess.Popen[Any]":
    """A command that executes the model file, which tells what it finds."""
    (folder / "samples.jsonl").write_text("{}\n")
    return preloader.fork(
        [*COMMAND, "learn", "samples.jsonl", "--model", "tells.py:model"],
        signal.SIGTERM,
        cwd=folder,
        env={**os.environ, "ONLY": "here", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def told(process: "subprocess.Popen[Any]", given: str | None = None) -> dict[str, Any]:
    out, error = process.communicate(given, PATIENCE)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert lines, error
    return dict(json.loads(lines[0]))


def test_what_is_forked_is_as_if_it_were_executed(preloader: Preloader, folder: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"passed")
    process = tell(
        preloader,
        folder,
        {"PIPE": str(read), "STDIN": "1", "TMPDIR": str(folder)},
        pass_fds=[read],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(read)
    os.close(write)
    found = told(process, "given")
    assert process.returncode == 7
    assert (found["cwd"], found["argv"]) == (str(folder), ["learn", "samples.jsonl", "--model", "tells.py:model"])
    assert found["environment"].keys() - {*os.environ, "ONLY", "PIPE", "STDIN", "TMPDIR", "TF_CPP_MIN_LOG_LEVEL"} <= {
        "XLA_FLAGS"
    }
    assert (found["inherited"], found["pipe"], found["stdin"]) == ("here", "passed", "given")
    assert found["temporary"] == str(folder)
    default = [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGHUP, signal.SIGUSR1)]
    assert (found["parent"], found["session"], found["default"]) == (os.getpid(), True, default)
    assert found["doubled"] == 6.0
    assert found["command"] == " ".join([*COMMAND, "learn", "samples.jsonl", "--model", "tells.py:model"])
    other = told(tell(preloader, folder, {}))
    assert other["random"][0] != found["random"][0]
    assert other["random"][1] != found["random"][1]
    assert other["sockets"] == [], "that of the preloader is closed"


ENDS = """
import atexit, os, sys, threading

def late():
    threading.main_thread().join()
    print("of a thread")

print("written late, too")
atexit.register(print, "at the exit")
threading.Thread(target=late).start()
{ends}
"""


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(-1)", 255),
        ("sys.exit(['why'])", 1),
        ("raise GeneratorExit('why')", 1),
        ("raise KeyboardInterrupt", 130),
        ("os.close(1); sys.exit()", 120),
    ],
)
def test_it_ends_as_if_it_were_executed(preloader: Preloader, folder: Path, ends: str, code: int) -> None:
    """With all that its threads and its ends still write."""
    (folder / "ends.py").write_text(ENDS.format(ends=ends))
    (folder / "samples.jsonl").write_text("{}\n")
    command = [*COMMAND, "learn", "samples.jsonl", "--model", "ends.py:model"]
    options: dict[str, Any] = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    found = []
    for process in (subprocess.Popen(command, **options), preloader.fork(command, signal.SIGTERM, **options)):
        out, error = process.communicate(timeout=PATIENCE)
        found.append((process.returncode, out, [line for line in error.splitlines() if "why" in line]))
    assert found[0] == found[1]
    assert found[0][0] == code, error
    assert code == 120 or found[0][1].splitlines() == ["written late, too", "of a thread", "at the exit"]


def test_it_is_killed_as_any_process_and_outlives_the_preloader_which_is_replaced(
    preloader: Preloader, folder: Path
) -> None:
    """What is to be started while there is none is executed."""
    first = tell(preloader, folder, {"WAIT": "1"})
    assert first.stdout is not None
    while not first.stdout.readline().startswith("{"):
        assert first.poll() is None
    before = preloader.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(before) or psutil.Process(before).status() == "zombie", PATIENCE)
    with pytest.raises(CannotFork, match="is started again"):
        preloader.fork([*COMMAND, "--version"], signal.SIGTERM)
    with start_preloaded(preloader, [*COMMAND, "--version"], signal.SIGTERM, stdout=subprocess.PIPE) as done:
        assert done.communicate(timeout=PATIENCE)[0].startswith(b"streamtrain ")
    assert (preloader.pid != before, done.returncode) == (True, 0)
    assert first.poll() is None
    first.kill()
    assert first.wait(PATIENCE) == -signal.SIGKILL
    for stream in (first.stdout, first.stderr):
        assert stream is not None
        stream.close()


def test_it_hands_on_one_that_is_forked_to_commands_that_need_one(preloader: Preloader, folder: Path) -> None:
    (folder / "nested.py").write_text(NESTED)
    process = preloader.fork(
        [*COMMAND, "serve", "--model", "nested.py:model", "--set", "publish.url=redis://127.0.0.1:1"],
        signal.SIGTERM,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    found = told(process)
    assert process.returncode == 7
    assert found["command"][:3] == [sys.executable, "-m", "streamtrain.service.preload"]
    assert (found["pid"], found["code"], found["parent"]) == (found["given"], 0, os.getpid())
    assert found["said"].startswith("streamtrain ")
    assert (found["again"] != found["given"], found["left"]) == (True, []), "another one takes its place"


@pytest.mark.parametrize("name", ["KERAS_BACKEND", "OMP_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS", "PYTHONHASHSEED"])
def test_what_libraries_read_on_import_must_be_alike(preloader: Preloader, name: str) -> None:
    with pytest.raises(CannotFork, match=f"^{name} in its environment: libraries read this"):
        preloader.fork([*COMMAND, "--version"], signal.SIGTERM, env={**os.environ, name: "5"})


def test_other_programs_are_executed(preloader: Preloader) -> None:
    with pytest.raises(CannotFork, match=r"^/bin/true is not a command of streamtrain"):
        preloader.fork(["/bin/true"], signal.SIGTERM)
    assert start_preloaded(preloader, ["/bin/true"], signal.SIGTERM).wait(PATIENCE) == 0


def test_nothing_outlives_a_supervisor_that_is_killed(folder: Path) -> None:
    """Neither what was forked nor the preloader."""
    (folder / "samples.jsonl").write_text("{}\n")
    code = f"""
import os, threading
from streamtrain.service.supervisor import Program, Supervisor
words = {[*COMMAND, "learn", str(folder / "samples.jsonl"), "--model", f"{folder / 'tells.py'}:model"]!r}
environment = dict(os.environ) | {{"WAIT": "1", "ONLY": "here"}}
supervisor = Supervisor([Program("a", words, environment, preload=True)], lambda name, line: print(line, flush=True))
supervisor.start()
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert any(line.startswith('{"cwd"') for line in process.stdout)
            left = [psutil.Process(pid) for pid in children(process.pid)]
            assert len(left) == 2, left
        finally:
            process.kill()
    assert psutil.wait_procs(left, PATIENCE)[1] == []


def test_a_supervisor_forks_again_what_was_killed(folder: Path) -> None:
    (folder / "samples.jsonl").write_text("{}\n")
    lines: list[str] = []
    up = threading.Semaphore(0)

    def write(_: str, line: str) -> None:
        lines.append(line)
        if line.startswith('{"cwd"'):
            up.release()

    words = [*COMMAND, "learn", str(folder / "samples.jsonl"), "--model", f"{folder / 'tells.py'}:model"]
    environment = {**os.environ, "WAIT": "1", "ONLY": "here"}
    supervisor = Supervisor([Program("a", words, environment, preload=True)], write)
    supervisor.start()
    try:
        for times in (1, 2):
            assert up.acquire(timeout=PATIENCE), lines
            pid = supervisor.pid("a")
            assert (pid is not None, supervisor.starts("a")) == (True, times)
            if times == 1 and pid is not None:
                os.kill(pid, signal.SIGKILL)
    finally:
        supervisor.stop()
    assert "was killed by SIGKILL; restarting in 0.1 s" in lines
