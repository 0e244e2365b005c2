"""MicroStep: trains on a batch as a sequence of micro-batches, in one call of a compiled graph (micro_graph.py).

Each micro-batch sees the rows and weights as changed by those before it, as if it were a batch of its own. This gives
the accuracy of small batches at nearly the speed of large ones, as a batch is decoded, planned, pulled and pushed once.
The shards receive row gradients in order and apply them one by one, so they reach the same values as this step; for
weights they receive the total change of all steps (see `DenseChange`).

TensorFlow is imported when a MicroStep is created; XLA compiles a graph when its first batch arrives. Learning rates
are arguments of a graph, so models that differ only in their rates can share one (see `GraphCache`).
"""

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import MicroPlan, Plan, aligned_floats
from streamtrain.model.batch import Batch
from streamtrain.model.features import Cells
from streamtrain.model.forward import Traced, tensor_view
from streamtrain.model.model import LARGE_WEIGHT, Model
from streamtrain.model.spec import Spec
from streamtrain.ps.client import PendingPull, RowGradients
from streamtrain.ps.push import DenseChange
from streamtrain.train.micro_graph import OF_GRAPHS, ColumnKind, MicroGraph, Shape, TableGroup, set_apart
from streamtrain.train.optimizer_steps import dense_decay
from streamtrain.train.step import Floats, Step

logger = logging.getLogger(__name__)

_ROOM = 1.5  # capacity for rows, relative to those needed, so that few graphs are compiled
_PADDED_IDS = 1 << 18  # that a batch may always have, padding included
_PADDING = 4  # times the ids of a larger one


def describe_steps(model: Model) -> str:
    """In what steps batches of a model are learned, as a line of the log."""
    size, large = model.micro_batch_size, sum(size for size in model.dense.sizes if size >= LARGE_WEIGHT)
    if size is None:
        return "learning each batch in one step, as micro_batch_size is None"
    steps = f"learning batches in steps of {size} samples (micro_batch_size)"
    if not large or model.accumulated_steps == 1:
        return steps
    return f"{steps}, {large:,} of the weights once in {model.accumulated_steps} of them (dense_accumulation_steps)"


class MicroResult(NamedTuple):
    """The result of training on a batch in steps.

    Attributes:
        predictions: float32 [n, L], each made just before its micro-batch was learned.
        loss: mean over micro-batches by number of samples.
        rows: by table, the gradients of its rows.
        dense: the change of the weights by all steps.
        statistics_change: float32 [S].
        non_finite_dense: number of steps whose dense gradient was dropped as non-finite.
        after: by table, the rows as the steps left them; float32 [n, dim + state].
    """

    predictions: Floats
    loss: float
    rows: Sequence[RowGradients]
    dense: DenseChange
    statistics_change: Floats
    non_finite_dense: int
    after: Sequence[Floats]


class RowBuffers(NamedTuple):
    """Buffers for the rows of a batch, with optimizer state.

    Attributes:
        matrices: float32 [rows, dim + state], one for each group of equal tables; the last row is padding.
        by_table: views of the rows of each table.
    """

    matrices: list[Floats]
    by_table: list[Floats]


class GraphCache:
    """A cache of compiled graphs, shared by learners of models that differ only in their rates. Used by one thread.

    Args:
        compiled: dict to keep them in, which caches of several threads may share; None: one of its own.

    Attributes:
        compiled: graphs by model, shape and whether XLA compiles them.
        shapes: the latest shape by kind of batches; the next learner begins with it.
        xla: whether XLA can compile them.
    """

    def __init__(self, compiled: dict[tuple[str, Shape, bool], Traced] | None = None) -> None:
        self.compiled = {} if compiled is None else compiled
        self.shapes: dict[str, Shape] = {}
        self.xla = True


