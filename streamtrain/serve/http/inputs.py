"""The fields that a model reads of an instance."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, defstruct
from msgspec.json import schema_components

from streamtrain.model.features import MAX_FLOAT, Categorical, Cross
from streamtrain.model.model import Model
from streamtrain.model.schema import Schema


@dataclass(frozen=True)
class InputField:
    """A field of an instance that features read.

    Attributes:
        name: its key.
        ids: whether it holds ids, one or a list; else a number.
        required: whether an instance without it is rejected.
    """

    name: str
    ids: bool
    required: bool


def input_fields(schema: Schema) -> dict[str, InputField]:
    """The fields by name, in the order of the features; one that several features read appears once."""
    fields: dict[str, InputField] = {}
    for one in schema.features:
        if isinstance(one, Cross):
            continue
        before = fields.get(one.field_name)
        ids, required = isinstance(one, Categorical), one.default is None
        if before is not None:
            ids, required = ids or before.ids, required or before.required
        fields[one.field_name] = InputField(one.field_name, ids, required)
    return fields


def instance_schema(model: Model) -> dict[str, Any]:
    """An instance as JSON Schema, for the OpenAPI document; the model's decoder is what reads instances."""
    ids = Meta(description=f"An id or a list of ids, each of at most {model.schema.max_id_bytes} bytes.")
    number = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT, description="A number.")]
    members: list[Any] = []
    fields = [*input_fields(model.schema).values()]
    for i, field in enumerate(fields):
        kind: Any = Annotated[str | int | list[str | int], ids] if field.ids else number
        members.append((f"f{i}", kind) if field.required else (f"f{i}", kind | UnsetType, UNSET))
    names = {f"f{i}": field.name for i, field in enumerate(fields)}
    _, schemas = schema_components([defstruct("Instance", members, kw_only=True, rename=names)])
    instance: dict[str, Any] = schemas["Instance"]
    return instance


def any_of(schemas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The JSON Schema of a body that is as one of these says."""
    different: list[dict[str, Any]] = []
    different += (one for one in schemas if one not in different)
    return different[0] if len(different) == 1 else {"anyOf": different}


def instances_schema(model: Model, at_most: int | None = None) -> dict[str, Any]:
    """A body with instances, each as `instance_schema` says."""
    instances: dict[str, Any] = {"type": "array", "items": instance_schema(model)}
    if at_most is not None:
        instances |= {"minItems": 1, "maxItems": at_most}
    return {"type": "object", "required": ["instances"], "properties": {"instances": instances}}
