"""What is learned: the model that counts, and a real one, each with its samples and what may be asked of it."""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from streamtrain.demo.stream import flights, happened, instance
from tests.cluster.counted import FEATURES, log_of

Offsets = np.ndarray[Any, np.dtype[np.int64]]

Which = Callable[[], Sequence[Offsets]]
"""Gives offsets of each partition."""

NOBODY = "nobody"  # an id that no sample has
IDS = range(1, 9)  # those that are asked for again and again, the most frequent ones
_FLIGHTS = 4096


class Samples(ABC):
    """Of one model.

    Attributes:
        name: of the service, its topic and its published model.
        file: text of the model file.
        model: the model's name in URLs.
    """

    name: str
    file: str
    model: str

    @abstractmethod
    def message(self, partition: int, offset: int, at: float) -> bytes:
        """The good sample that is at an offset, if it is not a bad one; it happens at a time."""

    @abstractmethod
    def instances(self) -> list[dict[str, Any]]:
        """What clients ask for."""

    @abstractmethod
    def told(self, values: Sequence[float], low: Which, high: Which) -> list[str]:
        """What cannot be in an answer.

        Args:
            values: what was predicted for `instances`.
            low: gives offsets of the good samples that must have been learned.
            high: those of the samples that can have been.
        """


class Counted(Samples):
    """Ids that are counted.

    Args:
        most: samples that a partition may get.
    """

    name = model = "counting"
    file = 'from tests.chaos.samples import counting_model\n\nmodel = counting_model("counting")\n'

    def __init__(self, partitions: int, most: int) -> None:
        self.logs = [log_of(partition, most) for partition in range(partitions)]

    def message(self, partition: int, offset: int, at: float) -> bytes:
        ids = {f"id{i}": int(one) for i, one in enumerate(self.logs[partition][offset])}
        return json.dumps({"label": 0, "ts": at, **ids}).encode()

    def instances(self) -> list[dict[str, Any]]:
        return [_asked(one) for one in (NOBODY, *IDS)]

    def told(self, values: Sequence[float], low: Which, high: Which) -> list[str]:
        """The first value is the number of samples, the others are beyond it by the counts of their ids."""
        (total, *others), least_of, most_of = values, low(), high()
        counted = {"samples": total} | {f"id {one}": n - total for one, n in zip(IDS, others, strict=True)}
        bounds = {"samples": (sum(map(len, least_of)), sum(map(len, most_of)))}
        for one in IDS:
            bounds[f"id {one}"] = (self.occurrences(one, least_of), self.occurrences(one, most_of))
        return [
            f"{name}: {counted[name]:g} is not from {least} to {most}"
            for name, (least, most) in bounds.items()
            if not least <= counted[name] <= most or counted[name] % 1
        ]

    def occurrences(self, one: int, offsets: Sequence[Offsets]) -> int:
        """How often an id is in the samples at offsets of each partition."""
        return sum(int((log[of] == one).sum()) for log, of in zip(self.logs, offsets, strict=True))


class Flights(Samples):
    """Flights of the demo."""

    name = model = "flights"
    file = "from streamtrain.demo.flights import model\n"

    def __init__(self) -> None:
        of_all = itertools.islice(itertools.chain.from_iterable(flights()), _FLIGHTS)
        self._flights = [_timeless(one) for one in of_all]

    def message(self, partition: int, offset: int, at: float) -> bytes:
        return happened(self._flights[(offset * 4 + partition) % _FLIGHTS], at)

    def instances(self) -> list[dict[str, Any]]:
        return [json.loads(instance(one)) for one in self._flights[:8]]

    def told(self, values: Sequence[float], low: Which, high: Which) -> list[str]:
        return [f"{one} is no probability" for one in values if not 0 <= one <= 1]


def counting_model(name: str) -> Any:
    """The model of tests/cluster/counted.py under a name of its own in URLs."""
    from tests.cluster.counted import model

    return model(name)


def _timeless(flight: bytes) -> bytes:
    """A flight without the time at which it left: of two times in a sample the last would count."""
    return json.dumps({name: of for name, of in json.loads(flight).items() if name != "ts"}).encode()


def _asked(one: object) -> dict[str, Any]:
    """An instance whose prediction is the number of samples, and how often an id has been learned."""
    return {"id0": one} | {f"id{i}": NOBODY for i in range(1, FEATURES)}
