"""Samples as dicts, written in every format, and a model that reads them."""

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import streamtrain.stream.formats.sample_pb2 as pb

import streamtrain as st
from streamtrain.errors import BadSample
from streamtrain.model.batch import Batch

Sample = Mapping[str, Any]

FIELDS = ("ts", "label", "stars", "w", "user", "tags", "price", "age")


def model(**options: Any) -> st.Model:
    schema = st.Schema(
        label=[st.Label("label"), st.Label("stars", kind="real", optional=True)],
        time="ts",
        weight="w",
        features=[
            st.Categorical("user", 4),
            st.Categorical("tags", 4, max_length=3, default="none"),
            st.Cross("both", 4, of=("user", "tags")),
            st.Numeric("price", transform=None),
            st.Numeric("age", default=1.0, transform="log1p"),
        ],
        **options,
    )
    return st.Model(schema, lambda inputs: None, loss={"label": "binary_crossentropy", "stars": "mean_squared_error"})


def same(one: tuple[Batch, list[BadSample]], other: tuple[Batch, list[BadSample]]) -> None:
    for name in Batch.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(one[0], name), getattr(other[0], name), err_msg=name)
    assert one[1] == other[1]


def in_json(sample: Sample) -> bytes:
    return json.dumps(sample).encode()


ANYTHING = [
    "null",
    "boolean",
    "long",
    "double",
    "string",
    {"type": "array", "items": ["null", "boolean", "long", "double", "string"]},
    {"type": "map", "values": "string"},
]
AVRO_OF_ANYTHING = {
    "type": "record",
    "name": "Anything",
    "fields": [{"name": name, "type": ANYTHING} for name in (*FIELDS, "unread")],
}


def in_avro(sample: Sample, schema: Any = AVRO_OF_ANYTHING) -> bytes:
    """One record; a field that it does not have is null."""
    to = io.BytesIO()
    fastavro.schemaless_writer(to, fastavro.parse_schema(schema), dict(sample))
    return to.getvalue()


def in_protobuf(sample: Sample) -> bytes:
    """A message of schemas/sample.proto: what it has no field for stands in its map."""
    message = pb.Sample()
    for name, value in sample.items():
        if name in ("ts", "label", "weight") and type(value) in (int, float):
            setattr(message, name, value)
        else:
            message.features[name].CopyFrom(protobuf_value(value))
    data: bytes = message.SerializeToString()
    return data


def protobuf_value(value: Any) -> Any:
    if value is None:
        return pb.Value()
    if isinstance(value, bool):
        return pb.Value(flag=value)
    if isinstance(value, int):
        return pb.Value(integer=value) if value < 2**63 else pb.Value(unsigned=value)
    if isinstance(value, float):
        return pb.Value(number=value)
    if isinstance(value, str):
        return pb.Value(text=value)
    return pb.Value(list=pb.List(values=[protobuf_value(one) for one in value]))


def compiled(proto: Path, *options: str) -> Path:
    """The descriptor set of a .proto."""
    out = proto.with_suffix(".desc")
    options = options or ("--include_imports",)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{proto.parent}", *options, f"--descriptor_set_out={out}"]
    subprocess.run([*command, str(proto)], check=True)
    return out
