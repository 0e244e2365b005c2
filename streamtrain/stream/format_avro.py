"""Avro: messages of one schema, or in Confluent's wire format, whose schemas a registry has.

fastavro decodes them with the schema of their writer. Confluent's own deserializer does the same, but adds to every
message far more work than that is, for rules and contexts that samples do not have.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from streamtrain.errors import BadSample, ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.stream.avro_schema import AvroSchema, NotASchema, schema_of
from streamtrain.stream.flat import FlatReader, Refused, needed
from streamtrain.stream.registry import HEADER_BYTES, MAGIC, Registry, UnknownSchema

_SINGLE_OBJECT = b"\xc3\x01"
_SINGLE_OBJECT_BYTES = 10  # these two, and the fingerprint of the schema


class AvroFormat:
    """Samples in Avro: records, whose fields are found by name. Not thread-safe.

    Args:
        model: whose samples are read.
        registry: has the schemas; messages are in Confluent's wire format.
        schema: without a registry, that of all messages, as JSON or parsed; None: the one in schemas/sample.avsc.
            Messages may be in Avro's single-object encoding, too.

    Raises:
        ConfigError: schema is not one of Avro, it is given beside a registry, or a package is missing.
    """

    def __init__(
        self, model: Model, registry: Registry | None = None, schema: str | Mapping[str, Any] | None = None
    ) -> None:
        needed("fastavro")
        self._reader = FlatReader(model)
        self._registry = registry
        self._writers: dict[int, AvroSchema] = {}
        if registry is not None and schema is not None:
            raise ConfigError("Avro with a registry is read by the registry's schemas: give no schema beside it")
        if registry is None:
            self._only, self._prefix = self._single(schema)

    def decode(self, messages: Sequence[bytes]) -> tuple[Batch, list[BadSample]]:
        """See Format."""
        if self._registry is None:
            return self._reader.decode(messages, self._by_schema)
        return self._reader.decode(messages, self._by_id)

    def _single(self, schema: str | Mapping[str, Any] | None) -> tuple[AvroSchema, bytes]:
        """The schema of all messages, and what they begin with in the single-object encoding."""
        fastavro = needed("fastavro.schema")
        if schema is None:
            schema = files("streamtrain.stream").joinpath("sample.avsc").read_text()
        try:
            parsed = schema_of(schema) if isinstance(schema, str) else schema
            reader = AvroSchema(parsed, self._reader.fields)
        except NotASchema as exc:
            raise ConfigError(f"not an Avro schema: {exc}") from exc
        fingerprint = fastavro.fingerprint(fastavro.to_parsing_canonical_form(parsed), "CRC-64-AVRO")
        return reader, _SINGLE_OBJECT + bytes.fromhex(fingerprint)

    def _by_schema(self, message: bytes) -> Mapping[str, Any]:
        return self._only.read(message, _SINGLE_OBJECT_BYTES if message.startswith(self._prefix) else 0)

    def _by_id(self, message: bytes) -> Mapping[str, Any]:
        if len(message) < HEADER_BYTES or message[0] != MAGIC:
            raise Refused("not_avro")
        number = int.from_bytes(message[1:HEADER_BYTES])
        writer = self._writers.get(number)
        if writer is None:
            writer = self._writers[number] = self._fetch(number)
        return writer.read(message, HEADER_BYTES)

    def _fetch(self, number: int) -> AvroSchema:
        assert self._registry is not None
        try:
            schema = self._registry.schema(number)
            referred: list[Any] = []
            self._refer(schema, referred)
            return AvroSchema(schema_of(schema.schema_str), self._reader.fields, referred)
        except (UnknownSchema, NotASchema) as exc:
            self._registry.forget(number)
            raise Refused("unknown_schema") from exc

    def _refer(self, schema: Any, found: list[Any]) -> None:
        """Adds the schemas that a schema refers to, each after those that it refers to itself."""
        assert self._registry is not None
        for one in self._registry.referenced(schema).values():
            self._refer(one, found)
            parsed = schema_of(one.schema_str)
            if parsed not in found:
                found.append(parsed)
