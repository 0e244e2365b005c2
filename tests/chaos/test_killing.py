"""The short form of killing.py: real processes on a real stream, kill -9, exact counts.

On Redis Streams: on Kafka the same and more is killed by test_chaos.py.
"""

from tests.chaos.killing import parse, run


def test_counts_are_exact_whoever_is_killed() -> None:
    short = ["--kills=6", "--restarts=1", "--every=1.5", "--samples=8000", "--rate=700", "--timeout=240"]
    done = run(parse(["--stream=redis", *short]))
    assert sum(done["kills"].values()) == 7
    assert done["counts"] == "exact"
