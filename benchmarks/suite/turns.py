"""Runs parts: contestants in turns, round by round, what is known already left out."""

import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from processes import cpu_seconds, machine_seconds

from streamtrain.errors import StreamtrainError
from suite.parts import Contestant, Figure, Part
from suite.results import Results
from suite.running import Failed, children, run
from suite.sizing import BUSY

MESSAGES = 2_500_000  # of a topic: more than is learned in one run of seconds


def figure_of(found: Any, place: Figure) -> list[float]:
    """The runs of a figure in the JSON of a command: one number, or those of a list."""
    for key in place:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError) as exc:
            raise Failed(f"there is no {' / '.join(map(str, place))} in what it printed") from exc
    return [float(one) for one in found] if isinstance(found, list) else [float(found)]


def full_broker(workload: str) -> AbstractContextManager[Any]:
    """A broker with the samples of a workload."""
    from stream import full_broker as full

    return full(workload, MESSAGES)


class Others:
    """What others take of the machine from its making on."""

    def __init__(self) -> None:
        self._began = self._seconds()

    def share(self) -> float:
        """Of all cores, 0 to 1."""
        foreign, whole = (now - then for now, then in zip(self._seconds(), self._began, strict=True))
        return max(foreign, 0.0) / whole if whole else 0.0

    def _seconds(self) -> tuple[float, float]:
        """Of CPU that others have used so far, and that there were: ended children are ours, and those that live."""
        busy, whole = machine_seconds()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        ours = sum(one.ru_utime + one.ru_stime for one in used) + sum(map(cpu_seconds, children()))
        return busy - ours, whole


class Turns:
    """Runs parts and tells each run as a line.

    Args:
        results: that are added to.
        rounds: of parts whose contestants take turns.
        say: takes a line.
        broker: gives one, full of the samples of a workload.
    """

    def __init__(
        self,
        results: Results,
        rounds: int,
        say: Callable[[str], object] = print,
        broker: Callable[[str], AbstractContextManager[Any]] = full_broker,
    ) -> None:
        self._results, self._rounds, self._say, self._broker = results, rounds, say, broker

    def part(self, part: Part) -> None:
        """All runs of a part that are missing; one that fails is told, and not tried again in this call."""
        known, names = self._results.part(part.name, part.title), [one.name for one in part.contestants]
        absent = {one.name: one.missing for one in part.contestants if one.missing}
        known["absent"] = {name: why for name, why in known["absent"].items() if name not in names} | absent
        there = [one for one in part.contestants if not one.missing]
        for name, why in absent.items():
            self._say(f"{part.name}: {name} is left out: {why}")
        left = self._left(part, there)
        if not left:
            self._say(f"{part.name}: done")
            self._results.save()
            return
        failed: set[str] = set()
        with ExitStack() as stack:
            broker = None
            for turn, one in left:
                if one.name in failed:
                    continue
                try:
                    if broker is None and any("{broker}" in word for word in one.command):
                        broker = stack.enter_context(self._broker(part.topic))
                    self._one(part, one, turn, broker)
                except (Failed, StreamtrainError, OSError) as exc:
                    failed.add(one.name)
                    self._results.fail(part.name, one.name, f"{type(exc).__name__}: {exc}")
                    self._say(f"{part.name}: {one.name} FAILED: {exc}")

    def _left(self, part: Part, there: Sequence[Contestant]) -> list[tuple[int, Contestant]]:
        """Runs that are missing, in the order of turns: there and back, so that no one is always first."""
        turns = range(1 if part.once else self._rounds)
        order = [(turn, one) for turn in turns for one in (there if turn % 2 == 0 else reversed(there))]
        return [(turn, one) for turn, one in order if not self._results.has(part.name, one.name, turn)]

    def _one(self, part: Part, one: Contestant, turn: int, broker: Any) -> None:
        """One run, kept and told."""
        command = [word.replace("{broker}", broker.servers if broker else "") for word in one.command]
        began, others = time.monotonic(), Others()
        printed = run(command, one.timeout)
        figures = {name: figure_of(printed, place) for name, place in one.figures.items()}
        seconds, share = time.monotonic() - began, others.share()
        self._results.add(part.name, one.name, turn, figures, seconds=seconds, others=share)
        where = part.name if part.once else f"{part.name} {turn + 1}/{self._rounds}"
        name, values = next(iter(figures.items()))
        took = f"{seconds:.0f} s" + (f", others used {share:.0%} of the machine" if share > BUSY else "")
        self._say(f"{where}: {one.name}: {sum(values) / len(values):,.4g} {name} ({took})")
