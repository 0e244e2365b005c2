"""Formats: what the messages of a stream are written in."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from streamtrain.errors import BadSample, ConfigError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader
from streamtrain.settings.groups import StreamSettings
from streamtrain.stream.formats.avro import AvroFormat
from streamtrain.stream.formats.protobuf import ProtobufFormat, read_descriptor_set
from streamtrain.stream.formats.registry import HEADER_BYTES, MAGIC, SchemaRegistry

FORMATS = ("json", "avro", "protobuf")

_MAGIC = bytes([MAGIC])


class Format(Protocol):
    """Decodes messages. Not thread-safe: each thread has its own."""

    def decode(self, messages: Sequence[bytes]) -> tuple[Batch, list[BadSample]]:
        """The batch of the good samples, and what was refused; positions count from the first message.

        Raises:
            SourceUnavailable: the schema registry does not answer. Nothing is lost: make the same call again.
            SourceRefused: the schema registry refuses the credentials, or is none.
        """


class JsonFormat:
    """Samples in JSON.

    Args:
        model: the model whose samples are read.
        framed: whether messages may begin with the header of Confluent's wire format, which is skipped.
    """

    def __init__(self, model: Model, *, framed: bool = False) -> None:
        self._reader = SampleReader(model)
        self._framed = framed

    def decode(self, messages: Sequence[bytes]) -> tuple[Batch, list[BadSample]]:
        if self._framed:
            messages = [one[HEADER_BYTES:] if one[:1] == _MAGIC else one for one in messages]
        return self._reader.decode(messages)


def make_format(
    name: str,
    model: Model,
    *,
    registry: str | None = None,
    registry_config: Mapping[str, str | int | float | bool] | None = None,
    schema_file: str | None = None,
) -> Format:
    """A format by its settings.

    Args:
        name: "json", "avro" or "protobuf".
        model: the model whose samples are read.
        registry: address of the schema registry; messages are in Confluent's wire format. In JSON they may be.
        registry_config: options of Confluent's client, such as "basic.auth.user.info".
        schema_file: without a registry, the schema of all messages: an Avro schema or a Protobuf descriptor set;
            default the one in `schemas`. Of Protobuf with a registry: has the types instead of the registry.

    Raises:
        ConfigError: these do not go together, the file is missing or not a schema, or a package is missing.
    """
    if name not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, not {name!r}")
    if registry_config and registry is None:
        raise ConfigError("registry_config is set without the registry's address")
    if name == "json":
        if schema_file is not None:
            raise ConfigError("schema_file is set, but JSON has no schema file: remove it, or choose another format")
        return JsonFormat(model, framed=registry is not None)
    if name == "avro" and registry is not None and schema_file is not None:
        raise ConfigError("Avro with a registry uses the registry's schemas: do not set schema_file as well")
    client = None if registry is None else SchemaRegistry(registry, registry_config)
    if name == "avro":
        return AvroFormat(model, client) if schema_file is None else _avro(model, Path(schema_file))
    return ProtobufFormat(model, client, read_descriptor_set(Path(schema_file)) if schema_file else None)


def format_of(settings: StreamSettings, model: Model) -> Format:
    """The format of a stream, by its settings; errors as `make_format`."""
    return make_format(
        settings.format,
        model,
        registry=settings.registry,
        registry_config=settings.registry_config,
        schema_file=settings.schema_file,
    )


def _avro(model: Model, path: Path) -> AvroFormat:
    try:
        return AvroFormat(model, schema=path.read_text())
    except OSError as exc:
        raise ConfigError(f"schema file {path} cannot be read: {exc.strerror}") from exc
    except (UnicodeDecodeError, ConfigError) as exc:
        raise ConfigError(f"schema file {path}: {exc}") from exc
