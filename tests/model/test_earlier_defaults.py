"""A run that began with the defaults of an earlier release keeps them."""

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import streamtrain as st
from streamtrain.errors import CheckpointError
from streamtrain.model.spec import Spec

EARLIER = {"embedding_optimizer": st.Adagrad(decay=0.999), "dense_optimizer": st.Adam(beta1=0.0)}


def graph(inputs: dict[str, Any]) -> Any:
    return keras.layers.Dense(1, "sigmoid")(inputs["user"])


def make(**options: Any) -> st.Model:
    return st.Model(st.Schema(features=[st.Categorical("user", dim=4)]), graph, **options)


def test_a_checkpoint_of_before_is_continued_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = [{"user": i % 7, "label": int(i % 3 == 0)} for i in range(100)]
    begun = st.Learner(make(**EARLIER))
    begun.learn(given)
    begun.save(tmp_path / "saved")
    with caplog.at_level(logging.INFO):
        again = st.Learner.load(tmp_path / "saved", make())
    assert (again.model.embedding_optimizer, again.model.dense_optimizer) == tuple(EARLIER.values())
    assert "the run began with the defaults of an earlier release, and keeps them" in caplog.text
    np.testing.assert_array_equal(again.predict(given), begun.predict(given))
    evolved = st.Learner.load(tmp_path / "saved", make(), evolve=True)
    assert evolved.model.dense_optimizer == make().dense_optimizer


def test_what_the_model_file_says_is_no_default(tmp_path: Path) -> None:
    st.Learner(make(**EARLIER)).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="dense_optimizer"):
        st.Learner.load(tmp_path / "saved", make(dense_optimizer=st.Adagrad(0.03, 0.1, decay=0.999)))


def test_a_model_that_fits_otherwise_is_left_alone() -> None:
    model = make()
    assert model.with_defaults_of(Spec.of(model)) is model
    assert model.with_defaults_of(Spec.of(make(seed=5))) is model
    kept = make(embedding_optimizer=st.FTRL(0.1)).with_defaults_of(
        Spec.of(make(embedding_optimizer=st.FTRL(0.1), dense_optimizer=st.Adam(beta1=0.0)))
    )
    assert kept.embedding_optimizer == st.FTRL(0.1)
    assert kept.dense_optimizer == st.Adam(beta1=0.0)
    assert kept.replace(seed=3).dense_optimizer == st.Adam(beta1=0.0)
