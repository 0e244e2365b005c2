"""The fields that a model reads of an instance."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from msgspec import UNSET, Meta, UnsetType, defstruct
from msgspec.json import schema_components

from streamtrain.model.features import MAX_FLOAT, Categorical, Cross
from streamtrain.model.model import Model
from streamtrain.model.schema import Schema
from streamtrain.serve.http.responses import HTTPError


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


class RequestLimits(NamedTuple):
    """What is counted of a request before anything of it is copied.

    Attributes:
        instances: that it may have.
        bytes: to which its instances may grow by what they share.
        take: counts these bytes among those of all requests in flight; raises Overloaded.
    """

    instances: int
    bytes: int
    take: Callable[[int], object]

    def check(self, instances: int, shared: int = 0) -> None:
        """Before its instances are made, each with so many bytes that are sent once for all of them.

        Raises:
            HTTPError: 413, there are too many, or they would take too much memory.
            Overloaded: see `take`.
        """
        if instances > self.instances:
            raise HTTPError(413, f"a request may have at most {self.instances} instances, not {instances}")
        if instances * shared > self.bytes:
            raise HTTPError(
                413,
                f"a context of {shared} bytes for {instances} examples makes {instances * shared} bytes, and a request "
                f"may have at most {self.bytes}: send fewer examples at once",
            )
        if shared:
            self.take(instances * shared)


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
