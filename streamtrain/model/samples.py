"""Samples: from what a caller has (JSON messages, dicts, or columns) to batches, by the schema.

Training and serving read samples by this module, so a sample means the same to both. What cannot be read is left out
and reported with a reason; docs/samples.md lists the reasons.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import (
    DECODE_REASONS,
    CategoricalSpec,
    CrossSpec,
    Decoder,
    LabelSpec,
    NumericSpec,
    TensorSamples,
)
from streamtrain.errors import BadSample, ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.columns import DETAILED, DETAILED_BYTES, ColumnReader, Describer, describe_future
from streamtrain.model.features import Label
from streamtrain.model.model import Model
from streamtrain.model.schema import time_format

LATE, FUTURE = "late", "future"
REASONS: tuple[str, ...] = (*DECODE_REASONS, "not_avro", "not_protobuf", "unknown_schema", FUTURE, LATE)
FUTURE_AFTER = 86_400.0
"""Default limit, in seconds, for event times ahead of the message's arrival."""

Samples = Batch | Mapping[str, Any] | Iterable[bytes | str | Mapping[str, Any]]


def refuse_future(
    batch: Batch, bad: list[BadSample], latest: float | NDArray[np.float64]
) -> tuple[Batch, list[BadSample]]:
    """Refuses samples of a batch whose event time is after `latest`: a value, or float64 [n], one for each sample.

    One of them would make every later sample late, and have all rows expire that have not been seen for long by it.
    """
    future = batch.times > latest
    if not future.any():
        return batch, bad
    times, limits = batch.times[future], np.broadcast_to(latest, batch.times.shape)[future]
    refused = [
        BadSample(int(i), FUTURE, "", describe_future(times[n], limits[n]) if n < DETAILED else "")
        for n, i in enumerate(batch.kept[future])
    ]
    return batch.select(~future), sorted([*bad, *refused], key=lambda one: one.index)


