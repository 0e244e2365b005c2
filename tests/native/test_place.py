"""Ids that were made to collide: no call takes longer for them, and no result depends on where keys go."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtrain import _core

Keys = NDArray[np.uint64]
MANY = 20_000


def random_keys(n: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 2**64, n, np.uint64)


def made(n: int, bits: int) -> Keys:
    """Keys that differ in so many of their bits only, of which they are a number: the lowest, or else the highest."""
    numbers = np.arange(n, dtype=np.uint64)
    base = np.uint64(0x123456789AB7 << 16 | 0x0123)
    if bits < 0:
        return numbers << np.uint64(64 + bits) | base & np.uint64(2 ** (64 + bits) - 1)
    return base >> np.uint64(bits) << np.uint64(bits) | numbers


CRAFTED = {
    "equal low bits": made(MANY, -16),
    "equal high bits": made(MANY, 16),
    "swapped bytes": made(MANY, 16).byteswap(),
    "multiples": np.arange(MANY, dtype=np.uint64) * np.uint64(1 << 40),
}


def plan(keys: Keys) -> None:
    n = len(keys)
    planner = _core.Planner([(0, "sum", 0)], [1], 2)
    made = planner.plan(keys, np.array([0, n]), np.arange(n + 1, dtype=np.int32)[None], np.zeros(n))
    made.common(made, 0)


def merge(keys: Keys) -> None:
    words = np.ones(len(keys), np.uint32)
    gradients = np.ones((len(keys), 1), np.float32)
    _core.merge_rows([keys, keys], [gradients, gradients], [words, words], [words, words], [1.0, 1.0])


def learn_and_expire(keys: Keys) -> None:
    table = _core.Table(1, optimizer="sgd", rate=1.0, expire_after=10)
    channel = table.open_channel()
    words = np.ones(len(keys), np.uint32)
    table.push(keys, np.ones((len(keys), 1), np.float32), words, words)
    table.pull(keys)
    assert table.expire(100, len(keys)) == len(keys)
    while table.pending(channel):
        table.drain(channel, 1000)


def seconds(call: Callable[[Keys], None], keys: Keys) -> float:
    best = float("inf")
    for _ in range(2):
        began = time.thread_time()
        call(keys)
        best = min(best, time.thread_time() - began)
    return best


@pytest.mark.parametrize("call", [plan, merge, learn_and_expire], ids=lambda call: str(call.__name__))
@pytest.mark.parametrize("crafted", sorted(CRAFTED))
def test_keys_that_are_alike_take_no_longer(call: Callable[[Keys], None], crafted: str) -> None:
    """They took hundreds of times as long where slots were chosen by bits of keys."""
    assert seconds(call, CRAFTED[crafted]) < 10 * seconds(call, random_keys(MANY))


RESULTS = """
import hashlib, sys
import numpy as np
from streamtrain import _core
rng = np.random.default_rng(7)
keys = rng.integers(0, 2**64, 5000, np.uint64)
words = np.ones(5000, np.uint32)
told = hashlib.sha256()
table = _core.Table(2, optimizer="adagrad", rate=0.5, expire_after=50, capacity=3000, min_count=2, sketch_width=4096)
channel = table.open_channel()
for step in range(20):
    some = rng.choice(keys, 2000, replace=False)
    gradients = rng.standard_normal((2000, 2)).astype(np.float32)
    table.push(some, gradients, words[:2000], words[:2000] * np.uint32(step * 9))
    table.expire(step * 9, 900)
    table.remove(rng.choice(keys, 50))
    drained = table.drain(channel, 700)
    for one in (drained.rows.keys, drained.rows.embeddings, drained.tombstones):
        told.update(np.ascontiguousarray(one).tobytes())
_, rows = table.scan(0, 10_000)
for one in (rows.keys, rows.embeddings, rows.state, rows.counts, rows.last_seen):
    told.update(np.ascontiguousarray(one).tobytes())
planner = _core.Planner([(0, "sum", 0)], [1], 3)
twice = rng.choice(keys, 6000)
plan = planner.plan(twice, np.array([0, 6000]), np.arange(6001, dtype=np.int32)[None], np.zeros(6000))
other = planner.plan(keys, np.array([0, 5000]), np.arange(5001, dtype=np.int32)[None], np.zeros(5000))
for one in (plan.keys(0), plan.counts(0), *plan.common(other, 0)):
    told.update(np.ascontiguousarray(one).tobytes())
merged = _core.merge_rows([keys, keys[::2].copy()], [np.ones((5000, 1), np.float32), np.ones((2500, 1), np.float32)],
                          [words, words[::2].copy()], [words, words[::2].copy()], [1.0, 0.5])
for one in merged:
    told.update(np.ascontiguousarray(one).tobytes())
print(told.hexdigest(), _core.keys_at(np.arange(3, dtype=np.uint64)).tolist())
"""


def test_results_are_those_of_any_process() -> None:
    """Though each has a secret of its own."""
    root = Path(__file__).parents[2]
    runs = [
        subprocess.run([sys.executable, "-c", RESULTS], check=True, capture_output=True, text=True, cwd=root).stdout
        for _ in range(3)
    ]
    digests, places = zip(*(run.split(" ", 1) for run in runs), strict=True)
    assert len(set(digests)) == 1
    assert len(set(places)) == 3


def test_every_key_has_a_place_of_its_own() -> None:
    keys = _core.keys_at(np.arange(1 << 16, dtype=np.uint64))
    assert len(np.unique(keys)) == 1 << 16
