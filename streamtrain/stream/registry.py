"""Registry: schemas by the id that messages in Confluent's wire format begin with."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from operator import methodcaller
from typing import Any
from urllib.parse import urlsplit

from streamtrain.errors import ConfigError, SourceRefused, SourceUnavailable
from streamtrain.stream.flat import needed

logger = logging.getLogger(__name__)

MAGIC = 0
HEADER_BYTES = 5  # the magic byte, and the id of the schema as a big-endian integer of 4 bytes

_LARGEST_ID = 2**31 - 1
_UNKNOWN_SECONDS = 60.0
_MOST_UNKNOWN = 10_000
# The caller tries again by itself, so that a client which does too would only hold it up.
_DEFAULTS = {"timeout": 10, "max.retries": 0}
# What the client raises where something else answers in the registry's place, such as the page of a proxy.
_NONSENSE = (OSError, ValueError, TypeError, LookupError, AttributeError)
_TEMPORARY = {408, 425, 429}
_NOT_FOUND = range(40400, 40500)  # codes of a registry, beside the HTTP status


class UnknownSchema(LookupError):
    """The registry has no such schema."""


class Registry:
    """A schema registry, through Confluent's client. Not thread-safe.

    Args:
        url: of the registry, or several with commas between.
        config: options of the client, such as "basic.auth.user.info" or "ssl.ca.location".

    Raises:
        ConfigError: an option is wrong, or a package is missing.
    """

    def __init__(self, url: str, config: Mapping[str, str | int | float | bool] | None = None) -> None:
        client = needed("confluent_kafka.schema_registry")
        self._error = client.SchemaRegistryError
        self._no_answer = (*_transports(), needed("confluent_kafka.schema_registry.error").OAuthTokenError, *_NONSENSE)
        self.name = f"schema registry at {','.join(map(_without_secrets, url.split(',')))}"
        # Schemas are asked for so rarely that each time has a client of its own: no connection is left open.
        self._client = partial(client.SchemaRegistryClient, {**_DEFAULTS, **(config or {}), "url": url})
        try:
            self._client().close()
        except (ValueError, TypeError, OSError) as exc:
            raise ConfigError(f"{self.name}: {exc}") from exc
        self._away = False
        self._unknown: dict[int, float] = {}

    def schema(self, number: int, form: str | None = None) -> Any:
        """The schema of an id, as the client's `Schema`.

        Args:
            number: the id.
            form: the form wanted, such as "serialized".

        Raises:
            UnknownSchema: there is none.
            SourceUnavailable: the registry does not answer.
            SourceRefused: it refuses the credentials, or is none.
        """
        if number > _LARGEST_ID or self._unknown.get(number, 0.0) > time.monotonic():
            raise UnknownSchema(number)
        return self._asked(methodcaller("get_schema", number, fmt=form))

    def forget(self, number: int) -> None:
        """Takes the schema of an id for unknown, for a minute, without asking."""
        if len(self._unknown) >= _MOST_UNKNOWN:
            self._unknown.clear()
        self._unknown[number] = time.monotonic() + _UNKNOWN_SECONDS

    def referenced(self, schema: Any, form: str | None = None) -> dict[str, Any]:
        """The schemas that a schema refers to, by the name that it has for them. Errors as of `schema`."""
        return {
            ref.name: self._asked(methodcaller("get_version", ref.subject, ref.version, True, form))
            for ref in schema.references or []
        }

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        try:
            with self._client() as client:
                answer = ask(client)
            schema = getattr(answer, "schema", answer)  # what is asked for by version has more about it
            if not isinstance(schema.schema_str, str):
                raise ValueError("its answer has no schema")
        except self._error as exc:
            status, code = exc.http_status_code, exc.error_code
            if status >= 500 or status in _TEMPORARY:
                raise self._unavailable(exc) from exc
            self._answers()
            if status == 404 and code in _NOT_FOUND:
                raise UnknownSchema(str(exc)) from exc
            raise SourceRefused(f"{self.name} refuses: {exc}") from exc
        except self._no_answer as exc:
            raise self._unavailable(exc) from exc
        self._answers()
        return schema

    def _unavailable(self, exc: Exception) -> SourceUnavailable:
        message = f"{self.name} does not answer: {exc or type(exc).__name__}"
        if not self._away:
            logger.warning("%s", message)
        self._away = True
        return SourceUnavailable(message)

    def _answers(self) -> None:
        if self._away:
            logger.info("%s answers again", self.name)
        self._away = False


def _transports() -> tuple[type[Exception], ...]:
    """What is raised where no answer comes, by either of the HTTP clients that Confluent's client may use."""
    found: list[type[Exception]] = []
    for module in ("httpx2", "httpx"):
        with suppress(ImportError):
            found.append(import_module(module).TransportError)
    return tuple(found)


def _without_secrets(url: str) -> str:
    parts = urlsplit(url.strip())
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
