"""Bodies of requests: however their parts multiply, what is made of them is bounded, or they are refused in words.

Input: which protocol, a byte; then the body. Of gRPC's Predict and ModelInfer see tensors.cc.
"""

import json
from collections.abc import Callable, Iterator

import streamtrain.serve.grpc.tensorflow_serving_pb2 as pb

from streamtrain.serve.errors import HTTPError
from streamtrain.serve.grpc.server import parse_message
from streamtrain.serve.grpc.tfserving import parse_examples as parse_proto
from streamtrain.serve.http.openinference import parse_request, to_messages
from streamtrain.serve.http.tfserving import parse_examples, parse_messages
from streamtrain.serve.service.admission import RequestLimits
from streamtrain.serve.service.served import InputField

_INSTANCES, _BYTES = 64, 16_384
_FIELDS = {name: InputField(name, ids=name != "p", required=False) for name in ("u", "v", "p")}
_ONE = {"u": _FIELDS["u"]}
_LONGER = 16  # times that a byte of a body may be as JSON: a float of 4 bytes has 20 digits, an escaped byte 6
_OVERHEAD = 64  # bytes of an instance besides its values


def _infer(body: bytes, limits: RequestLimits) -> list[bytes]:
    request, values = parse_request(body, None)
    return [bytes(one) for one in to_messages(request.inputs, values, _FIELDS, limits)]


_PARSERS: list[Callable[[bytes, RequestLimits], list[bytes]]] = [
    lambda body, limits: parse_messages(body, _FIELDS, limits)[0],
    lambda body, limits: parse_messages(body, _ONE, limits)[0],
    lambda body, limits: parse_examples(body, _FIELDS, limits)[0],
    lambda body, limits: parse_proto(parse_message(pb.ClassificationRequest, body).input, _FIELDS, limits),
    _infer,
]


def run(data: bytes) -> None:
    """One input."""
    if not data:
        return
    taken: list[int] = []
    limits = RequestLimits(_INSTANCES, _BYTES, taken.append)
    try:
        messages = _PARSERS[data[0] % len(_PARSERS)](data[1:], limits)
    except HTTPError as exc:
        if exc.status not in (400, 413) or not str(exc):
            raise
        return
    assert len(messages) <= _INSTANCES
    assert sum(map(len, messages)) <= sum(taken) + _LONGER * len(data) + _OVERHEAD * len(messages)


def seeds() -> Iterator[bytes]:
    """Of each protocol, small, with much of one thing, and with much of two."""
    user: dict[str, object] = {"u": "u1", "p": 0.5}
    contexts: list[dict[str, object]] = [{}, user, {"u": ["x" * 20] * 20}]
    for count in (1, 60, 65):
        yield b"\0" + json.dumps({"instances": [user] * count}).encode()
        yield b"\0" + json.dumps({"inputs": {"u": ["u1"] * count, "p": [0.5] * count}}).encode()
        yield b"\1" + json.dumps({"instances": ["u1"] * count}).encode()
        for context in contexts:
            yield b"\2" + json.dumps({"context": context, "examples": [{}] * count}).encode()
            yield b"\3" + _proto(context, count)
        tensor = {"name": "u", "shape": [count, 2], "datatype": "BYTES", "data": ["a", "b"] * count}
        yield b"\4" + json.dumps({"inputs": [tensor], "outputs": [{"name": "label"}] * count}).encode()
    yield b"\3" + _proto({"p": float("nan")}, 1)


def _proto(context: dict[str, object], count: int) -> bytes:
    request = pb.ClassificationRequest()
    given = request.input.example_list_with_context
    for name, value in context.items():
        feature = given.context.features.feature[name]
        if isinstance(value, float):
            feature.float_list.value.append(value)
        else:
            texts = value if isinstance(value, list) else [value]
            feature.bytes_list.value.extend(str(one).encode() for one in texts)
    for _ in range(count):
        given.examples.add()
    return bytes(request.SerializeToString())
