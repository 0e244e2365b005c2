"""The serving endpoint as a client sees it."""

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from streamtrain.address import parse_address
from streamtrain.errors import StreamtrainError

HEAD = "/versions/head"

_TIMEOUT = 30.0  # a promotion loads a version before it answers


class EndpointAway(StreamtrainError):
    """Nobody answers at the endpoint."""


class Answer(NamedTuple):
    """What it said.

    Attributes:
        status: of HTTP.
        headers: by name, in small letters.
        body: as JSON; text where it is none.
        ms: milliseconds that it took.
    """

    status: int
    headers: Mapping[str, str]
    body: Any
    ms: float


class Endpoint:
    """Asks over one connection, which it keeps. Belongs to one thread. Knows no proxies.

    Args:
        listen: "host:port" of the endpoint.
        model: name of the model.
        token: that control needs.
    """

    def __init__(self, listen: str, model: str, token: str = "") -> None:
        place = parse_address(listen, "serve.listen")
        self._connection = http.client.HTTPConnection(place.host, place.port, timeout=_TIMEOUT)
        self._path, self._token = f"/v1/models/{model}", token

    def is_ready(self) -> bool:
        """Whether it can predict by now."""
        try:
            return self.ask("GET", "/healthz/ready").status == 200
        except EndpointAway:
            return False

    def predict(self, instance: Mapping[str, Any], *, of: str = "", headers: Mapping[str, str] = {}) -> Answer:
        """Predicts an instance by what is served, or by the version `of`, such as `HEAD`."""
        return self.ask("POST", f"{self._path}{of}:predict", {"instances": [instance]}, headers)

    def control(self, what: str, body: Mapping[str, Any]) -> Answer:
        """Has it "promote" or "rollback"."""
        return self.ask("POST", f"{self._path}:{what}", body, {"authorization": f"Bearer {self._token}"})

    def ask(self, method: str, path: str, body: object = None, headers: Mapping[str, str] = {}) -> Answer:
        """Sends a request with a body of JSON, unless that is None.

        Raises:
            EndpointAway: nobody answers.
        """
        began = time.perf_counter()
        try:
            self._connection.request(method, path, None if body is None else json.dumps(body), dict(headers))
            answer = self._connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            self._connection.close()  # the next request opens it anew
            raise EndpointAway(f"nobody answers at port {self._connection.port}: {exc}") from exc
        ms = 1000 * (time.perf_counter() - began)
        about = {name.lower(): value for name, value in answer.headers.items()}
        try:
            return Answer(answer.status, about, json.loads(said), ms)
        except ValueError:
            return Answer(answer.status, about, said.decode(errors="replace"), ms)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
