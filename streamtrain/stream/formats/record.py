"""Records: samples as dicts of their fields, decoded from Avro or Protobuf, to batches.

They go through JSON to the native decoder, so that a sample means the same in every format. Writing JSON takes a small
part of the time that decoding a format takes in Python.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from streamtrain.errors import BadSample, ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader

# The map of a message whose entries are fields of the sample like those of the message itself.
FEATURES = "features"

# Stands for a value that no field can have: the decoder refuses it where the field is read.
UNREADABLE: dict[str, Any] = {}

_ANY_SIZE = 2**30


class InvalidSchema(ValueError):
    """What is given is not a schema of the format, or is beyond its bounds."""


class RefusedRecord(Exception):
    """A message cannot be decoded, for a reason of docs/samples.md."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RecordReader:
    """Reads the samples of one model. Not thread-safe.

    Attributes:
        fields: names of the fields that the model's schema reads.

    Raises:
        ConfigError: a package is missing, or the schema is wrong.
    """

    def __init__(self, model: Model) -> None:
        schema = model.schema
        fields = [schema.time, *(one.name for one in model.labels), schema.weight]
        fields += [one.field_name for one in schema.categoricals]
        fields += [one.field_name for one in schema.numerics]
        self.fields = tuple(dict.fromkeys(name for name in fields if name is not None))
        self._most = schema.max_message_bytes
        self._reader = SampleReader(model, max_message_bytes=_ANY_SIZE)  # the limit is on messages, not on their JSON
        self._encode = import_optional("msgspec.json").Encoder().encode

    def decode(
        self, messages: Sequence[bytes], parse: Callable[[bytes], Mapping[str, Any]]
    ) -> tuple[Batch, list[BadSample]]:
        """Decodes messages as one batch.

        Args:
            messages: encoded messages.
            parse: returns the fields of a message, where missing ones may be None, or raises RefusedRecord.
        """
        texts: list[bytes] = []
        places: list[int] = []
        bad: list[BadSample] = []
        for place, message in enumerate(messages):
            try:
                if len(message) > self._most:
                    raise RefusedRecord("too_large")
                texts.append(self._json(parse(message)))
                places.append(place)
            except RefusedRecord as exc:
                bad.append(BadSample(place, exc.reason, ""))
        batch, refused = self._reader.decode(texts)
        if not bad:
            return batch, refused
        bad += [replace(one, index=places[one.index]) for one in refused]
        return replace(batch, kept=np.array(places, np.int32)[batch.kept]), sorted(bad, key=lambda one: one.index)

    def _json(self, sample: Mapping[str, Any]) -> bytes:
        try:
            text: bytes = self._encode(sample)
        except OverflowError:  # more than 64 bits
            return json.dumps(sample).encode()
        # The encoder writes NaN and infinities as null, which would pass for missing. Python's writes what is refused.
        if b"null" in text and text.count(b"null") != list(sample.values()).count(None):
            return json.dumps(sample).encode()
        return text


def merge_features(own: Mapping[str, Any], features: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a message and the entries of its map in one; its own fields win unless they are None."""
    return {**(features or {}), **{name: value for name, value in own.items() if value is not None}}


def import_optional(module: str) -> Any:
    """Imports a module of the optional packages of formats.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as exc:
        raise ConfigError(
            f"this format needs packages that are not installed: pip install 'streamtrain[formats]' ({exc})"
        ) from exc
