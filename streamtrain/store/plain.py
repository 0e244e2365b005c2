"""Plain values: JSON that somebody else may have written, as what it should be; anything else is a ValueError."""

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def parsed(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def converted(kind: type[T], value: Any) -> T:
    """Parsed JSON as a value of a type: a dataclass, a NamedTuple, or made of such. Fields that it has not are dropped.

    Raises:
        ValueError: it is none.
    """
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise ValueError(str(exc)) from exc
