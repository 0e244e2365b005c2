"""The search space: settings and their values, and how each changes a model.

The search runs `HEATS` in order. A heat crosses the values of its settings, each applied to the best model so far. A
setting is one of `_CHANGES`, or any option of `Model`; a new option of `Model` is a line in `HEATS`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain, product
from math import log10
from typing import Any

from streamtrain.model.features import MAX_DIM, Embedded, Uniform
from streamtrain.model.model import Model
from streamtrain.model.optimizers import FTRL, SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from streamtrain.python_source import as_python

Heat = Mapping[str, Sequence[Any]]

_STEP = 10**0.5
_DECADE = (0.1, 1 / _STEP, 1.0, _STEP, 10.0)
_AROUND = (1 / _STEP, 1.0, _STEP)
_CLOSE = (_STEP**-0.5, 1.0, _STEP**0.5)
_EMBEDDING_OPTIMIZERS = (Adagrad(decay=0.9995), RowWiseAdagrad(decay=0.9995), Adam(0.003), FTRL(0.3), SGD(0.1))
_DENSE_OPTIMIZERS = (Adagrad(0.03, 0.1, decay=0.999), Adam(0.001, beta1=0.0), Adam(0.001), SGD(0.03))

HEATS: tuple[Heat, ...] = (
    {"reduction": ("row_sum", "mean", "sum"), "embedding_rate": _DECADE},
    {"dense_rate": _DECADE},
    {"micro_batch_size": (2, 4, 8, 16, 64), "embedding_rate": _AROUND},
    {"embedding_optimizer": _EMBEDDING_OPTIMIZERS, "embedding_rate": _AROUND},
    {"dense_optimizer": _DENSE_OPTIMIZERS, "dense_rate": _AROUND},
    {"initial_accumulator": (1e-5, 1e-3, 0.1, 1.0)},
    {"decay": (1.0, 0.9999, 0.99)},
    {"dim": (0.25, 0.5, 2.0, 4.0)},
    {"init_scale": (0.1, 1 / _STEP, _STEP, 10.0)},
    {"embedding_rate": _CLOSE, "dense_rate": _CLOSE},
)
"""Settings and their values. Rates, dim and init_scale are factors of the best model's."""

NEVER = (
    "combinations of all settings: settings are varied in turn, each from the best so far",
    "other optimizers for features with their own: they keep their kind, and embedding_rate scales their rates",
    "betas, epsilon, l1 and l2 of optimizers",
    "layers of the graph, features, grids of numbers, combiners, min_count, loss weights",
)
"""What is never tried."""


_FIXED = ("schema", "graph", "loss", "loss_weights", "keep", "name")  # options of `Model` that define the task


def key(model: Model) -> tuple[str, ...]:
    """Identifies a model; equal for models that differ by a few percent of a rate only."""
    settings = [f"{name}={_coarse(value)}" for name, value in _options(model).items()]
    return (*settings, *(f"{feature.name}: {_coarse_feature(feature)}" for feature in model.schema.embedded))


def trials(heat: Heat, base: Model) -> Iterator[Model]:
    """Every combination of a heat's values, applied to `base`; values that do not apply leave it unchanged."""
    for values in product(*heat.values()):
        model = base
        for name, value in zip(heat, values, strict=True):
            model = _CHANGES.get(name, _option(name))(model, value)
        yield model


def extend_heat(heat: Heat, base: Model, best: Model) -> Heat | None:
    """The heat to continue with if the best model has an outermost rate of `heat`; None: it has not."""
    rates = {name: values for name, values in heat.items() if name.endswith("_rate")}
    for values in product(*heat.values()):
        chosen = dict(zip(heat, values, strict=True))
        is_outermost = any(chosen[name] in (rates[name][0], rates[name][-1]) for name in rates)
        if is_outermost and key(next(trials({name: [value] for name, value in chosen.items()}, base))) == key(best):
            return rates
    return None


def changes(given: Model, model: Model) -> dict[str, str]:
    """How a model differs from the given one, as Python: options of `Model`, then options of features.

    >>> changes(given, model)  # doctest: +SKIP
    {'embedding_optimizer': 'st.Adagrad(0.16)', 'user.dim': '32'}
    """
    before, after = _options(given), _options(model)
    changed = {name: as_python(value) for name, value in after.items() if repr(value) != repr(before.get(name))}
    for was, now in zip(given.schema.embedded, model.schema.embedded, strict=True):
        for field in fields(now):
            if (value := getattr(now, field.name)) != getattr(was, field.name):
                changed[f"{now.name}.{field.name}"] = as_python(value)
    return changed


