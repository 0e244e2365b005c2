"""A worker compiles its graph before it has partitions: for the batches that it is going to learn."""

import pytest

import streamtrain as stm
from streamtrain.stream.formats.factory import JsonFormat
from streamtrain.testing.stream import MemoryStream
from streamtrain.train.step import Step
from streamtrain.train.warmup import Warmup
from tests.train.test_micro import assert_same, make, stream


def test_the_first_batch_is_not_compiled_for() -> None:
    samples, model = stream(128, seed=11), make("Adam", "Adam", "row_sum", 8)
    topic = MemoryStream.of({0: samples[:64], 1: samples[64:]})
    graphs = Warmup(model, Step(model), topic, JsonFormat(model), 64).graphs()
    compiled = dict(graphs.compiled)
    assert len(compiled) == 1
    ahead, alone = stm.Learner(model, batch_size=64, graphs=graphs), stm.Learner(model, batch_size=64)
    for one in (ahead, alone):
        one.learn(samples)
    assert_same(ahead, alone)
    assert graphs.compiled == compiled


@pytest.mark.parametrize("topic", [MemoryStream(), MemoryStream.of({0: []}), MemoryStream.of({0: ["{"] * 99})])
def test_a_topic_that_says_nothing_is_waited_for(topic: MemoryStream) -> None:
    model = make("Adam", "Adam", "row_sum", 8)
    assert not Warmup(model, Step(model), topic, JsonFormat(model), 64).graphs().compiled
