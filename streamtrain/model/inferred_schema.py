"""Schema inference: what the fields of samples are, by the values of the first ones, and the model file that says so.

    values ─► a role for each field, with the reason ─► Schema ─► model file

A field that is taken for the wrong thing costs accuracy, so ambiguous ones are taken for both: integers without a
telling name that repeat are an id and a number. Every feature has a default, as a field may be missing later.
"""

import re
import shlex
import time as clock
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import ConfigError
from streamtrain.model.features import BLANKS, JSON_NUMBER, Categorical, Feature, Label, Numeric
from streamtrain.model.schema import TIME_UNITS, Schema, find_time_formats
from streamtrain.python_source import as_python, plain, schema_source

INFERRED_SAMPLES = 10_000
"""Samples that a schema is inferred from."""

FUTURE_SECONDS = 86_400.0
"""Event times are not taken for such if they are further ahead of now: learners refuse them."""

Role = Literal["label", "time", "id", "number", "id and number", "list", "words", "left out"]

_FEW = 32  # different integers that are ids, whatever they are called
_REPEATED = 4  # times that each value of an integer is seen on average, from which on it may be an id
_MANY = 100  # different ids that need wide rows
_WIDE, _NARROW = 16, 8
_ENOUGH = 100  # samples without a repetition that tell a row's number from an id
_EXACT = 1 << 53  # up to which a double is any integer
_WORDS = 4  # on average, from which on a text is words rather than one id
_OFTEN = 0.02  # share of texts from which on a number of parts is not an exception
_EARLIEST, _LATEST = 1e8, 4.1e9  # epoch seconds of 1973 to 2099
_ASCENDING = 0.99  # share of times that are no earlier than the one before, in a file that is in order
_SEPARATOR = "|"
_NUMBER = re.compile(JSON_NUMBER)
_LONG = 24  # characters of an example

_ID_NAME = re.compile(
    r"(^|[_\W])(id|ids|uid|uuid|guid|code|key|hash|zip|zipcode|postcode|sku|asin|isbn|ean)$|[a-z]I[dD]s?$"
)
_TIME_NAME = re.compile(
    r"(^|[_\W])(ts|time|timestamp|date|datetime|epoch|at|when)$|^(ts|time|timestamp|date|datetime)([_\W]|$)"
    r"|[a-z](Time|Date|Timestamp|At)$|timestamp$"
)
_POSITIVE = (
    *("1", "yes", "y", "true", "t", "positive", "pos", "click", "clicked", "+", "+1", "good"),
    *("ja", "j", "oui", "o", "si", "sí", "sim", "vrai", "wahr", "да"),
)
_NEGATIVE: dict[str, str | int] = {
    **{"-1": 1, "no": "yes", "n": "y", "false": "true", "f": "t", "negative": "positive", "neg": "pos"},
    **{"nein": "ja", "non": "oui", "não": "sim", "нет": "да"},
}


class InferredField(NamedTuple):
    """What a field of the samples is taken for.

    Attributes:
        name: of the field.
        role: what it is.
        why: the values that say so, in words.
        examples: some of its values.
    """

    name: str
    role: Role
    why: str
    examples: str


@dataclass(frozen=True)
class InferredSchema:
    """What samples are, by their first ones.

    Attributes:
        schema: the schema.
        loss: of the label: cross entropy if it has two values, else the squared error.
        fields: all fields, in the order in which samples have them.
        text: fields to be read as text, as some of their values are or look like something else.
        lists: fields to be split, by name the character that separates the elements.
        samples: number of samples that were looked at.
    """

    schema: Schema
    loss: Literal["binary_crossentropy", "mean_squared_error"]
    fields: tuple[InferredField, ...]
    text: frozenset[str]
    lists: Mapping[str, str]
    samples: int

    def source(self, what: str) -> str:
        """The model file that says the same; `what` describes the samples, such as the file's name."""
        why = {one.name: one.why for one in self.fields}
        features = [one for one in self.schema.features if isinstance(one, Categorical | Numeric)]
        schema = schema_source(self.schema, {one.name: why[one.field_name] for one in features})
        loss = "" if self.loss == "binary_crossentropy" else f", loss={as_python(self.loss)}"
        title = plain(f"What streamtrain made of the first {self.samples:,} samples of {what}, to change as you like.")
        if self.options:
            read = plain(shlex.join(self.options))
            title += f"\n\nFiles like this are read with {read}, be it by learn, produce or another command.\n"
        return f'"""{title}"""\n\nimport streamtrain as st\n\n{schema}model = st.Model(schema{loss})\n'

    @property
    def options(self) -> list[str]:
        """The options with which commands read such files."""
        lists = ",".join(name if one == _SEPARATOR else f"{name}={one}" for name, one in self.lists.items())
        return [
            word
            for name, value in (("--text", ",".join(sorted(self.text))), ("--lists", lists))
            if value
            for word in (name, value)
        ]


