"""The two workloads that all step benchmarks share.

W1: 26 ids from vocabularies of 1M each, Zipf(1.05), rows of 16 floats, 13 numbers, a network 256-128-1, batch 1024.
W2: one id from a vocabulary of 5M, Zipf(1.05), rows of 128 floats, a network 64-1, batch 64 or 1024.

Ids are scattered over their vocabulary, labels are random with 25% positives: only speed is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ZIPF = 1.05
SCATTER = 387_420_489  # coprime to the vocabularies: rank -> scattered id
POSITIVES = 0.25


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


WORKLOADS = {
    "w1": Workload(ids=26, vocabulary=1_000_000, numbers=13, dim=16, hidden=(256, 128)),
    "w2": Workload(ids=1, vocabulary=5_000_000, numbers=0, dim=128, hidden=(64,)),
}


def columns(batch: tuple[NDArray[Any], ...]) -> dict[str, NDArray[Any]]:
    """A batch as the columns of the model's fields."""
    ids, numbers, labels = batch
    named = {f"id{i}": np.ascontiguousarray(ids[:, i]) for i in range(ids.shape[1])}
    named |= {f"number{i}": np.ascontiguousarray(numbers[:, i]) for i in range(numbers.shape[1])}
    return named | {"label": labels[:, 0].copy()}


def model(workload: Workload) -> Any:
    """The workload's streamtrain model; all ids share one table, as the peers' do."""
    import keras

    import streamtrain as st

    def graph(inputs: dict[str, Any]) -> Any:
        tensors = list(inputs.values())
        x = keras.layers.Concatenate()(tensors) if len(tensors) > 1 else tensors[0]
        for width in workload.hidden:
            x = keras.layers.Dense(width, activation="relu")(x)
        return keras.layers.Dense(1, activation="sigmoid")(x)

    features: Sequence[Any] = [
        *(st.Categorical(f"id{i}", dim=workload.dim, table="ids") for i in range(workload.ids)),
        *(st.Numeric(f"number{i}") for i in range(workload.numbers)),
    ]
    return st.Model(
        st.Schema(features=features), graph, embedding_optimizer=st.Adagrad(0.05), dense_optimizer=st.Adam(1e-3)
    )
