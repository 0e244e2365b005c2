"""gRPC by the unmodified clients of TensorFlow Serving and Triton, and what is refused."""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import streamtrain.serve.grpc.open_inference_pb2 as oip
import streamtrain.serve.grpc.tensorflow_serving_pb2 as tfs

from streamtrain.processes.server import PredictionServer, configure
from streamtrain.serve.http.app import make_app
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.service.service import ServingConfig
from streamtrain.store.publication import Weights
from tests.patience import PATIENCE, until
from tests.serve.http.test_openinference import priced
from tests.serve.published import KEYS, origin_of, rows
from tests.serve.running import TOKEN, running_grpc, running_server

HERE = Path(__file__).parent
PREDICT = "/tensorflow.serving.PredictionService/Predict"
INFER = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture(scope="module")
def registry() -> Registry:
    model = priced()
    origin = origin_of(model)
    origin.publish({"user": (KEYS, rows(1))}, Weights(np.ones(1, np.float32), np.empty(0, np.float32)), clock={0: 5})
    origin.keep("canary")
    registry = Registry(model, origin)
    registry.promote(1)
    registry.promote(HEAD)
    registry.refresh_labels()
    return registry


@pytest.fixture(scope="module")
def address(registry: Registry) -> Iterator[str]:
    with running_grpc(registry, offset_timeout=0.2, max_instances=3, max_body=4096) as one:
        yield one


def send(address: str, method: str, data: bytes, *metadata: tuple[str, str]) -> tuple[bytes, dict[str, str]]:
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        answer, call = channel.unary_unary(method).with_call(data, PATIENCE, metadata=metadata)
        return answer, {key: value for key, value in call.trailing_metadata()}


def refused(address: str, method: str, data: bytes, *metadata: tuple[str, str]) -> tuple[str, str]:
    """Code and details."""
    with pytest.raises(grpc.RpcError) as failed:
        send(address, method, data, *metadata)
    return failed.value.code().name, failed.value.details()


def price(values: list[float], **options: Any) -> Any:
    tensor = tfs.TensorProto(dtype=tfs.DT_FLOAT, float_val=values)
    tensor.tensor_shape.dim.add(size=options.pop("size", len(values)))
    return tensor


def asked(users: tuple[str, ...] = ("u1",), prices: list[float] | None = None, **spec: Any) -> Any:
    request = tfs.PredictRequest(model_spec=tfs.ModelSpec(**{"name": "model", **spec}))
    request.inputs["user"].dtype = tfs.DT_STRING
    request.inputs["user"].string_val.extend(one.encode() for one in users)
    request.inputs["user"].tensor_shape.dim.add(size=len(users))
    request.inputs["price"].CopyFrom(price([1.0] * len(users) if prices is None else prices))
    return request


@pytest.mark.parametrize(
    ("program", "worked"),
    [
        ("tensorflow_client.py", ["predict", "lists", "types", "version", "examples", "metadata"]),
        ("triton_client.py", ["health", "raw", "integers", "lists", "version", "error", "contents"]),
    ],
)
def test_unmodified_clients(address: str, program: str, worked: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / program), address],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "no_proxy": "*"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, worked), done.stderr