def infer_schema(
    samples: Sequence[Mapping[str, Any]],
    label: str,
    *,
    positive: str | None = None,
    time: str | None = None,
    text: Collection[str] = (),
    lists: Mapping[str, str] | None = None,
) -> InferredSchema:
    """Decides what the fields of samples are by their values.

    Args:
        samples: the first samples, as JSON has them.
        label: the field to be predicted.
        positive: its value that is the positive class, as text; None: by its values.
        time: the field of the event time; "": none; None: the one whose values are times, if there is one.
        text: fields that are read as text, and stay as they are.
        lists: fields that are read as lists, by name the separator.

    Raises:
        ConfigError: there is no such field, or no feature; or the label's values do not say which class is positive.
    """
    names = dict.fromkeys(name for sample in samples for name in sample)
    columns = {name: _Column(name, [sample.get(name) for sample in samples]) for name in names}
    for field, option in ((label, "--label"), (time, "--time")):
        if field and field not in columns:
            raise ConfigError(f"{option}: the samples have no field {field!r}; they have {', '.join(map(repr, names))}")
    made = _label(columns[label], positive)
    when = _time(columns, label, time)
    found: list[InferredField] = []
    features: list[Feature] = []
    texts, separators = {*text}, {**(lists or {})}
    for name, column in columns.items():
        if name == label:
            role: Role = "label"
            why = made.why
        elif when and column is when.column:
            role, why = "time", when.why
        else:
            role, why = _role(column, splits=name not in text)
            features += _features(column, role, names)
            if role == "id" and (column.floats or column.booleans):
                texts.add(name)
            if role in ("list", "words") and not column.lists:
                separators[name] = _SEPARATOR if role == "list" else " "
        found.append(InferredField(name, role, why, column.examples))
    if not features:
        raise ConfigError(f"no field but the label {label!r} tells samples apart: {_listed(found)}")
    form = None if when is None or when.format == "s" else when.format
    schema = Schema(label=made.label, time=when.column.name if when else None, time_format=form, features=features)
    return InferredSchema(schema, made.loss, tuple(found), frozenset(texts), separators, len(samples))


class _Column:
    """The values of a field: `values` without those that are missing."""

    def __init__(self, name: str, given: Sequence[Any]) -> None:
        self.name, self.all = name, given
        self.values = [value for value in given if not is_missing(value)]
        self.missing = len(given) - len(self.values)
        kinds = Counter(map(type, self.values))
        self.booleans, self.integers, self.floats = kinds[bool], kinds[int], kinds[float]
        self.lists, self.objects, self.texts = kinds[list], kinds[dict], [v for v in self.values if isinstance(v, str)]
        self.numbers = self.booleans + self.integers + self.floats
        flat = (
            self.values
            if not self.lists
            else [v for one in self.values for v in (one if isinstance(one, list) else [one])]
        )
        self.counts = Counter(str(value).lower() if isinstance(value, bool) else str(value) for value in flat)

    @property
    def is_numeric(self) -> bool:
        return self.numbers == len(self.values) > 0

    @property
    def words(self) -> float:
        """Words of a text, on average."""
        return sum(len(text.split()) for text in self.texts) / max(len(self.texts), 1)

    @property
    def examples(self) -> str:
        text, *more = [*self.counts][:3] or [""]
        text = text if len(text) <= _LONG else f"{text[:_LONG]}…"
        for one in more:
            text = f"{text}, {one}" if len(text) + len(one) < _LONG else text
        return text


def is_missing(value: object) -> bool:
    """Whether a value is missing: null, or a text that stands for it."""
    return value is None or (isinstance(value, str) and value in BLANKS)


class _Label(NamedTuple):
    label: str | Label
    loss: Literal["binary_crossentropy", "mean_squared_error"]
    why: str


