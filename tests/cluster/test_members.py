"""Who is there: signs of life, leases, and what is refused."""

import json
import logging
import threading

import pytest

from streamtrain.cluster.members import LEASE, Member, Members
from streamtrain.errors import ShardRefused


class Watched(Members):
    """Members whose clock is set by hand; `gone` are those that it told of."""

    def __init__(self) -> None:
        self.now, self.gone = 0.0, list[Member]()
        super().__init__(self.gone.append, lambda: self.now)

    def names(self, kind: str = "worker") -> list[str]:
        return [one.name for one in self.of(kind)]


def test_a_process_is_there_until_its_lease_ends() -> None:
    members = Watched()
    members.beat("worker", "b", '{"samples": 1}')
    members.now = LEASE - 1
    members.beat("worker", "a", "{}")
    members.now = LEASE
    assert members.of("worker") == [Member("worker", "a", {}, 1.0), Member("worker", "b", {"samples": 1}, LEASE)]
    assert members.gone == []
    members.now = LEASE + 0.5
    assert members.names() == ["a"]
    assert members.gone == [Member("worker", "b", {"samples": 1}, LEASE + 0.5)]
    members.beat("worker", "b", "{}")  # as it was only slow
    assert members.names() == ["a", "b"]


def test_a_sign_of_life_begins_the_lease_anew_and_says_the_latest() -> None:
    members = Watched()
    for second in range(20):
        members.now = float(second)
        members.beat("worker", "a", json.dumps({"samples": second}))
    assert members.of("worker") == [Member("worker", "a", {"samples": 19}, 0.0)]
    assert members.gone == []


def test_another_one_that_comes_ends_a_lease_too() -> None:
    members = Watched()
    members.beat("worker", "a", "{}")
    members.now = 10.0
    members.beat("server", "s", "{}")
    assert [one.name for one in members.gone] == ["a"]


def test_leaving_is_told_once() -> None:
    members = Watched()
    members.beat("worker", "a", "{}")
    members.leave("worker", "a")
    members.leave("worker", "a")
    members.leave("worker", "never there")
    members.now = 100.0
    assert members.names() == []
    assert [one.name for one in members.gone] == ["a"]


def test_kinds_do_not_mix() -> None:
    members = Watched()
    members.beat("worker", "x", '{"as": "worker"}')
    members.beat("server", "x", '{"as": "server"}')
    members.leave("worker", "x")
    assert members.names() == []
    assert [one.about for one in members.of("server")] == [{"as": "server"}]


@pytest.mark.parametrize(
    ("name", "about", "message", "reason"),
    [
        ("", "{}", "name must have 1 to 256 characters, not 0", "malformed"),
        ("x" * 257, "{}", "name must have 1 to 256 characters, not 257", "malformed"),
        ("a", '"' + "x" * (64 << 10) + '"', "at most 65536", "limit"),
        ("a", "", "the heartbeat of a is not JSON: ", "malformed"),
        ("a", "{", "the heartbeat of a is not JSON: ", "malformed"),
        ("a", "[" * 60_000, "the heartbeat of a is not JSON: ", "malformed"),
        ("a", "[1]", "the heartbeat of a is not a JSON object", "malformed"),
        ("a", "null", "the heartbeat of a is not a JSON object", "malformed"),
        ("a", '{"rate": NaN}', "NaN is not a JSON number", "malformed"),
        ("a", '{"rate": -Infinity}', "-Infinity is not a JSON number", "malformed"),
    ],
)
def test_what_is_damaged_is_refused(name: str, about: str, message: str, reason: str) -> None:
    members = Watched()
    with pytest.raises(ShardRefused, match=message) as caught:
        members.beat("worker", name, about)
    assert caught.value.reason == reason
    assert members.names() == []


def test_there_are_only_so_many() -> None:
    members = Watched()
    for i in range(4096):
        members.beat("worker", str(i), "{}")
    with pytest.raises(ShardRefused, match="4096 members already") as caught:
        members.beat("server", "one more", "{}")
    assert caught.value.reason == "limit"
    members.beat("worker", "7", '{"still": 1}')  # who is there already may say so
    members.now = LEASE + 1
    members.beat("server", "one more", "{}")
    assert len(members.gone) == 4096


def test_a_lease_ends_for_one_thread_only() -> None:
    members = Watched()
    for i in range(100):
        members.beat("worker", str(i), "{}")
    members.now = LEASE + 1
    asking = [threading.Thread(target=members.of, args=("worker",)) for _ in range(8)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert sorted(one.name for one in members.gone) == sorted(map(str, range(100)))


def test_who_is_lost_is_counted_and_said_and_who_leaves_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streamtrain")
    members = Watched()
    for _ in range(3):
        members.beat("worker", "a", "{}")
    members.beat("worker", "b", "{}")
    members.leave("worker", "b")
    members.now = 7.0
    assert members.of("worker") == members.of("worker") == []
    assert members.lost == {"worker": 1}
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "worker a joined"),
        ("INFO", "worker b joined"),
        ("INFO", "worker b left"),
        ("WARNING", "worker a lost: no heartbeat for 7 s"),
    ]
