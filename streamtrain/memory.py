"""Memory of a process: what it may still take of the machine and of the container, and what is never collected."""

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WITH_TENSORFLOW = 600
"""Megabytes that a process with TensorFlow needs at least, in addition to rows."""

_CGROUP = Path("/sys/fs/cgroup")

_keeps = False  # whether some objects are skipped for good


def has_room_for_standby() -> bool:
    """Whether there is memory for one more process with TensorFlow, and as much again is left for rows."""
    return free_megabytes() > 2 * WITH_TENSORFLOW


def free_megabytes(cgroup: Path = _CGROUP) -> int:
    """Megabytes that are free: of the machine's memory, or below the container's limit if that is less.

    Args:
        cgroup: folder of the container's control group (version 2).
    """
    free = _of_machine("MemAvailable")
    try:
        limit, used = ((cgroup / name).read_text() for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, KeyError):  # not in a container, or one of control groups of version 1
        return free
    return free if limit.strip() == "max" else min(free, (int(limit) - int(used) + int(cached)) >> 20)


def all_megabytes(cgroup: Path = _CGROUP) -> int:
    """Megabytes of the machine's memory, or the container's limit if that is less; `cgroup` as for free_megabytes."""
    of_machine = _of_machine("MemTotal")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
    except OSError:
        return of_machine
    return of_machine if limit == "max" else min(of_machine, int(limit) >> 20)


def _of_machine(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux: what is free is not known
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) // 1024


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Context of imports: the collector waits, and skips all objects that exist at the end from then on.

    TensorFlow's modules are a million objects that stay. Searching them over and over while more are imported takes a
    third of the import's time.
    """
    global _keeps  # noqa: PLW0603  # one for each process, as there is one collector
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _keeps = True
        gc.freeze()
        if was_enabled:
            gc.enable()


def exit_at_once() -> None:
    """Has this process not search its objects for cycles when it exits, which takes a second with TensorFlow."""
    atexit.register(gc.freeze)  # the first that is registered, if this is called early, and so the last that is called


@contextmanager
def freeze_heap() -> Iterator[None]:
    """Context in which the collector skips all objects that exist now; for good where it skips some for good already.

    Models, graphs and libraries are hundreds of thousands of objects that stay. Scanning them takes a third of a second
    in which nothing else runs: a worker does not learn, a shard does not respond.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not _keeps:  # it would search all of them again, and cannot be told which
            gc.unfreeze()
