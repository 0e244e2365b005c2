"""What decoding must give, in plain Python: the json module, xxhash, and the rules of docs/samples.md."""

import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, NoReturn

import numpy as np
import xxhash


@dataclass(frozen=True)
class Label:
    field: str
    kind: Literal["binary", "real", "count"] = "binary"
    optional: bool = False
    positive: str | None = None


@dataclass(frozen=True)
class Categorical:
    field: str
    max_length: int = 0
    default: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Cross:
    name: str
    categoricals: tuple[int, ...]
    max_length: int = 0


@dataclass(frozen=True)
class Numeric:
    field: str
    default: float | None = None
    transform: Literal["none", "log1p", "standardize"] = "none"
    mean: float = 0.0
    stddev: float = 1.0


@dataclass(frozen=True)
class Schema:
    labels: tuple[Label, ...] = ()
    categoricals: tuple[Categorical, ...] = ()
    crosses: tuple[Cross, ...] = ()
    numerics: tuple[Numeric, ...] = ()
    time: str | None = None
    per_second: float = 1.0
    pattern: str = ""
    weight: str | None = None
    max_message_bytes: int = 1 << 20
    max_id_bytes: int = 256
    max_ids: int = 10_000
    max_depth: int = 32


@dataclass
class Sample:
    keys: list[list[int]] = field(default_factory=list)  # per categorical, then per cross
    numeric: list[float] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    weight: float = 1.0
    time: float = 0.0


class Refused(Exception):
    """The message is refused for one of `reasons`; there are several where json cannot tell which came first."""

    def __init__(self, *reasons: str, field: str | None = "") -> None:
        super().__init__(reasons, field)
        self.reasons = frozenset(reasons)
        self.field = field  # None: not compared


class Integer(str):
    """The text of a JSON number without fraction and exponent."""


class Real(str):
    """The text of any other JSON number."""


class Pairs(list[tuple[str, Any]]):
    """The members of a JSON object."""


def depth_of(value: Any) -> int:
    """Count the levels of containers."""
    if not isinstance(value, list):
        return 0
    items = (item for _, item in value) if isinstance(value, Pairs) else value
    return 1 + max(map(depth_of, items), default=0)


def strings_of(value: Any) -> Iterable[str]:
    """Yield every string of a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Pairs):
        for key, item in value:
            yield key
            yield from strings_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_of(item)


def bracket_depth(text: str) -> int:
    """Count the levels of brackets in a text that may not be JSON."""
    depth = deepest = 0
    for token in re.findall(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', text, re.DOTALL):
        depth += (token in "[{") - (token in "]}")
        deepest = max(deepest, depth)
    return deepest


def parse(text: str, max_depth: int) -> Any:
    """Parse JSON strictly."""

    def refuse_constant(_: str) -> NoReturn:
        raise Refused("not_finite", *others, field=None)

    # Among what breaks a message as a whole, the decoder names what comes first in its bytes. The json module never
    # checks depth and surrogates, and calls an escape broken that the end of the message cuts off, even a whole one:
    # where these may have come first it cannot tell.
    others = ["too_deep"] if bracket_depth(text) > max_depth else []
    others += ["bad_escape"] if "\\" in text else []
    try:
        value = json.loads(
            text, object_pairs_hook=Pairs, parse_int=Integer, parse_float=Real, parse_constant=refuse_constant
        )
    except RecursionError:
        raise Refused("too_deep", field=None) from None
    except json.JSONDecodeError as error:
        surely_escape = "escape" in error.msg and others == ["bad_escape"] and error.pos < len(text) - 12
        raise Refused(*(["bad_escape"] if surely_escape else ["not_json", *others]), field=None) from None
    too_deep = depth_of(value) > max_depth
    lone = any("\ud800" <= c <= "\udfff" for string in strings_of(value) for c in string)
    if too_deep or lone:
        raise Refused(*["too_deep"] * too_deep, *["bad_escape"] * lone, field=None)
    return value


def float32(value: float) -> float:
    """Round to float32; infinite when it overflows."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


BLANKS = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "\\N", "-", "?")


def is_missing(value: Any) -> bool:
    """Whether a number is missing: null, or a text that stands for it."""
    return value is None or (type(value) is str and value in BLANKS)


def number_of(name: str, value: Any, booleans: bool = True) -> float:
    """Return a JSON number, or a boolean if allowed, as a finite double."""
    if isinstance(value, bool) and booleans:
        return float(value)
    if not isinstance(value, Integer | Real):
        raise Refused("wrong_type", field=name)
    number = float(value)
    if math.isinf(number):
        raise Refused("not_finite", field=name)
    return number


ISO = re.compile(
    r"\d{4}-\d\d-\d\d([T ]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d([.,]\d+)?)?(Z|[+-]([01]\d|2[0-3])(:?[0-5]\d)?)?)?",
    re.ASCII,
)
BEGIN, END = datetime(1, 1, 1, tzinfo=UTC).timestamp(), datetime(9999, 12, 31, tzinfo=UTC).timestamp() + 86400


def time_of(schema: Schema, name: str, value: Any) -> float:
    """Return seconds since the epoch."""
    if type(value) is str and schema.pattern:
        try:
            moment = datetime.strptime(value, schema.pattern)
        except ValueError:
            raise Refused("bad_time", field=name) from None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        seconds = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    elif type(value) is str:
        if not ISO.fullmatch(value):
            raise Refused("bad_time", field=name)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise Refused("bad_time", field=name) from None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        seconds = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    else:
        seconds = number_of(name, value, booleans=False) / schema.per_second
    if not BEGIN <= seconds < END:
        raise Refused("bad_time", field=name)
    return seconds


