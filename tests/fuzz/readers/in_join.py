"""What both logs of a join have in common."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from streamtrain.join.engine import Impression, Outcome
from streamtrain.join.messages import JoinReader
from streamtrain.model.samples import REASONS
from streamtrain.settings.groups import JoinSettings
from streamtrain.stream.dead_letters import DeadLetter
from streamtrain.stream.source import Fetched

BETWEEN, MOST = b"\xfe", 8
READER = JoinReader(
    JoinSettings.model_validate({"labels": {"spent": {"kinds": ["buy"], "value": True}}}),
    300.0,
)
SEEDS = [
    b'{"id":"a","time":1700000000}',
    b' {"id" : 7, "time" : "2024-02-29T23:59:59.25+01:30", "of" : [1, {"x": "\\ud83d\\ude00"}]} ',
    b'{"id":"\xff","time":1}',
    b'{"id":"a","time":1,"of":"\xff"}',
    b'{"id":"a","time":1,"of":' + b"[" * 1500 + b"]" * 1500 + b"}",
    b'{"id":"a","time":1,"of":' + b'{"a":' * 255 + b"1" + b"}" * 255 + b"}",
    b'{"id":' + b"9" * 400 + b',"time":1}',
    b'{"id":"a","time":' + b"9" * 400 + b"}",
    b'{"id":"a","id":"b","time":1e3,"time":2}',
    b'{"id":"\\ud800","time":-1}',
]
_DEEP = 300  # frames

One = TypeVar("One", Impression, Outcome)


def _deeper(
    reading: Callable[[Fetched], tuple[list[One], list[DeadLetter]]], fetched: Fetched, frames: int
) -> tuple[list[One], list[DeadLetter]]:
    return _deeper(reading, fetched, frames - 1) if frames else reading(fetched)


def read(reading: Callable[[Fetched], tuple[list[One], list[DeadLetter]]], messages: Sequence[bytes]) -> list[One]:
    """The usable ones of some messages: each is that or a dead letter, alone as among others, also in a deep stack."""
    numbers = [*range(len(messages))]
    # A tombstone before each, which is skipped.
    values: list[bytes | None] = [value for message in messages for value in (None, message)]
    offsets = [offset for number in numbers for offset in (number, number)]
    found: list[One]
    letters: list[DeadLetter]
    found, letters = reading(Fetched(0, offsets, values, [-1] * len(values)))
    assert sorted([*(one.offset for one in found), *(one.offset for one in letters)]) == numbers
    assert all(letter.reason in REASONS for letter in letters), letters
    for number, message in zip(numbers, messages, strict=True):
        again, refused = _deeper(reading, Fetched(0, [number], [message], [-1]), _DEEP)
        assert [of.reason for of in refused] == [of.reason for of in letters if of.offset == number]
        assert [(of.id, of.time) for of in again] == [(of.id, of.time) for of in found if of.offset == number]
    return found
