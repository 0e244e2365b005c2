"""`streamtrain deadletters`, as a process, on a real Kafka and a real Redis."""

import json
import signal
import subprocess
import threading

import pytest

from streamtrain.stream.dead_letters import DeadLetter, DeadLetters
from streamtrain.stream.source import Stream
from tests import commands
from tests.patience import until
from tests.stream.conftest import kafka, valkey
from tests.stream.kinds import KINDS, Place

__all__ = ["kafka", "valkey"]
LETTERS = 5000


@pytest.fixture(params=["kafka", "valkey"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param, KINDS[request.param].server(request))


def command(place: Place, *arguments: str) -> list[str]:
    url = f"kafka://{place.server}" if place.name == "kafka" else place.server
    return [*commands.COMMAND, "deadletters", *arguments, "--topic", place.topic, "--url", url]


def run(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(command(place, *arguments), capture_output=True, text=True, check=False, timeout=120)


def bury(stream: Stream, letters: list[DeadLetter]) -> None:
    dead = DeadLetters(stream, threading.Event())
    for letter in letters:
        dead.write(letter)
    dead.flush()
    dead.close()


def test_list_and_show(place: Place) -> None:
    stream = place.make(2)
    assert "has no dead letters" in run(place, "list").stdout
    user = DeadLetter(1, 12, "wrong_type", "user", b'{"user": {"a": "\xc3\xa9"}}', "found \x1b")
    bury(
        stream,
        [user, DeadLetter(0, 3, "not_json", "", b"{\x1b[31m"), DeadLetter(0, 4, "not_json", "", b"\0\0\0\0\7\xff")],
    )
    found = json.loads(run(place, "list", "--json").stdout)
    assert found["topic"] == place.topic
    assert {reason: of["letters"] for reason, of in found["reasons"].items()} == {"not_json": 2, "wrong_type": 1}
    assert found["reasons"]["wrong_type"]["first"]["offset"] == 12
    shown = run(place, "list").stdout
    assert "not_json" in shown
    assert "0:3" in shown
    assert "0:4" in shown
    one = run(place, "show", "1:12").stdout
    for words in ("wrong_type", "field      user", "detail     found \\x1b", '"a": "é"'):
        assert words in one
    assert "\\x1b[31m" in run(place, "show", "0:3").stdout
    raw = run(place, "show", "0:4").stdout
    assert "00 00 00 00 07 ff" in raw
    assert "schema     7" in raw
    for wrong, code in (("0:5", 1), ("x", 2), ("0:-1", 2)):
        assert run(place, "show", wrong).returncode == code


def test_replay_goes_on_where_it_was_killed(place: Place) -> None:
    stream = place.make(2)
    value = b"x" * 500
    reasons = ["not_json", "late"]
    bury(stream, [DeadLetter(i % 2, i, reasons[i % 2], "", value + b"%d" % i) for i in range(LETTERS)])

    def written() -> int:
        return sum(of.high - of.low for of in stream.bounds().values())

    for wanted in (1, LETTERS // 4):
        with commands.start(
            command(place, "replay", "--reason", "not_json"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            until(lambda wanted=wanted, process=process: written() >= wanted or process.poll() is not None)  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
    done = run(place, "replay", "--reason", "not_json")
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["replayed"] + counts["before"] == LETTERS // 2
    values = [record.value for record in stream.records(stream.bounds())]
    assert sorted(values) == sorted(value + b"%d" % i for i in range(0, LETTERS, 2))
    assert json.loads(run(place, "replay", "--limit", "10").stdout)["truncated"] == 0
