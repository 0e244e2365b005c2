"""Whether another number of shards or workers would help, and why: a proposal, from what the cluster says of itself.

Workers know what they wait for: samples if there are enough of them, shards if there are too few of these, and nothing
if they are too few themselves. Shards know how much of a core they use, what their rows take in memory, and what is
free. Nothing here acts: `up` does (`scale.auto`), or whoever reads the metrics.
"""

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SECONDS = 60.0
"""What is looked back on."""

_BUSY = 0.75  # cores of a shard, above which more are proposed
_AIM = 0.5  # cores of a shard, that are then aimed at
_IDLE = 0.35  # cores of a shard that fewer ones would have, below which fewer are proposed
_ROOM = 0.2  # of the bytes of its rows, that are to be free beside them
_WAITING = 0.4  # of their time that workers wait for shards, above which these are too few
_WORKING = 0.8  # of their time that workers do not wait for samples, above which they are too few
_RESTING = 0.7  # of their time that workers wait for samples, above which they are too many
_BEHIND = 10.0  # seconds of learning that a lag is worth, at least, to count
_CAUGHT_UP = 600.0  # seconds in which a lag is to be gone


class ShardLoad(NamedTuple):
    """Of a shard.

    Attributes:
        address: where it is.
        cpu: cores that its process uses; NaN: not known, as it does other work, too.
        memory: bytes of its rows.
        free: bytes that are free where it runs.
    """

    address: str
    cpu: float
    memory: int
    free: int


class Load(NamedTuple):
    """Of a cluster, of late.

    Attributes:
        shards: all of them.
        workers: number of workers.
        for_samples: share of their time that workers wait for samples.
        for_shards: share of their time that workers wait for shards.
        partitions: of the topic, of which a worker needs one at least.
        lag: samples that are not learned yet.
        is_behind: whether that is much, and does not go away soon.
    """

    shards: Sequence[ShardLoad]
    workers: int
    for_samples: float
    for_shards: float
    partitions: int
    lag: int
    is_behind: bool


class Proposal(NamedTuple):
    """Numbers that would be better.

    Attributes:
        shards: of shards; as many as there are: no other is proposed.
        workers: of workers, likewise.
        why: sentences, of what differs.
    """

    shards: int
    workers: int
    why: tuple[str, ...]


def propose(load: Load) -> Proposal:
    """What would be better."""
    shards, why_shards = _shards(load)
    workers, why_workers = (load.workers, "") if shards > len(load.shards) else _workers(load)
    return Proposal(shards, workers, tuple(why for why in (why_shards, why_workers) if why))


def _shards(load: Load) -> tuple[int, str]:
    now, used = len(load.shards), sum(one.cpu for one in load.shards)
    full = min(load.shards, key=lambda one: one.free - _ROOM * one.memory)
    memory = sum(one.memory for one in load.shards)
    if _are_apart(load.shards) and full.free < _ROOM * full.memory:
        each = (full.memory + full.free) / (1 + 2 * _ROOM)
        return max(now + 1, math.ceil(memory / each)), (
            f"{full.address} has {full.memory / 1e9:,.1f} GB of rows and {full.free / 1e9:,.1f} GB are free there"
        )
    mean = used / now
    if math.isnan(mean):
        return now, ""
    if mean > _BUSY:
        return min(2 * now, max(now + 1, math.ceil(used / _AIM))), f"shards use {mean:.2f} of a core each"
    if load.is_behind and load.for_samples < 1 - _WORKING and load.for_shards > _WAITING:
        return now + max(1, now // 2), (
            f"workers are {load.lag:,} samples behind, and wait for shards {load.for_shards:.0%} of their time"
        )
    fewer = max(1, math.ceil(used / _IDLE))
    if fewer < now and not load.is_behind and load.for_shards < _WAITING / 2:
        least = min(one.memory + one.free for one in load.shards) / (1 + 2 * _ROOM)
        if _are_apart(load.shards):
            fewer = max(fewer, math.ceil(memory / max(least, 1)))
        if fewer < now:
            return fewer, f"shards use {mean:.2f} of a core each"
    return now, ""


