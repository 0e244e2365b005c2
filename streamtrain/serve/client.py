"""Client of the HTTP endpoint of a server."""

import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from streamtrain.errors import ConfigError, PublicationError

HEAD = "/versions/head"
"""Path of the head, below that of its model."""


class EndpointError(PublicationError):
    """An endpoint does not answer, or refuses.

    Attributes:
        status: of HTTP; 0: there was no answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """Sends requests to a server, without any proxy, over connections that are kept. A context manager.

    Every method that sends one may raise EndpointError.

    Args:
        url: such as http://127.0.0.1:8501.
        token: the admin token or the read token; None: it needs none.
        timeout: seconds that an answer may take.

    Attributes:
        url: as given, without a trailing slash.

    Raises:
        ConfigError: the URL is not one of HTTP.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as exc:
            raise ConfigError(f"an endpoint is http://host:port, not {url!r}") from exc
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError(f"an endpoint is http://host:port, not {url!r}")
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.url,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            timeout=timeout,
            trust_env=False,
            verify=ssl.create_default_context() if parts.scheme == "https" else False,
        )

    def is_ready(self) -> bool:
        """Whether it answers and can predict."""
        try:
            self._request("GET", "/healthz/ready")
        except EndpointError:
            return False
        return True

    def model(self) -> str:
        """The name of the model that is served."""
        return str(self._field(self._request("GET", "/healthz/ready"), "model"))

    def checksums(self, model: str) -> list[dict[str, Any]]:
        """What is held by the process that answers: `loaded` of docs/http.md."""
        loaded: list[dict[str, Any]] = self._field(self._request("GET", f"{_path(model)}/checksums"), "loaded")
        return loaded

    def predict(
        self, model: str, instances: list[bytes], version: str = "", **headers: str
    ) -> tuple[list[Any], Mapping[str, str]]:
        """Predictions of instances as JSON, and the headers of the answer by lower-case name.

        Args:
            model: its name.
            instances: JSON objects.
            version: a path such as `HEAD`; "": what is served.
            headers: of the request, with underscores for hyphens.
        """
        body = b'{"instances":[%s]}' % b",".join(instances)
        answer = self._request("POST", f"{_path(model)}{version}:predict", body, headers)
        return self._field(answer, "predictions"), answer.headers

    def control(self, model: str, action: str, body: Mapping[str, Any]) -> None:
        """Sends "promote" or "rollback"; needs the admin token."""
        self._request("POST", f"{_path(model)}:{action}", json.dumps(body).encode())

    def _field(self, answer: httpx.Response, name: str) -> Any:
        try:
            body = answer.json()
        except ValueError as exc:
            raise EndpointError(f"{self.url} does not answer with JSON: it is not a streamtrain server") from exc
        if not isinstance(body, dict) or name not in body:
            raise EndpointError(
                f"the answer of {self.url} has no {name}: it is not a streamtrain server, or of another release"
            )
        return body[name]

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            sent["content-type"] = "application/json"
        try:
            answer = self._client.request(method, path, content=body, headers=sent)
        except httpx.HTTPError as exc:
            raise EndpointError(f"{self.url} does not answer: {exc}") from exc
        if not answer.is_success:
            raise EndpointError(f"{self.url}: {answer.status_code}: {_error(answer)}", answer.status_code)
        return answer

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (KeyError, TypeError, ValueError):
        return answer.text[:200]


def _path(model: str) -> str:
    return f"/v1/models/{quote(model, safe='')}"
