"""The child processes of a process, as tests find them."""

import psutil


def children(pid: int) -> dict[int, list[str]]:
    """The command of each running child by its id, the eldest first: ids start again at the largest.

    None if the process has ended.
    """
    found = {}
    try:
        for child in sorted(psutil.Process(pid).children(), key=psutil.Process.create_time):
            try:
                found[child.pid] = child.cmdline()
            except psutil.NoSuchProcess:  # it has ended meanwhile
                continue
    except psutil.NoSuchProcess:
        return {}
    return found
