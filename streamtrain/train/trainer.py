"""Trainer: trains on a batch: pull, one or several steps, push.

A batch larger than the model's micro-batches is trained in several steps (micro.py), any other in one (step.py).
"""

import logging
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan, Planner
from streamtrain.model.bad_samples import Refusals
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.ps.client import Client, PendingPull, PendingPush, RowGradients, ShardReader
from streamtrain.ps.clock import Span
from streamtrain.ps.push import DenseChange, Floats, change_of_step
from streamtrain.train.advice import describe_scales
from streamtrain.train.micro import MicroResult, MicroStep, RowBuffers
from streamtrain.train.prior import LabelPrior
from streamtrain.train.step import Step

logger = logging.getLogger(__name__)


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
        self,
        model: Model,
        step: Step,
        client: Client,
        shards: int,
        *,
        micro: MicroStep | None,
        ahead: int = 0,
    ) -> None:
        self._model, self._step = model, step
        self._micro = micro
        self._client = client
        self._planner = model.planner(shards)
        self._ahead = ahead
        self._changes: deque[_Change] = deque(maxlen=ahead)
        self._pushes = 0
        self._prior: LabelPrior | None = None
        self._is_first = True

    def move_to(self, client: Client, shards: int) -> None:
        """Learns with other shards from now on; what was pulled and not pushed is void."""
        self._client, self._planner = client, self._model.planner(shards)
        self.forget()

    def begin(self) -> None:
        """Has the outputs find the labels' log-odds (prior.py), as nothing has been learned yet.

        If every batch is one step, they take the way of all weights.
        """
        self._prior = LabelPrior(self._model) if self._micro and self._model.output_biases else None

    @property
    def ahead(self) -> int:
        """Batches that may be pulled before the previous one is pushed: none while the outputs begin in parts."""
        return 0 if self._prior and self._prior.is_parted else self._ahead

    @property
    def most(self) -> int:
        """Samples that the next batch may have."""
        return self._prior.most if self._prior else sys.maxsize

    @property
    def beginning(self) -> NDArray[np.float64] | None:
        """State of the outputs' beginning; None: they have begun, which they may be told to.

        The state of a model with other outputs tells them so, too.
        """
        return self._prior.state if self._prior else None

    @beginning.setter
    def beginning(self, given: NDArray[np.float64] | None) -> None:
        if self._prior and given is not None and given.shape == self._prior.state.shape:
            self._prior.state = given
        else:
            self._prior = None

    def plan(self, batch: Batch) -> Plan:
        """Which rows a batch needs."""
        return plan(self._planner, batch)

    def fits(self, plan: Plan, batch: Batch, most: int) -> bool:
        """Whether to learn a batch at once: it exchanges at most `most` bytes with any one shard, and has no parts."""
        if len(batch) > self.most:
            self.reserve(plan)
            return False
        if len(batch.keys) * self._client.most_row_bytes <= most:  # as nearly always
            return True
        return self._client.nbytes(plan, in_steps=self._micro is not None) <= most

    def reserve(self, plan: Plan) -> None:
        """Has the graph that is compiled next be large enough for a batch, though it is learned in parts."""
        if self._micro:
            self._micro.reserve(plan)

    def pull(self, plan: Plan, batch: Batch, ahead: int = 0) -> PulledBatch:
        """Requests the rows and weights of a batch; `ahead` batches are pulled and not pushed yet."""
        with_state = self._micro and (self._prior or self._micro.takes(batch))
        room = self._micro.room_for(plan) if self._micro and with_state else None
        pulled = self._client.pull(plan, ahead, room.by_table if room else None)
        return PulledBatch(batch, plan, pulled, room, self._pushes)

    def predict(self, batch: Batch) -> Floats:
        """Predictions of a batch, float32 [n, L], without learning from it."""
        return predict(self._planner, self._client, self._step, batch)

    def step(self, pulling: PulledBatch) -> BatchResult:
        """Predicts and trains on a pulled batch."""
        batch, plan, pulled = pulling.batch, pulling.plan, pulling.pulled
        if self._is_first:
            self._is_first = False
            for line in describe_scales(self._model.schema.numerics, batch.numeric):
                logger.warning("%s", line)
        if pulling.room is None:
            result = self._step.train(pulled.parameters, plan, pulled.rows, batch)
            rows = plan.unpool(result.row_gradient)
            return BatchResult(result.predictions, result.loss, rows, result.dense_gradient, result.statistics_change)
        assert self._micro is not None
        for change in self._changes:
            if change.pushes >= pulling.pushes:
                _carry(change, pulling)
        if self._prior is None:
            return self._learn(self._micro, pulling, pulling.room)
        moved = self._prior.move()
        if moved is not None:
            pulled.parameters[: len(moved)] += moved
        made = self._learn(self._micro, pulling, pulling.room, moved)
        self._prior.add(made.predictions, batch)
        if self._prior.is_settled:
            self._prior = None
        return made

    def _learn(
        self, micro: MicroStep, pulling: PulledBatch, room: RowBuffers, moved: Floats | None = None
    ) -> BatchResult:
        """Learns a batch that was pulled with the optimizer's state, in as many steps as it has.

        Its change has `moved`, by which the weights had been moved before, in it.
        """
        batch, plan, pulled = pulling.batch, pulling.plan, pulling.pulled
        if micro.takes(batch):
            steps = micro.train(pulled, room, plan, batch)
            if moved is not None:
                steps = steps._replace(dense=steps.dense._replace(by=steps.dense.by + moved))
            self._changes.append(_Change(self._pushes, plan, room.by_table, steps))
            change, non_finite = steps.statistics_change, steps.non_finite_dense
            return BatchResult(steps.predictions, steps.loss, steps.rows, steps.dense, change, non_finite)
        spec = self._client.spec
        rows = [of_table[:, :dim].ravel() for of_table, dim in zip(room.by_table, spec.dims, strict=True)]
        flat = np.concatenate([np.empty(0, np.float32), *rows])
        one = self._step.train(pulled.parameters, plan, flat, batch)
        rate = (pulled.rates or spec.first_rates).dense_optimizer
        before = pulled.parameters[: spec.dense_size]
        dense = change_of_step(*(spec, before, pulled.slots, pulled.steps), gradient=one.dense_gradient, rate=rate)
        if moved is not None:
            dense = dense._replace(by=dense.by + moved)
        return BatchResult(one.predictions, one.loss, plan.unpool(one.row_gradient), dense, one.statistics_change)

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