def _label(column: _Column, positive: str | None) -> _Label:
    name, counts = column.name, column.counts
    total = sum(counts.values())
    if column.lists or column.objects or not total:
        raise ConfigError(f"--label: field {name!r} holds {'no values' if not total else 'lists or objects'}")
    if positive is None and (column.booleans == total or counts.keys() <= {"0", "1", "0.0", "1.0"}):
        share = sum(counts[one] for one in ("1", "1.0", "true")) / total
        return _Label(name, "binary_crossentropy", f"0 or 1, {share:.2%} are 1")
    if positive is None and len(counts) > 2 and column.is_numeric:
        return _Label(name, "mean_squared_error", f"{len(counts):,} different numbers")
    chosen: str | int | None = positive if positive is not None else _positive(column)
    if chosen is None:
        common = ", ".join(f"{one} ({n / total:.0%})" for one, n in counts.most_common(5))
        more = ", …" if len(counts) > 5 else ""
        raise ConfigError(
            f"--label: field {name!r} has {len(counts):,} different values, {common}{more}: "
            f"say which of them is to be predicted, such as --label {name}={counts.most_common(2)[-1][0]}"
        )
    share = counts[str(chosen)] / total
    if isinstance(chosen, str) and re.fullmatch(r"-?[1-9]\d{0,17}|0", chosen):
        chosen = int(chosen)
    return _Label(
        Label(name, positive=chosen), "binary_crossentropy", f"{share:.2%} are {chosen}; all others count as 0"
    )


def _positive(column: _Column) -> str | int | None:
    """Which value is the positive class; None: the values do not say."""
    by_lower = {one.strip().lower(): one for one in column.counts}
    if len(column.counts) == 1:  # as of a rare label
        [(lower, value)] = by_lower.items()
        other = _NEGATIVE.get(lower)
        if isinstance(other, str):
            other = other.upper() if value.isupper() else other.capitalize() if value[:1].isupper() else other
        return value if lower in _POSITIVE else other
    if len(column.counts) != 2:
        return None
    if known := [by_lower[one] for one in _POSITIVE if one in by_lower]:
        return known[0]
    if column.is_numeric:
        return max(column.counts, key=float)
    return min(column.counts, key=lambda one: (column.counts[one], one))


class _Time(NamedTuple):
    column: _Column
    format: str | None
    why: str


def _time(columns: Mapping[str, _Column], label: str, given: str | None) -> _Time | None:
    """The field of the event time: of those that hold times one that ascends, else one that is called so."""
    if given == "":
        return None
    found, latest = [], clock.time() + FUTURE_SECONDS
    for place, column in enumerate(columns.values()):
        is_given, named = column.name == given, bool(_TIME_NAME.search(column.name))
        if column.name == label or (given and not is_given) or (column.missing and not is_given):
            continue
        for order, (form, seconds) in enumerate(_seconds(column, named=named or is_given)):
            if seconds.max() > latest and not is_given:
                continue  # such as when something expires
            ascending = float((np.diff(seconds) >= 0).mean()) if len(seconds) > 1 else 1.0
            if named or is_given or (ascending > _ASCENDING and len(column.counts) > 1):
                found.append(
                    ((ascending > _ASCENDING, named, -place, -order), _Time(column, form, _kind(form, ascending)))
                )
    if not found and given:
        return _Time(columns[given], None, "as given")
    return max(found, key=lambda one: one[0])[1] if found else None


def _kind(form: str | None, ascending: float) -> str:
    kind = f"{form} since the epoch" if form in TIME_UNITS else form or "ISO 8601"
    return kind + (", in order" if ascending == 1 else f", {1 - ascending:.0%} earlier than the sample before")


def _seconds(column: _Column, *, named: bool) -> Iterator[tuple[str | None, NDArray[np.float64]]]:
    """The event times of a column that holds nothing else, by each format that they may have."""
    if column.texts and len(column.texts) == len(column.values):
        yield from find_time_formats(column.texts)
    elif column.is_numeric and not column.booleans:
        numbers = np.array(column.values, np.float64)
        for unit, per_second in TIME_UNITS.items() if named else [("s", 1.0)]:
            if ((numbers >= _EARLIEST * per_second) & (numbers < _LATEST * per_second)).all():
                yield unit, numbers / per_second


