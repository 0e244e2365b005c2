"""The Open Inference Protocol, by an unmodified Triton client and by plain requests."""

import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import keras
import numpy as np
import pytest

import streamtrain as stm
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.store.publication import Weights
from tests import models
from tests.patience import PATIENCE
from tests.serve.published import KEYS, origin_of, rows
from tests.serve.running import serving

URL = "/v2/models/model"
TRITON = Path(__file__).parent / "triton.py"


def priced() -> stm.Model:
    """Predicts the sum of the rows of the users plus the price."""

    def graph(inputs: dict[str, Any]) -> Any:
        return inputs["user"] + keras.layers.Dense(1, use_bias=False)(inputs["price"])

    user = stm.Categorical("user", dim=1, combiner="sum", init=stm.Constant(0.0))
    return models.make([user, stm.Numeric("price", transform=None)], graph, loss="mean_squared_error")


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    model = priced()
    origin = origin_of(model)
    origin.publish({"user": (KEYS, rows(1))}, Weights(np.ones(1, np.float32), np.empty(0, np.float32)))
    origin.keep()
    registry = Registry(model, origin)
    registry.promote(1)
    registry.promote(HEAD)
    with serving(registry) as one:
        yield one


def tensor(name: str, shape: list[int], data: list[Any], datatype: str = "BYTES") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


PRICES = tensor("price", [2, 1], [0.5, 1], "FP32")


def test_triton_client(client: httpx.Client) -> None:
    """In a process of its own: its gevent patches what it imports."""
    path = os.environ.get("PATH", "")
    command = [sys.executable, str(TRITON), f"{client.base_url.host}:{client.base_url.port}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env={"PATH": path, "no_proxy": "*"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["binary", "json", "integers", "lists", "version", "error"]


def test_infer(client: httpx.Client) -> None:
    inputs = [tensor("user", [2, 2], [["u1", "u2"], ["u3", "none"]]), PRICES, tensor("more", [1], [None], "JSON")]
    answer = client.post(f"{URL}/infer", json={"id": "7", "inputs": inputs})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "model_name": "model",
        "model_version": "head",
        "id": "7",
        "outputs": [{"name": "label", "datatype": "FP32", "shape": [2, 1], "data": [2.5, 2.0]}],
    }
    assert answer.headers["x-model-version"] == "head"


def test_lists_of_different_lengths(client: httpx.Client) -> None:
    inputs = [tensor("user", [2, 2], ["u1", "u2", "u3", ""]), tensor("user.length", [2], [2, 1], "INT64"), PRICES]
    answer = client.post(f"{URL}/versions/1/infer", json={"inputs": inputs})
    assert answer.json()["outputs"][0]["data"] == [2.5, 2.0]
    assert answer.json()["model_version"] == "1"


def test_about(client: httpx.Client) -> None:
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    for path in ("/v2/health/live", "/v2/health/ready", f"{URL}/ready", f"{URL}/versions/1/ready"):
        assert client.get(path).status_code == 200
    about = client.get(URL).json()
    assert about == client.get(f"{URL}/versions/1").json()
    assert about["inputs"] == [
        {"name": "user", "datatype": "BYTES", "shape": [-1, -1]},
        {"name": "user.length", "datatype": "INT64", "shape": [-1], "optional": True},
        {"name": "price", "datatype": "FP32", "shape": [-1, 1]},
    ]
    assert about["outputs"] == [{"name": "label", "datatype": "FP32", "shape": [-1, 1]}]
    for path in ("/v2/models/other", "/v2/models/other/ready", f"{URL}/versions/9", f"{URL}/versions/9/ready"):
        assert client.get(path).status_code == 404


def test_null_stands_for_what_is_left_out(client: httpx.Client) -> None:
    body = {"inputs": [USERS, PRICES], "outputs": None, "parameters": None, "id": None}
    answer = client.post(f"{URL}/infer", json=body)
    assert answer.status_code == 200, answer.text
    assert [one["name"] for one in answer.json()["outputs"]] == ["label"]


def test_a_classification_is_refused_by_name(client: httpx.Client) -> None:
    output = {"name": "label", "parameters": {"classification": 2}}  # class_count=2 in Triton's clients
    answer = client.post(f"{URL}/infer", json={"inputs": [USERS, PRICES], "outputs": [output]})
    assert (answer.status_code, "(Triton's class_count) are not made here" in answer.json()["error"]) == (400, True)


def test_an_output_that_is_requested_twice(client: httpx.Client) -> None:
    """Each mention would be another tensor."""
    body = {"inputs": [USERS, PRICES], "outputs": [{"name": "label"}] * 20_000}
    answer = client.post(f"{URL}/infer", json=body)
    assert (answer.status_code, answer.json()["error"]) == (400, "output 'label' is requested twice")


