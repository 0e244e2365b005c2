"""Child processes that do not outlive this one, however it ends."""

import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any


def start_child(command: Sequence[str], death_signal: signal.Signals, **options: Any) -> "subprocess.Popen[Any]":
    """Starts a program that the kernel sends a signal once this process has ended.

    Linux takes the thread that forked for the parent, so each child has a thread that lives as long as it does.
    setpriv of util-linux sets the signal: Python between fork and exec could hang, as this process has threads.

    Args:
        command: path and arguments.
        death_signal: that is sent.
        options: see `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    started: Future[subprocess.Popen[Any]] = Future()

    def keep() -> None:
        setpriv = ["setpriv", "--pdeathsig", death_signal.name.removeprefix("SIG")]
        try:
            process = subprocess.Popen([*setpriv, *command], **options)
        except BaseException as exc:
            started.set_exception(exc)
            return
        started.set_result(process)
        process.wait()

    threading.Thread(target=keep, name=f"child {command[0]}", daemon=True).start()
    return started.result()
