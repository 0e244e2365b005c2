"""The short form of chaos.py: real processes, kill -9, exact counts."""

from tests.cluster.chaos import parse, run


def test_counts_are_exact_whoever_is_killed() -> None:
    done = run(parse(["--kills=8", "--every=1.5", "--samples=8000", "--rate=700", "--timeout=90"]))
    assert sum(done["kills"].values()) == 8
    assert done["counts"] == "exact"