def test_requests_that_are_wrong(address: str) -> None:
    several, ragged, broken = asked(("u1", "u2")), asked(), asked()
    several.inputs["price"].CopyFrom(price([1.0]))
    ragged.inputs["price"].CopyFrom(price([1.0, 2.0, 3.0], size=2))
    broken.inputs["user"].string_val[0] = b"\xff"
    scalar, strange, huge = asked(), asked(), asked()
    del scalar.inputs["price"].tensor_shape.dim[:]
    strange.inputs["price"].dtype = tfs.DT_HALF
    huge.inputs["price"].tensor_shape.dim[0].size = 1 << 40
    for request, code, said in (
        (asked(name="other"), "NOT_FOUND", "there is no model 'other'"),
        (asked(version_label="beta"), "NOT_FOUND", "label 'beta' is not loaded"),
        (asked(signature_name="x"), "INVALID_ARGUMENT", "unknown signature 'x'"),
        (asked(("u1",) * 4), "INVALID_ARGUMENT", "at most 3 instances, not 4"),
        (several, "INVALID_ARGUMENT", "inputs must have the same first dimension"),
        (ragged, "INVALID_ARGUMENT", "input 'price' has 3 values, which do not fill its shape [2]"),
        (broken, "INVALID_ARGUMENT", "'user' has a value that is not UTF-8"),
        (scalar, "INVALID_ARGUMENT", "shape must have one or more dimensions"),
        (strange, "INVALID_ARGUMENT", "input 'price': dtype 19 is not one of DT_FLOAT"),
        (huge, "INVALID_ARGUMENT", "may have at most 4194304 values"),
        (tfs.PredictRequest(model_spec={"name": "model"}), "INVALID_ARGUMENT", "none of the model's inputs"),
    ):
        found, details = refused(address, PREDICT, request.SerializeToString())
        assert (found, said in details) == (code, True), details
    code, details = refused(address, PREDICT, b"\xff\xff")
    assert (code, details.startswith("the request is not a PredictRequest: ")) == ("INVALID_ARGUMENT", True)
    assert refused(address, PREDICT, bytes(5000))[0] == "RESOURCE_EXHAUSTED"
    assert refused(address, "/tensorflow.serving.PredictionService/MultiInference", b"")[0] == "UNIMPLEMENTED"


def test_tensors_that_are_wrong(address: str) -> None:
    """Of the Open Inference Protocol; what may be wrong with a tensor: see tests/native/test_tensor.py."""
    user = {"name": "user", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"u1"]}}
    price = {"name": "price", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [0.5]}}
    for inputs, raw, said in (
        ([user, user], [], "input 'user' appears twice"),
        ([user, price], [b"u1"], "there are 1 raw_input_contents for 2 inputs"),
        ([user, price | {"shape": [2]}], [], "input 'price' has 1 values, which do not fill its shape [2]"),
        ([user, price | {"datatype": "FP16"}], [], "input 'price': FP16 values must be raw"),
        ([user], [], "instance 0: missing_field in field 'price': the sample has 'user'"),
        ([user | {"shape": [1, 1]}, price | {"name": "user.length"}], [], "must be 1 integers from 0 to 1"),
        ([price | {"name": "user"}, price], [], "instance 0: wrong_type in field 'user': it is 0.5; expected an id"),
    ):
        request = oip.ModelInferRequest(model_name="model", inputs=inputs, raw_input_contents=raw)
        code, details = refused(address, INFER, request.SerializeToString())
        assert (code, said in details) == ("INVALID_ARGUMENT", True), details
    code, details = refused(address, INFER, b"\xff\xff")
    assert (code, details.startswith("the request is not a ModelInferRequest: ")) == ("INVALID_ARGUMENT", True)
    code, details = refused(address, INFER, b"\x0a\x05model\x2a\x01\xff")
    assert (code, details) == ("INVALID_ARGUMENT", "one of the inputs is not an InferInputTensor")


CLASSIFY, REGRESS = (f"/tensorflow.serving.PredictionService/{one}" for one in ("Classify", "Regress"))


@pytest.mark.parametrize(("method", "kind"), [(CLASSIFY, tfs.ClassificationRequest), (REGRESS, tfs.RegressionRequest)])
def test_examples_that_are_too_many_or_wrong(registry: Registry, method: str, kind: Any) -> None:
    """A context of 20 kB and 200,000 empty examples are 420 kB, and would be four gigabytes of instances."""

    def examples(count: int, context: int, prices: Sequence[float] = (1.0,)) -> bytes:
        request = kind(model_spec={"name": "model"})
        given = request.input.example_list_with_context
        given.context.features.feature["user"].bytes_list.value.append(b"u1" + b"x" * context)
        given.context.features.feature["price"].float_list.value.extend(prices)
        given.examples.extend([tfs.Example()] * count)
        return bytes(request.SerializeToString())

    with running_grpc(registry) as address:
        send(address, method, examples(1000, 0))
        for count, context, said in (
            (200_000, 20_000, "at most 4096 instances, not 200000"),
            (4096, 20_000, "bytes for 4096 examples makes 8"),
        ):
            code, details = refused(address, method, examples(count, context))
            assert (code, said in details) == ("INVALID_ARGUMENT", True), details
        for wrong in (math.nan, math.inf, -math.inf):
            code, details = refused(address, method, examples(1, 0, [wrong]))
            assert (code, details) == ("INVALID_ARGUMENT", "'price' has a value that is not finite")


