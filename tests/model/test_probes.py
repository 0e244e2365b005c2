"""Probes: samples of the stream that servers try what they serve with; whatever bytes are in their place."""

import math

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamtrain as stm
from streamtrain.model.batch import Batch
from streamtrain.model.samples import SampleReader
from streamtrain.quality.probes import MOST_BYTES, MOST_SAMPLES, decode_probes, encode_probes
from tests import models


def _graph(inputs: dict[str, keras.KerasTensor]) -> keras.KerasTensor:
    pooled = [inputs["user"], keras.layers.Flatten()(inputs["last"]), inputs["price"]]
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(pooled))


MODEL = models.make(
    [
        stm.Categorical("user", dim=2),
        stm.Categorical("last", dim=2, combiner=None, max_length=3, default="none"),
        stm.Numeric("price", default=0.0),
    ],
    _graph,
)
SCHEMA = MODEL.schema


def batch_of(count: int, ids: int = 2) -> Batch:
    given = [{"user": [f"u{n}-{i}" for i in range(n % ids)], "last": ["a"] * (n % 4), "price": n} for n in range(count)]
    return next(SampleReader(MODEL, with_labels=False).batches(given, count))[0]


def finite(batch: Batch) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.zeros((len(batch), 1), np.float32)


def assert_same(one: Batch | None, other: Batch) -> None:
    assert one is not None
    for name in ("keys", "starts", "offsets", "numeric"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert getattr(one, name).dtype == getattr(other, name).dtype


def test_they_are_read_as_they_were_written() -> None:
    batch = batch_of(10)
    group = encode_probes(SCHEMA, batch, finite(batch))
    assert_same(decode_probes(SCHEMA, [group], 100), batch)
    assert b"u1-0" not in group  # ids are not in it, only their keys
    rows = np.arange(10)
    assert_same(decode_probes(SCHEMA, [group], 4), batch.select(rows < 4))
    two = [encode_probes(SCHEMA, half, finite(half)) for half in (batch.select(rows < 6), batch.select(rows >= 6))]
    assert_same(decode_probes(SCHEMA, two, 10), batch)
    assert_same(decode_probes(SCHEMA, [b"", two[0], b"\xc1", two[1]], 7), batch.select(rows < 7))


def test_they_are_the_last_that_were_predicted_with_finite_numbers() -> None:
    batch = batch_of(100)
    predictions = finite(batch)
    predictions[::2] = math.nan
    expected = batch.select(np.arange(100) % 2 == 1)
    assert_same(decode_probes(SCHEMA, [encode_probes(SCHEMA, batch, predictions)], 1000), expected)
    many = batch_of(300)
    last = many.select(np.arange(300) >= 300 - MOST_SAMPLES)
    assert_same(decode_probes(SCHEMA, [encode_probes(SCHEMA, many, finite(many))], 1000), last)
    assert encode_probes(SCHEMA, batch, np.full_like(predictions, math.nan)) == b""


def test_of_large_samples_there_are_fewer() -> None:
    long = SampleReader(MODEL, with_labels=False)
    given = [{"user": [f"{n}-{i}" for i in range(3000)]} for n in range(20)]
    large = next(long.batches(given, 20))[0]
    group = encode_probes(SCHEMA, large, finite(large))
    assert 0 < len(group) < MOST_BYTES
    assert_same(decode_probes(SCHEMA, [group], 100), large.select(np.arange(20) >= 15))
    too_large = next(long.batches([{"user": [str(i) for i in range(17_000)]}], 1))[0]
    assert encode_probes(SCHEMA, too_large, finite(too_large)) == b""


def test_of_another_schema_there_are_none() -> None:
    other = models.make([stm.Categorical("user", dim=2)], lambda inputs: keras.layers.Dense(1)(inputs["user"]))
    batch = batch_of(3)
    assert decode_probes(other.schema, [encode_probes(SCHEMA, batch, finite(batch))], 10) is None


@given(st.data())
def test_any_bytes_are_left_out_or_can_be_predicted(data: st.DataObject) -> None:
    batch = batch_of(5)
    group = bytearray(encode_probes(SCHEMA, batch, finite(batch)))
    for _ in range(data.draw(st.integers(1, 4))):
        group[data.draw(st.integers(0, len(group) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(group)))
    found = decode_probes(SCHEMA, [bytes(group[:cut]), bytes(group)], 10)
    if found is not None:
        assert np.isfinite(found.numeric).all()
        assert np.diff(found.offsets, axis=1).min() >= 0
        assert found.starts[-1] == len(found.keys)
        assert np.diff(found.offsets[1]).max() <= 3
        MODEL.planner(1).plan(found.keys, found.starts, found.offsets, found.times)


@pytest.mark.parametrize("bytes_", [b"\x95" + b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\x95\xa1a\xcf" + b"\xff" * 8])
def test_hostile_bytes_take_nothing(bytes_: bytes) -> None:
    assert decode_probes(SCHEMA, [bytes_], 10) is None
