"""Trainer: trains on a batch: pull, one or several steps, push.

A batch larger than the model's micro-batches is trained in several steps (micro.py), any other in one (step.py).
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from streamtrain._core import Plan, Planner
from streamtrain.model.bad_samples import Refusals
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.ps.client import Client, PendingPull, PendingPush, RowGradients, ShardReader
from streamtrain.ps.clock import Span
from streamtrain.ps.push import DenseChange, Floats
from streamtrain.train.micro import MicroResult, MicroStep, RowBuffers
from streamtrain.train.step import Step


@dataclass
class PulledBatch:
    """A batch whose rows and weights have been requested.

    Attributes:
        batch: the samples.
        plan: the batch's plan.
        pulled: the pull, complete after `wait`.
        room: buffers of the rows, if the batch is trained in several steps.
        pushes: number of batches pushed before this one was pulled.
    """

    batch: Batch
    plan: Plan
    pulled: PendingPull
    room: RowBuffers | None
    pushes: int

    def wait(self) -> None:
        """Waits for all shards."""
        self.pulled.wait()


class BatchResult(NamedTuple):
    """The result of training on a batch.

    Attributes:
        predictions: float32 [n, L], made before their samples were learned.
        loss: as the model defines it.
        rows: row gradients, flat in the plan's order; or by table, if there were several steps.
        dense: the gradient float32 [P], or the change made by several steps.
        statistics_change: float32 [S].
        non_finite_dense: number of non-finite dense gradients dropped here.
    """

    predictions: Floats
    loss: float
    rows: Floats | Sequence[RowGradients]
    dense: Floats | DenseChange
    statistics_change: Floats
    non_finite_dense: int = 0


class _Change(NamedTuple):
    """The local effect of a batch."""

    pushes: int
    plan: Plan
    before: Sequence[Floats]
    result: MicroResult


def plan(planner: Planner, batch: Batch) -> Plan:
    """Which rows a batch needs."""
    return planner.plan(batch.keys, batch.starts, batch.offsets, batch.times)


def predict(planner: Planner, shards: ShardReader, step: Step, batch: Batch) -> Floats:
    """Predictions of a batch, float32 [n, L], from what the shards hold now."""
    planned = plan(planner, batch)
    pulled = shards.pull(planned).wait()
    return step.predict(pulled.parameters, planned, pulled.rows, batch)


class Trainer:
    """Trains on batches. Used by one thread.

    Batches may be pulled while earlier ones are still in their step. Their rows then lack the changes of those steps;
    these are added before the batch is trained on, so the result is as if each batch were pulled after the previous
    one was pushed.

    Args:
        model: the model to train.
        step: its training function.
        client: connected to all shards.
        shards: number of shards.
        micro: trains on a batch in several steps; None: every batch is one step.
        ahead: maximum number of batches that are pulled before the previous one is pushed.
    """

    def __init__(
        self, model: Model, step: Step, client: Client, shards: int, *, micro: MicroStep | None, ahead: int = 0
    ) -> None:
        self._step = step
        self._micro = micro
        self._client = client
        self._planner = model.planner(shards)
        self._changes: deque[_Change] = deque(maxlen=ahead)
        self._pushes = 0

    def plan(self, batch: Batch) -> Plan:
        """Which rows a batch needs."""
        return plan(self._planner, batch)

    def fits(self, plan: Plan, batch: Batch, most: int) -> bool:
        """Whether a batch exchanges at most `most` bytes of rows or gradients with any one shard."""
        if len(batch.keys) * self._client.most_row_bytes <= most:  # as nearly always
            return True
        return self._client.nbytes(plan, in_steps=self._micro is not None) <= most

    def pull(self, plan: Plan, batch: Batch, ahead: int = 0) -> PulledBatch:
        """Requests the rows and weights of a batch; `ahead` batches are pulled and not pushed yet."""
        room = self._micro.room_for(plan) if self._micro and self._micro.takes(batch) else None
        pulled = self._client.pull(plan, ahead, room.by_table if room else None)
        return PulledBatch(batch, plan, pulled, room, self._pushes)

    def predict(self, batch: Batch) -> Floats:
        """Predictions of a batch, float32 [n, L], without learning from it."""
        return predict(self._planner, self._client, self._step, batch)

    def step(self, pulling: PulledBatch) -> BatchResult:
        """Predicts and trains on a pulled batch."""
        batch, plan, pulled = pulling.batch, pulling.plan, pulling.pulled
        if pulling.room is None:
            result = self._step.train(pulled.parameters, plan, pulled.rows, batch)
            rows = plan.unpool(result.row_gradient)
            return BatchResult(result.predictions, result.loss, rows, result.dense_gradient, result.statistics_change)
        assert self._micro is not None
        for change in self._changes:
            if change.pushes >= pulling.pushes:
                _carry(change, pulling)
        micro = self._micro.train(pulled, pulling.room, plan, batch)
        self._changes.append(_Change(self._pushes, plan, pulling.room.by_table, micro))
        return BatchResult(
            micro.predictions, micro.loss, micro.rows, micro.dense, micro.statistics_change, micro.non_finite_dense
        )

    def push(
        self,
        pulling: PulledBatch,
        of: BatchResult,
        *,
        spans: Sequence[Span],
        watermark: int,
        watermarks: Mapping[int, float] = {},
        idle: Collection[int] = (),
        refusals: Mapping[int, Refusals] = {},
        predictions: Mapping[int, bytes] = {},
    ) -> PendingPush:
        """Pushes the result of a batch to all shards; see `Client.push`."""
        self._pushes += 1
        return self._client.push(
            pulling.plan,
            of.rows,
            of.dense,
            of.statistics_change,
            spans=spans,
            watermark=watermark,
            watermarks=watermarks,
            idle=idle,
            refusals=refusals,
            predictions=predictions,
            pulled=pulling.pulled,
        )

    def forget(self) -> None:
        """Drops recorded changes, as the shards may have rejected them."""
        self._changes.clear()


def _carry(change: _Change, pulling: PulledBatch) -> None:
    """Adds the changes of an earlier batch to a batch that was pulled before that one was pushed."""
    pulled, room, dense = pulling.pulled, pulling.room, change.result.dense
    assert room is not None
    for t, rows in enumerate(room.by_table):
        mine, theirs = pulling.plan.common(change.plan, t)
        rows[mine] += change.result.after[t][theirs] - change.before[t][theirs]
        learned = change.plan.counts(t)[theirs]
        awaited = pulled.awaited[t]
        awaited[mine] = np.maximum(awaited[mine].astype(np.int64) - learned, 0)
    cut = len(dense.by)
    pulled.parameters[:cut] += dense.by
    pulled.parameters[cut:] += change.result.statistics_change
    pulled.slots = dense.decay[:, None] * pulled.slots + dense.added
    pulled.steps += dense.steps
