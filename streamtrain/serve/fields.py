"""Fields: what a model reads of a sample, as clients are told."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from streamtrain.model.features import MAX_FLOAT, Categorical, Cross
from streamtrain.model.model import Model
from streamtrain.model.schema import Schema

_Id = str | int


@dataclass(frozen=True)
class InputField:
    """A field of a sample that features read.

    Attributes:
        name: its key.
        ids: whether it holds ids, one or a list; else a number.
        required: whether a sample without it is refused.
    """

    name: str
    ids: bool
    required: bool


def fields_of(schema: Schema) -> dict[str, InputField]:
    """The fields by name, in the order of the features. One that several features read is there once."""
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


def instance_model(model: Model) -> type[BaseModel]:
    """An instance as a pydantic model, for the OpenAPI page; instances themselves are read by the model's decoder."""
    limit = model.schema.max_id_bytes
    members: dict[str, Any] = {}
    for i, field in enumerate(fields_of(model.schema).values()):
        kind: Any = _Id | list[_Id] if field.ids else float
        default: Any = ... if field.required else None
        about = f"An id or a list of ids, each of at most {limit} bytes." if field.ids else "A number."
        bounds: dict[str, Any] = {} if field.ids else {"ge": -MAX_FLOAT, "le": MAX_FLOAT}
        members[f"f{i}"] = (kind, Field(default, alias=field.name, description=about, **bounds))
    named: type[BaseModel] = create_model("Instance", __config__=ConfigDict(extra="allow"), **members)
    return named


def instance_schema(model: Model) -> dict[str, Any]:
    """An instance as JSON Schema."""
    return instance_model(model).model_json_schema()
