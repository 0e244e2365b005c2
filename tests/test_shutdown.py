"""How a process ends that a signal told to, and one that does not end."""

import signal
import subprocess
import sys

PROGRAM = """
import logging, sys, threading
from streamtrain.shutdown import step, stop_on_signals
logging.basicConfig(format="%(message)s")
stopped = stop_on_signals({deadline})
print("ready", flush=True)
stopped.wait()
with step("the last checkpoint"), step("shard 1"):
    print("stopping", flush=True)
    {wait}
"""
FOR_EVER = "threading.Event().wait()"


def started(deadline: float | None, wait: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(deadline=deadline, wait=wait)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_what_does_not_end_in_time_is_ended_and_named() -> None:
    with started(0.5, FOR_EVER) as process:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    line, *stacks = said.splitlines()
    assert line == "did not end within 0.5 s of SIGTERM: gave up waiting for the last checkpoint, shard 1"
    assert any("<string>" in one for one in stacks), said


def test_a_thread_that_stays_is_ended_as_well() -> None:
    with started(0.5, f"threading.Thread(target=lambda: {FOR_EVER}).start()") as process:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said.splitlines()[0] == "did not end within 0.5 s of SIGTERM: gave up waiting for its threads"


def test_an_interpreter_that_stands_still_is_ended_as_well() -> None:
    """As if a library waited for ever, and held its lock."""
    with started(0.5, "__import__('ctypes').PyDLL(None).sleep(1000)") as process:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said.startswith("Timeout ")
    assert any("<string>" in one for one in said.splitlines()), said


def test_another_signal_shows_what_is_waited_for_and_all_threads() -> None:
    with started(600, "sys.stdin.read()") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "SIGINT: still waiting for the last checkpoint, shard 1\n"
        assert "thread" in process.stderr.readline().lower()
        process.communicate(timeout=120)
    assert process.returncode == 0


def test_without_a_deadline_no_stacks_are_shown() -> None:
    with started(None, "sys.stdin.read()") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        first = process.stderr.readline()
        _, rest = process.communicate(timeout=120)
    assert (process.returncode, first, rest) == (0, "SIGINT: still waiting for the last checkpoint, shard 1\n", "")