class MicroStep:
    """Trains on batches in micro-batches. Used by one thread.

    Args:
        model: the model to train.
        step: its training function; the states of random generators are kept there.
        batch_size: expected maximum number of samples; larger batches are accepted and compiled for.
        spec: of the shards, whose optimizers it steps with as they do; the model file may have changed since the run
            began.
        graphs: compiled graphs to use and to add to; None: those of the model.
    """

    def __init__(
        self, model: Model, step: Step, batch_size: int, spec: Spec, *, graphs: GraphCache | None = None
    ) -> None:
        import tensorflow as tf

        assert model.micro_batch_size is not None
        self._tf = tf
        self._model = model
        self._step = step
        self.size = model.micro_batch_size
        self._spec = spec
        self._groups = TableGroup.all_of(model, spec)
        self._tables = [list(group.tables) for group in self._groups]
        self._dims = spec.dims
        self._sizes = model.dense.sizes
        self._numbers = step.forward.columns.width - step.forward.columns.numeric
        self._most_steps = -(-batch_size // self.size)
        own = spec.own_rates
        self._own_rates = [own[group.tables[0]] for group in self._groups]
        # Shapes are its own: what it learns must not depend on what others have learned.
        self._graphs = GraphCache(model.traced.setdefault("micro", {})) if graphs is None else graphs
        first = self._first_shape()
        self._looks = repr([self.size, first, [(group.tables, group.features) for group in self._groups]])
        self._made_of = self._looks + repr(self._ingredients())
        self._shape = self._graphs.shapes.get(self._looks, first)

    def _ingredients(self) -> list[Any]:
        """Everything that a graph depends on besides its shape."""
        model = self._model
        optimizers = [*(group.settings for group in self._groups), self._spec.dense_optimizer]
        return [
            id(model.graph),  # which a compiled graph keeps alive
            model.seed,  # a graph may have drawn constants
            [(one.name, one.dim, one.combiner, one.max_length) for one in model.schema.embedded],
            [one.name for one in model.schema.numerics],
            [(label, model.losses[label.name], model.loss_weights[label.name]) for label in model.labels],
            model.reduction,
            model.accumulated_steps,
            [sorted((name, value) for name, value in one.items() if name in OF_GRAPHS) for one in optimizers],
            [group.admits for group in self._groups],
        ]

    def _first_shape(self) -> Shape:
        kinds: list[tuple[ColumnKind, int]] = []
        for one in self._model.schema.embedded:
            if one.combiner is None:
                assert one.max_length is not None
                kinds.append(("sequence", self.size * one.max_length))
            elif isinstance(one, Cells):
                kinds.append(("cells", self.size * len(one.bits)))
            else:
                kinds.append(("single", self.size))
        none = (0,) * len(self._groups)
        return Shape(self._most_steps, none, none, tuple(kinds), guarded=False)

    def takes(self, batch: Batch) -> bool:
        """Whether to train on a batch here, rather than in one step.

        False for batches no larger than a micro-batch, and for those with a sample of so many ids that padding the
        other steps to it would multiply memory and time.
        """
        if len(batch) <= self.size:
            return False
        lengths = np.diff(batch.offsets, axis=1).sum(axis=0)
        most = int(np.add.reduceat(lengths, np.arange(0, len(batch), self.size)).max(initial=0))
        return self._shape.steps * most <= max(_PADDED_IDS, _PADDING * int(lengths.sum()))

    def reserve(self, plan: Plan) -> Shape:
        """Has the next graph be large enough for batches like that of a plan; compiles nothing."""
        self._grow_rows(plan)
        return self._fit(MicroPlan(plan, self.size, self._tables))

    def compile(self, plan: Plan) -> None:
        """Compiles the graph for batches like that of a plan; learns nothing."""
        shape = self.reserve(plan)
        self._call(shape, self._graph(shape).no_samples())

    def room_for(self, plan: Plan) -> RowBuffers:
        """Allocates buffers for the rows of a plan."""
        self._grow_rows(plan)
        matrices = []
        for group, rows in zip(self._groups, self._shape.rows, strict=True):
            matrix = aligned_floats(rows * group.width).reshape(rows, group.width)
            matrix[rows - 1] = 0.0
            matrices.append(matrix)
        return RowBuffers(matrices, self._cut(matrices, plan))

    def _cut(self, matrices: Sequence[Floats], plan: Plan) -> list[Floats]:
        """The rows of each table."""
        by_table: dict[int, Floats] = {}
        for group, matrix in zip(self._groups, matrices, strict=True):
            bounds = accumulate((len(plan.keys(t)) for t in group.tables), initial=0)
            for t, (start, stop) in zip(group.tables, pairwise(bounds), strict=True):
                by_table[t] = matrix[start:stop]
        return [by_table[t] for t in range(len(self._dims))]

    def _grow_rows(self, plan: Plan) -> None:
        """Grows the row capacity to that of full batches of this kind."""
        counts = [len(plan.keys(t)) for t in range(len(self._dims))]
        needed = [sum(counts[t] for t in group.tables) for group in self._groups]
        if all(need < rows for need, rows in zip(needed, self._shape.rows, strict=True)):
            return
        full = max(self._most_steps * self.size / max(plan.samples, 1), 1.0)
        rows = tuple(
            now if need < now else _rounded(min(int(need * full * _ROOM), max(self._most_rows(group), need)) + 1)
            for group, need, now in zip(self._groups, needed, self._shape.rows, strict=True)
        )
        self._shape = self._shape._replace(rows=rows)

    def _most_rows(self, group: TableGroup) -> int:
        """How many rows a full batch has, if each of its ids is another and lists are as long as they were so far."""
        return self._shape.steps * sum(self._shape.slots[f][1] for f in group.features)

    def train(self, pulled: PendingPull, room: RowBuffers, plan: Plan, batch: Batch) -> MicroResult:
        """Learns a batch.

        Args:
            pulled: its rows and the weights, all with the optimizer's state.
            room: buffers with the rows.
            plan: the batch's plan.
            batch: the samples.
        """
        micro = MicroPlan(plan, self.size, self._tables)
        shape = self._fit(micro)
        arguments = self._arguments(shape, micro, pulled, room, batch)
        outputs = self._call(shape, arguments)
        if not bool(outputs[0]):  # a gradient is not finite: repeat with a check of each
            shape = shape._replace(guarded=True)
            outputs = self._call(shape, arguments)
        return self._result(shape, micro, pulled, plan, outputs)

    def _fit(self, micro: MicroPlan) -> Shape:
        """The shape for a batch: as large as the largest so far, so that few graphs are compiled."""
        shape = self._shape
        lengths = micro.lengths
        slots: list[tuple[ColumnKind, int]] = []
        for (kind, room), (single, longest) in zip(shape.slots, lengths, strict=True):
            is_new = kind == "single" and not single
            is_list = is_new or kind == "list"
            grown = is_list and (is_new or longest > room)
            slots.append(("list" if is_list else kind, _rounded(longest * 5 // 4) if grown else room))
        entries = []
        for g, (group, room) in enumerate(zip(self._groups, shape.entries, strict=True)):
            most = sum(slots[f][1] for f in group.features) + 1
            need = micro.width(g) + 1
            entries.append(room if need <= room else min(most, _rounded(need * 5 // 4)))
        steps = max(shape.steps, micro.steps)
        self._shape = shape._replace(steps=steps, slots=tuple(slots), entries=tuple(entries))
        self._graphs.shapes[self._looks] = self._shape
        return self._shape

    def _arguments(
        self, shape: Shape, micro: MicroPlan, pulled: PendingPull, room: RowBuffers, batch: Batch
    ) -> list[Any]:
        """Arguments of the graph of a shape, in the order of `MicroGraph._packing`."""
        steps, size, n = shape.steps, self.size, len(batch)
        # Each argument has a fixed cost, so small ones are packed into two: one of floats, one of integers.
        rates = pulled.rates or self._spec.first_rates
        of_groups = [rates.embedding_optimizer if own is None else own for own in self._own_rates]
        floats: list[Any] = [
            set_apart(
                [*(one.settings for one in self._groups), self._spec.dense_optimizer],
                [*of_groups, rates.dense_optimizer],
            ),
            pulled.slots,
            np.array([pulled.steps], np.float32),
        ]
        integers: list[Any] = [np.array([n], np.int32)]
        for g, group in enumerate(self._groups):
            entries, rows = shape.entries[g], len(room.matrices[g])
            kinds = [_placed(*shape.slots[f]) for f in group.features]
            awaited = np.concatenate([pulled.awaited[t] for t in group.tables]) if group.admits else None
            floats.append(micro.live(g, steps, entries, awaited))
            integers += [micro.index(g, steps, entries, rows - 1), micro.occurrences(g, steps, kinds, entries - 1)]
        for f, (kind, slots) in enumerate(shape.slots):
            if kind == "list":
                segments, scales = micro.segments(f, steps, slots)
                integers.append(segments)
                floats.append(scales)
            elif kind == "cells":
                floats.append(self._repeat_last(_scales(np.diff(batch.offsets[f]), slots // size), shape, micro))
        numbers = np.empty((n, self._numbers), np.float32)
        self._step.forward.set_numbers(batch, numbers)
        weights = np.zeros(steps * size, np.float32)
        weights[:n] = batch.weights
        floats += [*(self._repeat_last(one, shape, micro) for one in (numbers, batch.labels)), weights]
        return [
            *self._step.state,
            pulled.parameters,
            *room.matrices,
            _packed(floats),
            _packed(integers).view(np.int32),
        ]

    def _repeat_last(self, of_samples: Floats, shape: Shape, micro: MicroPlan) -> Floats:
        """float32 [steps * size, …], the last step filled with the last sample, of weight 0.

        A graph may not support samples of zeros.
        """
        padded = np.zeros((shape.steps * self.size, of_samples.shape[1]), np.float32)
        padded[: len(of_samples)] = of_samples
        padded[len(of_samples) : micro.steps * self.size] = of_samples[-1]
        return padded

    def _result(
        self, shape: Shape, micro: MicroPlan, pulled: PendingPull, plan: Plan, outputs: list[Any]
    ) -> MicroResult:
        _, predictions, losses, parameters, slots_after, dropped, *rest = outputs
        groups = len(self._groups)
        gradients, matrices, self._step.state = rest[:groups], rest[groups : 2 * groups], rest[2 * groups :]
        cut = sum(self._sizes)
        before, after, slots_before = pulled.parameters, tensor_view(parameters), pulled.slots
        taken = micro.steps - int(dropped)
        decay = dense_decay(self._spec.dense_optimizer, taken)
        change = DenseChange(
            after[:cut] - before[:cut], tensor_view(slots_after) - decay[:, None] * slots_before, decay, float(taken)
        )
        return MicroResult(
            predictions.numpy().reshape(shape.steps * self.size, -1)[: plan.samples],
            float(losses.numpy().sum()) / plan.samples,
            self._by_table(shape, micro, plan, gradients),
            change,
            after[cut:] - before[cut:],
            int(dropped),
            self._cut([tensor_view(matrix) for matrix in matrices], plan),
        )

    def _by_table(self, shape: Shape, micro: MicroPlan, plan: Plan, gradients: Sequence[Any]) -> list[RowGradients]:
        """Gradients in the order of the rows."""
        by_table: dict[int, RowGradients] = {}
        for g, (group, of_group) in enumerate(zip(self._groups, gradients, strict=True)):
            positions, repeats, counts = micro.order(g, shape.entries[g])
            ordered = tensor_view(of_group).reshape(-1, group.dim).take(positions, 0)  # faster than an index
            rows = [0, *accumulate(len(plan.keys(t)) for t in group.tables)]
            ends = np.concatenate([[0], np.cumsum(repeats, dtype=np.int64)])
            for t, (start, stop) in zip(group.tables, pairwise(rows), strict=True):
                span = slice(ends[start], ends[stop])
                by_table[t] = RowGradients(ordered[span], counts[span], repeats[start:stop])
        return [by_table[t] for t in range(len(self._dims))]

    def _call(self, shape: Shape, arguments: list[Any]) -> list[Any]:
        try:
            return self._compiled(shape)(*arguments)
        except (self._tf.errors.InvalidArgumentError, self._tf.errors.UnimplementedError) as exc:
            if not self._graphs.xla:
                raise
            logger.warning("XLA cannot compile the graph, so its micro-batches run several times slower: %s", exc)
            self._graphs.xla = False
            return self._compiled(shape)(*arguments)

    def _compiled(self, shape: Shape) -> Traced:
        compiled, key = self._graphs.compiled, (self._made_of, shape, self._graphs.xla)
        if key not in compiled:
            compiled[key] = self._graph(shape).trace(xla=self._graphs.xla)
        return compiled[key]

    def _graph(self, shape: Shape) -> MicroGraph:
        return MicroGraph(self._model, self._step, self._spec, self._groups, shape)


def _placed(kind: ColumnKind, slots: int) -> tuple[Literal["single", "list", "sequence"], int]:
    """How the core places a feature's ids: those of cells as those of a sequence."""
    return "sequence" if kind == "cells" else kind, slots


def _scales(lengths: NDArray[np.int32], most: int) -> Floats:
    """What each row of a sample's cells is multiplied with, by how many it has of at most `most`; float32 [n, most]."""
    counts = np.arange(most + 1)[:, None]
    table = np.where(np.arange(most) < counts, 1 / np.sqrt(np.maximum(counts, 1)), 0.0).astype(np.float32)
    return table[lengths]


def _rounded(count: int) -> int:
    """The next of eight sizes from one power of two to the next."""
    step = max(1 << max(count - 1, 1).bit_length() >> 4, 8)
    return -(-count // step) * step


def _packed(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays of four bytes an element, one after another, where TensorFlow takes them without a copy."""
    packed, at = aligned_floats(sum(array.size for array in arrays)), 0
    for array in arrays:
        packed[at : at + array.size] = array.reshape(-1).view(np.float32)
        at += array.size
    return packed