_Judged = tuple[Role, str] | None


def _role(column: _Column, *, splits: bool) -> tuple[Role, str]:
    """What a field that is neither label nor time is, and why; `splits`: whether its text may be a list."""
    missing = f", {column.missing / len(column.all):.0%} missing" if column.missing else ""
    judged = (_useless(column), _list(column), _number(column), _split(column) if splits else None)
    role, why = next((one for one in judged if one), ("id", f"{len(column.counts):,} different values"))
    if role in ("id", "left out") and column.texts and all(_NUMBER.fullmatch(one) for one in column.counts):
        why += "; numbers in quotes are text"
    return role, why if role == "left out" else f"{why}{missing}"


def _useless(column: _Column) -> _Judged:
    """Fields that teach nothing."""
    total, different = len(column.values), len(column.counts)
    why = ""
    if not total or column.objects:
        why = "no values" if not total else "objects"
    elif column.lists:
        items = [item for one in column.values if isinstance(one, list) for item in one]
        if not all(isinstance(item, str | int) and not isinstance(item, bool) for item in items):
            why = "lists of what is neither text nor integers"
    elif different == 1 and not column.missing and len(column.all) < INFERRED_SAMPLES:
        why = "always the same"  # in all of the file; of a longer one the first samples may be of one month or campaign
    elif different == total >= _ENOUGH and column.words < _WORDS:
        if column.texts or (_is_called_an_id(column) and not column.booleans):
            why = "never the same twice"
        elif not column.floats and all(b - a == 1 for a, b in pairwise(column.values)):
            why = "counts the rows"
    if not column.name and not why:
        why = "it has no name"
    return ("left out", why) if why else None


def _list(column: _Column) -> _Judged:
    return ("list", f"lists of {len(column.counts):,} different ids") if column.lists else None


def _number(column: _Column) -> _Judged:
    """Numbers and ids that are integers."""
    different, role, why = len(column.counts), "number", "numbers with fractions"
    if not column.is_numeric:
        return None
    if column.booleans:
        why = "true or false"
    elif _is_called_an_id(column):
        role, why = "id", f"called an id, {different:,} different values"
    elif not column.floats and any(abs(value) > _EXACT for value in column.values):
        role, why = "id", f"{different:,} different integers, too large for numbers"
    elif not column.floats:
        each = len(column.values) / different
        role = "id" if different <= _FEW else "id and number" if each >= _REPEATED else "number"
        why = f"{different:,} different integers" + (f", each {each:,.0f} times" if role == "id and number" else "")
    return role, why  # type: ignore[return-value]


def _split(column: _Column) -> _Judged:
    """Texts of several parts."""
    texts = column.texts
    lengths = Counter(text.count(_SEPARATOR) + 1 for text in texts)
    often = [parts for parts, count in lengths.items() if count >= max(2, _OFTEN * len(texts))]
    if len(often) > 1:
        return "list", f"{min(often)} to {max(often)} parts, separated by {_SEPARATOR}"
    if column.words < _WORDS or len(column.counts) <= len(texts) / 2:
        return None
    return "words", f"texts of {column.words:.0f} words"


def _is_called_an_id(column: _Column) -> bool:
    return bool(_ID_NAME.search(column.name)) and (
        not column.floats or all(float(v).is_integer() for v in column.values)
    )


def _features(column: _Column, role: Role, taken: Collection[str]) -> list[Feature]:
    if role == "left out":
        return []
    # Names that the graph gives to weights and cells are left to it.
    name = _free(f"{column.name}_", taken) if column.name.endswith(("_weight", "_cells")) else column.name
    field = None if name == column.name else column.name
    categorical = Categorical(name, _WIDE if len(column.counts) > _MANY else _NARROW, field=field, default="")
    match role:
        case "id" | "list" | "words":
            return [categorical]
        case "number":
            return [Numeric(name, field=field, default=0.0)]
        case "id and number":
            return [categorical, Numeric(_free(f"{name}_number", taken), field=column.name, default=0.0)]
    return []


def _free(name: str, taken: Collection[str]) -> str:
    """The name, made longer until no field has it."""
    while name in taken:
        name += "_"
    return name


def _listed(found: Sequence[InferredField]) -> str:
    return "; ".join(f"{one.name!r} is {one.role}: {one.why}" for one in found)
