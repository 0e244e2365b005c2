"""A source in memory: for tests, notebooks and benchmarks."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from streamtrain.errors import BadSample
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader

Sample = bytes | str | Mapping[str, Any]


class MemorySource:
    """Samples by partition and offset, each list's first at offset 0. One may add while another reads.

    Args:
        model: whose schema reads the samples.
        samples: by partition, dicts or JSON messages; a partition has one of both.
        more: whether samples may be added later.
    """

    def __init__(self, model: Model, samples: Mapping[int, Sequence[Sample]], *, more: bool = False) -> None:
        self._reader = SampleReader(model)
        self._samples = {partition: list(of_partition) for partition, of_partition in samples.items()}
        self._more = more
        self._changed = threading.Condition()

    def add(self, partition: int, samples: Sequence[Sample]) -> None:
        """Adds samples at the end of a partition."""
        with self._changed:
            self._samples.setdefault(partition, []).extend(samples)
            self._changed.notify_all()

    def end(self) -> None:
        """There will be no more."""
        with self._changed:
            self._more = False
            self._changed.notify_all()

    def ends(self) -> Mapping[int, int]:
        """Offset after the last sample there is, by partition."""
        return {partition: len(samples) for partition, samples in self._samples.items()}

    def read(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Batch, list[BadSample]]:
        """The samples of some ranges (partition, start, end) as one batch, and those that were refused."""
        samples = [one for partition, start, end in spans for one in self._samples[partition][start:end]]
        return next(iter(self._reader.batches(samples, len(samples))))

    def wait(self, seconds: float) -> bool:
        """Waits for more samples, for at most so long; False: there will never be any."""
        with self._changed:
            if self._more:
                self._changed.wait(seconds)
            return self._more