def snippet(given: Model, model: Model) -> str:
    """Python to paste: the varied options of `Model`, and the changed ones of features."""
    changed = changes(given, model)
    varied = {*chain(*HEATS), *changed}
    lines = ["model = st.Model(", "    schema, graph, ...,"]
    lines += [f"    {name}={as_python(value)}," for name, value in _options(model).items() if name in varied]
    lines.append(")")
    features: dict[str, list[str]] = {}
    for name, value in changed.items():
        feature, _, option = name.rpartition(".")
        if feature:
            features.setdefault(feature, []).append(f"{option}={value}")
    kinds = {feature.name: type(feature).__name__ for feature in model.schema.embedded}
    lines += [f'st.{kinds[name]}("{name}", ..., {", ".join(options)})' for name, options in features.items()]
    return "\n".join(lines)


def _options(model: Model) -> dict[str, Any]:
    """Options of a model that can be varied, in the order of `Model`; without those of features."""
    names = [name for name in inspect.signature(Model).parameters if name not in _FIXED]
    return {name: getattr(model, name) for name in names}


def _coarse(value: object) -> str:
    """A value, with the rate of an optimizer rounded to a few percent."""
    if isinstance(value, Optimizer):
        return f"{replace(value, rate=1.0)!r} {round(20 * log10(value.rate))}"
    return repr(value)


def _coarse_feature(feature: Embedded) -> str:
    optimizer = "" if feature.optimizer is None else _coarse(feature.optimizer)
    return f"{replace(feature, optimizer=None)!r} {optimizer}"


SettingChange = Callable[[Model, Any], Model]


def _option(name: str) -> SettingChange:
    return lambda model, value: model.replace(**{name: value})


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _scaled(optimizer: Optimizer, factor: float) -> Optimizer:
    return optimizer if factor == 1 else replace(optimizer, rate=_rounded(optimizer.rate * factor))


def with_features(model: Model, change: Callable[[Any], dict[str, Any]]) -> Model:
    """The model with embedded features changed by the options that `change` returns for each."""
    features = [replace(f, **change(f)) if isinstance(f, Embedded) else f for f in model.schema.features]
    return model.replace(schema=replace(model.schema, features=features))


def _uses_default(model: Model) -> bool:
    return any(table.optimizer is None for table in model.schema.tables)


def _embedding_rate(given: Model, factor: float) -> Model:
    """Scales the rates of features with their own optimizer, too."""
    model = with_features(given, lambda f: {} if f.optimizer is None else {"optimizer": _scaled(f.optimizer, factor)})
    if _uses_default(model):
        model = model.replace(embedding_optimizer=_scaled(model.embedding_optimizer, factor))
    return model


def _embedding_optimizer(model: Model, optimizer: Optimizer) -> Model:
    return model.replace(embedding_optimizer=optimizer) if _uses_default(model) else model


def _dense_rate(model: Model, factor: float) -> Model:
    return model.replace(dense_optimizer=_scaled(model.dense_optimizer, factor))


def _accumulators(name: str) -> SettingChange:
    """Sets an option of all optimizers of rows that have it."""

    def change(given: Model, value: float) -> Model:
        def changed(optimizer: Optimizer) -> Optimizer:
            return replace(optimizer, **{name: value}) if hasattr(optimizer, name) else optimizer

        model = with_features(given, lambda f: {} if f.optimizer is None else {"optimizer": changed(f.optimizer)})
        if _uses_default(model):
            model = model.replace(embedding_optimizer=changed(model.embedding_optimizer))
        return model

    return change


def _dim(model: Model, factor: float) -> Model:
    """Scales the dim of all features; a dim of 1 is a weight and stays."""
    return with_features(model, lambda f: {} if f.dim == 1 else {"dim": min(MAX_DIM, max(2, round(f.dim * factor)))})


def _init_scale(model: Model, factor: float) -> Model:
    """Scales the initial values of tables with a uniform initializer."""
    tables = {table.name: table.init for table in model.schema.tables}

    def scaled(feature: Embedded) -> dict[str, Uniform]:
        init = tables[feature.table_name]
        return {"init": Uniform(_rounded(init.scale * factor))} if isinstance(init, Uniform) and init.scale else {}

    return with_features(model, scaled)


_CHANGES: dict[str, SettingChange] = {
    "embedding_rate": _embedding_rate,
    "embedding_optimizer": _embedding_optimizer,
    "dense_rate": _dense_rate,
    "initial_accumulator": _accumulators("initial_accumulator"),
    "decay": _accumulators("decay"),
    "dim": _dim,
    "init_scale": _init_scale,
}
