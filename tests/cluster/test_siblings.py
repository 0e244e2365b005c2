"""Siblings, with processes that do next to nothing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamtrain.cluster.siblings import Siblings
from streamtrain.errors import ConfigError, StreamtrainError
from tests.ps.raw import until

LONG = 60
MAIN = """
import logging
from functools import partial
from pathlib import Path
from streamtrain.cluster.siblings import Siblings
from tests.cluster.test_siblings import wait_until_told
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    Siblings(partial(wait_until_told, Path({folder!r})), 2).run()
    print("ended")
"""


def wait_until_told(folder: Path, index: int, is_again: bool, started: Callable[[], None]) -> None:
    """Leaves its pid; ends in order on SIGTERM."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    (folder / f"{index}{'-again' if is_again else ''}").write_text(str(os.getpid()))
    started()
    assert told.wait(LONG)
    (folder / f"{index}-ended").touch()


def refuse(index: int, is_again: bool, started: Callable[[], None]) -> None:
    if index == 1:
        raise ConfigError(f"process {index} is set wrongly")
    started()
    threading.Event().wait()


def die(index: int, is_again: bool, started: Callable[[], None]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    (tmp_path / "main.py").write_text(MAIN.format(folder=str(tmp_path)))
    root = str(Path(__file__).parent.parent.parent)
    with subprocess.Popen(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process
        process.kill()


def pid_in(file: Path) -> int:
    """That a process leaves."""
    until(lambda: file.exists() and file.read_text(), LONG)
    return int(file.read_text())


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_one_that_is_killed_comes_back_and_all_end_together(
    supervised: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    pids = [pid_in(tmp_path / str(index)) for index in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    assert pid_in(tmp_path / "1-again") not in pids
    assert is_there(pids[0])
    supervised.terminate()
    said, _ = supervised.communicate(timeout=LONG)
    assert supervised.returncode == 0, said
    assert "process 1 ended by signal 9; starts again in 0.5 s" in said
    assert said.endswith("ended\n")
    assert (tmp_path / "0-ended").exists()
    assert (tmp_path / "1-ended").exists()


def test_without_their_parent_they_end(supervised: "subprocess.Popen[str]", tmp_path: Path) -> None:
    pids = [pid_in(tmp_path / str(index)) for index in range(2)]
    supervised.kill()
    until(lambda: not any(is_there(pid) for pid in pids), LONG)


def test_what_is_set_wrongly_ends_all() -> None:
    with pytest.raises(ConfigError, match="process 1 is set wrongly"):
        Siblings(refuse, 2, LONG).run()


def test_none_that_starts() -> None:
    with pytest.raises(StreamtrainError, match="no process could start: it ended by signal 9"):
        Siblings(die, 2, LONG).run()
