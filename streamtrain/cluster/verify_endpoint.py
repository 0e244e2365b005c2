"""Verify, the other end: the HTTP endpoint of a server, as a client sees it."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, NamedTuple

from streamtrain.errors import ConfigError, PublicationError


class EndpointError(PublicationError):
    """An endpoint does not answer, or refuses.

    Attributes:
        status: of HTTP; 0: there is no answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Answer(NamedTuple):
    """What an endpoint answers: values of JSON, and headers by lower-case name."""

    body: dict[str, Any]
    headers: Mapping[str, str]


class Endpoint:
    """Asks a server, without any proxy. Every method may raise EndpointError.

    Args:
        url: such as http://127.0.0.1:8501.
        token: the admin token, or the read token; None: it needs none.
        timeout: seconds for an answer.

    Attributes:
        url: as given, without a slash at its end.

    Raises:
        ConfigError: the URL is none of HTTP.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"an endpoint is http://host:port, not {url!r}")
        self.url = url.rstrip("/")
        self._token, self._timeout = token, timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def model(self) -> str:
        """The name of the model that is served."""
        return str(self._field(self._ask("/healthz/ready"), "model"))

    def checksums(self, model: str) -> list[dict[str, Any]]:
        """What is held by the process that answers: `loaded` of docs/http.md."""
        found: list[dict[str, Any]] = self._field(self._ask(f"/v1/models/{_quoted(model)}/checksums"), "loaded")
        return found

    def predict(self, model: str, instances: list[bytes], **headers: str) -> tuple[list[Any], Mapping[str, str]]:
        """Predictions of instances as JSON, and the headers of the answer."""
        body = b'{"instances":[%s]}' % b",".join(instances)
        answer = self._ask(f"/v1/models/{_quoted(model)}:predict", body, **headers)
        return self._field(answer, "predictions"), answer.headers

    def _field(self, answer: Answer, name: str) -> Any:
        if not isinstance(answer.body, dict) or name not in answer.body:
            raise EndpointError(
                f"{self.url} does not say {name}: it is no server of streamtrain, or of another release"
            )
        return answer.body[name]

    def _ask(self, path: str, body: bytes | None = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._token is not None:
            named["authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self.url + path, body, named)
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return Answer(json.load(answer), {name.lower(): value for name, value in answer.headers.items()})
        except urllib.error.HTTPError as exc:
            with exc:
                raise EndpointError(f"{self.url}: {exc.code}: {_sentence(exc.read())}", exc.code) from exc
        except (OSError, HTTPException) as exc:
            raise EndpointError(f"{self.url} does not answer: {getattr(exc, 'reason', exc)}") from exc
        except ValueError as exc:
            raise EndpointError(f"{self.url} does not answer with JSON: it is no server of streamtrain") from exc


def _sentence(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (KeyError, TypeError, ValueError):
        return body[:200].decode(errors="replace")


def _quoted(model: str) -> str:
    return urllib.parse.quote(model, safe="")
