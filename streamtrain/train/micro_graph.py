"""MicroGraph: the compiled graph that trains on a batch as a sequence of micro-batches.

    rows, weights, optimizer state ─► ( gather ─► predict ─► gradients ─► step of rows and weights )* ─► gradients

Its shapes are static, and padded: a `Shape` says how large they are. TensorFlow is imported when a MicroGraph is made.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.model.forward import Traced
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.train.optimizer_steps import step_dense, step_rows
from streamtrain.train.step import Step

_SMALL = 1024  # elements; the optimizer steps smaller weights together
_LIMIT = 2.0**56  # of gradients, as in the core's optimizer.h

OF_GRAPHS = ("dim", "optimizer", "epsilon", "decay", "beta1", "beta2", "beta", "l1", "l2")
"""Settings of an optimizer that a compiled graph depends on; its rate and first accumulator are arguments."""

_BY_OPTIMIZER = ("rate", "initial_accumulator")  # settings that are arguments

_OF_OPTIMIZERS = (*OF_GRAPHS, *_BY_OPTIMIZER)

ColumnKind = Literal["single", "list", "cells", "sequence"]


def set_apart(settings: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> NDArray[np.float32]:
    """What a graph takes of optimizers as an argument, float32 [2, n]: their rates, and their first accumulators."""
    return np.array([rates, [one.get("initial_accumulator", 0.0) for one in settings]], np.float32)


@dataclass(frozen=True)
class TableGroup:
    """Tables whose rows share one matrix, as their settings are equal."""

    tables: tuple[int, ...]
    features: tuple[int, ...]
    dim: int
    width: int  # dim and the optimizer's state
    settings: dict[str, Any]
    admits: bool  # whether a key's first gradients may be left out

    @classmethod
    def all_of(cls, model: Model, spec: Spec) -> "list[TableGroup]":
        names = [table.name for table in model.schema.tables]
        of_feature = [names.index(one.table_name) for one in model.schema.embedded]
        groups: dict[str, list[int]] = {}
        for t, settings in enumerate(spec.tables):
            alike = {name: value for name, value in settings.items() if name in _OF_OPTIMIZERS}
            groups.setdefault(repr(sorted(alike.items())), []).append(t)
        return [
            cls(
                tuple(tables),
                tuple(f for f, t in enumerate(of_feature) if t in tables),
                spec.dims[tables[0]],
                spec.dims[tables[0]] + spec.state_sizes[tables[0]],
                spec.tables[tables[0]],
                any(spec.tables[t].get("min_count", 1) > 1 for t in tables),
            )
            for tables in groups.values()
        ]


class Shape(NamedTuple):
    """The static shape of a compiled graph.

    Attributes:
        steps: maximum number of steps of a batch.
        rows: by group, number of rows of its matrix.
        entries: by group, maximum number of different rows in a step.
        slots: by feature, its kind and the maximum number of ids in a step: those of a list lie side by side, each
            sample of cells or of a sequence has its share of them.
        guarded: whether each non-finite gradient is dropped; else one is only reported.
    """

    steps: int
    rows: tuple[int, ...]
    entries: tuple[int, ...]
    slots: tuple[tuple[ColumnKind, int], ...]
    guarded: bool


class _Arguments(NamedTuple):
    """The arguments of a graph.

    Attributes:
        count: number of samples.
        optimizers: what may differ of each group's optimizer, then of that of the weights; see `set_apart`.
        own: states of random generators.
        parameters: [P + S].
        slots: [slots, P], state of the dense optimizer.
        taken: number of steps of the dense optimizer so far.
        groups: for each its matrix, then [steps, …] index, live and occurrences; see MicroPlan.
        pooled: by feature, for a list [steps, …] segments and scales, see MicroPlan; for cells [steps, slots] what the
            row of each is multiplied with, 0 where there is none.
        numbers: [steps, size, …], numeric features and lengths of sequences.
        labels: [steps, size, L].
        weights: [steps, size].
    """

    count: Any
    optimizers: Any
    own: list[Any]
    parameters: Any
    slots: Any
    taken: Any
    groups: list[list[Any]]
    pooled: dict[int, list[Any]]
    numbers: Any
    labels: Any
    weights: Any


class _State(NamedTuple):
    """The loop variables of the steps.

    Attributes:
        k: index of the step, from 0.
        rows: the matrix of each group.
        dense: the weights, packed; see `MicroGraph._pack`.
        slots: state of the dense optimizer, by slot and packed as the weights.
        done: number of steps that it has taken.
        statistics: the graph's statistics.
        own: states of the graph's random generators.
        unusable: by group, the number of steps whose gradient was not finite or too large; float32 [entries, dim].
        made: results of the steps: predictions, loss, and gradients of rows by group.
    """

    k: Any
    rows: list[Any]
    dense: list[Any]
    slots: list[list[Any]]
    done: Any
    statistics: list[Any]
    own: list[Any]
    unusable: list[Any]
    made: list[Any]


class MicroGraph:
    """The graph for batches of one shape.

    Args:
        model: the model to train.
        step: its training function.
        spec: of the shards.
        groups: the model's tables.
        shape: the graph's static shape.
    """

    def __init__(self, model: Model, step: Step, spec: Spec, groups: Sequence[TableGroup], shape: Shape) -> None:
        import tensorflow as tf

        assert model.micro_batch_size is not None
        self._tf, self._model, self._step, self._groups, self._shape = tf, model, step, groups, shape
        self._size = model.micro_batch_size
        self._sizes = model.dense.sizes
        self._dense_optimizer, self._slots = spec.dense_optimizer, spec.dense_slots
        small = [i for i, size in enumerate(self._sizes) if size < _SMALL]
        large = [[i] for i, size in enumerate(self._sizes) if size >= _SMALL]
        self._packs = [*large, small] if small else large
        self._numbers = step.forward.columns.width - step.forward.columns.numeric

    def trace(self, *, xla: bool) -> Traced:
        """Traces it; XLA compiles it when it is called first."""
        return Traced(self._graph, self._signature(), xla=xla)

    def no_samples(self) -> list[Any]:
        """Arguments of a batch without samples, with which the graph takes no steps."""
        return [np.zeros(one.shape, one.dtype.as_numpy_dtype) for one in self._tf.nest.flatten(self._signature())]

    def _signature(self) -> list[Any]:
        tf = self._tf
        parameters = sum(self._sizes) + len(self._model.statistics)
        of_floats, of_integers = self._packing()
        return [
            [tf.TensorSpec(one.shape, one.dtype) for one in self._step.state],
            tf.TensorSpec([parameters], tf.float32),
            [
                tf.TensorSpec([rows, group.width], tf.float32)
                for group, rows in zip(self._groups, self._shape.rows, strict=True)
            ],
            tf.TensorSpec([sum(map(math.prod, of_floats))], tf.float32),
            tf.TensorSpec([sum(map(math.prod, of_integers))], tf.int32),
        ]

    def _graph(self, *given: Any) -> Any:
        """All steps of a batch; arguments as `MicroStep._arguments` and results as `MicroStep._result` have them."""
        tf = self._tf
        of = self._unpacked(*given)
        cut, layout = sum(self._sizes), self._model.dense
        last = (of.count + self._size - 1) // self._size
        first = _State(
            tf.constant(0),
            [matrix for matrix, *_ in of.groups],
            self._pack(layout.split_tensor(of.parameters[:cut])),
            [self._pack(layout.split_tensor(of.slots[s])) for s in range(self._slots)],
            tf.constant(0),
            self._model.statistics.split_tensor(of.parameters[cut:]),
            list(of.own),
            [tf.zeros(one) for one in self._made()[2:]],
            [tf.TensorArray(tf.float32, self._shape.steps, element_shape=one) for one in self._made()],
        )
        state = _State(
            *tf.while_loop(
                lambda k, *_: k < last,
                lambda *variables: self._learn(of, _State(*variables)),
                first,
                parallel_iterations=1,
            )
        )
        predictions, losses, *gradients = [array.stack() for array in state.made]
        flat = [tf.reshape(one, [-1]) for one in [*self._unpack(state.dense), *state.statistics]]
        changed = tf.concat(flat, 0) if flat else tf.zeros([0])
        by_weight = [self._unpack(of_slot) for of_slot in state.slots]
        flat_slots = [tf.concat([tf.reshape(one, [-1]) for one in of_slot], 0) for of_slot in by_weight if of_slot]
        slots = tf.stack(flat_slots) if flat_slots else of.slots
        finite = tf.reduce_all(tf.abs(changed) < _LIMIT) & tf.reduce_all(tf.math.is_finite(slots))
        finite &= tf.reduce_all([tf.reduce_all(one == 0) for one in state.unusable] or [True])
        dropped = last - state.done
        return finite, predictions, losses, changed, slots, dropped, *gradients, *state.rows, *state.own

    def _packing(self) -> tuple[list[list[int]], list[list[int]]]:
        """Shapes of what is packed, floats and integers; in the order of `MicroStep._arguments`."""
        steps, size = self._shape.steps, self._size
        floats, integers = [[len(_BY_OPTIMIZER), len(self._groups) + 1], [self._slots, sum(self._sizes)], [1]], [[1]]
        for group, entries in zip(self._groups, self._shape.entries, strict=True):
            floats.append([steps, entries])
            integers += [[steps, entries], [steps, sum(self._shape.slots[f][1] for f in group.features)]]
        for kind, slots in self._shape.slots:
            if kind == "list":
                integers.append([steps, slots])
                floats.append([steps, size])
            elif kind == "cells":
                floats.append([steps, slots])
        floats += [[steps, size, self._numbers], [steps, size, len(self._model.labels)], [steps, size]]
        return floats, integers

    def _unpacked(self, own: list[Any], parameters: Any, matrices: list[Any], *packed: Any) -> _Arguments:
        tf = self._tf
        (optimizers, slots, taken, *rest), (count, *integers) = (
            [tf.reshape(part, of) for part, of in zip(tf.split(one, [*map(math.prod, all_of)]), all_of, strict=True)]
            for one, all_of in zip(packed, self._packing(), strict=True)
        )
        groups = len(matrices)
        segments, scales = iter(integers[2 * groups :]), iter(rest[groups:])
        pooled = {
            f: [next(segments), next(scales)] if kind == "list" else [next(scales)]
            for f, (kind, _) in enumerate(self._shape.slots)
            if kind in ("list", "cells")
        }
        return _Arguments(
            count[0],
            optimizers,
            own,
            parameters,
            slots,
            taken[0],
            [[m, integers[2 * g], rest[g], integers[2 * g + 1]] for g, m in enumerate(matrices)],
            pooled,
            *scales,
        )

    def _learn(self, of: _Arguments, state: _State) -> _State:
        """One step."""
        tf, k, forward, reduction = self._tf, state.k, self._step.forward, self._model.reduction
        blocks = [tf.gather(matrix, one[1][k]) for matrix, one in zip(state.rows, of.groups, strict=True)]
        ids = [
            tf.gather(block[:, : group.dim], one[3][k])
            for group, block, one in zip(self._groups, blocks, of.groups, strict=True)
        ]
        parts = self._parts(k, ids, of)
        known = forward.merge(state.own, state.statistics)
        weights = self._unpack(state.dense)
        outputs, new_known, penalties = forward.call_parts(weights, known, parts, training=True)
        samples = tf.cast(tf.clip_by_value(of.count - k * self._size, 1, self._size), tf.float32)
        loss = self._step.loss(outputs, of.labels[k], of.weights[k], penalties, samples)
        gradients = tf.gradients(loss, [*ids, *weights], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        of_ids, of_weights = gradients[: len(ids)], gradients[len(ids) :]
        share = 1.0 / samples
        if reduction != "sum":
            of_weights = [one * share for one in of_weights]
        rows, row_gradients, unusable = [], [], []
        for g, (matrix, block, one, given) in enumerate(zip(state.rows, blocks, of_ids, of.groups, strict=True)):
            gradient = tf.math.unsorted_segment_sum(one, given[3][k], block.shape[0])
            if reduction == "mean":
                gradient *= share
            settings = self._groups[g].settings | self._set_apart(of, g)
            moved = step_rows(settings, block, gradient)
            if self._leaves_out(self._groups[g]):
                live = given[2][k][:, None] > 0
                if self._shape.guarded:
                    live &= tf.reduce_all(tf.abs(gradient) < _LIMIT, 1, keepdims=True)
                moved = tf.where(live, moved, block)
            rows.append(tf.tensor_scatter_nd_update(matrix, given[1][k][:, None], moved))
            row_gradients.append(gradient)
            unusable.append(state.unusable[g] + tf.where(tf.abs(gradient) < _LIMIT, 0.0, 1.0))
        dense, slots, done = self._step_dense(of, state, self._pack(of_weights))
        if self._step.differs:
            outputs, *_ = forward.call_parts(weights, known, parts, training=False)
        # The sum where the model says so, else the mean; both weighed by the number of samples.
        values = [forward.predictions(outputs), loss / share if reduction == "sum" else loss, *row_gradients]
        made = [array.write(k, value) for array, value in zip(state.made, values, strict=True)]
        own, statistics = forward.separate(new_known)
        return _State(k + 1, rows, dense, slots, done, statistics, own, unusable, made)

    def _set_apart(self, of: _Arguments, optimizer: int) -> dict[str, Any]:
        return {name: of.optimizers[i, optimizer] for i, name in enumerate(_BY_OPTIMIZER)}

    def _pack(self, weights: list[Any]) -> list[Any]:
        """Large weights by themselves, then all small ones as one vector, as each kernel of XLA has a fixed cost."""
        tf = self._tf
        return [
            weights[pack[0]] if len(pack) == 1 else tf.concat([tf.reshape(weights[i], [-1]) for i in pack], 0)
            for pack in self._packs
        ]

    def _unpack(self, packed: list[Any]) -> list[Any]:
        """The weights in their order; undoes `_pack`."""
        tf, shapes = self._tf, self._model.dense.shapes
        weights: dict[int, Any] = {}
        for pack, one in zip(self._packs, packed, strict=True):
            pieces = [one] if len(pack) == 1 else tf.split(one, [self._sizes[i] for i in pack])
            weights |= {i: tf.reshape(piece, shapes[i]) for i, piece in zip(pack, pieces, strict=True)}
        return [weights[i] for i in range(len(weights))]

    def _leaves_out(self, group: TableGroup) -> bool:
        """Whether some gradients of a group's entries are not applied.

        Otherwise those of padding are 0, which leaves its row of zeros as it is, and no choice is needed: XLA does not
        vectorize updates with one.
        """
        sequences = any(self._shape.slots[f][0] == "sequence" for f in group.features)  # padding has gradients there
        return self._shape.guarded or group.admits or sequences

    def _step_dense(self, of: _Arguments, state: _State, gradients: list[Any]) -> tuple[Any, Any, Any]:
        """Weights, slots and number of steps after one, of which a guarded one may be left out."""
        tf = self._tf
        t = of.taken + tf.cast(state.done + 1, tf.float32)
        settings = self._dense_optimizer | self._set_apart(of, -1)
        dense, slots = step_dense(settings, state.dense, state.slots, t, gradients)
        if not self._shape.guarded:
            return dense, slots, state.done + 1
        usable = tf.reduce_all([tf.reduce_all(tf.abs(one) < _LIMIT) for one in gradients] or [True])

        def kept(after: list[Any], before: list[Any]) -> list[Any]:
            return [tf.where(usable, a, b) for a, b in zip(after, before, strict=True)]

        of_slots = [kept(a, b) for a, b in zip(slots, state.slots, strict=True)]
        return kept(dense, state.dense), of_slots, tf.where(usable, state.done + 1, state.done)

    def _made(self) -> list[list[int]]:
        """Shapes of what each step gives: predictions, loss, gradients of rows by group."""
        gradients = [[entries, group.dim] for group, entries in zip(self._groups, self._shape.entries, strict=True)]
        return [[self._size, len(self._model.labels)], [], *gradients]

    def _parts(self, k: Any, ids: list[Any], of: _Arguments) -> list[Any]:
        """The features of a step, each pooled, then numeric ones and lengths."""
        tf, size = self._tf, self._size
        parts: list[Any] = [None] * len(self._shape.slots)
        for group, vectors in zip(self._groups, ids, strict=True):
            # Not slices: their gradients would be padded and added up.
            of_features = tf.split(vectors, [self._shape.slots[f][1] for f in group.features])
            for f, mine in zip(group.features, of_features, strict=True):
                kind, slots = self._shape.slots[f]
                if kind == "cells":
                    (scales,) = of.pooled[f]
                    scaled = mine * scales[k][:, None]
                    parts[f] = tf.reduce_sum(tf.reshape(scaled, [size, slots // size, group.dim]), 1)
                elif kind == "list":
                    segments, scales = (one[k] for one in of.pooled[f])
                    belongs = tf.cast(segments[None, :] == tf.range(size)[:, None], tf.float32)
                    parts[f] = tf.matmul(belongs * scales[:, None], mine)
                else:
                    parts[f] = tf.reshape(mine, [size, slots // size * group.dim])
        return parts + [of.numbers[k][:, j : j + 1] for j in range(self._numbers)]
