"""TensorFlow Serving's gRPC API, so that its clients work unchanged.

Tensors are columns, as in the Open Inference Protocol: see `serve/http/openinference.py`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from google.protobuf.json_format import ParseDict

import streamtrain.serve.grpc.tensorflow_serving_pb2 as pb
from streamtrain._core import InputTensor
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.grpc.server import Call, Method, Reply, parse_message
from streamtrain.serve.service.admission import RequestLimits
from streamtrain.serve.service.protocols import (
    SIGNATURE,
    check_signature,
    describe_signatures,
    describe_status,
    outputs_of,
    refused_tensors,
    to_samples,
    version_number,
)
from streamtrain.serve.service.served import InputField, Target
from streamtrain.serve.service.service import Service
from streamtrain.store.publication import Floats

PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"
PROTOCOL = "tensorflow-grpc"

_ANY = "type.googleapis.com/tensorflow.serving.SignatureDefMap"


def parse_tensors(request: Any) -> list[InputTensor]:
    """The tensors of a request.

    Raises:
        HTTPError: 400, a tensor is malformed; 413, too large.
    """
    with refused_tensors():
        return [InputTensor.of_tensorflow(name, tensor) for name, tensor in request.inputs.items()]


def _texts(name: str, values: list[bytes]) -> list[str]:
    try:
        return [one.decode() for one in values]
    except UnicodeDecodeError as exc:
        raise HTTPError(400, f"{name!r} has a value that is not UTF-8: {exc}") from exc


def parse_examples(given: Any, fields: Mapping[str, InputField], limits: RequestLimits) -> list[bytes]:
    """The instances of an `Input`, each as JSON.

    Raises:
        HTTPError: 400, a feature is malformed; 413, there are too many, or too large with their context.
        Overloaded: see `RequestLimits`.
    """
    if given.WhichOneof("kind") == "example_list_with_context":
        listed, context = given.example_list_with_context, given.example_list_with_context.context
    else:
        listed, context = given.example_list, pb.Example()
    limits.check(len(listed.examples))
    shared = _row(context, fields)
    limits.check(len(listed.examples), len(orjson.dumps(shared)) if shared else 0)
    return [orjson.dumps(shared | _row(one, fields)) for one in listed.examples]


def _row(example: Any, fields: Mapping[str, InputField]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, feature in example.features.feature.items():
        if name not in fields or (kind := feature.WhichOneof("kind")) is None:
            continue
        values = [*getattr(feature, kind).value]
        if kind == "bytes_list":
            values = _texts(name, values)
        elif not all(map(math.isfinite, values)):
            raise HTTPError(400, f"{name!r} has a value that is not finite")
        row[name] = values[0] if len(values) == 1 else values
    return row


def _tensor_of(values: Floats) -> Any:
    """Predictions of one output as a tensor [n, 1]."""
    proto = pb.TensorProto(dtype=pb.DT_FLOAT, float_val=values.tolist())  # many clients read float_val only
    proto.tensor_shape.dim.add(size=len(values))
    proto.tensor_shape.dim.add(size=1)
    return proto


class TensorFlowServing:
    """Its services.

    Args:
        service: predicts.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def services(self) -> dict[str, dict[str, Method]]:
        """The methods of each service."""
        return {
            PREDICTION_SERVICE: {
                "Predict": Method(self._predict, PROTOCOL),
                "Classify": Method(self._classify, PROTOCOL),
                "Regress": Method(self._regress, PROTOCOL),
                "GetModelMetadata": Method(self._metadata),
            },
            MODEL_SERVICE: {"GetModelStatus": Method(self._status)},
        }

    async def _predict(self, call: Call) -> Reply:
        request = parse_message(pb.RawPredictRequest, call.data)
        check_signature(request.model_spec.signature_name)
        target = self._resolve(request.model_spec)
        labels = target.model.labels
        wanted = [*dict.fromkeys(request.output_filter)] or labels
        if unknown := {*wanted} - {*labels}:
            raise HTTPError(400, f"unknown output {unknown.pop()!r}; the outputs are {labels}")
        samples = to_samples(parse_tensors(request), target.fields)
        predicted, spec, after = await self._run(call, target, samples, SIGNATURE)
        response = pb.PredictResponse(model_spec=spec)
        for name in wanted:
            response.outputs[name].CopyFrom(_tensor_of(predicted[:, labels.index(name)]))
        return response, after

    async def _classify(self, call: Call) -> Reply:
        request = parse_message(pb.ClassificationRequest, call.data)
        target, signature = self._resolve(request.model_spec), request.model_spec.signature_name
        labels = target.model.labels
        outputs = outputs_of(signature, labels)
        messages = parse_examples(request.input, target.fields, self._service.limits(call.admitted))
        predicted, spec, after = await self._run(call, target, messages, signature)
        response = pb.ClassificationResponse(model_spec=spec)
        for row in predicted[:, outputs].tolist():
            classes = response.result.classifications.add().classes
            for j, score in zip(outputs, row, strict=True):
                classes.add(label=labels[j], score=score)
        return response, after

    async def _regress(self, call: Call) -> Reply:
        request = parse_message(pb.RegressionRequest, call.data)
        target, signature = self._resolve(request.model_spec), request.model_spec.signature_name
        (output,) = outputs_of(signature, target.model.labels, single=True)
        messages = parse_examples(request.input, target.fields, self._service.limits(call.admitted))
        predicted, spec, after = await self._run(call, target, messages, signature)
        response = pb.RegressionResponse(model_spec=spec)
        for value in predicted[:, output].tolist():
            response.result.regressions.add(value=value)
        return response, after

    async def _metadata(self, call: Call) -> Reply:
        request = parse_message(pb.GetModelMetadataRequest, call.data)
        if [*request.metadata_field] != ["signature_def"]:
            raise HTTPError(400, f"metadata_field must be ['signature_def'], not {[*request.metadata_field]}")
        target = self._resolve(request.model_spec)
        response = pb.GetModelMetadataResponse(model_spec=_spec_of(target, target.choose().name))
        signatures = ParseDict(describe_signatures(target.model.model), pb.SignatureDefMap())
        response.metadata["signature_def"].type_url = _ANY
        response.metadata["signature_def"].value = signatures.SerializeToString()
        return response, {}

    async def _status(self, call: Call) -> Reply:
        spec = parse_message(pb.GetModelStatusRequest, call.data).model_spec
        described = describe_status(self._service, spec.name, *_version_of(spec))
        return ParseDict(described, pb.GetModelStatusResponse()), {}

    def _resolve(self, spec: Any) -> Target:
        return self._service.resolve(spec.name, *_version_of(spec))

    async def _run(
        self, call: Call, target: Target, messages: Sequence[bytes], signature: str
    ) -> tuple[Floats, Any, Mapping[str, str]]:
        """Predictions [n, L], the spec of the model that has made them, and metadata of the response."""
        predicted, after = await self._service.predict(target, messages, call.metadata, call.began, one_by_one=True)
        return predicted.predictions, _spec_of(target, after["x-model-version"], signature or SIGNATURE), after


def _spec_of(target: Target, version: str, signature: str = "") -> Any:
    spec = pb.ModelSpec(name=target.model.name, signature_name=signature)
    spec.version.value = int(version_number(version))
    return spec


def _version_of(spec: Any) -> tuple[str | None, str | None]:
    """The version and the label that a spec names."""
    kind = spec.WhichOneof("version_choice")
    if kind == "version_label":
        return None, spec.version_label
    return (str(spec.version.value) if kind == "version" else None), None
