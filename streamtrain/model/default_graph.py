"""The graph of a model that gives none: a deep part over all inputs, and weights of ids and of pairs of ids beside it.

    all features ─► Dense(64, relu) ─► Dense(1) ─┐
    a weight for each id and each pair of ids ───┴─► sum ─► sigmoid

The deep part finds what ids have in common; the wide part remembers what is particular to an id or a pair (Cheng et al.
2016). Its weights learn at a lower rate than rows, as they overfit at the same one. Keras is imported when a graph is
built.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from streamtrain.durations import parse_duration
from streamtrain.errors import ConfigError
from streamtrain.model.features import (
    Categorical,
    Constant,
    Cross,
    Embedded,
    Feature,
    Grid,
    Label,
    Numeric,
    pool_sequence,
)
from streamtrain.model.optimizers import Adagrad
from streamtrain.model.schema import Schema
from streamtrain.python_source import as_python

PAIRED = 10
"""Features of ids, the first of a schema, of which each is paired with each."""
PAIR_ROWS = 1 << 24
"""Rows that all pairs of a model have together at most; the least recently seen go first."""

_UNITS = 64
_WEIGHTS = Adagrad(0.03)
_ENDS = {"binary": "sigmoid", "real": "linear", "count": "exponential"}  # by kind of label


def complete(schema: Schema) -> Schema:
    """A schema with what the graph needs: grids of its numbers, and if it has one label, weights of ids and of pairs.

    Sequences, features without a combiner, have no weights.
    """
    features: list[Feature] = [
        replace(one, grid=Grid()) if isinstance(one, Numeric) and one.grid is None else one for one in schema.features
    ]
    ids = [one for one in schema.categoricals if one.combiner is not None] if len(schema.labels) == 1 else []
    pairs = [*combinations(ids[:PAIRED], 2)]
    _check_names(schema, [weight_name(*of) for of in [*((one,) for one in ids), *pairs]])
    for one in ids:
        read: dict[str, Any] = {"field": one.field_name, "default": one.default, "max_length": one.max_length}
        features.append(Categorical(weight_name(one), 1, **read, **_options(one)))
    for pair in pairs:
        of = tuple(one.name for one in pair)
        features.append(Cross(weight_name(*pair), 1, of=of, **_options(*pair), capacity=PAIR_ROWS // len(pairs)))
    return replace(schema, features=features, label=schema.labels)


def weight_name(*of: Embedded) -> str:
    """The feature that is the weight of an id or of a pair."""
    return "*".join(one.name for one in of) + "_weight"


def _check_names(schema: Schema, weights: Sequence[str]) -> None:
    taken = {one.name for one in schema.features}
    for name in weights:
        if name in taken:
            raise ConfigError(
                f"feature {name!r}: a model without a graph has a weight of this name; give the feature another one "
                "(field= goes on reading the same field), or the model a graph"
            )
        taken.add(name)


def _options(*of: Categorical) -> dict[str, Any]:
    """Options of the weight of features: it is admitted and expires as the strictest of them."""
    lives = [(parse_duration(one.expire_after, "expire_after"), one.expire_after) for one in of if one.expire_after]
    return {
        "combiner": "mean",
        "init": Constant(0.0),
        "optimizer": _WEIGHTS,
        "min_count": max((one.min_count for one in of if one.min_count), default=None),
        "expire_after": min(lives)[1] if lives else None,
    }


class DeepAndWide:
    """The graph, as a function of its named inputs.

    Args:
        schema: what `complete` gave.
        labels: of the model, with their kinds.
    """

    def __init__(self, schema: Schema, labels: Sequence[Label]) -> None:
        wide = {weight_name(one) for one in schema.categoricals}
        wide |= {weight_name(a, b) for a, b in combinations(schema.categoricals, 2)}
        self._wide = [one.name for one in schema.embedded if one.name in wide]
        self._sequences = [one.name for one in schema.embedded if one.combiner is None]
        self._inputs = len(schema.embedded) - len(self._wide) + len(schema.numerics)
        self._labels = tuple(labels)

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The outputs by label, each [batch, 1]."""
        import keras

        left = dict(inputs)
        wide = [left.pop(name) for name in self._wide]
        for name in self._sequences:
            left[name] = pool_sequence(left[name], left.pop(f"{name}_mask"))
        deep = [*left.values()]
        hidden = keras.layers.Dense(_UNITS, "relu")(keras.layers.Concatenate()(deep) if len(deep) > 1 else deep[0])
        outputs = {}
        for label in self._labels:
            output = keras.layers.Dense(1)(hidden)
            output = keras.layers.Add()([output, *wide]) if wide else output
            outputs[label.name] = keras.layers.Activation(_ENDS[label.kind or "real"])(output)
        return outputs

    def source(self) -> str:
        """The graph as Python: a function that makes the same layers."""
        lines = ["left = dict(inputs)"]
        if self._wide:
            lines.append(f"wide = [left.pop(name) for name in {as_python(self._wide)}]")
        for name in self._sequences:
            one, mask = as_python(name), as_python(f"{name}_mask")
            lines.append(f"left[{one}] = st.pool_sequence(left[{one}], left.pop({mask}))")
        lines.append(f'hidden = keras.layers.Dense({_UNITS}, "relu")(keras.layers.Concatenate()([*left.values()]))')
        if self._inputs == 1:
            lines[-1:] = ["[only] = left.values()", f'hidden = keras.layers.Dense({_UNITS}, "relu")(only)']
        output = "keras.layers.Dense(1)(hidden)"
        if self._wide:
            output = f"keras.layers.Add()([{output}, *wide])"
        lines.append("return {")
        for label in self._labels:
            end = as_python(_ENDS[label.kind or "real"])
            lines.append(f"    {as_python(label.name)}: keras.layers.Activation({end})({output}),")
        return "".join(["def graph(inputs):\n", *(f"    {line}\n" for line in [*lines, "}"])])
