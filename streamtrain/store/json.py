"""Parses JSON from untrusted sources into typed values; whatever does not match is a ValueError."""

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def convert(kind: type[T], value: Any) -> T:
    """Converts parsed JSON to a type, such as a dataclass or a NamedTuple. Unknown fields are ignored.

    Raises:
        ValueError: the value does not match the type.
    """
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise ValueError(str(exc)) from exc
