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
from streamtrain.model.model import LARGE_WEIGHT, Model
from streamtrain.model.spec import Spec
from streamtrain.train.optimizer_steps import step_dense, step_rows
from streamtrain.train.products import factor_shapes, multiply_factors, norm_ratio, products_of, turn_products
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


class _Rows(NamedTuple):
    """What each micro-batch changes, as loop variables.

    Attributes:
        k: index of the micro-batch, from 0.
        matrices: that of each group.
        statistics: the graph's statistics.
        own: states of the graph's random generators.
        unusable: by group, the number of micro-batches whose gradient was not finite or too large; float32 [entries,
            dim].
        made: results of the micro-batches: predictions, loss, and gradients of rows by group.
    """

    k: Any
    matrices: list[Any]
    statistics: list[Any]
    own: list[Any]
    unusable: list[Any]
    made: list[Any]


class _Weights(NamedTuple):
    """What each step of the weights changes, as loop variables.

    Attributes:
        values: the weights, packed; see `MicroGraph._pack`.
        slots: state of the dense optimizer, by slot and packed as the weights.
        done: number of steps that it has taken.
    """

    values: list[Any]
    slots: list[list[Any]]
    done: Any

    def cut(self, large: int) -> "tuple[_Weights, _Weights]":
        """The first ones, and the others."""
        first, others = (
            _Weights(self.values[part], [of_slot[part] for of_slot in self.slots], self.done)
            for part in (slice(large), slice(large, None))
        )
        return first, others

    @classmethod
    def joined(cls, first: "_Weights", others: "_Weights") -> "_Weights":
        """Both together, with the steps of the first ones."""
        slots = [a + b for a, b in zip(first.slots, others.slots, strict=True)]
        return cls(first.values + others.values, slots, first.done)


class _Forward(NamedTuple):
    """What a micro-batch is before its gradients are taken.

    Attributes:
        blocks: by group, the rows of the micro-batch with their state.
        ids: by group, the vectors of its ids.
        features: the matrix of the graph's inputs, as `Forward.call` takes it.
        known: non-trainable weights before it.
        after: those after it.
        outputs: of the graph, in training.
        loss: the sum over its samples.
        samples: their number.
    """

    blocks: list[Any]
    ids: list[Any]
    features: Any
    known: list[Any]
    after: list[Any]
    outputs: dict[str, Any]
    loss: Any
    samples: Any


