"""What a user of tensorflow-serving-api does with two models of one server; run with its address. Prints what works."""

import sys

import grpc
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

SECONDS = 30

channel = grpc.insecure_channel(sys.argv[1])
predictions = prediction_service_pb2_grpc.PredictionServiceStub(channel)
models = model_service_pb2_grpc.ModelServiceStub(channel)

for model, field, expected in (("ads", "user", 1001.0), ("feed", "item", 3003.0)):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.inputs[field].CopyFrom(tf.make_tensor_proto([["u1"]]))
    response = predictions.Predict(request, SECONDS)
    assert response.model_spec.name == model
    assert tf.make_ndarray(response.outputs["label"]).tolist() == [[expected]]
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = model
    assert models.GetModelStatus(status, SECONDS).model_version_status[0].state == 30  # AVAILABLE
    print(model)

request.model_spec.name = "other"
try:
    predictions.Predict(request, SECONDS)
except grpc.RpcError as exc:
    refusal = exc
assert refusal.code() == grpc.StatusCode.NOT_FOUND
assert refusal.details() == "there is no model 'other'; the models are ads, feed"
print("unknown")
