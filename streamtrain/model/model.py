"""Model: a schema, a Keras graph over its features, a loss and the optimizers.

The graph never holds a table: it sees the rows that a batch pulled, so one Keras model is the training graph and the
inference graph, and no vocabulary size exists anywhere.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import random
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Planner
from streamtrain.errors import ConfigError
from streamtrain.model.default_graph import DeepAndWide, complete
from streamtrain.model.dense import DenseLayout, describe_mixes, describe_weights, find_output_bias
from streamtrain.model.features import MAX_MICRO_BATCH, Label, LabelKind, Numeric, is_count, is_number
from streamtrain.model.optimizers import Adagrad, Adam, Optimizer, ours
from streamtrain.model.sampling import Sampling
from streamtrain.model.schema import Schema
from streamtrain.model.spec import REDUCTIONS, Spec
from streamtrain.python_source import as_python, plain, schema_source

if TYPE_CHECKING:
    import keras

logger = logging.getLogger(__name__)

Loss = str | Callable[[Any, Any], Any]

# What each loss needs of its label. A loss that is not listed may be given as a callable.
LOSSES: dict[str, LabelKind] = {
    "binary_crossentropy": "binary",
    "fake_negative_weighted": "binary",
    "mean_squared_error": "real",
    "mean_absolute_error": "real",
    "huber": "real",
    "poisson": "count",
}

_CROSS_ENTROPY = ("binary_crossentropy", "fake_negative_weighted")
_LAYER_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")  # of a scope at the root of a TensorFlow graph
# Defaults that were others, by release, the latest first; a run keeps those with which it began.
_EARLIER_DEFAULTS: tuple[dict[str, Any], ...] = (
    {"embedding_optimizer": Adagrad(decay=0.999), "dense_optimizer": Adam(beta1=0.0)},
)
LARGE_WEIGHT = 65_536
"""Elements from which a step of a weight costs more than eight samples; docs/performance.md."""

_ACCUMULATED_STEPS, _ACCUMULATED_SAMPLES = 4, 32  # for one step of a large weight, at most; docs/quality.md
_FEW_WEIGHTS = 10_000  # which cost a step little whether they change or not
_BUILDING = threading.RLock()  # of graphs: one may build another
_KEPT_OTHERWISE = ("loss", "keep")  # options that are not attributes of the same name


class Model:
    """A schema, a Keras graph over its features, losses and optimizers.

    Args:
        schema: the fields of a sample and the features made of them.
        graph: called once with {feature name: Keras tensor}; returns the prediction `[batch, 1]`, or for several labels
            a mapping from label name to it. What its layers add to the loss, such as regularizers, counts in each step
            as in one of Keras; weights with a constraint are refused. None: a deep part over all features, with grids
            of numbers, and for one label weights of ids and of pairs of ids beside it (model/default_graph.py).
        loss: one of "binary_crossentropy" (the graph ends in a sigmoid), "fake_negative_weighted" (the same, for
            streams in which every sample is a negative first, and each positive follows as a second sample),
            "mean_squared_error", "mean_absolute_error", "huber", "poisson"; a Keras loss, whose values per sample are
            taken, whatever its reduction; or a callable of (labels [batch, 1], predictions [batch, 1]) that returns
            `[batch]`. For several labels a mapping from label name to loss, or one loss for all.
        embedding_optimizer: for the rows of all tables that name none of their own. Default: `Adagrad(decay=0.9995)`.
        dense_optimizer: for the weights of the graph: SGD, Adagrad or Adam. Default:
            `Adagrad(0.03, initial_accumulator=0.1, decay=0.999)`; without a graph, whose steps are of fewer samples,
            `decay=0.99975`.
        name: the name under which it is served.
        reduction: how the gradients of a step's samples are put together. "row_sum": those of rows are added up, as a
            row is touched by few of the samples, and those of the weights averaged; so one rate of each holds for any
            size. "mean": all are averaged over the step, as Keras does. "sum": all are added up.
        micro_batch_size: samples of a step. A larger batch is learned as a sequence of such steps, of which each sees
            the rows and weights that those before it have changed. "auto": 2 without a graph, otherwise 8. None: a
            whole batch is one step.
        dense_accumulation_steps: number of such steps in which the gradients of a large weight, of 65,536 elements or
            more, are added up for one step of its own, as that costs more than the samples; a batch ends it. "auto": 4,
            or as many as have 32 samples.
        loss_weights: factor of each label's loss; default 1.
        seed: of birth values and of the graph's initial weights. Building the graph sets Keras's and TensorFlow's
            global seed to it.
        keep: share of the samples that is learned from, by label, such as {0: 0.1} for a tenth of the negatives;
            predictions are corrected for it. For one label, with the loss "binary_crossentropy". Default: all.

    Raises:
        ConfigError: an option is wrong; the message names it. Errors of the graph show when it is first built.
    """

    def __init__(
        self,
        schema: Schema,
        graph: Callable[[dict[str, Any]], Any] | None = None,
        *,
        loss: Loss | Mapping[str, Loss] = "binary_crossentropy",
        embedding_optimizer: Optimizer | None = None,
        dense_optimizer: Optimizer | None = None,
        name: str = "model",
        reduction: Literal["row_sum", "mean", "sum"] = "row_sum",
        micro_batch_size: int | Literal["auto"] | None = "auto",
        dense_accumulation_steps: int | Literal["auto"] = "auto",
        loss_weights: Mapping[str, float] | None = None,
        seed: int = 0,
        keep: Mapping[int, float] | None = None,
    ) -> None:
        self.schema = complete(schema) if graph is None and isinstance(schema, Schema) else schema
        given = {"embedding_optimizer": embedding_optimizer, "dense_optimizer": dense_optimizer}
        self._defaulted = frozenset(name for name, one in given.items() if one is None)
        has_default_graph = graph is None or isinstance(graph, DeepAndWide)
        if micro_batch_size == "auto":
            self._defaulted |= {"micro_batch_size"}
            micro_batch_size = 2 if has_default_graph else 8  # docs/quality.md
        self.micro_batch_size = micro_batch_size
        self.dense_accumulation_steps = dense_accumulation_steps
        # Both follow a stream that drifts, and learn from one positive in thousands of samples (docs/quality.md).
        self.embedding_optimizer = Adagrad(decay=0.9995) if embedding_optimizer is None else embedding_optimizer
        if dense_optimizer is None:
            # A quarter of the samples in each step, so a fourth root: either remembers some 8,000 samples.
            dense_optimizer = Adagrad(0.03, 0.1, decay=0.99975 if has_default_graph else 0.999)
        self.dense_optimizer = dense_optimizer
        self.name = name
        self.reduction = reduction
        self.seed = seed
        if graph is not None and not callable(graph):
            raise ConfigError(f"graph must be a function of {{feature name: Keras tensor}}, not {graph!r}")
        self._check_options()
        names = [label.name for label in schema.labels]
        self.losses = {name: _of_keras(one) for name, one in _per_label("loss", loss, names).items()}
        self.loss_weights = _per_label("loss_weights", 1.0 if loss_weights is None else {**loss_weights}, names)
        for label, factor in self.loss_weights.items():
            if not is_number(factor) or not math.isfinite(factor):
                raise ConfigError(f"loss_weights: the one of {label!r} must be a finite number, not {factor!r}")
        self.labels = tuple(_resolve(label, self.losses[label.name]) for label in schema.labels)
        self.graph = DeepAndWide(self.schema, self.labels) if graph is None else graph
        self.sampling = None if keep is None else Sampling(keep)
        if self.sampling and [*self.losses.values()] != ["binary_crossentropy"]:
            raise ConfigError('keep is for models of one label with the loss "binary_crossentropy"')
        self.traced: dict[str, Any] = {}  # what `Step` and `MicroStep` trace, for all learners of this model

    def __getstate__(self) -> dict[str, Any]:
        """Without what is traced, which can be neither pickled nor copied."""
        return self.__dict__ | {"traced": {}}

    def replace(self, **options: Any) -> Model:
        """The same model with other options, like `dataclasses.replace`; its graph is rebuilt.

        Args:
            options: those of `Model` that change, by name.

        Raises:
            ConfigError: an option is wrong.
        """
        return Model(**(self._given() | options))

    def _given(self) -> dict[str, Any]:
        """All options, without those that are as they are by default."""
        names = {*inspect.signature(Model).parameters}.difference(_KEPT_OTHERWISE, self._defaulted)
        given = {name: getattr(self, name) for name in names}
        return given | {"loss": self.losses, "keep": self.sampling and self.sampling.rates}

    def source(self, title: str) -> str:
        """A model file that has this model, with the graph that it has by default as Python to change.

        Args:
            title: of the file, in one line.

        Raises:
            ConfigError: the graph is one of its own, or a loss is.
        """
        if not isinstance(self.graph, DeepAndWide):
            raise ConfigError("the model has a graph of its own, which stands in its file")
        given = self._given() | {name: getattr(self, name) for name in ("dense_optimizer", "micro_batch_size")}
        losses = {*given["loss"].values()}
        if own := [name for name, one in given["loss"].items() if not isinstance(one, str)]:
            raise ConfigError(f"the loss of {own[0]!r} cannot be written down: give the model one that has a name")
        if len(losses) == 1:
            [given["loss"]] = losses
        if {*self.loss_weights.values()} == {1.0}:
            del given["loss_weights"]
        options = [
            f"    {name}={as_python(given[name])},\n"
            for name, one in inspect.signature(Model).parameters.items()
            if one.kind is one.KEYWORD_ONLY and name in given and given[name] != one.default
        ]
        return (
            f'"""{plain(title)}"""\n\nimport keras\n\nimport streamtrain as st\n\n{schema_source(self.schema, {})}\n\n'
            f"{self.graph.source()}\n\nmodel = st.Model(\n    schema,\n    graph,\n{''.join(options)})\n"
        )

    def with_defaults_of(self, learned: Spec) -> Model:
        """This model as a run began with it: with the defaults of an earlier release, if those make it fit.

        Args:
            learned: what the run has learned.

        Returns:
            The model that fits; this one, if none does.
        """
        wanted = Spec.of(self)
        for earlier in _EARLIER_DEFAULTS if wanted.identity != learned.identity else ():
            changed = {name: value for name, value in earlier.items() if name in self._defaulted}
            if changed and Spec.of(other := self.replace(**changed)).identity == learned.identity:
                logger.info(
                    "the run began with the defaults of an earlier release, and keeps them: %s; `streamtrain evolve` "
                    "gives what it has learned to the model with those of this release",
                    ", ".join(f"{name}={value}" for name, value in changed.items()),
                )
                return other
        return self

    def named(self, name: str) -> Model:
        """This model under another name, with the same graph; see `replace` for one of its own.

        Raises:
            ConfigError: the name is wrong.
        """
        other = copy.copy(self)
        other.name, other.traced = name, self.traced
        other._check_options()
        return other

    def _check_options(self) -> None:
        if not isinstance(self.schema, Schema):
            raise ConfigError(f"schema must be a Schema, not {self.schema!r}")
        if not isinstance(self.embedding_optimizer, Optimizer):
            raise ConfigError(f"embedding_optimizer must be {ours(self.embedding_optimizer)}")
        if not isinstance(self.dense_optimizer, Optimizer) or not self.dense_optimizer.for_dense:
            raise ConfigError(f"dense_optimizer must be {ours(self.dense_optimizer, ('SGD', 'Adagrad', 'Adam'))}")
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {self.reduction!r}")
        if self.micro_batch_size is not None and not is_count(self.micro_batch_size, MAX_MICRO_BATCH):
            raise ConfigError(
                f'micro_batch_size must be 1 to {MAX_MICRO_BATCH}, "auto" or None, not {self.micro_batch_size!r}'
            )
        if self.dense_accumulation_steps != "auto" and not is_count(self.dense_accumulation_steps, MAX_MICRO_BATCH):
            raise ConfigError(
                f'dense_accumulation_steps must be 1 to {MAX_MICRO_BATCH} or "auto", not '
                f"{self.dense_accumulation_steps!r}"
            )
        if not isinstance(self.name, str) or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"name must consist of letters, digits, - and _, not {self.name!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed must be an integer, not {self.seed!r}")

    @cached_property
    def keras(self) -> keras.Model:
        """The Keras model over the features; built, with TensorFlow loaded, on first use.

        Raises:
            ConfigError: the graph's output does not fit the labels.
        """
        import keras

        if keras.backend.backend() != "tensorflow":
            raise ConfigError(f"Keras runs on {keras.backend.backend()!r}; set KERAS_BACKEND=tensorflow")
        try:
            with _seeded(self.seed % 2**32):
                inputs = {
                    name: keras.Input(shape, dtype=dtype, name=name) for name, (shape, dtype) in self._inputs().items()
                }
                outputs = self.graph(dict(inputs))
        except Exception as exc:
            raise ConfigError(describe_failure("graph", exc)) from exc
        outputs = self._outputs(outputs)
        try:
            model = keras.Model(inputs, outputs, name=self.name)
        except Exception as exc:  # such as layers of one name
            raise ConfigError(describe_failure("graph", exc)) from exc
        for layer in model.layers:
            if layer.name not in inputs and not _LAYER_NAME.fullmatch(layer.name):
                raise ConfigError(
                    f"graph: a layer is named {layer.name!r}, but TensorFlow takes letters and digits of ASCII, and "
                    "after the first also _ . - and >"
                )
        return model

    def _inputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape without the batch and dtype of every input, in the order of the features."""
        inputs: dict[str, tuple[tuple[int, ...], str]] = {}
        for one in self.schema.features:
            if isinstance(one, Numeric):
                inputs[one.name] = ((1,), "float32")
                if one.cells:
                    inputs[one.cells.name] = ((one.cells.dim,), "float32")
            elif one.combiner is None:
                assert one.max_length is not None
                inputs[one.name] = ((one.max_length, one.dim), "float32")
                inputs[f"{one.name}_mask"] = ((one.max_length,), "bool")
            else:
                inputs[one.name] = ((one.dim,), "float32")
        return inputs

    def _outputs(self, outputs: Any) -> dict[str, Any]:
        names = [label.name for label in self.labels]
        if not isinstance(outputs, Mapping):
            listed = list(outputs) if isinstance(outputs, Sequence) else [outputs]
            if len(listed) != len(names):
                raise ConfigError(f"graph returns {len(listed)} outputs for the labels {names}")
            outputs = dict(zip(names, listed, strict=True))
        if set(outputs) != set(names):
            raise ConfigError(f"graph returns outputs named {sorted(outputs)}, but the labels are {names}")
        for name, output in outputs.items():
            if tuple(getattr(output, "shape", ())) != (None, 1):
                shape = getattr(output, "shape", None)
                raise ConfigError(
                    f"graph: the output for {name!r} must be a Keras tensor [batch, 1], not of shape {shape}"
                )
        return {name: outputs[name] for name in names}

    @cached_property
    def dense(self) -> DenseLayout:
        """The layout of the graph's trainable weights in the flat dense vector."""
        weights = self.keras.trainable_variables
        for weight in weights:
            if weight.dtype != "float32":
                raise ConfigError(f"graph: weight {weight.path!r} is {weight.dtype}; trainable weights must be float32")
            if weight.constraint is not None:
                raise ConfigError(
                    f"graph: weight {weight.path!r} has the constraint {type(weight.constraint).__name__}, but shards "
                    "change weights without it; make the graph use a function of the weight that keeps to it, such as "
                    "keras.ops.softplus for weights that must not be negative"
                )
        return DenseLayout(tuple(w.path for w in weights), tuple(tuple(w.shape) for w in weights))

    @property
    def accumulated_steps(self) -> int:
        """Micro-batches for one step of the large weights."""
        if self.dense_accumulation_steps != "auto":
            return self.dense_accumulation_steps
        return min(max(_ACCUMULATED_SAMPLES // (self.micro_batch_size or _ACCUMULATED_SAMPLES), 1), _ACCUMULATED_STEPS)

    @cached_property
    def output_biases(self) -> dict[str, int]:
        """Where in the flat dense vector the bias of each output of cross entropy is, by label.

        Outputs without one, such as those of a layer of one's own, are missing.
        """
        weights = self.keras.trainable_variables
        starts = dict(zip(map(id, weights), accumulate(self.dense.sizes, initial=0), strict=False))
        found = {
            label: starts.get(id(find_output_bias(output)))
            for label, output in self.keras.output.items()
            if self.losses[label] in _CROSS_ENTROPY
        }
        return {label: start for label, start in found.items() if start is not None}

    @cached_property
    def statistics_variables(self) -> list[Any]:
        """The graph's non-trainable float weights that layers such as batch norm keep, without those of `constants`."""
        constants = {id(one) for one in self.constants}
        return [w for w in self.keras.non_trainable_variables if w.dtype == "float32" and id(w) not in constants]

    @cached_property
    def constants(self) -> list[Any]:
        """The graph's non-trainable float weights that no step changes, such as pretrained vectors, if they are many.

        They are the model file's: shards do not keep them, and nothing sends them.
        """
        weights = [w for w in self.keras.non_trainable_variables if w.dtype == "float32"]
        if sum(math.prod(one.shape) for one in weights) <= _FEW_WEIGHTS:
            return []
        changed = changed_in_training(self.keras)
        return [one for one in weights if id(one) not in changed]

    @cached_property
    def statistics(self) -> DenseLayout:
        """The layout of the graph's non-trainable float weights in the flat vector of statistics."""
        weights = self.statistics_variables
        return DenseLayout(tuple(w.path for w in weights), tuple(tuple(w.shape) for w in weights))

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the parts of the model stand for; see `Spec.about`."""
        labels = [label.name for label in self.labels]
        embedding = self.embedding_optimizer.settings()
        about = self.schema.about() | {"embedding_optimizer": {name: embedding[name] for name in ("optimizer", "rate")}}
        parts = {"weights": self.keras.trainable_variables, "statistics": self.statistics_variables}
        parts |= {"constants": self.constants} if self.constants else {}
        for name, variables in parts.items():
            about[name] = [asdict(one) for one in describe_weights(self.keras, labels, variables)]
        about["mixes"] = [asdict(one) for one in describe_mixes(self.keras, labels)]
        decoded: dict[str, Any] = json.loads(json.dumps(about))
        return decoded

    def initial_parameters(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """First values of the weights, float32 [P], and of the statistics, float32 [S]."""
        weights, statistics = self.keras.trainable_variables, self.statistics_variables
        return (
            self.dense.flatten([one.numpy() for one in weights]),
            self.statistics.flatten([one.numpy() for one in statistics]),
        )

    def planner(self, shards: int) -> Planner:
        """A planner of batches for tables that are split over `shards` shards."""
        index = {table.name: i for i, table in enumerate(self.schema.tables)}
        return Planner(
            [(index[one.table_name], one.combiner or "none", one.max_length or 0) for one in self.schema.embedded],
            [table.dim for table in self.schema.tables],
            shards,
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """What is drawn goes by a seed; afterwards the generators of the process are what they were.

    Keras draws the seeds of initializers from Python's generator, from which any thread may draw at any moment, such as
    a client that pauses between two attempts. So meanwhile it has one of its own, and graphs are built one at a time.
    """
    import keras

    seeds: Any = sys.modules.get("keras.src.random.seed_generator")
    with _BUILDING:
        states = random.getstate(), np.random.get_state()
        keras.utils.set_random_seed(seed)
        if has_own := hasattr(seeds, "python_random"):
            seeds.python_random = random.Random(seed)
        try:
            yield
        finally:
            if has_own:
                seeds.python_random = random
            random.setstate(states[0])
            np.random.set_state(states[1])


def loss_function(loss: Loss) -> Callable[[Any, Any], Any]:
    """The function of (labels [batch, 1], predictions [batch, 1]) that a model's loss stands for."""
    import keras

    if callable(loss):
        return loss
    if loss == "fake_negative_weighted":
        return fake_negative_weighted
    function: Callable[[Any, Any], Any] = getattr(keras.losses, loss)
    return function


def fake_negative_weighted(labels: Any, predictions: Any) -> Any:
    """Cross-entropy for streams in which every sample is a negative first, and each positive follows as a second one.

    Of a true rate p, that stream has positives at the rate p / (1 + p). Weights of (1 + f) for positives and
    (1 - f)(1 + f) for negatives, with the prediction f as a constant, make the expected gradient that of the
    cross-entropy to p, times (1 - f^2) / (1 + p). So predictions converge to p, and need no correction (Ktena et al.,
    "Addressing Delayed Feedback for Continuous Training with Neural Networks in CTR prediction", RecSys 2019).

    Args:
        labels: float32 [batch, 1], 0 or 1.
        predictions: float32 [batch, 1], probabilities.

    Returns:
        float32 [batch]. Its gradient is what counts: its value may be smaller for worse predictions.
    """
    import keras

    fixed = keras.ops.stop_gradient(predictions)
    weights = (1 + fixed) * (1 - (1 - labels) * fixed)
    return weights[:, 0] * keras.losses.binary_crossentropy(labels, predictions)


def fake_negative_likelihood(labels: Any, predictions: Any) -> Any:
    """Cross-entropy to f / (1 + f), the rate of positives in a stream with fake negatives, if f is the true one.

    It has the minimum of `fake_negative_weighted`, but is also a measure to compare predictions by.

    Args:
        labels: float32 [batch, 1], 0 or 1.
        predictions: float32 [batch, 1], probabilities.

    Returns:
        float32 [batch].
    """
    import keras

    return keras.losses.binary_crossentropy(labels, predictions / (1 + predictions))


_PACKAGE = Path(__file__).parent.parent
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_INSTALLED = {"site-packages", "dist-packages"}


def own_frames(exc: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error that are in code of the user: neither here, nor in Python or an installed package."""
    frames = traceback.extract_tb(exc.__traceback__)
    paths = [Path(frame.filename) for frame in frames]
    return [
        frame
        for frame, path in zip(frames, paths, strict=True)
        if not frame.filename.startswith("<")
        and not _INSTALLED & {*path.parts}
        and not path.is_relative_to(_PACKAGE)
        and not path.is_relative_to(_LIBRARY)
    ]


def describe_failure(what: str, exc: Exception) -> str:
    """An error in the user's code, with the lines of that code that led to it."""
    lines = traceback.format_list(own_frames(exc))
    if isinstance(exc, SyntaxError):
        lines += traceback.format_exception_only(exc)[:-1]
        exc = type(exc)(exc.msg)
    where = "".join(lines).rstrip()
    return f"{what} fails with {type(exc).__name__}: {exc}" + (f"\n{where}" if where else "")


def _per_label(option: str, given: Any, names: list[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    for name in given:
        if name not in names:
            raise ConfigError(f"{option} names {name!r}, which is not a label; the labels are {names}")
    if option == "loss":
        for name in names:
            if name not in given:
                raise ConfigError(f"loss is missing for label {name!r}")
    return {name: given.get(name, 1.0) for name in names}


def _of_keras(loss: Any) -> Any:
    """A loss of Keras by its name if that means the same, else as a function of values per sample; others as given."""
    losses = _imported_losses()
    if losses is None:
        return loss

    def settings(of: Any) -> dict[str, Any]:
        return {name: value for name, value in of.get_config().items() if name not in ("name", "reduction", "dtype")}

    for name in LOSSES:
        kind = getattr(losses, name.title().replace("_", ""), None)
        is_plain = kind is not None and type(loss) is kind and settings(loss) == settings(kind())
        if is_plain or (callable(loss) and loss is getattr(losses, name, None)):
            return name
    return loss.call if isinstance(loss, losses.Loss) else loss


def _imported_losses() -> Any:
    """Those of Keras; None: nobody can have one, as nobody has imported it, or another thread is still at it."""
    return getattr(sys.modules.get("keras"), "losses", None)


def _kind_of_label(loss: Any) -> LabelKind:
    """What a callable's label is unless the schema says it."""
    losses, given = _imported_losses(), getattr(loss, "__self__", None)
    if losses is None or not isinstance(given, losses.BinaryCrossentropy | losses.BinaryFocalCrossentropy):
        return "real"
    return "real" if given.get_config()["from_logits"] else "binary"


def _resolve(label: Label, loss: Loss) -> Label:
    if callable(loss):
        return replace(label, kind=label.kind or _kind_of_label(loss))
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ConfigError(f"loss must be one of {', '.join(LOSSES)} or a callable, not {loss!r}")
    if label.kind not in (None, LOSSES[loss]):
        raise ConfigError(f"label {label.name!r} is {label.kind}, but loss {loss!r} needs it to be {LOSSES[loss]}")
    return replace(label, kind=LOSSES[loss])


def changed_in_training(model: keras.Model) -> set[int]:
    """By id, the non-trainable weights that a step in training changes. Traces the graph."""
    import tensorflow as tf

    trainable, state = model.trainable_variables, model.non_trainable_variables
    changed: set[int] = set()

    def step(trainable_: list[Any], state_: list[Any], inputs: dict[str, Any]) -> None:
        _, after = model.stateless_call(trainable_, state_, inputs, training=True)
        changed.update(id(one) for one, was, now in zip(state, state_, after, strict=True) if now is not was)

    weights = [[tf.TensorSpec(one.shape, one.dtype) for one in of] for of in (trainable, state)]
    inputs = {one.name: tf.TensorSpec(one.shape, one.dtype) for one in model.inputs}
    try:
        tf.function(step, autograph=False).get_concrete_function(*weights, inputs)
    except Exception as exc:
        raise ConfigError(describe_failure("graph", exc)) from exc
    return changed