class _Gradients(NamedTuple):
    """The gradients of a micro-batch.

    Attributes:
        ids: by group, those of the vectors of its ids.
        weights: by weight, None where factors are wanted instead.
        factors: of those, see products.py.
    """

    ids: list[Any]
    weights: list[Any]
    factors: list[list[Any]]


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
        self._size, self._accumulated = model.micro_batch_size, model.accumulated_steps
        self._sizes = model.dense.sizes
        self._dense_optimizer, self._slots = spec.dense_optimizer, spec.dense_slots
        small = [i for i, size in enumerate(self._sizes) if size < _SMALL]
        alone = sorted((i for i, size in enumerate(self._sizes) if size >= _SMALL), key=lambda i: -self._sizes[i])
        self._packs = [*([i] for i in alone), small] if small else [[i] for i in alone]
        self._large = sum(size >= LARGE_WEIGHT for size in self._sizes) if self._accumulated > 1 else 0
        self._numbers = step.forward.columns.width - step.forward.columns.numeric
        self._xla = True

    def trace(self, *, xla: bool) -> Traced:
        """Traces it; XLA compiles it when it is called first."""
        self._xla = xla
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
        rows = _Rows(
            tf.constant(0),
            [matrix for matrix, *_ in of.groups],
            self._model.statistics.split_tensor(of.parameters[cut:]),
            list(of.own),
            [tf.zeros(one) for one in self._made()[2:]],
            [tf.TensorArray(tf.float32, self._shape.steps, element_shape=one) for one in self._made()],
        )
        weights = _Weights(
            self._pack(layout.split_tensor(of.parameters[:cut])),
            [self._pack(layout.split_tensor(of.slots[s])) for s in range(self._slots)],
            tf.constant(0),
        )
        factors = self._factors() if self._large else []
        rows, weights = tf.while_loop(
            lambda rows, _: rows.k < last,
            lambda rows, weights: self._learn(of, last, factors, rows, weights),
            (rows, weights),
            parallel_iterations=1,
        )
        predictions, losses, *gradients = [array.stack() for array in rows.made]
        flat = [tf.reshape(one, [-1]) for one in [*self._unpack(weights.values), *rows.statistics]]
        changed = tf.concat(flat, 0) if flat else tf.zeros([0])
        by_weight = [self._unpack(of_slot) for of_slot in weights.slots]
        flat_slots = [tf.concat([tf.reshape(one, [-1]) for one in of_slot], 0) for of_slot in by_weight if of_slot]
        slots = tf.stack(flat_slots) if flat_slots else of.slots
        finite = tf.reduce_all(tf.abs(changed) < _LIMIT) & tf.reduce_all(tf.math.is_finite(slots))
        finite &= tf.reduce_all([tf.reduce_all(one == 0) for one in rows.unusable] or [True])
        dropped = last - weights.done
        return finite, predictions, losses, changed, slots, dropped, *gradients, *rows.matrices, *rows.own

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

    def _learn(
        self, of: _Arguments, last: Any, factors: list[list[list[int]] | None], rows: _Rows, weights: _Weights
    ) -> tuple[_Rows, _Weights]:
        """One step of the large weights, and the steps of rows and small weights that belong to it."""
        if not self._large:
            rows, gradients = self._learn_rows(of, rows, self._unpack(weights.values), [])
            return rows, self._step_weights(of, weights, self._pack(gradients.weights))
        return self._accumulate(of, last, factors, rows, weights)

    def _accumulate(
        self, of: _Arguments, last: Any, factors: list[list[list[int]] | None], rows: _Rows, weights: _Weights
    ) -> tuple[_Rows, _Weights]:
        """Steps of rows and small weights while the large weights stay as they are, then one step of these.

        `factors` are those of `_factors`.
        """
        tf, first = self._tf, rows.k
        stop = tf.minimum(first + self._accumulated, last)
        large, small = weights.cut(self._large)
        kept = [
            [tf.TensorArray(tf.float32, self._accumulated, element_shape=shape) for shape in shapes]
            for shapes in factors
            if shapes
        ]
        whole = [one for one, shapes in zip(large.values, factors, strict=True) if not shapes]
        added = [[tf.zeros_like(one), tf.zeros([])] for one in whole]
        factored = [i for [i], shapes in zip(self._packs[: self._large], factors, strict=True) if shapes]

        def learn(rows: _Rows, small: _Weights, kept: list[list[Any]], added: list[list[Any]]) -> Any:
            at = rows.k - first
            # Copies of this loop's own, whose users can be seen.
            values = [tf.identity(one) for one in self._unpack([*large.values, *small.values])]
            rows, gradients = self._learn_rows(of, rows, values, factored)
            packed, found = self._pack(gradients.weights), gradients.factors
            more, of_small = [one for one in packed[: self._large] if one is not None], packed[self._large :]
            usable = None
            if self._shape.guarded:
                # Not their factors: those may be finite though their product is not.
                written = [tf.matmul(*pair, transpose_a=True) for pair in found]
                usable = self._usable([*more, *of_small, *written])
                more, found = tf.nest.map_structure(lambda one: tf.where(usable, one, 0.0), (more, found))
            small = self._step_weights(of, small, of_small, usable=usable)
            pairs = zip(kept, found, strict=True)
            kept = [[array.write(at, one) for array, one in zip(*pair, strict=True)] for pair in pairs]
            added = [[a + one, b + tf.reduce_sum(one * one)] for (a, b), one in zip(added, more, strict=True)]
            return rows, small, kept, added

        rows, small, kept, added = tf.while_loop(
            lambda rows, *_: rows.k < stop, learn, (rows, small, kept, added), parallel_iterations=1
        )
        products = iter([multiply_factors(*(one.stack() for one in pair)) for pair in kept])
        others = iter([(one, norm_ratio(squares, tf.reduce_sum(one * one))) for one, squares in added])
        gradients, ratios = zip(*(next(products if shapes else others) for shapes in factors), strict=True)
        steps = small.done - large.done
        usable = (steps > 0) & self._usable([*ratios])  # which squares that are too large leave without a value
        large = self._step_weights(of, large, [*gradients], ratios=[*ratios], steps=steps, usable=usable)
        return rows, _Weights.joined(large, small)

    def _factors(self) -> list[list[list[int]] | None]:
        """By large weight, `factor_shapes`."""
        tf = self._tf
        found: list[list[list[int]] | None] = []

        def look(*given: Any) -> Any:
            of = self._unpacked(*given)
            values = self._model.dense.split_tensor(tf.zeros([sum(self._sizes)]))
            statistics = self._model.statistics.split_tensor(of.parameters[sum(self._sizes) :])
            rows = _Rows(tf.constant(0), [matrix for matrix, *_ in of.groups], statistics, list(of.own), [], [])
            self._forward(of, rows, values)
            found.extend(factor_shapes(values[i]) for [i] in self._packs[: self._large])

        tf.function(look, input_signature=self._signature(), autograph=False).get_concrete_function()
        return found

    def _forward(self, of: _Arguments, rows: _Rows, values: list[Any]) -> _Forward:
        tf, k, forward = self._tf, rows.k, self._step.forward
        blocks = [tf.gather(matrix, one[1][k]) for matrix, one in zip(rows.matrices, of.groups, strict=True)]
        ids = [
            tf.gather(block[:, : group.dim], one[3][k])
            for group, block, one in zip(self._groups, blocks, of.groups, strict=True)
        ]
        features = self._features(k, ids, of)
        known = forward.merge(rows.own, rows.statistics)
        outputs, after, penalties = forward.call(values, known, features, training=True)
        samples = tf.cast(tf.clip_by_value(of.count - k * self._size, 1, self._size), tf.float32)
        loss = self._step.loss(outputs, of.labels[k], of.weights[k], penalties, samples)
        return _Forward(blocks, ids, features, known, after, outputs, loss, samples)

    def _gradients(self, seen: _Forward, values: list[Any], factored: Sequence[int]) -> _Gradients:
        """The gradients of a micro-batch.

        Args:
            seen: what comes before them.
            values: the weights.
            factored: indices of those of which the factors of the gradient are wanted.
        """
        tf = self._tf
        find = turn_products if self._xla else products_of
        found = {i: find(values[i]) for i, size in enumerate(self._sizes) if size >= _SMALL}
        products = {i: found[i] for i in factored}
        others = [one for i, one in enumerate(values) if i not in products]
        results = [one.result for of_weight in products.values() for one in of_weight]
        flat = tf.gradients(
            seen.loss, [*seen.ids, *others, *results], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        of_ids, of_weights = flat[: len(seen.ids)], flat[len(seen.ids) :]
        if self._model.reduction != "sum":
            share = 1.0 / seen.samples
            of_weights = [one * share for one in of_weights]
        rest = iter(of_weights)
        by_weight = [None if i in products else next(rest) for i in range(len(values))]
        factors = [
            [tf.concat([one.left for one in of_weight], 0), tf.concat([next(rest) for _ in of_weight], 0)]
            for of_weight in products.values()
        ]
        return _Gradients(of_ids, by_weight, factors)

    def _learn_rows(
        self, of: _Arguments, rows: _Rows, values: list[Any], factored: Sequence[int]
    ) -> tuple[_Rows, _Gradients]:
        """The rows after one step of them, and all gradients; arguments as `_gradients` has them."""
        tf, k, forward, reduction = self._tf, rows.k, self._step.forward, self._model.reduction
        seen = self._forward(of, rows, values)
        gradients = self._gradients(seen, values, factored)
        matrices, row_gradients, unusable = [], [], []
        for g, (matrix, block, one, given) in enumerate(
            zip(rows.matrices, seen.blocks, gradients.ids, of.groups, strict=True)
        ):
            gradient = tf.math.unsorted_segment_sum(one, given[3][k], block.shape[0])
            if reduction == "mean":
                gradient *= 1.0 / seen.samples
            settings = self._groups[g].settings | self._set_apart(of, g)
            moved = step_rows(settings, block, gradient)
            if self._leaves_out(self._groups[g]):
                live = given[2][k][:, None] > 0
                if self._shape.guarded:
                    live &= tf.reduce_all(tf.abs(gradient) < _LIMIT, 1, keepdims=True)
                moved = tf.where(live, moved, block)
            matrices.append(tf.tensor_scatter_nd_update(matrix, given[1][k][:, None], moved))
            row_gradients.append(gradient)
            unusable.append(rows.unusable[g] + tf.where(tf.abs(gradient) < _LIMIT, 0.0, 1.0))
        outputs = seen.outputs
        if self._step.differs:
            outputs, *_ = forward.call(values, seen.known, seen.features, training=False)
        # The sum where the model says so, else the mean; both weighed by the number of samples.
        loss = seen.loss * seen.samples if reduction == "sum" else seen.loss
        made = [
            array.write(k, value)
            for array, value in zip(rows.made, [forward.predictions(outputs), loss, *row_gradients], strict=True)
        ]
        own, statistics = forward.separate(seen.after)
        return _Rows(k + 1, matrices, statistics, own, unusable, made), gradients

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

    def _step_weights(
        self,
        of: _Arguments,
        weights: _Weights,
        gradients: list[Any],
        *,
        ratios: list[Any] | None = None,
        steps: Any = None,
        usable: Any = None,
    ) -> _Weights:
        """Some weights after one or several steps, which a guarded graph leaves out if a gradient is not finite.

        Args:
            of: the arguments.
            weights: those before it.
            gradients: their gradients, added up over the steps.
            ratios: see `step_dense`.
            steps: how many; None: one.
            usable: whether the gradients are; None: that is to be found out.
        """
        tf = self._tf
        done = weights.done + (1 if steps is None else steps)
        settings = self._dense_optimizer | self._set_apart(of, -1)
        t = of.taken + tf.cast(done, tf.float32)
        values = step_dense(settings, weights.values, weights.slots, t, gradients, ratios=ratios, steps=steps)
        after = _Weights(*values, done)
        if not self._shape.guarded:
            return after
        if usable is None:
            usable = self._usable(gradients)
        kept: _Weights = tf.nest.map_structure(lambda a, b: tf.where(usable, a, b), after, weights)
        return kept

    def _usable(self, gradients: list[Any]) -> Any:
        tf = self._tf
        return tf.reduce_all([tf.reduce_all(tf.abs(one) < _LIMIT) for one in gradients] or [True])

    def _made(self) -> list[list[int]]:
        """Shapes of what each step gives: predictions, loss, gradients of rows by group."""
        gradients = [[entries, group.dim] for group, entries in zip(self._groups, self._shape.entries, strict=True)]
        return [[self._size, len(self._model.labels)], [], *gradients]

    def _features(self, k: Any, ids: list[Any], of: _Arguments) -> Any:
        """The matrix of a step's features."""
        tf, size = self._tf, self._size
        columns: dict[int, Any] = {}  # by the first of the features in them
        for group, vectors in zip(self._groups, ids, strict=True):
            runs = self._runs(group)
            # Not slices: their gradients would be padded and added up.
            of_runs = tf.split(vectors, [sum(self._shape.slots[f][1] for f in run) for run in runs])
            for run, mine in zip(runs, of_runs, strict=True):
                f = run[0]
                kind, slots = self._shape.slots[f]
                if kind == "single":
                    by_sample = tf.transpose(tf.reshape(mine, [len(run), size, group.dim]), [1, 0, 2])
                    columns[f] = tf.reshape(by_sample, [size, len(run) * group.dim])
                elif kind == "cells":
                    (scales,) = of.pooled[f]
                    scaled = mine * scales[k][:, None]
                    columns[f] = tf.reduce_sum(tf.reshape(scaled, [size, slots // size, group.dim]), 1)
                elif kind == "list":
                    segments, scales = (one[k] for one in of.pooled[f])
                    belongs = tf.cast(segments[None, :] == tf.range(size)[:, None], tf.float32)
                    columns[f] = tf.matmul(belongs * scales[:, None], mine)
                else:
                    columns[f] = tf.reshape(mine, [size, slots // size * group.dim])
        return tf.concat([*(columns[f] for f in sorted(columns)), of.numbers[k]], 1)

    def _runs(self, group: TableGroup) -> list[list[int]]:
        """A group's features, together where each sample has one id of each and none of another group is between."""
        runs: list[list[int]] = []
        for f in group.features:
            alike = bool(runs) and f == runs[-1][-1] + 1 and self._shape.slots[f] == self._shape.slots[f - 1]
            if alike and self._shape.slots[f][0] == "single":
                runs[-1].append(f)
            else:
                runs.append([f])
        return runs
