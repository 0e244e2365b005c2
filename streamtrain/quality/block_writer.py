"""BlockWriter: writes a worker's blocks to Redis, in a thread of its own."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from streamtrain.errors import StreamtrainError
from streamtrain.model.model import Model
from streamtrain.periodic import PeriodicTask
from streamtrain.quality.blocks import Block, Slices, figures_of
from streamtrain.store.redis.blocks import BlockLog, RedisBlocks

logger = logging.getLogger(__name__)

_EVERY = 0.1  # seconds between writes: fewer, larger ones take less of the CPU that learns
_MOST_WAITING = 4096
_MOST_AT_ONCE = 64
_CLOSE_SECONDS = 2.0


class BlockWriter:
    """Computes the figures of blocks and writes them. What cannot be written is tried again; training continues.

    Args:
        blocks: where they are written.
        log: what they are of.
        model: the model.
        slices: groups of samples that have figures of their own.
        failed: called for every attempt that fails.
    """

    def __init__(
        self, blocks: RedisBlocks, log: BlockLog, model: Model, slices: Slices, failed: Callable[[], object]
    ) -> None:
        self._blocks, self._log, self._model, self._slices, self._failed = blocks, log, model, slices, failed
        self._lock = threading.Lock()
        self._waiting: deque[Block] = deque()
        self._stored: list[tuple[int, int]] = []
        self._dropped = 0
        self._task = PeriodicTask("blocks", self._write, _EVERY, subject="writing figures of blocks to Redis")

    def offer(self, block: Block) -> None:
        """Queues a block. If too many wait, the oldest is dropped: it is then missing from comparisons."""
        with self._lock:
            self._waiting.append(block)
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
                self._dropped += 1

    def take_stored(self) -> list[tuple[int, int]]:
        """Partition and number of the blocks that have been written since the last call."""
        with self._lock:
            stored, self._stored = self._stored, []
        return stored

    def start(self) -> None:
        self._task.start()

    def close(self) -> None:
        """Writes what waits, and ends the thread. What cannot be written is written by the worker that continues."""
        self._task.close(_CLOSE_SECONDS)
        try:
            while self._write() is not None:
                continue
        except StreamtrainError as exc:
            logger.debug("the last blocks are not written: %s", exc)

    def _write(self) -> float | None:
        """Writes some blocks; 0: there are more."""
        with self._lock:
            blocks = [self._waiting[i] for i in range(min(len(self._waiting), _MOST_AT_ONCE))]
            dropped, self._dropped = self._dropped, 0
        if dropped:
            logger.warning("dropped the figures of %d blocks that could not be written to Redis for too long", dropped)
        if not blocks:
            return None
        contents = [
            (block.partition, block.number, figures_of(block, self._model, self._slices).encode()) for block in blocks
        ]
        try:
            self._blocks.put(self._log, contents)
        except Exception:
            self._failed()
            raise
        with self._lock:
            self._stored += [(block.partition, block.number) for block in blocks]
            for block in blocks:
                if self._waiting and self._waiting[0] is block:
                    self._waiting.popleft()
            return 0.0 if self._waiting else None
