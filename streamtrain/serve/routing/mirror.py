"""The mirror: predicts copies of requests in a thread of its own, and measures how the predictions differ."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from streamtrain.errors import StreamtrainError
from streamtrain.metrics.serving import DIFFERENCES, MirrorState
from streamtrain.serve.predictor import Predictor
from streamtrain.store.publication import Floats
from streamtrain.store.traffic import Arm

_MAX_INSTANCES = 4096  # that wait
_BATCH = 512
_PAUSE = 0.1  # seconds in which copies gather: few large batches take less time from requests than many small ones


class _Copy(NamedTuple):
    arm: Arm
    columns: list[int]
    messages: Sequence[bytes]
    predictions: Floats


class Mirror:
    """Predicts copies of requests with another arm. Nothing waits for it: what there is no room for is dropped.

    Args:
        find: finds the predictor of an arm, if it is loaded.
        labels: names of the outputs of the model that answers.
        room: instances that may wait.
    """

    def __init__(
        self, find: Callable[[Arm], Predictor | None], labels: Sequence[str], room: int = _MAX_INSTANCES
    ) -> None:
        self._find, self._labels, self._room = find, labels, room
        self._queue: deque[_Copy] = deque()
        self._waiting = 0
        self._lock = threading.Lock()
        self._wakeup = threading.Event()
        self._closing = threading.Event()
        self._counts = {"compared": 0, "dropped": 0, "failed": 0}
        self._buckets = np.zeros((len(labels), len(DIFFERENCES) + 1), np.int64)
        self._sums = np.zeros((2, len(labels)))  # of differences, and of their absolute values
        self._thread: threading.Thread | None = None

    def copy(self, arm: Arm, columns: list[int], messages: Sequence[bytes], predictions: Floats) -> None:
        """Takes a copy of a request; returns at once.

        Args:
            arm: that predicts it, too.
            columns: of its predictions, for each of the labels.
            messages: the instances, as JSON.
            predictions: that were answered, float32 [n, labels].
        """
        if self._waiting + len(messages) > self._room:
            with self._lock:
                self._counts["dropped"] += 1
            return
        with self._lock:
            self._waiting += len(messages)
        self._queue.append(_Copy(arm, columns, messages, predictions))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
            self._thread.start()
        self._wakeup.set()

    def close(self) -> None:
        """Ends; what waits is dropped."""
        self._closing.set()
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()

    def state(self) -> MirrorState:
        """For the metrics."""
        with self._lock:
            differences = {
                label: (self._buckets[j].tolist(), float(self._sums[1, j])) for j, label in enumerate(self._labels)
            }
            signed = {label: float(self._sums[0, j]) for j, label in enumerate(self._labels)}
            return MirrorState(dict(self._counts), differences, signed)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wakeup.wait()
            if self._closing.wait(_PAUSE):
                return
            self._wakeup.clear()
            while self._queue and not self._closing.is_set():
                self._compare(self._take())

    def _take(self) -> list[_Copy]:
        """Copies for one predictor, in order."""
        batch = [self._queue.popleft()]
        size = len(batch[0].messages)
        while self._queue and self._queue[0].arm == batch[0].arm and size + len(self._queue[0].messages) <= _BATCH:
            batch.append(self._queue.popleft())
            size += len(batch[-1].messages)
        return batch

    def _compare(self, batch: list[_Copy]) -> None:
        messages = [message for one in batch for message in one.messages]
        answered = np.concatenate([one.predictions for one in batch])
        difference: Floats | None = None
        try:
            if (predictor := self._find(batch[0].arm)) is not None:
                predicted = predictor.predict_messages(messages)
                good = np.ones(len(messages), bool)
                good[[one.index for one in predicted.bad]] = False
                difference = predicted.predictions[:, batch[0].columns] - answered[good]
                difference = difference[np.isfinite(difference).all(axis=1)]
        except StreamtrainError:  # counted below, for the metrics: no client waits for it
            difference = None
        with self._lock:
            self._waiting -= len(messages)
            self._counts["failed" if difference is None else "compared"] += len(batch)
            if difference is not None:
                self._add(difference)

    def _add(self, difference: Floats) -> None:
        self._sums += difference.sum(0, np.float64), np.abs(difference).sum(0, np.float64)
        for j in range(len(self._labels)):
            places = np.searchsorted(DIFFERENCES, np.abs(difference[:, j]))
            self._buckets[j] += np.bincount(places, minlength=len(DIFFERENCES) + 1)
