"""Registry: schemas by the id that messages in Confluent's wire format begin with."""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from operator import methodcaller
from typing import Any

from streamtrain.address import redacted
from streamtrain.errors import ConfigError, SourceRefused, SourceUnavailable
from streamtrain.logs import LogThrottle
from streamtrain.stream.formats.record import import_optional

logger = logging.getLogger(__name__)

MAGIC = 0
HEADER_BYTES = 5  # the magic byte, and the id of the schema as a big-endian integer of 4 bytes

_LARGEST_ID = 2**31 - 1
_UNKNOWN_SECONDS = 60.0
_MAX_UNKNOWN = 100  # that are asked for within those seconds
_MAX_SCHEMAS = 100  # of which one schema consists, with all that it refers to
_MAX_CHARACTERS = 4 << 20  # of all of these
_SHORT = 300  # characters of what a schema has against it
_MAIN = "streamtrain_main.proto"  # a schema has no name in the registry, as those have that it refers to
# The caller retries by itself, so retries of the client would only delay it.
_DEFAULTS = {"timeout": 10, "max.retries": 0}
_IDLE_SECONDS = 5.0  # after which a connection is not used again
# What the client raises where something else answers, such as the page of a proxy.
_BAD_ANSWER = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
_TEMPORARY = {408, 425, 429}
_UNAUTHORIZED = 401
_NOT_FOUND = range(40400, 40500)  # codes of a registry, in addition to the HTTP status


class UnknownSchema(LookupError):
    """The registry has no such schema, or not one that can be used."""


