"""The Open Inference Protocol over gRPC; what tensors mean is the same as over HTTP."""

from itertools import repeat
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict

import streamtrain.serve.grpc.open_inference_pb2 as pb
from streamtrain._core import InputTensor
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.grpc.server import Call, Method, Reply, parse_message
from streamtrain.serve.service.protocols import (
    check_outputs,
    describe_model,
    describe_server,
    refused_tensors,
    to_samples,
)
from streamtrain.serve.service.served import Target
from streamtrain.serve.service.service import Service
from streamtrain.store.publication import Floats

SERVICE = "inference.GRPCInferenceService"
PROTOCOL = "openinference-grpc"


def parse_tensors(request: Any) -> list[InputTensor]:
    """The tensors of a request.

    Raises:
        HTTPError: 400, a tensor is malformed; 413, too large.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise HTTPError(400, f"there are {len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    with refused_tensors():
        return [*map(InputTensor.of_inference, request.inputs, raw or repeat(None))]


class OpenInference:
    """Its service.

    Args:
        service: predicts.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def services(self) -> dict[str, dict[str, Method]]:
        """The methods of the service."""
        return {
            SERVICE: {
                "ServerLive": Method(self._live, is_public=True),
                "ServerReady": Method(self._ready, is_public=True),
                "ModelReady": Method(self._model_ready),
                "ServerMetadata": Method(self._server),
                "ModelMetadata": Method(self._describe),
                "ModelInfer": Method(self._infer, PROTOCOL),
            }
        }

    async def _live(self, call: Call) -> Reply:
        return pb.ServerLiveResponse(live=True), {}

    async def _ready(self, call: Call) -> Reply:
        return pb.ServerReadyResponse(ready=self._service.is_ready), {}

    async def _model_ready(self, call: Call) -> Reply:
        request = parse_message(pb.ModelReadyRequest, call.data)
        try:
            self._resolve(request.name, request.version).choose()
        except HTTPError as exc:
            if exc.status == 503:
                return pb.ModelReadyResponse(ready=False), {}
            raise
        return pb.ModelReadyResponse(ready=True), {}

    async def _server(self, call: Call) -> Reply:
        return pb.ServerMetadataResponse(**describe_server()), {}

    async def _describe(self, call: Call) -> Reply:
        request = parse_message(pb.ModelMetadataRequest, call.data)
        described = describe_model(self._service, request.name, request.version or None)
        return ParseDict(described, pb.ModelMetadataResponse(), ignore_unknown_fields=True), {}

    async def _infer(self, call: Call) -> Reply:
        request = parse_message(pb.RawModelInferRequest, call.data)
        target = self._resolve(request.model_name, request.model_version)
        labels = target.model.labels
        wanted = [one.name for one in request.outputs] or labels
        if unknown := {*wanted} - {*labels}:
            raise HTTPError(400, f"unknown output {unknown.pop()!r}; the outputs are {labels}")
        check_outputs([one.name for one in request.outputs])
        samples = to_samples(parse_tensors(request), target.fields)
        predicted, after = await self._service.predict(target, samples, call.metadata, call.began, one_by_one=True)
        response = pb.ModelInferResponse(
            model_name=target.model.name, model_version=after["x-model-version"], id=request.id
        )
        for name in wanted:
            values_of = np.ascontiguousarray(predicted.predictions[:, labels.index(name)])
            _add_output(response, name, values_of, is_raw=bool(request.raw_input_contents))
        return response, after

    def _resolve(self, name: str, version: str) -> Target:
        return self._service.resolve(name, version or None)


def _add_output(response: Any, name: str, values: Floats, *, is_raw: bool) -> None:
    """Raw if the inputs were: a client that sends raw contents reads them, too."""
    output = response.outputs.add(name=name, datatype="FP32", shape=[len(values), 1])
    if is_raw:
        response.raw_output_contents.append(values.tobytes())
    else:
        output.contents.fp32_contents.extend(values.tolist())
