"""Comparison of two models: what the interval promises, and what is said where there is nothing to compare."""

import numpy as np
import pytest

from streamtrain.errors import ConfigError, PublicationError
from streamtrain.quality.blocks import Slices
from streamtrain.quality.comparison import (
    FEWEST_BLOCKS,
    LabelComparison,
    compare_blocks,
    confidence_sequence,
    read_blocks,
)
from streamtrain.store.redis.blocks import RedisBlocks
from streamtrain.store.redis.server import RedisServer
from tests.cluster.compared import LOG, blocks, model
from tests.stream.redis_fixtures import valkey

__all__ = ["valkey"]


def alarms(draws: np.ndarray) -> float:
    """Share of comparisons, a row each, that ever claim a difference, looked at after every block."""
    count = draws.shape[1]
    ever = np.zeros(len(draws), bool)
    for row, values in enumerate(draws):
        for seen in range(FEWEST_BLOCKS, count + 1):
            _, low, high = confidence_sequence(values[:seen], np.ones(seen))
            if not low <= 0 <= high:
                ever[row] = True
                break
    return float(ever.mean())


def test_of_a_thousand_comparisons_without_a_difference_at_most_one_in_twenty_ever_alarms() -> None:
    assert alarms(np.random.default_rng(0).normal(size=(1000, 120))) <= 0.05


def test_heavy_tails_do_not_alarm_more_often() -> None:
    assert alarms(np.random.default_rng(1).standard_t(3, size=(300, 100))) <= 0.05


def test_a_difference_is_found_and_lies_in_the_interval() -> None:
    draws = np.random.default_rng(2).normal(0.3, 1.0, 2000)
    mean, low, high = confidence_sequence(draws, np.ones(2000))
    assert 0 < low < 0.3 < high
    assert mean == pytest.approx(draws.mean())
    assert high - low < 0.4


def test_the_interval_is_that_of_the_paper() -> None:
    """Theorem 2.2 of arXiv:2103.06476 by hand, of 400 uncorrelated values with deviation 1."""
    values = np.tile([1.0, -1.0], 200)  # neighbours differ, so the long-run deviation is the smaller one
    mean, low, high = confidence_sequence(values, np.ones(400), tuned_for=400)
    rho2 = (-2 * np.log(0.05) + np.log(-2 * np.log(0.05) + 1)) / 400
    margin = np.sqrt(2 * (400 * rho2 + 1) / (400**2 * rho2) * np.log(np.sqrt(400 * rho2 + 1) / 0.05))
    assert (mean, low, high) == pytest.approx((0.0, -margin * np.sqrt(400 / 399), margin * np.sqrt(400 / 399)))


def test_weights_make_it_the_mean_of_samples() -> None:
    assert confidence_sequence(np.array([1.0, 4.0]), np.array([3.0, 1.0])).mean == pytest.approx(7 / 4)
    assert confidence_sequence(np.empty(0), np.empty(0)).low == -np.inf


def test_the_better_model_is_named() -> None:
    good, bad = blocks("good", range(40)), blocks("bad", range(40), 1.0)
    (result,) = compare_blocks(bad, good).results
    assert (result.label, result.slice, result.blocks) == ("click", "", 40)
    assert result.sentence("bad", "good").startswith("good is better by 0.")
    assert result.difference.mean == pytest.approx(result.ours.log_loss - result.theirs.log_loss)
    assert result.ours.calibration > result.theirs.calibration
    assert result.ours.auc == pytest.approx(result.theirs.auc, abs=0.003)  # both order samples in the same way
    assert compare_blocks(good, bad).results[0].sentence("good", "bad").startswith("good is better by 0.")
    sliced = compare_blocks(bad, good, slice_of="country").results
    assert [(one.slice, one.ours.samples) for one in sliced] == [("", 4000), ("country=DE", 2000)]


def test_a_model_is_not_better_than_itself() -> None:
    (result,) = compare_blocks(blocks("a", range(40)), blocks("b", range(40))).results
    assert result.sentence("a", "b") == "no difference: the losses of both are the same in every block"


def test_little_says_so() -> None:
    (result,) = compare_blocks(blocks("a", range(5)), blocks("b", range(3, 40), 1.0)).results
    assert result.sentence("a", "b") == "no difference yet: 2 blocks in common, and an interval needs 16"
    assert result.to_json("a", "b")["low"] is None


def test_an_interval_with_0_in_it_says_so() -> None:
    found: LabelComparison = compare_blocks(blocks("a", range(40)), blocks("b", range(40), 0.02)).results[0]
    assert found.sentence("a", "b").startswith("no difference yet: the interval contains 0 (-0.0")


def test_the_last_ones() -> None:
    ours, theirs = blocks("a", range(40)), blocks("b", range(40), 1.0)
    assert [number for _, number in compare_blocks(ours, theirs, last_blocks=3).places] == [37, 38, 39]
    assert [number for _, number in compare_blocks(ours, theirs, last_seconds=4).places] == [35, 36, 37, 38, 39]
    with pytest.raises(ConfigError, match=r"no label 'buy' that both models have: they have click"):
        compare_blocks(ours, theirs, label="buy")
    with pytest.raises(ConfigError, match=r"no slice of 'device' that both models have: they have country=DE"):
        compare_blocks(ours, theirs, slice_of="device")


def test_nothing_to_compare_says_why() -> None:
    with pytest.raises(PublicationError, match=r"a has offsets 0 to 499 of partition 0; b has 700 to 999 of partition"):
        compare_blocks(blocks("a", range(5)), blocks("b", range(7, 10)))
    with pytest.raises(PublicationError, match=r"a learns from topic clicks \(x1\), and b from topic clicks \(x2\)"):
        compare_blocks(blocks("a", range(5)), blocks("b", range(5), log=LOG._replace(id="x2")))
    with pytest.raises(PublicationError, match=r"a has blocks of 100 offsets and b of 200; set compare\.block"):
        compare_blocks(blocks("a", range(5)), blocks("b", range(5), log=LOG._replace(size=200)))


def test_redis_keeps_the_latest_and_a_block_once(valkey: str) -> None:
    server = RedisServer(valkey)
    written, where = blocks("kept", range(80)), RedisBlocks(server, "kept")
    contents = [(p, number, one.encode()) for (p, number), one in written.blocks.items()]
    where.put(LOG, contents)
    where.put(LOG, contents[40:])  # again, as after a restart
    found = read_blocks(server, "kept")
    assert sorted(found.blocks) == [(0, number) for number in range(30, 80)]
    assert found.blocks == {place: one for place, one in written.blocks.items() if place[1] >= 30}
    assert found.is_full
    where.put(LOG._replace(id="x2"), contents[:1])
    assert sorted(read_blocks(server, "kept").blocks) == [(0, 0)]
    with pytest.raises(ConfigError, match=r"nothing to compare: model none at .* has no figures; .* have some: kept"):
        read_blocks(server, "none")
    server.close()


@pytest.mark.parametrize("wanted", [["city=DE"], ["country"], [f"country={i}" for i in range(33)]])
def test_slices_must_be_of_a_categorical_feature(wanted: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"compare\.slices"):
        Slices(model(), wanted)