class SchemaRegistry:
    """A schema registry, through Confluent's client. Not thread-safe.

    Args:
        url: URL of the registry, or several, separated by commas.
        config: options of the client, such as "basic.auth.user.info" or "ssl.ca.location".
        now: seconds of a clock that never goes back.

    Raises:
        ConfigError: an option is wrong, or a package is missing.
    """

    def __init__(
        self,
        url: str,
        config: Mapping[str, str | int | float | bool] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        client = import_optional("confluent_kafka.schema_registry")
        self._error = client.SchemaRegistryError
        self._no_answer = (
            *_transports(),
            import_optional("confluent_kafka.schema_registry.error").OAuthTokenError,
            *_BAD_ANSWER,
        )
        self.name = f"schema registry at {','.join(map(redacted, url.split(',')))}"
        self._make = partial(client.SchemaRegistryClient, {**_DEFAULTS, **(config or {}), "url": url})
        self._now = now
        try:
            self._connect()
        except (ValueError, TypeError, OSError) as exc:
            raise ConfigError(f"{self.name}: {exc}") from exc
        self._is_unreachable = False
        self._throttle = LogThrottle(now=now)
        self._unknown: deque[tuple[float, int]] = deque()  # until when which id is not asked for

    def fetch(self, schema_id: int, form: str | None = None) -> dict[str, str]:
        """The schema of an id and those that it refers to, by name, each after those that it refers to itself.

        Args:
            schema_id: the id.
            form: the form wanted, such as "serialized".

        Raises:
            UnknownSchema: there is none that can be used; call `mark_unusable` with it.
            SourceUnavailable: the registry does not answer.
            SourceRefused: it refuses the credentials, or is not a schema registry.
        """
        while self._unknown and self._unknown[0][0] <= self._now():
            self._unknown.popleft()
        if schema_id > _LARGEST_ID or any(schema_id == one for _, one in self._unknown):
            raise UnknownSchema(schema_id)
        if len(self._unknown) >= _MAX_UNKNOWN:
            if times := self._throttle.allow("many"):
                logger.warning(
                    "%s did not know %d schema ids within %g s: ids of %d more messages are not looked up; "
                    "dead letters whose schema exists can be replayed",
                    *(self.name, _MAX_UNKNOWN, _UNKNOWN_SECONDS, times),
                )
            raise UnknownSchema(schema_id)
        schemas: dict[str, str] = {}
        self._add(_MAIN, self._request(methodcaller("get_schema", schema_id, fmt=form)), form, schemas, [])
        return schemas

    def mark_unusable(self, schema_id: int, reason: Exception) -> None:
        """Treats the schema of an id as unknown for a minute, without requests."""
        if schema_id > _LARGEST_ID or any(schema_id == one for _, one in self._unknown):
            return
        if len(self._unknown) < _MAX_UNKNOWN:
            self._unknown.append((self._now() + _UNKNOWN_SECONDS, schema_id))
            if times := self._throttle.allow("one"):
                logger.warning(
                    "%s has no usable schema %d: %s; its messages are refused as unknown_schema (%d ids)",
                    *(self.name, schema_id, _short(reason), times),
                )

    def _add(self, name: str, schema: Any, form: str | None, schemas: dict[str, str], around: list[str]) -> None:
        """Adds the schemas that a schema refers to, then itself."""
        for ref in schema.references or []:
            texts = all(isinstance(one, str) and one.isprintable() and one for one in (ref.name, ref.subject))
            if not texts or type(ref.version) is not int:
                raise UnknownSchema(f"it refers to {ref.name!r}, version {ref.version!r} of subject {ref.subject!r}")
            if ref.name in (*around, name):
                raise UnknownSchema(f"{ref.name} refers to itself")
            if len(schemas) + len(around) >= _MAX_SCHEMAS:
                raise UnknownSchema(f"it refers to more than {_MAX_SCHEMAS} schemas")
            if ref.name not in schemas:
                inner = self._request(methodcaller("get_version", ref.subject, ref.version, True, form))
                self._add(ref.name, inner, form, schemas, [*around, name])
        schemas[name] = schema.schema_str
        if sum(map(len, schemas.values())) > _MAX_CHARACTERS:
            raise UnknownSchema(f"with what it refers to it has more than {_MAX_CHARACTERS:,} characters")

    def _connect(self) -> None:
        """Makes a client, which takes 40 ms for the certificates of all authorities: not one for each request."""
        client = self._make()
        self._client, self._hang_up, self._last = client, weakref.finalize(self, client.close), self._now()

    def _ask(self, ask: Callable[[Any], Any]) -> Any:
        if not self._hang_up.alive or self._now() - self._last > _IDLE_SECONDS:
            self._hang_up()
            self._connect()
        self._last = self._now()
        self._client.clear_caches()  # what it knows is asked for again only if it could not be used
        return ask(self._client)

    def _request(self, ask: Callable[[Any], Any]) -> Any:
        try:
            answer = self._ask(ask)
            schema = getattr(answer, "schema", answer)  # what is asked for by version has more about it
            if not isinstance(schema.schema_str, str):
                raise ValueError("its answer has no schema")
        except self._error as exc:
            status, code = exc.http_status_code, exc.error_code
            if status >= 500 or status in _TEMPORARY:
                raise self._unavailable(exc) from exc
            self._mark_reachable()
            if status == 404 and code in _NOT_FOUND:
                raise UnknownSchema(str(exc)) from exc
            if status != _UNAUTHORIZED and self._accepts_credentials():
                raise UnknownSchema(str(exc)) from exc
            raise SourceRefused(f"{self.name} refuses: {exc}") from exc
        except self._no_answer as exc:
            self._hang_up()
            raise self._unavailable(exc) from exc
        self._mark_reachable()
        return schema

    def _accepts_credentials(self) -> bool:
        """Whether only one schema is refused, rather than the credentials."""
        try:
            return isinstance(self._ask(lambda client: client.get_subjects(limit=1)), list)
        except self._error:
            return False

    def _unavailable(self, exc: Exception) -> SourceUnavailable:
        message = f"{self.name} does not answer: {exc or type(exc).__name__}"
        if not self._is_unreachable:
            logger.warning("%s", message)
        self._is_unreachable = True
        return SourceUnavailable(message)

    def _mark_reachable(self) -> None:
        if self._is_unreachable:
            logger.info("%s answers again", self.name)
        self._is_unreachable = False


def _transports() -> tuple[type[Exception], ...]:
    """The errors of the HTTP clients that Confluent's client may use."""
    schemas: list[type[Exception]] = []
    for module in ("httpx2", "httpx"):
        with suppress(ImportError):
            client = import_module(module)
            schemas += (client.HTTPError, client.InvalidURL)
    return tuple(schemas)


def _short(reason: Exception) -> str:
    text = " ".join(str(reason).split()) or type(reason).__name__
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}…"
