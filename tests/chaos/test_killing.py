"""The short form of killing.py: real processes on a real stream, kill -9, exact counts."""

import pytest

from streamtrain.embedded.jars import resolve
from streamtrain.errors import StreamtrainError
from tests.chaos.killing import parse, run
from tests.stream.servers import missing


@pytest.mark.parametrize("stream", ["kafka", "redis"])
def test_counts_are_exact_whoever_is_killed(stream: str) -> None:
    if stream == "kafka":
        try:
            resolve()
        except StreamtrainError as exc:
            missing("kafka", exc)
    short = ["--kills=6", "--restarts=1", "--every=1.5", "--samples=8000", "--rate=700", "--timeout=240"]
    done = run(parse([f"--stream={stream}", *short]))
    assert sum(done["kills"].values()) == 7
    assert done["counts"] == "exact"
