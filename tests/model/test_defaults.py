"""The defaults learn: README's model on real flights, beside a linear model that is learned sample by sample."""

import json
import zlib
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import keras
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import streamtrain as st
from streamtrain.demo.flights import IDS
from streamtrain.demo.stream import flights

COUNT = 60_000


@pytest.fixture(scope="module")
def messages() -> list[bytes]:
    return list(islice(chain.from_iterable(flights()), COUNT))


def graph(inputs: dict[str, Any]) -> Any:
    """README's."""
    x = keras.layers.Concatenate()(list(inputs.values()))
    x = keras.layers.Dense(64, "relu")(x)
    return keras.layers.Dense(1, "sigmoid")(x)


def auc_of(messages: list[bytes], batch_size: int) -> float:
    schema = st.Schema(label="label", time="ts", features=[st.Categorical(name, dim=16) for name in IDS])
    learner = st.Learner(st.Model(schema, graph, loss="binary_crossentropy"), batch_size=batch_size)
    learner.learn(messages)
    return learner.metrics()["label"].auc


def linear_auc(messages: list[bytes], rates: Sequence[float], bits: int = 18) -> float:
    """Logistic regression of hashed one-hot fields by AdaGrad: each sample is predicted, then learned, one by one.

    The best of some rates.
    """
    samples = [json.loads(message) for message in messages]
    labels = np.array([sample["label"] for sample in samples])
    hashed = np.array(
        [[zlib.crc32(f"{name}={sample[name]}".encode()) % (1 << bits) for name in IDS] for sample in samples]
    )
    hashed = np.column_stack([hashed, np.full(len(hashed), 1 << bits)])  # and a bias
    weights, sums = np.zeros(((1 << bits) + 1, len(rates))), np.full(((1 << bits) + 1, len(rates)), 1e-8)
    scores = np.empty((len(samples), len(rates)))
    for i, (at, label) in enumerate(zip(hashed, labels.tolist(), strict=True)):
        scores[i] = score = weights[at].sum(0)
        error = 1 / (1 + np.exp(-score)) - label
        sums[at] += error * error
        weights[at] -= np.array(rates) * error / np.sqrt(sums[at])
    return max(float(roc_auc_score(labels, one)) for one in scores.T)


def test_the_defaults_beat_a_linear_model_with_any_batch(messages: list[bytes]) -> None:
    linear = linear_auc(messages, (0.05, 0.1, 0.2))
    aucs = {batch_size: auc_of(messages, batch_size) for batch_size in (64, 256, 1024)}
    assert 0.6 < linear < 0.8, linear  # an oracle that does not learn would prove nothing
    assert min(aucs.values()) > linear + 0.02, (aucs, linear)
    assert max(aucs.values()) - min(aucs.values()) < 0.001, aucs