def _workers(load: Load) -> tuple[int, str]:
    now = load.workers
    if not now:
        return now, ""
    if load.is_behind and load.for_samples < 1 - _WORKING:
        more = min(max(load.partitions, now), now + max(1, now // 2))
        behind = f"workers are {load.lag:,} samples behind, and wait for samples {load.for_samples:.0%} of their time"
        return more, behind if more > now else f"{behind}; more of them need more than {load.partitions} partitions"
    fewer = max(1, math.ceil(now * (1 - load.for_samples) / _AIM))
    if not load.is_behind and load.for_samples > _RESTING and fewer < now:
        return fewer, f"workers wait for samples {load.for_samples:.0%} of their time"
    return now, ""


def _are_apart(shards: Sequence[ShardLoad]) -> bool:
    """Whether each has memory of its own; of those that are known by name, `registry:…`, it is not known."""
    hosts = [one.address.rpartition(":")[0] for one in shards]
    return len({*hosts}) == len(hosts) and not {"127.0.0.1", "localhost", "[::1]", "unix", "registry"}.intersection(
        hosts
    )


class _Seen(NamedTuple):
    at: float
    cpu: Mapping[str, float]
    lag: int


class LoadWatch:
    """Remembers what is needed to tell the load of late. Thread-safe."""

    def __init__(self) -> None:
        self._seen: deque[_Seen] = deque()
        self._lock = threading.Lock()
        self._proposal: Proposal | None = None

    @property
    def proposal(self) -> Proposal | None:
        """By the last look; None: it is not known yet."""
        return self._proposal

    def look(
        self, at: float, shards: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], lag: int | None, rate: float
    ) -> None:
        """Looks at the cluster.

        Args:
            at: monotonic seconds.
            shards: statuses by address; None of one that does not answer, after which all begins anew.
            workers: what they report.
            lag: samples that are not learned yet; None: not known.
            rate: samples learned per second.
        """
        load = None
        with self._lock:
            if not shards or any(one is None or not one.ready for one in shards.values()):
                self._seen.clear()
            else:
                now = _Seen(at, {address: one.cpu_ms / 1000 for address, one in shards.items()}, lag or 0)
                if self._seen and (self._seen[-1].cpu.keys() != now.cpu.keys() or _has_restarted(self._seen[-1], now)):
                    self._seen.clear()
                self._seen.append(now)
                while len(self._seen) > 1 and self._seen[1].at <= at - SECONDS:
                    self._seen.popleft()
                load = self._load(shards, workers, rate)
        self._proposal = None if load is None else propose(load)

    def _load(self, shards: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], rate: float) -> Load | None:
        first, last = self._seen[0], self._seen[-1]
        if (seconds := last.at - first.at) < SECONDS:
            return None
        loads = [
            ShardLoad(
                address,
                (last.cpu[address] - first.cpu[address]) / seconds if one.cpu_ms else math.nan,
                sum(table.bytes for table in one.tables),
                one.free_memory,
            )
            for address, one in shards.items()
        ]
        caught_up = (first.lag - last.lag) / seconds
        is_behind = last.lag > max(_BEHIND * rate, 1) and last.lag > _CAUGHT_UP * max(caught_up, 0)
        waits = [(share(one, "waits_for_samples"), share(one, "waits_for_shards")) for one in workers]
        for_samples, for_shards = (sum(of) / len(of) if of else 0.0 for of in ([w[i] for w in waits] for i in (0, 1)))
        partitions = len({p for one in workers for p in one.get("partitions") or ()})
        return Load(loads, len(workers), for_samples, for_shards, partitions, last.lag, is_behind)


def _has_restarted(before: _Seen, now: _Seen) -> bool:
    return any(now.cpu[address] < cpu for address, cpu in before.cpu.items())


def share(about: Mapping[str, Any], name: str) -> float:
    """A share, from what a worker reports; 0 if it does not."""
    value = about.get(name)
    return min(1.0, max(0.0, float(value))) if isinstance(value, int | float) else 0.0
