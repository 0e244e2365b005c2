"""Commands of streamtrain as processes. They are forked, as `up` does it: imports take seconds.

What is forked differs from what is executed only by its modules, which are imported already; see
`streamtrain.service.preload`. Tests of the start itself, and of what a command imports, use `subprocess`.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from streamtrain.service.preload import CannotFork, Preloader

COMMAND = [sys.executable, "-m", "streamtrain"]

_MOST = 2  # preloaders at a time: each has 600 MB
_preloaders: list[Preloader] = []
_lock = threading.Lock()


def start(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """As `subprocess.Popen`. What is no command of streamtrain is executed."""
    if list(command[: len(COMMAND)]) == COMMAND:
        environment = options.get("env")
        options["env"] = dict(os.environ if environment is None else environment)
        with _lock:
            for preloader in _preloaders:
                try:
                    return preloader.fork(command, signal.SIGKILL, **options)
                except CannotFork:
                    continue
            if len(_preloaders) == _MOST:
                _preloaders.pop(0).close()
            _preloaders.append(Preloader(options["env"], hands_on=True))
            return _preloaders[-1].fork(command, signal.SIGKILL, **options)
    return subprocess.Popen(command, **options)


def run(
    command: Sequence[str],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """As `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with start(command, **options) as process:
        try:
            out, error = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, error)
    if check:
        done.check_returncode()
    return done


@atexit.register
def _close() -> None:
    for preloader in _preloaders:
        preloader.close()
