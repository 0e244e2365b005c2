"""What requests of every protocol may ask for, and how models are described to them, over HTTP and gRPC."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from streamtrain._core import InputTensor, TensorSamples
from streamtrain.model.model import Model
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.registry import HEAD
from streamtrain.serve.service.served import InputField, input_fields
from streamtrain.serve.service.service import Service

SIGNATURE = "serving_default"
METHOD = "tensorflow/serving/predict"
LENGTH = ".length"


def check_signature(name: str | None) -> None:
    """Raises HTTPError 400 for another signature than the one of predictions."""
    if name not in (None, "", SIGNATURE):
        raise HTTPError(400, f"unknown signature {name!r}; the signature is {SIGNATURE!r}")


def outputs_of(signature: str, labels: list[str], *, single: bool = False) -> list[int]:
    """The columns of predictions that a signature of examples means: those of all labels, or of the one it names.

    Raises:
        HTTPError: 400, there is no such signature, or several labels where there may be a `single` one.
    """
    if signature in labels:
        return [labels.index(signature)]
    if signature not in ("", SIGNATURE):
        raise HTTPError(400, f"unknown signature {signature!r}; the signatures are {[SIGNATURE, *labels]}")
    if single and len(labels) > 1:
        raise HTTPError(400, f"the model has several labels: set signature_name to one of {labels}")
    return [*range(len(labels))]


def describe_status(
    service: Service, name: str, version: str | None = None, label: str | None = None
) -> dict[str, Any]:
    """The states of loaded versions, or of one: GetModelStatusResponse as JSON.

    Raises:
        HTTPError: 404, there is no such model, or the version is not loaded.
    """
    if version is None and label is None:
        states = [_state(str(one)) for one in service.find(name).registry.resident] or [_state(HEAD, "LOADING")]
    else:
        states = [_state(service.resolve(name, version, label).choose().name)]
    return {"model_version_status": states}


def describe_signatures(model: Model) -> dict[str, Any]:
    """Inputs and outputs of a model: SignatureDefMap as JSON."""
    fields = input_fields(model.schema)
    signature = {
        "inputs": {name: _tensor(name, "DT_STRING" if one.ids else "DT_FLOAT") for name, one in fields.items()},
        "outputs": {one.name: _tensor(one.name, "DT_FLOAT", "1") for one in model.labels},
        "method_name": METHOD,
    }
    return {"signature_def": {SIGNATURE: signature}}


def version_number(version: str) -> str:
    """Versions of TensorFlow Serving are integers; 0 stands for the head."""
    return "0" if version == HEAD else version


def _state(version: str, state: str = "AVAILABLE") -> dict[str, Any]:
    return {"version": version_number(version), "state": state, "status": {"error_code": "OK", "error_message": ""}}


def _tensor(name: str, dtype: str, *extents: str) -> dict[str, Any]:
    dims = [{"size": extent, "name": ""} for extent in ("-1", *extents)]
    return {"dtype": dtype, "tensor_shape": {"dim": dims, "unknown_rank": False}, "name": name}


@contextmanager
def refused_tensors() -> Iterator[None]:
    """Tensors that the native core refuses are the sender's mistake.

    Raises:
        HTTPError: 400, they are malformed, or match neither each other nor the model; 413, too large.
    """
    try:
        yield
    except OverflowError as exc:
        raise HTTPError(413, str(exc)) from exc
    except ValueError as exc:
        raise HTTPError(400, str(exc)) from exc


def check_outputs(names: Sequence[str]) -> None:
    """Raises HTTPError 400 if an output is requested twice: each mention would be another tensor."""
    if len({*names}) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise HTTPError(400, f"output {twice!r} is requested twice")


def to_samples(tensors: Sequence[InputTensor], fields: Mapping[str, InputField]) -> TensorSamples:
    """The instances of a request, all of whose tensors the native core has read.

    Raises:
        HTTPError: see `refused_tensors`.
    """
    with refused_tensors():
        return TensorSamples(tensors, {name: field.ids for name, field in fields.items()})


def describe_server() -> dict[str, Any]:
    """The server's name and version."""
    return {"name": "streamtrain", "version": version("streamtrain")}


def describe_model(service: Service, name: str, version: str | None = None) -> dict[str, Any]:
    """Inputs and outputs of a model.

    Raises:
        HTTPError: 404, there is no such model, or the version is not loaded.
    """
    if version is None:
        served = service.find(name)
    else:
        target = service.resolve(name, version)
        target.choose()
        served = target.model
    inputs: list[dict[str, Any]] = []
    for one in served.fields.values():
        inputs.append({"name": one.name, "datatype": "BYTES" if one.ids else "FP32", "shape": [-1, 1]})
        if one.ids:
            inputs[-1]["shape"] = [-1, -1]
            inputs.append({"name": one.name + LENGTH, "datatype": "INT64", "shape": [-1], "optional": True})
    return {
        "name": name,
        "versions": [str(one) for one in served.registry.resident],
        "platform": "streamtrain_tensorflow",
        "inputs": inputs,
        "outputs": [{"name": label, "datatype": "FP32", "shape": [-1, 1]} for label in served.labels],
    }
