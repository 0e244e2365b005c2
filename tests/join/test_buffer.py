"""Impressions that wait: what is put in comes out, wherever it was, and nothing stays behind."""

import os
import random
import tempfile
from functools import partial
from pathlib import Path

import pytest

from streamtrain.errors import SourceError, SourceUnavailable
from streamtrain.join import buffer
from streamtrain.join.buffer import Buffer, Memory


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "_SEGMENT", 1000)
    monkeypatch.setattr(buffer, "_WRITE", 64)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_put_in_comes_out(tmp_path: Path) -> None:
    draw, memory, before = random.Random(3), Memory(500), open_files()
    buffers = [Buffer(memory, str(tmp_path)) for _ in range(2)]
    kept: list[tuple[Buffer, bytes, bytes | int]] = []
    most = 0
    for _ in range(3000):
        if kept and draw.random() < len(kept) / 100:
            of, value, key = kept.pop(draw.randrange(min(10, len(kept))))
            assert of.take(key) == value
        else:
            of, value = draw.choice(buffers), draw.randbytes(draw.choice([0, 1, 60, 90, 1500]))
            kept.append((of, value, of.put(value)))
        assert 0 <= memory.used <= 500
        most = max(most, sum(one.file_bytes for one in buffers))
    assert most > 0
    assert not list(tmp_path.iterdir())
    for of, value, key in kept:
        assert of.take(key) == value
    assert memory.used == 0
    assert sum(one.file_bytes for one in buffers) <= 2 * 1500  # the last file of each, which goes on
    for one in buffers:
        one.close()
    assert open_files() == before


def test_files_are_deleted_once_they_are_not_needed(tmp_path: Path) -> None:
    one = Buffer(Memory(0), str(tmp_path))
    keys = [one.put(bytes([number]) * 400) for number in range(7)]  # two of them in a file
    assert one.file_bytes == 7 * 400
    assert [one.take(key) for key in keys[:3]] == [bytes([number]) * 400 for number in range(3)]
    assert one.file_bytes == 5 * 400
    one.close()


def test_a_buffer_that_is_closed_gives_its_memory_back(tmp_path: Path) -> None:
    memory = Memory(10)
    first, second = Buffer(memory, str(tmp_path)), Buffer(memory, str(tmp_path))
    assert (first.put(b"12345678"), memory.used) == (b"12345678", 8)
    assert isinstance(second.put(b"12345678"), int)
    first.close()
    assert second.put(b"12345678") == b"12345678"
    second.close()
    assert memory.used == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"cannot be written to {tmp_path}/missing: .* raise join.memory_bytes"):
        Buffer(Memory(0), f"{tmp_path}/missing").put(b"1")


def test_a_full_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits into the part that is not written yet is kept, and a buffer on a full disk can be closed."""
    full = partial(open, "/dev/full", "r+b")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *, dir, buffering: full(buffering))
    one = Buffer(Memory(0))
    small = one.put(b"1" * 63)
    with pytest.raises(
        SourceUnavailable, match=r"cannot be written to /\S+: .*No space left on device; give join.folder"
    ):
        one.put(b"2")
    assert one.take(small) == b"1" * 63
    one.close()
