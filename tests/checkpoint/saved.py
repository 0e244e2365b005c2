"""Clusters in this process that save themselves, for tests: nodes, a place for epochs, and what takes them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from streamtrain._core import shards_of
from streamtrain.checkpoint.cluster_checkpoint import Checkpointer, CheckpointInfo
from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.ps.clock import Clock, PushOutcome, Span
from streamtrain.ps.consistency import Async
from streamtrain.ps.nodes.node import Node
from streamtrain.ps.nodes.shards import Control, LocalControl, RunTemplate, Shards
from streamtrain.ps.push import Push, PushResult
from streamtrain.ps.row_memory import RowMemory
from streamtrain.ps.shard import Shard
from streamtrain.store.checkpoint.epochs import Epochs
from tests.ps.counting import Log, assert_exact, pushes
from tests.ps.served import COUNTING

Contents = dict[int, tuple[list[float], list[float], int, int]]
"""Of a table by key: embedding, state, count, last_seen."""


class Cluster:
    """Shards that restore themselves from the newest epoch at a place, or begin anew, and are saved there.

    Args:
        place: of the epochs.
        shards: how many.
        beginning: what they begin with.
        wrap: of a control, for what is to fail.
        cut_patience: seconds.
        freeze_patience: seconds.
        write_patience: seconds.
        memory: for rows; None: all that they need.
        options: of the checkpointer.
    """

    def __init__(
        self,
        place: str,
        shards: int = 2,
        beginning: RunTemplate = COUNTING,
        wrap: Callable[[int, Control], Control] = lambda _, control: control,
        *,
        cut_patience: float = 30.0,
        freeze_patience: float = 60.0,
        write_patience: float = 60.0,
        memory: RowMemory | None = None,
        **options: Any,
    ) -> None:
        self.epochs = Epochs(place)
        self._beginning, self._memory = beginning, memory
        self._patience: Any = {"cut_patience": cut_patience, "freeze_patience": freeze_patience}
        self._patience["write_patience"] = write_patience
        self.nodes = [self._node(i, shards) for i in range(shards)]
        self.restored = [node.restore() for node in self.nodes]
        Shards(self.nodes, beginning).agree()
        self.controls = [wrap(i, LocalControl(node)) for i, node in enumerate(self.nodes)]
        self.checkpointer = Checkpointer(self.controls, self.epochs, **{"keep": 100, "full_every": 100, **options})

    def _node(self, index: int, shards: int) -> Node:
        checkpoints = CheckpointWriter(Epochs(self.epochs.url), memory=self._memory)
        return Node(index, shards, Async, checkpoints, memory=self._memory, **self._patience)

    def crash(self, index: int) -> None:
        """A shard is gone, and comes back as of the newest epoch; if that cannot be, it was not gone."""
        node = self._node(index, len(self.nodes))
        node.restore()
        self.nodes[index], self.controls[index] = node, LocalControl(node)
        Shards(self.nodes, self._beginning).agree()

    @property
    def shards(self) -> list[Shard]:
        return [node.shard for node in self.nodes]

    def take(self, *, full: bool = False) -> CheckpointInfo:
        return self.checkpointer.take(full=full)

    def learn(self, log: Log, *spans: tuple[int, int, int]) -> None:
        """Push ranges of the log, (partition, start, end) each, one batch after another, to all shards."""
        for span in spans:
            for pushed in self.push(pushes(log, [Span(*span)], len(self.nodes))):
                assert pushed.outcome is PushOutcome.APPLIED

    def push(self, parts: Sequence[Push]) -> list[PushResult]:
        return [shard.push(part) for shard, part in zip(self.shards, parts, strict=True)]


def around(control: Control, **other: Any) -> Any:
    """A control some of whose methods, by name, do something else."""
    names = ("target", "status", "initialise", "freeze", "cut", "write")
    return SimpleNamespace(**{name: getattr(control, name) for name in names} | other)


def until(log: Log, clock: Clock) -> dict[int, list[Sequence[int]]]:
    """The log as a shard at a clock knows it."""
    return {partition: list(samples[: clock.get(partition, 0)]) for partition, samples in log.items()}


def assert_each_exact(shards: Iterable[Shard], log: Log) -> None:
    """Assert that every shard has learned exactly what the log says up to its own clock."""
    for shard in shards:
        assert_exact([shard], until(log, shard.clock()))


def restored(place: str, epoch: int, shards: int) -> list[Shard]:
    """All shards as a keeper brings them back that finds no newer epoch than this one."""
    found = []
    for i in range(shards):
        epochs = Epochs(place)
        numbers = [number for number in epochs.numbers() if number <= epoch]
        epochs.numbers = lambda numbers=numbers: numbers  # type: ignore[method-assign,misc]
        one = CheckpointWriter(epochs).restore(i, shards)
        assert one is not None
        assert one[0].index == i
        found.append(one[0])
    return found


def contents(shards: Iterable[Shard], table: int = 0) -> Contents:
    """All rows of a table; asserts that each is on its owner."""
    rows: Contents = {}
    for shard in shards:
        _, part = shard.tables[table].scan(0, 1 << 20)
        assert (shards_of(part.keys, shard.shards) == shard.index).all()
        columns = (part.embeddings.tolist(), part.state.tolist(), part.counts.tolist(), part.last_seen.tolist())
        rows |= dict(zip(part.keys.tolist(), zip(*columns, strict=True), strict=True))
    return rows


def dense(shards: Iterable[Shard]) -> dict[str, Any]:
    """All of the dense parameters, with the optimizer's state, and the statistics."""
    shards = list(shards)
    return {
        "values": np.concatenate([shard.dense.pull() for shard in shards]).tolist(),
        "slots": np.concatenate([shard.dense.slots for shard in shards], axis=1).tolist(),
        "steps": {shard.dense.steps for shard in shards},
        "statistics": np.concatenate([shard.statistics.pull() for shard in shards]).tolist(),
    }


def some_log(partitions: int, samples: int, ids: int = 50, seed: int = 0) -> Log:
    rng = np.random.default_rng(seed)
    return {p: rng.integers(0, ids, (samples, 2)).tolist() for p in range(partitions)}


def aside(call: Callable[[], Any]) -> Any:
    """A call in a thread of its own, as a future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def with_table(beginning: RunTemplate, **settings: Any) -> RunTemplate:
    """The same with other settings of its first table."""
    spec = beginning.spec
    changed: Mapping[str, Any] = {**vars(spec), "tables": ({**spec.tables[0], **settings}, *spec.tables[1:])}
    return RunTemplate(type(spec)(**changed), beginning.dense, beginning.statistics, beginning.start)
