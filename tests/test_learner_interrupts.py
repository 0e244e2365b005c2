"""A learner that is interrupted, at any moment: each batch counts as a whole or not at all."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
import pytest

import streamtrain as stm
from streamtrain.errors import ShardBroken
from streamtrain.ps.shard import Shard
from streamtrain.shutdown import defer_signals
from tests.models import make
from tests.patience import PATIENCE

IDS = 50
INTERRUPTS = 40
DROPPED_SECONDS = 30.0  # after which an interrupt has come to nothing: a batch takes milliseconds


def counting(micro: int | None = None) -> stm.Model:
    """Rows that count occurrences, and a weight that counts samples."""

    def graph(inputs: dict[str, Any]) -> Any:
        ones = keras.layers.Lambda(lambda x: x * 0 + 1, output_shape=(1,))(inputs["user"])
        samples = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(ones)
        return keras.layers.Add()([*inputs.values(), samples])

    zero = stm.Constant(0.0)
    return make(
        [stm.Categorical(name, dim=1, combiner="sum", init=zero) for name in ("user", "tags")],
        graph,
        loss=lambda labels, predictions: -predictions,
        reduction="sum",
        embedding_optimizer=stm.SGD(1.0),
        dense_optimizer=stm.SGD(1.0),
        micro_batch_size=micro,
    )


def batch_of(number: int, size: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(number)
    return [
        {"ts": number, "label": 0, "user": int(rng.integers(IDS)), "tags": rng.integers(0, IDS, 3).tolist()}
        for _ in range(size)
    ]


def differences(learner: stm.Learner, learned: list[dict[str, Any]]) -> list[str]:
    """What a learner has not counted as it should have."""
    ids: list[str | int] = list(range(IDS))
    counted = {name: learner.embeddings(name, ids)[:, 0].tolist() for name in ("user", "tags")}
    expected = {
        "user": Counter(one["user"] for one in learned),
        "tags": Counter(tag for one in learned for tag in one["tags"]),
    }
    wrong = [f"{name}: {counted[name]}" for name in counted if counted[name] != [expected[name][i] for i in ids]]
    weights = np.concatenate([shard.dense.pull() for shard in learner._shards])
    wrong += [f"weights: {weights} instead of {len(learned)}"] * bool((weights != len(learned)).any())
    clocks = [shard.clock() for shard in learner._shards]
    return wrong + [f"clocks: {clocks}"] * any(clock != {0: len(learned)} for clock in clocks)


def interrupt(armed: threading.Event, longest: float) -> None:
    """Sends this process SIGINT a while, at most `longest` seconds, after each time that it is armed.

    Once more if it is not armed again: Python drops what is raised in a finalizer or a callback of a weak reference.
    """
    drawn = random.Random(1)
    for _ in range(INTERRUPTS):
        armed.wait()
        armed.clear()
        time.sleep(drawn.uniform(0, longest))  # which is the moment that is drawn
        os.kill(os.getpid(), signal.SIGINT)
        while not armed.wait(DROPPED_SECONDS):
            os.kill(os.getpid(), signal.SIGINT)


def learn_interrupted(shards: int, micro: int | None, folder: str, told: Connection) -> None:
    """Learns in a process of its own; tells what is wrong in the end, and how many batches counted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else it stays ignored in a background job of a shell
    learner = stm.Learner(counting(micro), batch_size=64, shards=shards)
    learned, began = list[dict[str, Any]](), 0.0
    for number in range(2):
        batch, began = batch_of(number, 64), time.monotonic()
        learner.learn(batch)
        learned.extend(batch)
    armed, longest = threading.Event(), max(0.015, 3 * (time.monotonic() - began))  # the second, which compiles nothing
    threading.Thread(target=interrupt, args=(armed, longest), daemon=True).start()
    for _ in range(INTERRUPTS):
        try:
            armed.set()
            while True:
                if learner.samples > len(learned):
                    learned.extend(batch)
                number += 1
                batch = batch_of(number, 64)
                learner.learn(batch)
        except KeyboardInterrupt:
            continue
    armed.set()
    if learner.samples > len(learned):
        learned.extend(batch)
    wrong = differences(learner, learned)
    learner.save(f"{folder}/saved")
    wrong += differences(stm.Learner.load(f"{folder}/saved", counting(micro)), learned)
    told.send((wrong, len(learned) // 64))


@pytest.mark.parametrize(("shards", "micro"), [(1, None), (3, None), (2, 8)])
def test_every_batch_counts_as_a_whole_or_not_at_all(shards: int, micro: int | None, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=learn_interrupted, args=(shards, micro, str(tmp_path), theirs))
    child.start()
    theirs.close()
    try:
        assert mine.poll(5 * PATIENCE), "it does not come to an end"
        wrong, counted = mine.recv()
    finally:
        child.join(PATIENCE)
        child.kill()
    assert wrong == []
    assert counted > 2


class Rung(Exception):
    """What a handler of signals raises."""


@contextmanager
def handled(number: int, came: list[int]) -> Iterator[None]:
    def handle(one: int, _: FrameType | None) -> None:
        came.append(one)
        raise Rung

    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def raise_within(numbers: Sequence[int], came: list[int]) -> None:
    with defer_signals():
        for number in numbers:
            signal.raise_signal(number)
        assert came == []


def test_signals_are_held_off_and_none_is_lost() -> None:
    came: list[int] = []
    with handled(signal.SIGALRM, came), handled(signal.SIGUSR1, came):
        handlers = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGINT)]
        with pytest.raises(Rung):
            raise_within((signal.SIGALRM, signal.SIGUSR1, signal.SIGALRM), came)
        assert came == [signal.SIGALRM, signal.SIGUSR1, signal.SIGALRM]
        assert [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGINT)] == handlers
        with pytest.raises(Rung):
            signal.raise_signal(signal.SIGALRM)


