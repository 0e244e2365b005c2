"""What a user of tensorflow-serving-api does; run as a program, with the address of the server. Prints what has worked.

The server's own messages are imported, too: neither may keep the other from being registered.
"""

import sys

import grpc
import streamtrain.serve.grpc.open_inference_pb2
import streamtrain.serve.grpc.tensorflow_serving_pb2  # noqa: F401
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

MODEL, SECONDS = "model", 30

channel = grpc.insecure_channel(sys.argv[1])
stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

request = predict_pb2.PredictRequest()
request.model_spec.name = MODEL
request.model_spec.signature_name = "serving_default"
request.inputs["user"].CopyFrom(tf.make_tensor_proto([["u1", "u2"], ["u3", "none"]]))
request.inputs["price"].CopyFrom(tf.make_tensor_proto([0.5, 1.0]))
response, call = stub.Predict.with_call(request, SECONDS, metadata=[("x-request-id", "r1")])
assert tf.make_ndarray(response.outputs["label"]).tolist() == [[2.5], [2.0]]
assert list(response.outputs["label"].float_val) == [2.5, 2.0]
assert (response.model_spec.name, response.model_spec.version.value) == (MODEL, 0)
after = dict(call.trailing_metadata())
assert (after["x-model-version"], after["x-publication"], after["x-request-id"]) == ("head", "1", "r1")
print("predict")

request.inputs["user.length"].CopyFrom(tf.make_tensor_proto([1, 2]))
assert tf.make_ndarray(stub.Predict(request, SECONDS).outputs["label"]).tolist() == [[1.5], [2.0]]
request.inputs["user.length"].CopyFrom(tf.make_tensor_proto([0, 1]))
assert tf.make_ndarray(stub.Predict(request, SECONDS).outputs["label"]).tolist() == [[0.5], [2.0]]
print("lists")

del request.inputs["user.length"]
for numbers in (tf.constant([7, 8], tf.int64), tf.constant([7, 8], tf.int32), tf.constant([7, 8], tf.uint64)):
    request.inputs["user"].CopyFrom(tf.make_tensor_proto(numbers))
    assert tf.make_ndarray(stub.Predict(request, SECONDS).outputs["label"]).tolist() == [[0.5], [1.0]]
for kind in (tf.float32, tf.float64, tf.int32, tf.int64):
    request.inputs["price"].CopyFrom(tf.make_tensor_proto([3, 3], kind))  # in the compressed form, too
    assert tf.make_ndarray(stub.Predict(request, SECONDS).outputs["label"]).tolist() == [[3.0], [3.0]]
print("types")

request.model_spec.version.value = 1
assert stub.Predict(request, SECONDS).model_spec.version.value == 1
request.model_spec.version_label = "canary"
assert stub.Predict(request, SECONDS).model_spec.version.value == 1
print("version")

examples = classification_pb2.ClassificationRequest()
examples.model_spec.name = MODEL
feature = examples.input.example_list.examples.add().features.feature
feature["user"].bytes_list.value.extend([b"u1", b"u2"])
feature["price"].float_list.value.append(0.5)
feature = examples.input.example_list.examples.add().features.feature
feature["user"].int64_list.value.append(7)
feature["price"].int64_list.value.append(2)
result = stub.Classify(examples, SECONDS).result
assert [[(one.label, one.score) for one in each.classes] for each in result.classifications] == [
    [("label", 2.5)],
    [("label", 2.0)],
]
values = regression_pb2.RegressionRequest()
values.model_spec.name = MODEL
values.input.example_list_with_context.examples.add()
values.input.example_list_with_context.examples.add().features.feature["price"].float_list.value.append(4)
feature = values.input.example_list_with_context.context.features.feature
feature["user"].bytes_list.value.append(b"u1")
feature["price"].float_list.value.append(1)
assert [one.value for one in stub.Regress(values, SECONDS).result.regressions] == [2.0, 5.0]
print("examples")

about = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
about.model_spec.name = MODEL
signatures = get_model_metadata_pb2.SignatureDefMap()
assert stub.GetModelMetadata(about, SECONDS).metadata["signature_def"].Unpack(signatures)
signature = signatures.signature_def["serving_default"]
assert signature.inputs["user"].dtype == tf.string.as_datatype_enum
assert [dim.size for dim in signature.outputs["label"].tensor_shape.dim] == [-1, 1]
status = get_model_status_pb2.GetModelStatusRequest()
status.model_spec.name = MODEL
listed = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(status, SECONDS).model_version_status
assert sorted(one.version for one in listed) == [0, 1]
assert {one.state for one in listed} == {get_model_status_pb2.ModelVersionStatus.AVAILABLE}
print("metadata")
