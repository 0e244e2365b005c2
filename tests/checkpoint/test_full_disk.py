"""Checkpoints that cannot be written: training goes on, it is seen, and what was saved before stays good."""

import errno
import logging
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamtrain.checkpoint.cluster_checkpoint import CheckpointInfo, CheckpointSchedule
from streamtrain.errors import CheckpointError
from streamtrain.store.checkpoint.epochs import Epochs
from tests.checkpoint.saved import Cluster, restored, some_log
from tests.patience import PATIENCE
from tests.ps.counting import assert_exact

LOG = some_log(1, 40_000, ids=30_000)


def first(n: int) -> dict[int, Any]:
    return {0: LOG[0][:n]}


@contextmanager
def full_disk(place: Path) -> Iterator[None]:
    """Nothing more fits on the disk of `place`."""
    free = shutil.disk_usage(place).free
    filler = place / "filler"
    with filler.open("wb") as file:
        file.write(bytes(free - 20_000))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def small_files(_: Path) -> Iterator[None]:
    """No file may be larger than 20 kB, for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_directory(place: Path) -> Iterator[None]:
    """There is a file where the directory was."""
    aside = place.with_name("aside")
    (place / "epochs").rename(aside)
    (place / "epochs").touch()
    try:
        yield
    finally:
        (place / "epochs").unlink()
        aside.rename(place / "epochs")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield path
    subprocess.run(["umount", path], check=True)


def check_writing_fails(
    place: Path,
    broken: Callable[[Path], AbstractContextManager[None]],
    numbers: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = str(place / "epochs")
    cluster = Cluster(url)
    cluster.learn(LOG, (0, 0, 1_000))
    cluster.take()
    cluster.learn(LOG, (0, 1_000, 20_000))
    with broken(place):
        caplog.clear()
        schedule = CheckpointSchedule(cluster.checkpointer, 0.001)
        failed = counting_failures(schedule)
        schedule.start()
        assert failed.acquire(timeout=PATIENCE)
        cluster.learn(LOG, (0, 20_000, 21_000))
        assert failed.acquire(timeout=PATIENCE)
        schedule.stop()
    assert schedule.failed >= 2
    assert schedule.taken == 0
    (error,) = [record for record in caplog.records if record.name.startswith("streamtrain.")]  # said once
    assert error.levelno == logging.ERROR
    assert numbers_of(error.message, numbers)
    assert Epochs(url).numbers() == [1]
    assert_exact(restored(url, 1, 2), first(1_000))
    taken = cluster.take()
    assert taken.kind == "full", "what changed before the failure is in no delta"
    assert_exact(restored(url, taken.epoch, 2), first(21_000))
    assert_exact(cluster.shards, first(21_000))
    cluster.learn(LOG, (0, 21_000, 22_000))
    assert cluster.take().kind == "delta"
    assert sum(node.counters.get("checkpoint_failures", 0) for node in cluster.nodes) >= 2


def counting_failures(schedule: CheckpointSchedule) -> threading.Semaphore:
    """Is released whenever a checkpoint could not be taken."""
    failed = threading.Semaphore(0)
    take = schedule._checkpointer.take

    def taking(**options: Any) -> CheckpointInfo:
        try:
            return take(**options)
        except CheckpointError:
            failed.release()
            raise

    schedule._checkpointer.take = taking  # type: ignore[method-assign]
    return failed


def numbers_of(message: str, numbers: tuple[int, ...]) -> bool:
    return any(f"Errno {number}]" in message for number in numbers)


def test_full_disk(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_writing_fails(disk, full_disk, (errno.ENOSPC,), caplog)


def test_limit_of_file_sizes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_writing_fails(tmp_path, small_files, (errno.EFBIG,), caplog)


def test_place_that_is_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_writing_fails(tmp_path, no_directory, (errno.ENOTDIR, errno.EEXIST), caplog)
