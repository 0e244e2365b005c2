"""The short form of rolling.py: one restart of all joiners while their topics are full; test_chaos.py has workers."""

from streamtrain.embedded.jars import resolve
from streamtrain.errors import StreamtrainError
from tests.chaos.rolling import parse, run
from tests.stream.servers import missing


def test_all_is_taken_though_every_member_is_replaced() -> None:
    try:
        resolve()
    except StreamtrainError as exc:
        missing("kafka", exc)
    done = run(parse(["--of=joiners", "--messages=20000", "--restarts=1"]))
    assert done["joiners"]["samples"] == "exact"
