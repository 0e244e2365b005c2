"""Types of settings: what a value may be in a file, in the environment or on the command line, and how it is masked."""

import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretStr, ValidationInfo

from streamtrain.address import parse_address
from streamtrain.clock import parse_duration

MASK = "***"
_SECRET = re.compile(r"password|secret|token|jaas|user\.info|\.key$|\.pem$")  # among the keys of options
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+(?=@)")


def mask_credentials(text: str) -> str:
    """Text with what stands before the @ of URLs masked."""
    return _CREDENTIALS.sub(MASK, text)


def masked(value: Any) -> Any:
    """A value as it may be shown."""
    if isinstance(value, dict):
        return {key: MASK if _SECRET.search(key) else inner for key, inner in value.items()}
    return mask_credentials(value) if isinstance(value, str) else value


def _addresses(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    texts = [text.strip() for text in value.split(",")] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts:
        raise ValueError('must be a list of addresses such as ["10.0.0.1:2222"], or these separated by commas')
    addresses = tuple(str(parse_address(text, str(info.field_name))) for text in texts)
    if len(set(addresses)) < len(addresses):
        raise ValueError("must name every address once")
    return addresses


def _listen(value: Any, info: ValidationInfo) -> str:
    return str(parse_address(value, str(info.field_name), any_port=True))


def _seconds(value: Any, info: ValidationInfo) -> float:
    if _is_text(info) and isinstance(value, str) and re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", value):
        value = float(value)
    return parse_duration(value, str(info.field_name))


def _count(value: Any, info: ValidationInfo) -> int:
    if _is_text(info) and isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("must be an integer")
    return value


def _flag(value: Any, info: ValidationInfo) -> bool:
    if _is_text(info) and value in ("true", "false"):
        return bool(value == "true")
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be non-empty text")
    return value


def _ratio(value: Any, info: ValidationInfo) -> float:
    if _is_text(info) and isinstance(value, str) and re.fullmatch(r"[01]?(\.[0-9]{1,9})?", value) and value:
        value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError("must be a number from 0 to 1")
    return float(value)


def _margin(value: Any, info: ValidationInfo) -> float:
    if _is_text(info) and isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?|\.[0-9]{1,9}", value):
        value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError("must be a number above 0")
    return float(value)


def _options(value: Any, info: ValidationInfo) -> dict[str, str | int | float | bool]:
    if _is_text(info) and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as exc:
            raise ValueError('must be a JSON object such as {"fetch.min.bytes": 1000}') from exc
    if not isinstance(value, dict) or not all(isinstance(one, str | int | float | bool) for one in value.values()):
        raise ValueError("must be a table of texts, numbers and truths")
    return value


def _start(value: Any) -> str:
    if value in ("earliest", "latest", "committed"):
        return str(value)
    try:
        when = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError) as exc:
        raise ValueError('must be "earliest", "latest", "committed" or an ISO 8601 time') from exc
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).isoformat()


def _is_text(info: ValidationInfo) -> bool:
    """Whether numbers and truth may come as text: environment and command line have nothing else."""
    return bool(info.context and info.context["text"])


Addresses = Annotated[tuple[str, ...], BeforeValidator(_addresses)]
Listen = Annotated[str, BeforeValidator(_listen)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Count = Annotated[int, BeforeValidator(_count)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]
Ratio = Annotated[float, BeforeValidator(_ratio)]
Margin = Annotated[float, BeforeValidator(_margin)]
Options = Annotated[dict[str, str | int | float | bool], BeforeValidator(_options)]
Start = Annotated[str, BeforeValidator(_start)]
Secret = Annotated[SecretStr, BeforeValidator(_text)]


class Group(BaseModel):
    """Settings of one concern. They do not change, and show no credentials."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(value)
