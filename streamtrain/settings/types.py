"""Types of settings: which values they accept, as text or typed, and how secrets in them are masked."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    Strict,
    ValidationError,
    ValidationInfo,
)

from streamtrain.address import MASK, Hosts, parse_address, redacted
from streamtrain.durations import parse_duration, parse_size

_SECRET_OPTION = re.compile(r"password|secret|token|jaas|user\.info|\.key$|\.pem$")


def masked(value: Any) -> Any:
    """A value without its secrets, to be shown."""
    if isinstance(value, dict):
        return {key: MASK if _SECRET_OPTION.search(key) else inner for key, inner in value.items()}
    return redacted(value) if isinstance(value, str) else value


def _parse_text(value: Any, info: ValidationInfo) -> Any:
    """Numbers, booleans and tables may be given as text where the source has no other type: JSON, or ".5"."""
    if isinstance(value, str) and info.context and info.context["text"]:
        with suppress(ValueError, RecursionError):
            return json.loads(re.sub(r"^\.(?=\d)", "0.", value))
    return value


def _split(value: Any, expected: str) -> list[Any]:
    texts = [text.strip() for text in value.split(",")] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise ValueError(f"must be a list of {expected}, or these separated by commas")
    return list(texts)


def _addresses(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    expected = 'addresses such as ["10.0.0.1:2222"]'
    addresses = tuple(
        str(parse_address(text, str(info.field_name), names=True)) for text in _split(value or None, expected)
    )
    if len(set(addresses)) < len(addresses):
        raise ValueError("must name every address once")
    return addresses


def _host_names(value: Any) -> tuple[str, ...]:
    names = _split(value, 'names such as ["ads.example.org", "*.example.org"]')
    Hosts(names=names)
    return tuple(names)


def _slices(value: Any) -> tuple[str, ...]:
    expected = 'slices such as ["country=DE"]'
    slices = _split(value, expected)
    if not all(isinstance(one, str) and "=" in one for one in slices):
        raise ValueError(f"must be a list of {expected}")
    if len(set(slices)) < len(slices):
        raise ValueError("must name every slice once")
    return tuple(slices)


def _model_files(value: Any, info: ValidationInfo) -> dict[str, str]:
    """A table, or the names alone as a list or text."""
    parsed = _parse_text(value, info)
    if not isinstance(parsed, dict):
        names = _split(parsed or [], 'names of published models such as ["ads", "challenger"], or a table')
        if len(set(names)) < len(names):
            raise ValueError("must name every model once")
        parsed = dict.fromkeys(names, "")
    for name, file in parsed.items():
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"must have names that consist of letters, digits, - and _, not {name!r}")
        if not isinstance(file, str):
            raise ValueError(f'must name the model file of {name!r}, or be "", not {file!r}')
    return {name: _expand_home(file) for name, file in parsed.items()}


def _expand_home(path: str) -> str:
    """With ~ as shells mean it, which they do not see in `--set key=~/x`, in files and in variables."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"must be a path whose ~ has a home: set HOME, or write it out, not {path!r}")
    return expanded


def _listen(value: Any, info: ValidationInfo) -> str:
    return str(parse_address(value, str(info.field_name), any_port=True))


def _reached(value: Any, info: ValidationInfo) -> str:
    return str(parse_address(value, str(info.field_name), any_port=True, names=True))


def _seconds(value: Any, info: ValidationInfo) -> float:
    return parse_duration(_parse_text(value, info), str(info.field_name))


def _size(value: Any, info: ValidationInfo) -> float:
    parsed = _parse_text(value, info)
    if isinstance(parsed, int | float) and not isinstance(parsed, bool) and 0 < parsed < 2**63:
        return float(parsed)
    return parse_size(str(parsed), str(info.field_name))


def _size_or_auto(value: Any, info: ValidationInfo) -> float | str:
    return "auto" if value == "auto" else _size(value, info)


def _start(value: Any) -> str:
    if value in ("earliest", "latest", "committed"):
        return str(value)
    try:
        when = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError) as exc:
        raise ValueError('must be "earliest", "latest", "committed" or an ISO 8601 time') from exc
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).isoformat()


_TYPED = (Strict(), BeforeValidator(_parse_text))  # '8' is not a number in a file

Addresses = Annotated[tuple[str, ...], BeforeValidator(_addresses)]
HostNames = Annotated[tuple[str, ...], BeforeValidator(_host_names)]
Slices = Annotated[tuple[str, ...], BeforeValidator(_slices)]
Weights = Annotated[dict[str, float], *_TYPED]
ModelFiles = Annotated[dict[str, str], BeforeValidator(_model_files)]
Listen = Annotated[str, BeforeValidator(_listen)]
Reached = Annotated[str, BeforeValidator(_reached)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Size = Annotated[float, BeforeValidator(_size)]
SizeOrAuto = Annotated[float | Literal["auto"], BeforeValidator(_size_or_auto)]
Count = Annotated[int, *_TYPED]
Flag = Annotated[bool, *_TYPED]
Ratio = Annotated[float, Field(ge=0, le=1), *_TYPED]
Margin = Annotated[float, Field(gt=0, allow_inf_nan=False), *_TYPED]
Options = Annotated[dict[str, str | int | float | bool], *_TYPED]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(_expand_home)]
Table = BeforeValidator(_parse_text)
Start = Annotated[str, BeforeValidator(_start)]
Secret = Annotated[SecretStr, Field(min_length=1)]

MESSAGES = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be non-empty text",
    "string_too_short": "must be non-empty text",
    "too_short": "must be non-empty text",
    "dict_type": 'must be a table of text, numbers and booleans; as text, JSON such as {"fetch.min.bytes": 1000}',
}
"""What is wrong with a value, by pydantic's type of the error, where pydantic's own words are less clear."""


_UNCLEAR = {"missing": "is required", "extra_forbidden": "is not a setting", "greater_than": "is too small"}


def table_of(group: type[BaseModel], *, single: bool = False) -> BeforeValidator:
    """Checks a table of groups by name, or a single group, so that an error names the key within the table."""

    def checked(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, inner in {"": value}.items() if single else value.items():
            if not isinstance(inner, dict | group):
                raise ValueError(f"must have a table for each name, not {name} = {inner!r}")
            try:
                group.model_validate(inner)
            except ValidationError as exc:
                error = exc.errors(include_url=False)[0]
                key = ".".join(filter(None, [name, *map(str, error["loc"])]))
                words = _UNCLEAR.get(error["type"]) or MESSAGES.get(error["type"]) or error["msg"]
                words = re.sub(r"^(Value error, (\S+ (?=must))?|(Input|String|Tuple) should (?=\S))", "", words)
                words = words.replace("be '", "must be '", 1) if words.startswith("be ") else words
                raise ValueError(f"must be valid: {key} {words}") from exc
        return value

    return BeforeValidator(checked)


class SettingsGroup(BaseModel):
    """Settings of one concern: immutable, and printed without credentials."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(value)