def test_an_output_that_is_named_many_times_is_answered_once(address: str) -> None:
    request = asked()
    request.output_filter.extend(["label"] * 500)
    answer = tfs.PredictResponse.FromString(send(address, PREDICT, request.SerializeToString())[0])
    assert [*answer.outputs] == ["label"]
    infer = oip.ModelInferRequest(
        model_name="model",
        inputs=[
            {"name": "user", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"u1"]}},
            {"name": "price", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [0.5]}},
        ],
        outputs=[{"name": "label"}] * 2,
    )
    code, details = refused(address, INFER, infer.SerializeToString())
    assert (code, details) == ("INVALID_ARGUMENT", "output 'label' is requested twice")


def test_waiting_for_offsets(address: str) -> None:
    request = asked().SerializeToString()
    _, after = send(address, PREDICT, request, ("x-min-offset", "0:4"), ("x-request-id", "mine"))
    assert (after["x-request-id"], after["x-publication"]) == ("mine", "1")
    code, details = refused(address, PREDICT, request, ("x-min-offset", "0:5"))
    assert (code, "not learned within 0.2 s" in details) == ("FAILED_PRECONDITION", True)
    assert len(send(address, PREDICT, request, ("x-request-id", "no spaces"))[1]["x-request-id"]) == 16


def test_tokens(registry: Registry) -> None:
    request = asked().SerializeToString()
    with running_grpc(registry, read_token="reader") as address:
        assert oip.ServerLiveResponse.FromString(send(address, LIVE, b"")[0]).live
        for given in ((), (("authorization", "Bearer guess"),)):
            code, details = refused(address, PREDICT, request, *given)
            assert (code, "the read token is required" in details) == ("UNAUTHENTICATED", True)
        for token in ("reader", TOKEN):
            send(address, PREDICT, request, ("authorization", f"Bearer {token}"))


def test_limits_and_metrics(registry: Registry) -> None:
    config = ServingConfig(grpc_listen="127.0.0.1:0", max_requests=1, offset_timeout=PATIENCE)
    server = PredictionServer(configure(make_app(registry, config=config), "127.0.0.1:0"))
    request = asked().SerializeToString()
    with running_server(server) as url, httpx.Client(base_url=url, trust_env=False, verify=False) as client:
        address = f"127.0.0.1:{server.grpc_port}"
        with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
            predict, later = channel.unary_unary(PREDICT), [("x-min-offset", "0:9")]
            waiting = predict.future(request, PATIENCE, metadata=later)
            until(lambda: "streamtrain_serving_under_way_requests 1.0" in client.get("/metrics").text)
            code, details = refused(address, PREDICT, request)
            assert (code, details) == ("UNAVAILABLE", "1 requests are in flight; try again later")
            waiting.cancel()
            until(lambda: "streamtrain_serving_under_way_requests 0.0" in client.get("/metrics").text)
            assert predict.future(request, 0.5, metadata=later).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: "streamtrain_serving_under_way_requests 0.0" in client.get("/metrics").text)
        send(address, PREDICT, request)
        text = client.get("/metrics").text
    assert 'streamtrain_serving_requests_total{code="200",protocol="tensorflow-grpc"} 1.0' in text
    assert 'streamtrain_serving_requests_total{code="503",protocol="tensorflow-grpc"} 1.0' in text
    assert 'streamtrain_serving_shed_requests_total{reason="requests"} 1.0' in text


def test_a_port_that_is_taken(registry: Registry, address: str) -> None:
    server = PredictionServer(configure(make_app(registry, config=ServingConfig(grpc_listen=address)), "127.0.0.1:0"))
    thread = threading.Thread(target=server.run)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert str(server.failure).startswith(f"cannot bind {address} (serve.grpc_listen): in use")
