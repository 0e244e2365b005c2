"""Impressions that wait for their labels: in memory up to a bound, beyond it in temporary files."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

from streamtrain.errors import SourceError, SourceUnavailable

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
    written: int = 0
    rest: bytearray = field(default_factory=bytearray)  # what is not written yet
    needed: int = 0  # number of values that are not taken yet

    def write(self) -> None:
        while self.rest:
            count = os.write(self.file.fileno(), self.rest)
            del self.rest[:count]
            self.written += count

    def read(self, at: int, size: int) -> bytes:
        there = min(max(self.written - at, 0), size)
        begin = max(at - self.written, 0)
        return os.pread(self.file.fileno(), there, at) + self.rest[begin : begin + size - there]


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
            SourceUnavailable: the disk is full.
            SourceError: the file cannot be written for another reason.
        """
        memory, size = self._memory, len(value)
        if memory.used + size <= memory.limit:
            memory.used += size
            self._held += size
            return value
        with self._naming("written to"):
            return self._write(value)

    def take(self, kept: bytes | int) -> bytes:
        """A value, which is no longer kept."""
        if isinstance(kept, bytes):
            self._memory.used -= len(kept)
            self._held -= len(kept)
            return kept
        position, size = kept >> _SIZE_BITS, kept & (1 << _SIZE_BITS) - 1
        number, at = divmod(position, _SEGMENT)
        segment = self._segments[number]
        with self._naming("read from"):
            value = segment.read(at, size)
        segment.needed -= 1
        if not segment.needed and number != self._last:
            self._segments.pop(number).file.close()
        return value

    def _write(self, value: bytes) -> int:
        segment = self._segments.get(self._last)
        if segment is None or segment.end + len(value) > _SEGMENT:
            if segment is not None and not segment.needed:
                self._segments.pop(self._last).file.close()
            elif segment is not None:
                segment.write()
            file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed with the last value)
            self._last += 1
            segment = self._segments[self._last] = _Segment(file)
        segment.rest += value
        position = self._last * _SEGMENT + segment.end
        segment.end += len(value)
        segment.needed += 1
        if len(segment.rest) >= _WRITE:
            segment.write()
        return position << _SIZE_BITS | len(value)

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            kind = SourceUnavailable if exc.errno in (errno.ENOSPC, errno.EDQUOT) else SourceError
            raise kind(
                f"impressions that wait cannot be {what} {self._folder or tempfile.gettempdir()}: {exc}; give "
                "join.folder more room, or raise join.memory_bytes"
            ) from exc

    def close(self) -> None:
        """Forgets all values."""
        for one in self._segments.values():
            one.file.close()
        self._segments.clear()
        self._memory.used -= self._held
        self._held = 0