USERS = tensor("user", [2], ["u1", "u2"])
BINARY = {"name": "user", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "none of the model's inputs"),
        ([USERS], "instance 0: missing_field in field 'price'"),
        ([USERS, USERS], "'user' appears twice"),
        ([USERS, tensor("price", [1], [1])], "same first dimension"),
        ([tensor("user", [3], ["u1"]), PRICES], r"1 values, which do not fill its shape \[3\]"),
        ([tensor("user", [], ["u1"]), PRICES], "one or more dimensions"),
        ([tensor("user", [-2], ["u1"]), PRICES], "one or more dimensions"),
        ([tensor("user", [2, 1, 1], ["u1", "u2"]), PRICES], r"must be of shape \[n\], \[n, 1\] or \[n, k\]"),
        ([tensor("user", [2], [["u1"], ["u2"]]), PRICES], "the nesting of"),
        ([USERS, tensor("price", [2, 2], [1, 2, 3, 4])], r"must be of shape \[n\] or \[n, 1\]"),
        ([USERS, tensor("price", [2], ["a", "b"])], "wrong_type in field 'price'"),
        ([USERS, PRICES, tensor("user.length", [2], [1, 2], "INT64")], "2 integers from 0 to 1"),
        ([{"name": "user", "shape": [1], "datatype": "BYTES"}, PRICES], 'neither "data" nor'),
        ([{"name": "user"}], "not an inference request"),
        ([BINARY], "binary_data_size is 6, but 0 bytes are left"),
        ("all", "not an inference request"),
    ],
)
def test_bad_tensors(client: httpx.Client, inputs: Any, message: str) -> None:
    answer = client.post(f"{URL}/infer", json={"inputs": inputs})
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]), answer.text


def price_of(value: bytes, datatype: str) -> dict[str, Any]:
    return {"name": "price", "shape": [1], "datatype": datatype, "parameters": {"binary_data_size": len(value)}}


@pytest.mark.parametrize(
    ("text", "price", "size", "message"),
    [
        (b"\2\0\0\0u1", (np.float32(np.nan).tobytes(), "FP32"), 0, "'price' has a value that is not finite"),
        (b"\2\0\0\0u1", (b"\0\0\0", "FP32"), 0, "3 bytes are not a whole number of FP32 values"),
        (b"\2\0\0\0u1", (b"\0\0\0\0", "FP8"), 0, "datatype 'FP8' is not one of"),
        (b"\2\0\0\0u1", (b"\0\0\0\0", "FP32"), 1, "not an inference request"),
        (b"\2\0\0\0u1", (b"\0\0\0\0", "FP32"), -10_000, "not an inference request"),
        (b"\2\0\0\0\xff1", (b"\0\0\0\0", "FP32"), 0, "'user' has a value that is not UTF-8"),
        (b"\3\0\0\0u1", (b"\0\0\0\0", "FP32"), 0, "the last text is truncated"),
        (b"\2\0\0\0u1\0\0", (b"\0\0\0\0", "FP32"), 0, "expected texts"),
    ],
)
def test_bad_binary_data(client: httpx.Client, text: bytes, price: tuple[bytes, str], size: int, message: str) -> None:
    user = {**BINARY, "parameters": {"binary_data_size": len(text)}}
    head = httpx.Request("POST", "http://x", json={"inputs": [user, price_of(*price)]}).content
    header = {"inference-header-content-length": str(len(head) + size)}
    answer = client.post(f"{URL}/infer", content=head + text + price[0], headers=header)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]), answer.text


@pytest.mark.parametrize("extent", [1 << 23, 1 << 63, 1 << 70])
@pytest.mark.parametrize("values", [{"data": []}, {"parameters": {"binary_data_size": 0}}])
def test_a_shape_that_is_too_large(client: httpx.Client, extent: int, values: dict[str, Any]) -> None:
    inputs = [{"name": "user", "shape": [extent, 0], "datatype": "BYTES", **values}]
    answer = client.post(f"{URL}/infer", json={"inputs": inputs})
    assert (answer.status_code, "at most 4194304 values" in answer.json()["error"]) == (413, True), answer.text


def test_some_tensors_in_binary_and_some_in_json(client: httpx.Client) -> None:
    ids, prices = (
        b"".join(struct.pack("<I", 2) + one for one in (b"u1", b"u2", b"u3", b"u1")),
        np.array([0.5, 1], np.float32),
    )
    user = {"name": "user", "shape": [2, 2], "datatype": "BYTES", "parameters": {"binary_data_size": len(ids)}}
    lengths = tensor("user.length", [2], [2, 1], "INT64")
    price = {"name": "price", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": prices.nbytes}}
    for inputs, data in (
        ([user, lengths, price], ids + prices.tobytes()),
        ([user, lengths, PRICES], ids),
        ([tensor("user", [2, 2], ["u1", "u2", "u3", ""]), lengths, price], prices.tobytes()),
    ):
        head = httpx.Request("POST", "http://x", json={"inputs": inputs}).content
        header = {"inference-header-content-length": str(len(head))}
        answer = client.post(f"{URL}/infer", content=head + data, headers=header)
        assert answer.json()["outputs"][0]["data"] == [2.5, 2.0], answer.text


def test_binary_data_that_belongs_to_nothing(client: httpx.Client) -> None:
    head = httpx.Request("POST", "http://x", json={"inputs": [USERS, PRICES]}).content
    header = {"inference-header-content-length": str(len(head))}
    answer = client.post(f"{URL}/infer", content=head + b"more", headers=header)
    assert "4 bytes of binary data belong to no input" in answer.json()["error"]


def test_an_output_that_there_is_not(client: httpx.Client) -> None:
    answer = client.post(f"{URL}/infer", json={"inputs": [USERS, PRICES], "outputs": [{"name": "buy"}]})
    assert (answer.status_code, "unknown output 'buy'" in answer.json()["error"]) == (400, True)
