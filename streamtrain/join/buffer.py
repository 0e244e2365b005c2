"""Impressions that wait for their labels: in memory up to a bound, beyond it in temporary files."""

import os
import tempfile
from dataclasses import dataclass
from typing import IO

from streamtrain.errors import SourceError

_SEGMENT = 64 << 20  # bytes of a file, which is deleted once nothing in it is needed
_WRITE = 1 << 20  # bytes that are written at once
_SIZE_BITS = 32


@dataclass
class Memory:
    """What all buffers of a process may hold in memory.

    Attributes:
        limit: in bytes.
        used: so far.
    """

    limit: float = float("inf")
    used: int = 0


@dataclass
class _Segment:
    file: IO[bytes]
    end: int = 0
    flushed: int = 0
    needed: int = 0  # number of values that are not taken yet


class Buffer:
    """Values of one partition. For one thread.

    No name leads to the files, so nothing is left of them after a crash; the state is rebuilt from Kafka.

    Args:
        memory: shared with other buffers.
        folder: of the files; None: the system's for temporary files.
    """

    def __init__(self, memory: Memory | None = None, folder: str | None = None) -> None:
        self._memory = memory or Memory()
        self._folder = folder
        self._held = 0
        self._segments: dict[int, _Segment] = {}
        self._last = -1

    @property
    def file_bytes(self) -> int:
        """The size of all files."""
        return sum(one.end for one in list(self._segments.values()))

    def put(self, value: bytes) -> bytes | int:
        """Keeps a value; returns what to take it with, which is the value itself if it is in memory.

        Raises:
            SourceError: the file cannot be written.
        """
        memory, size = self._memory, len(value)
        if memory.used + size <= memory.limit:
            memory.used += size
            self._held += size
            return value
        try:
            return self._write(value)
        except OSError as exc:
            raise SourceError(
                f"impressions that wait cannot be written to {self._folder or tempfile.gettempdir()}: {exc}; give "
                "join.folder more room, or raise join.memory_bytes"
            ) from exc

    def take(self, kept: bytes | int) -> bytes:
        """A value, which is no longer kept."""
        if isinstance(kept, bytes):
            self._memory.used -= len(kept)
            self._held -= len(kept)
            return kept
        position, size = kept >> _SIZE_BITS, kept & (1 << _SIZE_BITS) - 1
        number, at = divmod(position, _SEGMENT)
        segment = self._segments[number]
        if segment.flushed < at + size:
            segment.file.flush()
            segment.flushed = segment.end
        value = os.pread(segment.file.fileno(), size, at)
        segment.needed -= 1
        if not segment.needed and number != self._last:
            self._segments.pop(number).file.close()
        return value

    def _write(self, value: bytes) -> int:
        segment = self._segments.get(self._last)
        if segment is None or segment.end + len(value) > _SEGMENT:
            if segment is not None and not segment.needed:
                self._segments.pop(self._last).file.close()
            file = tempfile.TemporaryFile(dir=self._folder, buffering=_WRITE)  # noqa: SIM115 (closed with the last value)
            self._last += 1
            segment = self._segments[self._last] = _Segment(file)
        segment.file.write(value)
        position = self._last * _SEGMENT + segment.end
        segment.end += len(value)
        segment.needed += 1
        return position << _SIZE_BITS | len(value)

    def close(self) -> None:
        """Forgets all values."""
        for one in self._segments.values():
            one.file.close()
        self._segments.clear()
        self._memory.used -= self._held
        self._held = 0
