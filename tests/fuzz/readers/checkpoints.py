"""Checkpoints: whatever is in the files of one, it is read or refused as a checkpoint that is damaged.

Input: a byte whose lowest bit says whether sizes and checksums are made good after the edits, as of who may write
there, and whose others which readers read; then edits (see edits.py) of the files of a full checkpoint and a delta.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import fsspec
import numpy as np

from streamtrain.checkpoint.shard_state import describe_run, describe_shard, restore_shard, shard_arrays, shard_tables
from streamtrain.errors import CheckpointError, PublicationError
from streamtrain.ps.clock import Span
from streamtrain.ps.push import Push, RowUpdate
from streamtrain.ps.rpc import wire
from streamtrain.ps.shard import InitialState, Run, Shard
from streamtrain.store.checkpoint.checkpoint import commit, write_part
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.checkpoint.manifest import MANIFEST, _digest
from streamtrain.store.checkpoint.parquet import RowPart
from streamtrain.store.checkpoint.source import CheckpointOrigin
from tests.fuzz import edits
from tests.fuzz.readers import tried
from tests.fuzz.readers.frames import SPEC

_ROOT = "memory://fuzz"
_TABLES = [one["name"] for one in SPEC.tables]
_MOST_ROWS = 1 << 20  # of a file of some kilobytes


def run(data: bytes) -> None:
    """One input."""
    files = dict(written())
    edits.apply(data[1:], files)
    if data and data[0] & 1:
        sign(files)
    for name, content in files.items():
        fsspec.filesystem("memory").pipe_file(f"/fuzz/{name}", content)
    try:
        read(data[0] >> 1 if data else 0)
    finally:
        fsspec.filesystem("memory").rm("/fuzz", recursive=True)


def read(which: int) -> None:
    """All that is done with checkpoints, each of which may be refused; or one part of it, which is quicker."""
    epochs = Epochs(_ROOT)
    parts: list[list[Callable[[], object]]] = [
        [partial(restored, epochs, number) for number in (1, 2)],
        [partial(changes, epochs, number) for number in (1, 2)],
        [epochs.numbers, epochs.newest_good, epochs.check, partial(epochs.retain, 5)],
        [served],
    ]
    for part in [parts[which % 5 - 1]] if which % 5 else parts:
        for one in part:
            refused(one)


def refused(what: Callable[[], object]) -> None:
    """Tried, where these are the refusals."""
    tried(what, CheckpointError, PublicationError)


def restored(epochs: Epochs, number: int) -> None:
    """By as many shards as wrote it, and by more."""
    chain = epochs.open(number)
    for shards in (1, 2):
        shard = restore_shard(chain, 0, shards, SPEC)
        assert all(len(table) < _MOST_ROWS for table in shard.tables)
        wire.encode_positions(*shard.progress())
        json.dumps([describe_run(shard, aligned=True), describe_shard(shard)], allow_nan=False)


def changes(epochs: Epochs, number: int) -> None:
    """Columns fit each other, whatever they hold."""
    for table in _TABLES:
        for change in epochs.open(number).changes(table):
            assert change.keys.dtype == np.uint64
            assert len(change.keys) <= 1 << 16
            assert all(len(column) == len(change.keys) for column in change)
            if isinstance(change, RowPart):
                assert change.embeddings.dtype == change.state.dtype == np.float32


def served() -> None:
    """By the origin of those who serve."""
    origin = CheckpointOrigin(_ROOT, "model")
    for publication in origin.newest_first():
        refused(partial(origin.load, publication, len))


def sign(files: dict[str, bytes]) -> None:
    """Makes sizes and checksums those of the files, as far as manifests name any."""
    for name in [one for one in files if one.endswith(MANIFEST)]:
        try:
            content = json.loads(files[name])
            content.pop("sha256", None)
            _sign_files(content.get("files"), name.removesuffix(MANIFEST), files)
            files[name] = json.dumps(content | {"sha256": _digest(content)}).encode()
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue  # it is no object


def _sign_files(facts: Any, folder: str, files: dict[str, bytes]) -> None:
    for file, one in facts.items() if isinstance(facts, dict) else ():
        there = files.get(f"{folder}{file}", b"")
        if isinstance(one, dict):
            one |= {"bytes": len(there), "sha256": hashlib.sha256(there).hexdigest()}


@functools.cache
def written() -> dict[str, bytes]:
    """By name the files of both checkpoints."""
    shard = Shard(InitialState(Run("run", {0: 0}), SPEC, np.zeros(3, np.float32), np.zeros(2, np.float32)), 0, 1)
    rng = np.random.default_rng(0)

    def learn(start: int) -> None:
        keys = rng.integers(0, 2**64, 4, np.uint64)
        updates = [
            RowUpdate(keys, rng.normal(size=(4, one["dim"])).astype(np.float32), *np.full((2, 4), 2, np.uint32))
            for one in SPEC.tables
        ]
        dense, statistics = np.ones(3, np.float32), np.ones(2, np.float32)
        shard.push(Push([Span(0, start, start + 4)], 4, updates, dense, statistics, 2, {0: 2.0}))

    for epoch, base in ((1, None), (2, 1)):
        learn(4 * epoch - 4)
        gone = {name: [rng.integers(0, 2**64, 2, np.uint64)] for name in _TABLES} if base else None
        place = f"{_ROOT}/epoch-{epoch:09d}"
        tables = shard_tables(shard, lambda t: iter([_rows(shard, t)]))
        part = write_part(place, 0, shard_arrays(shard), tables, tombstones=gone, about=describe_shard(shard))
        commit(place, describe_run(shard, aligned=True), [part], kind="delta" if base else "full", base=base)
    memory = fsspec.filesystem("memory")
    files = {path.removeprefix("/fuzz/"): bytes(memory.cat_file(path)) for path in sorted(memory.find("/fuzz"))}
    memory.rm("/fuzz", recursive=True)
    return files


def _rows(shard: Shard, table: int) -> RowPart:
    _, rows = shard.tables[table].scan(0, 100)
    return RowPart(rows.keys, rows.embeddings, rows.state, rows.counts, rows.last_seen)


def seeds() -> Iterator[bytes]:
    """Nothing changed, every file changed in some ways, and values of the manifests replaced; for all and each part."""
    yield b"\0"
    which = itertools.cycle(bytes([1 + 2 * part]) for part in range(1, 5))
    for i, (name, content) in enumerate(written().items()):
        if len(content) < 4000:
            yield b"\1" + edits.replace(i, content)
        yield next(which) + bytes([1, i, len(content) // 2 % 256, 0, 1, 0])
        yield next(which) + bytes([2, i, len(content) // 2 % 256, 0])
        yield next(which) + bytes([4, i])
        for node in range(60) if name.endswith(MANIFEST) else ():
            yield next(which) + bytes([3, i, node, (node * 7) % len(edits.VALUES)])
