"""One command of the suite: run to its end, or ended, and nothing of it left behind."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_PATIENCE = 20.0  # seconds that a command has to end in order
_TOLD = 600  # characters of what a failed command said


class Failed(Exception):
    """A command failed; the text says how."""


def adopt_orphans() -> None:
    """Makes processes children of ours whose parents have ended: they can then be found and ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "orphans cannot be adopted")


def children() -> set[int]:
    """Processes whose parent this one is."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def run(command: Sequence[str], timeout: float) -> dict[str, Any]:
    """The JSON of the last line that a command prints.

    Its temporary files are in a folder of its own, which goes with it.

    Args:
        command: program and arguments; {tmp} in them stands for that folder.
        timeout: seconds that it may take.

    Raises:
        Failed: it ended with an error, took too long or printed no JSON.
    """
    before = children()
    with (
        tempfile.TemporaryDirectory(prefix="streamtrain-bench-") as folder,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        process = subprocess.Popen(
            [one.replace("{tmp}", folder) for one in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=BENCHMARKS.parent,
            env=os.environ | {"TMPDIR": folder, "TF_CPP_MIN_LOG_LEVEL": "3"},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as exc:
            raise Failed(f"not done within {timeout:g} s{_end(err)}") from exc
        finally:
            _end_all(process, before)
        out.seek(0)
        lines = [line for line in out.read().decode(errors="replace").splitlines() if line.startswith("{")]
        if code:
            raise Failed(f"ended with {code}{_end(err)}")
        if not lines:
            raise Failed(f"printed no JSON{_end(err)}")
        try:
            found: dict[str, Any] = json.loads(lines[-1])
        except ValueError as exc:
            raise Failed(f"printed no JSON: {lines[-1][:_TOLD]}") from exc
        return found


def _end_all(process: "subprocess.Popen[bytes]", before: set[int]) -> None:
    """Ends a command in order if it can, and kills all that it has started; what is orphaned by that is ours next."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    while left := children() - before:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _end(err: Any) -> str:
    """The end of what was said."""
    err.seek(0)
    said = err.read().decode(errors="replace").strip()
    return f": …{said[-_TOLD:]}" if said else ""


def python(script: str, *arguments: object) -> tuple[str, ...]:
    """A script of this folder's parent, run by this Python."""
    return (sys.executable, str(BENCHMARKS / script), *map(str, arguments))
