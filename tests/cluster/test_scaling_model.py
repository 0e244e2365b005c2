"""The protocol of scaling, in all states of small clusters: rows are what the clock says, and the end is reached."""

import pytest

from tests.cluster.scaling_model import Model, explore, without

SPLIT = Model([(0,), (0, 1)], batches=2, moves=(1,), crashes=1)
MERGED = Model([(0, 1), (0,)], batches=2, moves=(1,), crashes=1)


@pytest.mark.parametrize(
    ("model", "least"),
    [
        (SPLIT, 1_900),
        (MERGED, 3_600),
        (Model([(0,), (1,)], batches=2, moves=(1,), crashes=2), 4_000),  # to another process
        (Model([(0, 1), (1, 0)], batches=2, moves=(1,), crashes=1), 4_000),  # exchanged
        (Model([(0,), (0, 1)], batches=2, moves=(1, 0), crashes=1), 8_000),  # there and back
        (Model([(0, 1), (0, 2, 1)], batches=1, moves=(1,), crashes=1), 7_000),  # as `up` does not, but may
    ],
)
def test_rows_count_what_the_clock_says_and_the_end_can_be_reached(model: Model, least: int) -> None:
    explored = explore(model)
    assert explored.states > least
    assert (explored.wrong, explored.stuck) == ("", None)


@pytest.mark.parametrize(
    ("model", "parts", "what"),
    [
        (SPLIT, ["place"], "wrong"),  # a shard takes pushes of who thinks that it has another place
        (MERGED, ["align"], "wrong"),  # the checkpoint is of shards at different clocks
        (SPLIT, ["follow"], "stuck"),  # workers do not look for another map
        (SPLIT, ["strays"], "stuck"),  # shards that start again with the place of before are left alone
        # Nobody lets pushes through that were held back by a coordinator which has ended.
        (SPLIT, ["release", "told"], "stuck"),
    ],
)
def test_a_protocol_that_lacks_a_part_is_found_out(model: Model, parts: list[str], what: str) -> None:
    explored = explore(without(model, *parts))
    assert bool(explored.wrong) == (what == "wrong")
    assert (explored.stuck is not None) == (what == "stuck")