class SampleReader:
    """Reads the samples of one model. Thread-safe, but threads that share one take turns.

    Args:
        model: the model whose samples are read.
        with_labels: whether labels and weights are read (training) or ignored (prediction).
        max_message_bytes: maximum size of a JSON message; None: as the schema says.
        future_after: `batches` refuses samples whose event time is more than this many seconds after `now`; None: no
            limit.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        model: Model,
        *,
        with_labels: bool = True,
        max_message_bytes: int | None = None,
        future_after: float | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._future_after, self._now = future_after, now
        self._with_labels = with_labels
        try:
            self._decoder = _decoder(model, max_message_bytes or model.schema.max_message_bytes)
        except ValueError as exc:
            raise ConfigError(f"schema: {exc}") from exc
        self._describer = Describer(model)
        self._columns = ColumnReader(model, self._describer, with_labels=with_labels)

    def batches(self, samples: Samples, batch_size: int) -> Iterator[tuple[Batch, list[BadSample]]]:
        """Cuts samples into batches of at most `batch_size` and reads each.

        Args:
            samples: JSON messages (bytes or str), dicts, a mapping from field to column, a pandas or Arrow table, or a
                `Batch`, which is passed on whole. Messages and dicts may come from any iterable, also an endless one.
            batch_size: number of samples given to a batch; those refused make it smaller.

        Yields:
            The batch of the good samples, and what was refused. Positions (`Batch.kept`, `BadSample.index`) count from
            the first sample of the call.

        Raises:
            TypeError: samples are none of these, such as a single sample or a path.
            ConfigError: a column cannot be what the schema says that it is.
        """
        if isinstance(samples, Batch):
            yield samples, []
            return
        table = self._columns.as_table(samples)
        if table is not None:
            for start in range(0, table.num_rows, batch_size):
                yield self._without_future(*self._columns.read(table.slice(start, batch_size), start))
            return
        if isinstance(samples, bytes | str | os.PathLike) or not isinstance(samples, Iterable):
            raise TypeError(_not_samples(samples))
        rows, start = iter(samples), 0
        while chunk := list(islice(rows, batch_size)):
            yield self._without_future(*self.decode([_message(one) for one in chunk], start))
            start += len(chunk)

    def _without_future(self, batch: Batch, bad: list[BadSample]) -> tuple[Batch, list[BadSample]]:
        if self._future_after is None:
            return batch, bad
        return refuse_future(batch, bad, self._now() + self._future_after)

    def decode(self, messages: Sequence[bytes | TensorSamples], start: int = 0) -> tuple[Batch, list[BadSample]]:
        """Decodes JSON messages, and samples in tensors, as one batch; `start` is the position of the first."""
        columns = self._decoder.decode(messages, self._with_labels)
        bad: list[BadSample] = []
        parsed, described = 0, _messages_at(messages, (index for index, *_ in columns.errors[:DETAILED]))
        for index, reason, field, at in columns.errors:
            message, detail = next(described, b""), ""
            parsed += len(message)
            if len(bad) < DETAILED and (parsed <= DETAILED_BYTES or reason == "too_large"):
                detail = self._describer.message(reason, field, message, at)
            bad.append(BadSample(start + index, reason, field, detail))
        batch = Batch(
            keys=columns.keys,
            starts=columns.starts,
            offsets=columns.offsets,
            numeric=columns.numeric,
            labels=columns.labels,
            weights=columns.weights,
            times=columns.times,
            kept=columns.kept + np.int32(start) if start else columns.kept,
        )
        return batch, bad


def _decoder(model: Model, max_message_bytes: int) -> Decoder:
    schema = model.schema
    position = {one.name: i for i, one in enumerate(schema.categoricals)}
    return Decoder(
        labels=[_label_spec(one) for one in model.labels],
        categoricals=[
            CategoricalSpec(
                one.field_name,
                max_length=one.max_length or 0,
                default=one.default_ids,
            )
            for one in schema.categoricals
        ],
        crosses=[
            CrossSpec(one.name, [position[name] for name in one.of], max_length=one.max_length or 0)
            for one in schema.crosses
        ],
        numerics=[
            NumericSpec(
                one.field_name,
                default=one.default,
                transform=one.transform or "none",
                mean=one.mean,
                stddev=one.stddev,
                cells=one.cells.bits if one.cells else (),
            )
            for one in schema.numerics
        ],
        time=schema.time,
        weight=schema.weight,
        time_format=time_format(schema.time_format),
        max_message_bytes=max_message_bytes,
        max_id_bytes=schema.max_id_bytes,
        max_ids=schema.max_ids,
        max_depth=schema.max_depth,
    )


def _label_spec(label: Label) -> LabelSpec:
    positive = None if label.positive is None else str(label.positive)
    return LabelSpec(label.name, kind=label.kind or "real", optional=label.optional, positive=positive)


def _messages_at(messages: Sequence[bytes | TensorSamples], indexes: Iterable[int]) -> Iterator[bytes]:
    """Of the samples that were given to a decoder those at `indexes`, which ascend."""
    begin = end = 0
    one: bytes | TensorSamples = b""
    rest = iter(messages)
    for index in indexes:
        while end <= index:
            one, begin = next(rest), end
            end += len(one) if isinstance(one, TensorSamples) else 1
        yield one[index - begin] if isinstance(one, TensorSamples) else one


def _message(sample: bytes | str | Mapping[str, Any]) -> bytes:
    if isinstance(sample, bytes):
        return sample
    if isinstance(sample, str):
        return sample.encode("utf-8", "surrogatepass")
    if isinstance(sample, Mapping):
        try:
            text = _STRICT.encode(sample if type(sample) is dict else dict(sample))
        except ValueError:  # NaN is a missing number; infinity is written and refused
            text = _LENIENT.encode({name: None if _is_nan(value) else value for name, value in sample.items()})
        return text.encode("utf-8", "surrogatepass")
    raise TypeError(f"a sample must be bytes, str or a dict, not {type(sample).__name__}")


def _is_nan(value: object) -> bool:
    """Whether a value is NaN, which pandas and NumPy have where a number is missing."""
    return isinstance(value, float | np.floating) and math.isnan(value)


def _not_samples(given: object) -> str:
    if not isinstance(given, bytes | str | os.PathLike):
        return f"samples must be a list of samples or a table, not {given!r}"
    text = os.fspath(given)
    if isinstance(text, bytes) or text.lstrip().startswith("{"):
        return "samples must be a list of samples; put a single one in a list"
    return (
        f"samples must be a list of samples or a table, not the path {text!r}; read the file first, such as with "
        "open(path, 'rb') for JSON lines or pandas.read_csv(path), or run `streamtrain learn`"
    )


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays, dates and the like, as JSON has them; {} for others, refused where it is read."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, UUID):
        return str(value)
    return {}


_STRICT = json.JSONEncoder(default=_plain, ensure_ascii=False, allow_nan=False)
_LENIENT = json.JSONEncoder(default=_plain, ensure_ascii=False)
