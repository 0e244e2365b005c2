"""What a user of tritonclient does over gRPC; a program, given the address of the server. Prints what has worked."""

import sys

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

MODEL = "model"
PREDICTIONS = [[2.5], [2.0]]

client = InferenceServerClient(sys.argv[1])
assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready(MODEL)
assert client.is_model_ready(MODEL, "1")
assert client.get_server_metadata().name == "streamtrain"
metadata = client.get_model_metadata(MODEL)
assert [one.name for one in metadata.inputs] == ["user", "user.length", "price"]
assert sorted(metadata.versions) == ["1", "head"]
print("health")

ids = np.array([["u1", "u2"], ["u3", "none"]], object)
user, price = InferInput("user", [2, 2], "BYTES"), InferInput("price", [2, 1], "FP32")
user.set_data_from_numpy(ids)
price.set_data_from_numpy(np.array([[0.5], [1.0]], np.float32))
result = client.infer(MODEL, [user, price], request_id="9", outputs=[InferRequestedOutput("label")])
assert result.as_numpy("label").tolist() == PREDICTIONS
assert (result.get_response().id, result.get_response().model_version) == ("9", "head")
print("raw")

number = InferInput("user", [2, 1], "INT64")
number.set_data_from_numpy(np.array([[7], [8]]))
assert client.infer(MODEL, [number, price]).as_numpy("label").tolist() == [[0.5], [1.0]]
print("integers")

lengths = InferInput("user.length", [2], "INT64")
lengths.set_data_from_numpy(np.array([1, 2]))
assert client.infer(MODEL, [user, lengths, price]).as_numpy("label").tolist() == [[1.5], [2.0]]
print("lists")

assert client.infer(MODEL, [user, price], model_version="1").get_response().model_version == "1"
print("version")

try:
    client.infer(MODEL, [user])
except InferenceServerException as exc:
    print("error" if "missing_field in field 'price'" in str(exc) else exc)

# As kserve's client does: values in the fields of their types.
request = service_pb2.ModelInferRequest(model_name=MODEL)
texts, numbers = request.inputs.add(name="user", datatype="BYTES", shape=[2, 2]), request.inputs.add()
texts.contents.bytes_contents.extend(one.encode() for one in ids.ravel())
numbers.name, numbers.datatype = "price", "FP64"
numbers.shape.extend([2])
numbers.contents.fp64_contents.extend([0.5, 1.0])
stub = service_pb2_grpc.GRPCInferenceServiceStub(client._channel)
(output,) = stub.ModelInfer(request).outputs
assert list(output.contents.fp32_contents) == [2.5, 2.0]
print("contents")
