"""About: what a serving process says of its model and of itself to the console, and the JSON Schemas of that."""

from typing import Any

from streamtrain.model.features import Categorical, Cross
from streamtrain.model.model import Model
from streamtrain.serve.fields import fields_of, instance_schema
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.service import Service


def of_model(model: Model) -> dict[str, Any]:
    """What never changes: outputs, tables, and the fields of an instance with the features that read them."""
    readers = [one for one in model.schema.features if not isinstance(one, Cross)]
    fields = []
    for name, one in fields_of(model.schema).items():
        reading = [feature for feature in readers if feature.field_name == name]
        lengths = [feature.max_length for feature in reading if isinstance(feature, Categorical)]
        fields.append(
            {
                "name": name,
                "ids": one.ids,
                "required": one.required,
                "default": next((feature.default for feature in reading if feature.default is not None), None),
                "max_ids": None if None in lengths else max((length for length in lengths if length), default=None),
                "features": [feature.name for feature in reading],
            }
        )
    return {
        "model": model.name,
        "outputs": [label.name for label in model.labels],
        "fields": fields,
        "crosses": [{"name": one.name, "of": one.of} for one in model.schema.crosses],
        "tables": [{"name": table.name, "dim": table.dim} for table in model.schema.tables],
    }


def of_process(service: Service, now: float) -> dict[str, Any]:
    """What is loaded and served now, by the clock of this process, `now`."""
    registry = service.registry
    served = registry.served
    return {
        "time": now,
        "served": served.name if served else None,
        "loaded": [_loaded(one) for one in registry.resident.values()],
        "labels": registry.labels,
        "origin": service.origin_state(),
    }


def _loaded(predictor: Predictor) -> dict[str, Any]:
    publication = predictor.publication
    return {
        "version": predictor.name,
        "publication": publication.number,
        "published": publication.published,
        "watermark": publication.watermark or None,
        "learned": sum(publication.clock.values()),
        "rows": predictor.loaded.rows,
        "bytes": predictor.loaded.nbytes,
        "metrics": publication.metrics,
    }


_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_NUMBER: dict[str, Any] = {"type": "number"}


def _maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def _by(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": schema}


def _object(properties: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties}


_METRICS = _by(_by(_maybe(_NUMBER)))
_LOADED = _object(
    {
        "version": _TEXT | {"description": 'A number, or "head".'},
        "publication": _COUNT,
        "published": _NUMBER | {"description": "Seconds since the epoch."},
        "watermark": _maybe(_NUMBER) | {"description": "Latest event time learned, seconds since the epoch."},
        "learned": _COUNT | {"description": "Samples up to its clock, over all partitions."},
        "rows": _by(_COUNT),
        "bytes": _COUNT,
        "metrics": _METRICS,
    }
)
_FIELD = _object(
    {
        "name": _TEXT,
        "ids": {"type": "boolean", "description": "One id or a list of ids; else a number."},
        "required": {"type": "boolean"},
        "default": {"description": "What is read where it is missing."},
        "max_ids": _maybe(_COUNT) | {"description": "Of a longer list, the last so many count; null: no limit."},
        "features": _list(_TEXT),
    }
)
PROCESS = _object(
    {
        "model": _TEXT,
        "outputs": _list(_TEXT),
        "fields": _list(_FIELD),
        "crosses": _list(_object({"name": _TEXT, "of": _list(_TEXT)})),
        "tables": _list(_object({"name": _TEXT, "dim": _COUNT})),
        "control": {"type": "boolean", "description": "Whether there is an admin token."},
        "cluster": {"type": "boolean", "description": "Whether a coordinator is configured."},
        "time": _NUMBER | {"description": "Now, seconds since the epoch."},
        "served": _maybe(_TEXT),
        "loaded": _list(_LOADED),
        "labels": _by(_COUNT),
        "origin": _TEXT,
    }
)
CLUSTER = {
    "type": "object",
    "description": "See docs/serving.md. Any number may be null.",
    "properties": {
        "time": _maybe(_NUMBER),
        "figures": _METRICS,
        "shards": _list({"type": "object"}),
        "workers": _list({"type": "object"}),
        "servers": _list({"type": "object"}),
        "dead_letters": _by(_maybe(_NUMBER)),
        "history": _list({"type": "object"}),
    },
}
_KEY = {
    "key": _TEXT | {"description": "Unsigned 64-bit, in decimal."},
    "found": {"type": "boolean", "description": "Whether it has a row; else it reads its birth value."},
    "norm": _maybe(_NUMBER) | {"description": "Euclidean."},
}
ROW = _object(
    {
        "table": _TEXT,
        "id": _TEXT,
        **_KEY,
        "values": _list(_NUMBER),
        "count": _maybe(_NUMBER) | {"description": "How often it was learned; null: the cluster does not tell."},
        "last_seen": _maybe(_NUMBER)
        | {"description": "Event time, seconds since the epoch; null as well, and where the table does not keep it."},
        "cluster": _TEXT | {"description": '"ok", "not configured", or why the cluster does not tell.'},
    }
)
_HIT = _object({"id": _maybe(_TEXT) | {"description": "null: of a cross."}, **_KEY})
HITS = _object(
    {
        "version": _TEXT,
        "publication": _COUNT,
        "features": _list(_object({"feature": _TEXT, "table": _TEXT, "ids": _list(_HIT)})),
    }
)


def instances(model: Model) -> dict[str, Any]:
    """A request that explains one instance."""
    one = _list(instance_schema(model)) | {"minItems": 1, "maxItems": 1}
    return {"type": "object", "required": ["instances"], "properties": {"instances": one}}