def label_of(label: Label, value: Any, max_id_bytes: int) -> float:
    """Return a label as float32."""
    is_positive = label.positive is not None and type(value) is str and value == label.positive
    if is_missing(value) and not is_positive:
        if label.optional:
            return math.nan
        raise Refused("missing_field", field=label.field)
    if label.positive is not None:
        return class_of(label, label.positive, value, max_id_bytes)
    number = number_of(label.field, value)
    if (label.kind == "binary" and number not in (0, 1)) or (label.kind == "count" and number < 0):
        raise Refused("bad_label", field=label.field)
    if math.isinf(float32(number)):
        raise Refused("not_finite", field=label.field)
    return float32(number)


def class_of(label: Label, positive: str, value: Any, max_id_bytes: int) -> float:
    """Return 1 for the positive class, 0 for another."""
    is_number = re.fullmatch(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", positive, re.ASCII)
    if isinstance(value, bool):
        return float(positive == ("true" if value else "false") or bool(is_number and float(positive) == value))
    if isinstance(value, Integer | Real):
        number = number_of(label.field, value)
        return float(bool(is_number) and number == float(positive))
    if type(value) is not str:
        raise Refused("wrong_type", field=label.field)
    if len(value.encode()) > max_id_bytes:
        raise Refused("id_too_long", field=label.field)
    return float(value == positive)


def weight_of(name: str, value: Any) -> float:
    """Return a weight as float32."""
    if is_missing(value):
        return 1.0
    number = number_of(name, value, booleans=False)
    if number < 0:
        raise Refused("bad_weight", field=name)
    if math.isinf(float32(number)):
        raise Refused("not_finite", field=name)
    return float32(number)


def key_of(text: str) -> int:
    """Return the key of an id."""
    return xxhash.xxh64_intdigest(text.encode())


def ids_of(spec: Categorical, value: Any, max_id_bytes: int) -> list[int]:
    """Return the keys of an id or a list of ids."""
    if value is None:
        if spec.default is None:
            raise Refused("missing_field", field=spec.field)
        return [key_of(one) for one in spec.default]
    keys = []
    for item in value if isinstance(value, list) and not isinstance(value, Pairs) else [value]:
        if not isinstance(item, str) or isinstance(item, Real):
            raise Refused("wrong_type", field=spec.field)
        if len(item.encode()) > max_id_bytes:
            raise Refused("id_too_long", field=spec.field)
        keys.append(key_of("0" if isinstance(item, Integer) and item == "-0" else item))
    return keys[-spec.max_length :]


def cross_of(spec: Cross, lists: Sequence[list[int]]) -> list[int]:
    """Return the keys of all combinations."""
    if math.prod(map(len, lists)) > 4096:
        raise Refused("cross_too_large", field=spec.name)
    keys = [
        xxhash.xxh64_intdigest(struct.pack(f"<{len(combination)}Q", *combination))
        for combination in itertools.product(*lists)
    ]
    return keys[-spec.max_length :]


TRANSFORMS: dict[str, Callable[[Numeric, float], float]] = {
    "none": lambda _, x: x,
    "log1p": lambda _, x: math.copysign(math.log1p(abs(x)), x),
    "standardize": lambda spec, x: (x - spec.mean) / spec.stddev,
}


def numeric_of(spec: Numeric, value: Any) -> float:
    """Return a transformed number as float32."""
    if is_missing(value):
        if spec.default is None:
            raise Refused("missing_field", field=spec.field)
        number = spec.default
    else:
        number = number_of(spec.field, value)
    number = float32(TRANSFORMS[spec.transform](spec, number))
    if math.isinf(number):
        raise Refused("not_finite", field=spec.field)
    return number


def check_count(schema: Schema, sample: Sample, name: str) -> None:
    """Refuse a sample that has too many ids, counting those of a feature or cross that was read last."""
    if sum(map(len, sample.keys)) > schema.max_ids:
        raise Refused("too_many_ids", field=name)


def decode(schema: Schema, message: bytes, with_labels: bool = True) -> Sample:
    """Decode one message, or raise `Refused`."""
    if len(message) > schema.max_message_bytes:
        raise Refused("too_large")
    try:
        text = message.decode()
    except UnicodeDecodeError:
        raise Refused("not_utf8") from None
    if text.startswith("\ufeff"):
        raise Refused("not_json")
    pairs = parse(text, schema.max_depth)
    if not isinstance(pairs, Pairs):
        raise Refused("not_an_object")
    values = dict(pairs)
    sample = Sample()
    if schema.time is not None:
        if values.get(schema.time) is not None:
            sample.time = time_of(schema, schema.time, values[schema.time])
        elif with_labels:
            raise Refused("missing_field", field=schema.time)
    if with_labels:
        sample.labels = [label_of(label, values.get(label.field), schema.max_id_bytes) for label in schema.labels]
        if schema.weight is not None:
            sample.weight = weight_of(schema.weight, values.get(schema.weight))
    for spec in schema.categoricals:
        sample.keys.append(ids_of(spec, values.get(spec.field), schema.max_id_bytes))
        check_count(schema, sample, spec.field)
    for cross in schema.crosses:
        sample.keys.append(cross_of(cross, [sample.keys[c] for c in cross.categoricals]))
        check_count(schema, sample, cross.name)
    sample.numeric = [numeric_of(spec, values.get(spec.field)) for spec in schema.numerics]
    return sample
