"""Scaling: a cluster goes on with another number of shards, while its workers and servers run on.

A checkpoint is taken, of which the next shards read the rows of their places, and further ones until little changes
from one to the next. Then what is new is published, pushes are held back, another one is taken, of what has changed
since, and the next map of shards is kept beside it: from then on it is in force. Every shard of it takes what has
changed from the checkpoint, and workers go on with them from there. Until the map is kept, nothing has changed: shards
whose pushes are held back for too long, as this process is gone, let them through. What has changed since the
publication is among what has changed since the first checkpoint, which the shards know: so what they publish first need
not be everything.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, NamedTuple

from streamtrain.errors import CheckpointError, ShardError, ShardRefused, ShardUnavailable
from streamtrain.ps.nodes.shards import Control
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.ps.rpc.control import Retry, patiently
from streamtrain.ps.shard import HASH_SLOTS, own_slots

logger = logging.getLogger(__name__)

HOLD = 10.0
"""Seconds for which pushes are held back at most; the shards of the next map learn again what passes later."""


class OpenedShards(NamedTuple):
    """Controls of shards, in order.

    Attributes:
        controls: with the timeout of a cluster.
        polled: with that of a poll.
    """

    controls: list[Control]
    polled: list[Control]


class Progress(NamedTuple):
    """A change of shards that is under way.

    Attributes:
        shards: how many there are to be.
        step: one of `STEPS`.
        since: seconds since the epoch at which the step began.
        rows: in step "rows", that have been read.
        total: in step "rows", about how many are to be.
    """

    shards: int
    step: str
    since: float
    rows: int = 0
    total: int = 0


STEPS = {
    "checkpoint": "taking a checkpoint",
    "rows": "the next shards read their rows from it",
    "changes": "the next shards read what has changed meanwhile",
    "publication": "waiting for the publication under way",
    "switch": "pushes are held back, and the shards change",
}
"""What happens one after another, for people."""


def progress_of(scaling: Mapping[str, Any]) -> str:
    """What happens now, for people, from the status of a cluster that changes."""
    step, total = scaling["step"], scaling["total"]
    share = f", {min(99, 100 * scaling['rows'] // total)}% of {total:,} rows" if total else ""
    return f"{STEPS.get(step, step)}{share} …"


class Estimate(NamedTuple):
    """What a change of shards would be like, if rows are spread as evenly as hashes are.

    Attributes:
        shards: how many there are.
        next: how many there are to be.
        rows: of all shards.
        bytes: of all shards.
        bytes_each: of each of the next shards.
        bytes_meanwhile: that one of today's shards needs at most, until it has changed: for its rows, and those gained.
    """

    shards: int
    next: int
    rows: int
    bytes: int
    bytes_each: int
    bytes_meanwhile: int

    @classmethod
    def of(cls, status: Mapping[str, Any], count: int) -> "Estimate":
        """From the status of a cluster.

        Raises:
            ShardUnavailable: a shard does not answer, or has not begun.
        """
        shards = status["shards"]
        if away := [one["address"] for one in shards if one["state"] != "ready"]:
            raise ShardUnavailable(f"{', '.join(away)}: not ready, so its rows are not known; retry later")
        rows = sum(sum(one["rows"].values()) for one in shards)
        total = sum(one["bytes"] for one in shards)
        places = {was: index for index, was in enumerate(next_places(len(shards), count)) if was is not None}
        gained = [_gained(was, len(shards), places.get(was, count), count) for was in range(len(shards))]
        meanwhile = max(one["bytes"] + int(total * share) for one, share in zip(shards, gained, strict=True))
        return cls(len(shards), count, rows, total, total // count, meanwhile)


def next_places(shards: int, count: int) -> list[int | None]:
    """Which of today's shards gets each place, so that as few rows as possible move; None: a new one gets it.

    Shards stay in their order, and the first one stays the first.

    Args:
        shards: how many there are.
        count: how many there are to be.

    >>> next_places(2, 4), next_places(2, 3), next_places(4, 2)
    ([0, None, 1, None], [0, None, 1], [0, 2])
    """
    # The most that any of the first i shards keep, in any of the first j places.
    keep = [[0.0] * (count + 1) for _ in range(shards + 1)]
    kept = [[1 / count - _gained(i, shards, j, count) for j in range(count)] for i in range(shards)]
    for i in range(shards):
        for j in range(count):
            keep[i + 1][j + 1] = max(keep[i][j + 1], keep[i + 1][j], keep[i][j] + kept[i][j])
    places: list[int | None] = [None] * count
    i, j = shards, count
    while i and j:
        if keep[i][j] == keep[i - 1][j]:
            i -= 1
        elif keep[i][j] == keep[i][j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            places[j] = i
    return places


def rows_to_read(before: ShardMap, after: ShardMap, rows: int) -> int:
    """About how many rows the shards of the next map read, if they are spread as evenly as hashes are.

    Args:
        before: the map in force.
        after: the next one.
        rows: of all shards.
    """
    was = {address: index for index, address in enumerate(before.shards)}
    places = [(was.get(address, len(was)), index) for index, address in enumerate(after.shards)]
    return round(rows * sum(_gained(then, len(was), index, len(places)) for then, index in places))


def _gained(was: int, shards: int, index: int, count: int) -> float:
    """The share of all rows that a shard gains which has another place among another number of them.

    Args:
        was: its index; `shards` or more: it had no place.
        shards: how many there are.
        index: its next one; `count` or more: it gets no place.
        count: how many there are then.
    """
    if index >= count:
        return 0.0
    next_begin, next_end = own_slots(index, count)
    begin, end = own_slots(was, shards) if was < shards else (0, 0)
    common = max(0, min(end, next_end) - max(begin, next_begin))
    return (next_end - next_begin - common) / HASH_SLOTS


MOST_SHARDS = 1024

_LOOK_SECONDS = 0.5  # between two looks at how far shards are
_STARTING = Retry(give_up=10.0)  # a process that has just been started does not answer yet

OpenShards = Callable[[Sequence[str], Sequence[str]], OpenedShards]
"""Opens the shards at some addresses, with backups at others or none."""


def check_map(before: ShardMap, after: ShardMap) -> None:
    """Whether a map may follow another one.

    Raises:
        ShardRefused: it has no shards or too many, a process twice, or not the backups that it should have.
    """
    count = len(after.shards)
    if not count:
        raise ShardRefused("a cluster needs at least one shard")
    if count > MOST_SHARDS:
        raise ShardRefused(f"a cluster has at most {MOST_SHARDS} shards, not {count}", "limit")
    if twice := [address for address, times in Counter(after.addresses).items() if times > 1]:
        raise ShardRefused(f"{twice[0]} is named twice: each shard needs a process of its own")
    if len(after.backups) != (count if before.backups else 0):
        have = "have backups: give as many with --backups" if before.backups else "have no backups: leave --backups out"
        raise ShardRefused(
            f"the shards of this cluster {have}, not {len(after.backups)} for {count} shards", "mismatch"
        )
    # A process that is started again asks the one whose backup it has been, or that has been its backup.
    pairs = {one: {*before.pair(i)} for i in range(len(before.backups)) for one in before.pair(i)}
    for index in range(len(after.backups)):
        pair = after.pair(index)
        for address in pair:
            if (was := pairs.get(address)) is not None and was != {*pair}:
                together = " and ".join(sorted(was))
                raise ShardRefused(f"{together} are a shard and its backup, and must stay so", "mismatch")


def check_next(held: Sequence[Control], added: Sequence[Control]) -> str:
    """Whether a cluster can go on with other processes; the id of its run.

    Args:
        held: of the shards that it has.
        added: of processes that are to have a shard, or a backup, and have none of it now.

    Raises:
        ShardRefused: one is of another cluster.
        ShardError: one cannot be reached, or has not begun.
    """
    runs, own = set[str](), set[str]()
    for control in held:
        status = patiently(control.status, _STARTING, threading.Event())
        if not status.ready:
            raise ShardError(f"the shard at {control.target} has not begun: nothing has been learned yet")
        runs.add(status.run)
        own.add(status.incarnation)
    if len(runs) > 1:
        raise ShardRefused(f"shards are of different runs, {' and '.join(sorted(runs))}", "mismatch")
    for control in added:
        status = patiently(control.status, _STARTING, threading.Event())
        # Not one of this cluster that was left out of a map while its coordinator ended, or has started again since.
        if status.shards and (status.run not in runs | {""} or (status.workers and status.incarnation not in own)):
            raise ShardRefused(
                f"the shard at {control.target} is shard {status.shard} of {status.shards} of another cluster: a new "
                "one must wait for a place, as `streamtrain ps --spare` does",
                "mismatch",
            )
    return runs.pop()


def read_ahead(
    opened: OpenedShards, *, rate: float = 0.0, observe: Callable[[int], object] = lambda rows: None
) -> None:
    """Has shards read the rows of their next places, all at the same time.

    Args:
        opened: all of them.
        rate: bytes per second that each reads at most; 0: as many as it can.
        observe: is told from time to time how many rows all of them have read.

    Raises:
        ShardError: one cannot be reached.
        CheckpointError: one cannot read a checkpoint. All let go of what they have read then.
    """
    controls = opened.controls
    with ThreadPoolExecutor(len(controls)) as pool:
        reading = [pool.submit(one.read_ahead, index, len(controls), rate=rate) for index, one in enumerate(controls)]
        try:
            while wait(reading, _LOOK_SECONDS, FIRST_EXCEPTION).not_done and not _failed(reading):
                observe(sum(map(_rows_ahead, opened.polled)))
            for one in reading:
                if one.done():
                    one.result()
        except BaseException:
            list(pool.map(forget_ahead, controls))
            raise


def _failed(reading: Sequence[Future[None]]) -> bool:
    return any(one.done() and one.exception() is not None for one in reading)


def _rows_ahead(control: Control) -> int:
    with suppress(ShardError):
        return int(control.status().rows_ahead)
    return 0


def forget_ahead(control: Control) -> None:
    """Has a shard let go of what it has read, and end a reading that is under way, if it can be reached."""
    with suppress(ShardError):
        control.read_ahead(0, 0)


def place_all(shard_map: ShardMap, controls: Sequence[Control], run: str, head: str) -> None:
    """Gives all shards of a map their places, at the same time; what fails is logged: `place_strays` tries it again.

    Args:
        shard_map: the map.
        controls: of its shards.
        run: of the cluster.
        head: what the publication is known by from which they go on; "": the next one is full.
    """
    with ThreadPoolExecutor(len(controls)) as pool:
        errors = pool.map(lambda index: _place(shard_map, index, controls[index], run, head), range(len(controls)))
        for control, error in zip(controls, errors, strict=True):
            if error is not None:
                logger.warning("%s has not got its place yet: %s", control.target, error)


def place_strays(
    shard_map: ShardMap, controls: Sequence[Control], statuses: Sequence[Any | None], told: set[int]
) -> list[str]:
    """Gives shards their places that have started again since, or could not be reached; returns what is in the way.

    Args:
        shard_map: the map in force.
        controls: of its shards.
        statuses: of these; None: one does not answer.
        told: shards that have their places from this process; others may still hold pushes back.
    """
    count, faults = len(shard_map.shards), []
    run = next((one.run for one in statuses if one is not None and one.ready), "")
    for index, (control, status) in enumerate(zip(controls, statuses, strict=True)):
        if status is None:
            continue
        place = (status.shard, status.shards, status.map_epoch)
        if place == (index, count, shard_map.epoch) and index in told:
            continue
        error = _place(shard_map, index, control, run)
        if error is None:
            told.add(index)
        else:
            faults.append(f"{control.target}: {error}")
    return faults


def vacate(shard_map: ShardMap, controls: Sequence[Control], run: str) -> None:
    """Has processes that are not of a map let go of what they hold; those that do not answer have ended."""
    for control in controls:
        try:
            control.place(0, 0, run, shard_map.epoch)
        except (ShardError, CheckpointError) as exc:
            logger.info("%s is no shard any more: %s", control.target, exc)


def _place(shard_map: ShardMap, index: int, control: Control, run: str, head: str = "") -> Exception | None:
    try:
        control.place(index, len(shard_map.shards), run, shard_map.epoch, head=head, pair=shard_map.pair(index))
    except (ShardError, CheckpointError) as exc:
        return exc
    return None