def test_other_threads_do_not_hold_signals_off() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def run() -> None:
        with defer_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_learner_that_has_learned_a_batch_in_part_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = stm.Learner(counting(), batch_size=64, shards=2)
    learner.learn(batch_of(0, 64))
    learner.save(tmp_path / "good")
    apply = Shard._apply

    def fail(shard: Shard, push: Any) -> Any:
        if shard.index == 1:
            raise MemoryError("no more")
        return apply(shard, push)

    monkeypatch.setattr(Shard, "_apply", fail)
    with pytest.raises(ShardBroken):
        learner.learn(batch_of(1, 64))
    monkeypatch.undo()
    assert learner.samples == 64
    for ask in (
        lambda: learner.learn(batch_of(1, 1)),
        lambda: learner.predict(batch_of(1, 1)),
        lambda: learner.embeddings("user", [1]),
        lambda: learner.save(tmp_path / "bad"),
    ):
        with pytest.raises(
            ShardBroken, match="the learner is broken, load it from a checkpoint: samples 64 to 127 were"
        ):
            ask()
    assert differences(stm.Learner.load(tmp_path / "good", counting()), batch_of(0, 64)) == []


def test_a_push_that_a_shard_does_not_apply_is_not_overlooked() -> None:
    learner = stm.Learner(counting(), shards=2)
    learner.learn(batch_of(0, 10))
    learner.samples = 5  # as if something else had learned with its shards
    with pytest.raises(ShardBroken, match="must be new to all shards, but are REJECTED, REJECTED"):
        learner.learn(batch_of(1, 10))
    with pytest.raises(ShardBroken):
        learner.predict(batch_of(1, 1))


def test_threads_that_share_a_learner_take_turns(tmp_path: Path) -> None:
    """Learning, predicting and saving side by side: nothing is lost, and what is saved is of between two batches."""
    learner = stm.Learner(counting(8), batch_size=32, shards=2)
    learner.learn(batch_of(0, 32))
    ended, failures = threading.Event(), list[BaseException]()

    def often(what: Any) -> None:
        try:
            while not ended.is_set():
                what()
        except BaseException as exc:
            failures.append(exc)

    def save() -> None:
        learner.save(tmp_path / "saved")
        loaded = stm.Learner.load(tmp_path / "saved", counting(8))
        assert loaded.samples % 32 == 0
        assert {clock for shard in loaded._shards for clock in shard.clock().values()} == {loaded.samples}

    threads = [threading.Thread(target=often, args=(what,)) for what in [lambda: learner.predict(batch_of(7, 20))] * 2]
    threads += [threading.Thread(target=often, args=(what,)) for what in (save, lambda: learner.metrics(window=True))]
    for one in threads:
        one.start()
    learners = [
        threading.Thread(target=lambda at=at: [learner.learn(batch_of(at + i, 32)) for i in range(20)])
        for at in (100, 200)
    ]
    for one in learners:
        one.start()
    for one in learners:
        one.join()
    ended.set()
    for one in threads:
        one.join()
    assert failures == []
    numbers = [0, *range(100, 120), *range(200, 220)]
    assert differences(learner, [sample for number in numbers for sample in batch_of(number, 32)]) == []
