"""What a user of tritonclient does; run as a program, with the address of the server. Prints what has worked."""

import sys

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

MODEL = "model"
PREDICTIONS = [[2.5], [2.0]]

client = InferenceServerClient(sys.argv[1])
assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready(MODEL)
assert client.get_model_metadata(MODEL)["name"] == MODEL

ids = np.array([["u1", "u2"], ["u3", "none"]], object)
user, price = InferInput("user", [2, 2], "BYTES"), InferInput("price", [2, 1], "FP32")
prices = np.array([[0.5], [1.0]], np.float32)

user.set_data_from_numpy(ids)
price.set_data_from_numpy(prices)
result = client.infer(MODEL, [user, price], request_id="9")
assert result.as_numpy("label").tolist() == PREDICTIONS
assert result.get_response()["id"] == "9"
print("binary")

user.set_data_from_numpy(ids, binary_data=False)
price.set_data_from_numpy(prices, binary_data=False)
wanted = [InferRequestedOutput("label", binary_data=False)]
assert client.infer(MODEL, [user, price], outputs=wanted).as_numpy("label").tolist() == PREDICTIONS
print("json")

number = InferInput("user", [2, 1], "INT64")
number.set_data_from_numpy(np.array([[7], [8]]))
assert client.infer(MODEL, [number, price]).as_numpy("label").tolist() == [[0.5], [1.0]]
print("integers")

user.set_data_from_numpy(ids)
lengths = InferInput("user.length", [2], "INT64")
lengths.set_data_from_numpy(np.array([1, 2]))
assert client.infer(MODEL, [user, lengths, price]).as_numpy("label").tolist() == [[1.5], [2.0]]
print("lists")

assert client.infer(MODEL, [user, price], model_version="1").get_response()["model_version"] == "1"
print("version")

try:
    client.infer(MODEL, [user])
except InferenceServerException as exc:
    print("error" if "missing_field in field 'price'" in str(exc) else exc)
