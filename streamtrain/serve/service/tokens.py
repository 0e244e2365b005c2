"""Bearer tokens for control and for reading."""

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Literal, get_args

from streamtrain.errors import ConfigError
from streamtrain.logs import LogThrottle
from streamtrain.serve.errors import HTTPError

logger = logging.getLogger(__name__)

TokenKind = Literal["admin", "read"]

_LOG_SECONDS = 10.0  # guessing tokens does not fill the log


class Tokens:
    """The tokens of an endpoint. Only digests are kept, and they are compared in constant time.

    Args:
        admin: required for control, and sufficient for reading; None: control is refused.
        read: required for all but health and the console's own page and files; None: not required.
        now: seconds of a monotonic clock.

    Attributes:
        refused: requests whose token was missing or wrong, by kind.

    Raises:
        ConfigError: a token is empty, or both are the same.
    """

    def __init__(
        self, admin: str | None = None, read: str | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        if admin is not None and not admin.strip():
            raise ConfigError("the admin token is empty; unset it to disable control")
        if read is not None and not read.strip():
            raise ConfigError("the read token is empty; unset it to allow reading without a token")
        if admin is not None and read is not None and admin.strip() == read.strip():
            raise ConfigError("the admin token and the read token are the same: every reader could promote versions")
        self._salt = secrets.token_bytes(16)
        self._admin = None if admin is None else self._digest(admin)
        self._read = None if read is None else self._digest(read)
        self._throttle = LogThrottle(_LOG_SECONDS, now)
        self.refused: dict[TokenKind, int] = dict.fromkeys(get_args(TokenKind), 0)

    @property
    def has_admin(self) -> bool:
        """Whether control is possible."""
        return self._admin is not None

    @property
    def has_read(self) -> bool:
        """Whether reading requires a token."""
        return self._read is not None

    def check_admin(self, headers: Mapping[str, str], client: str) -> None:
        """Checks the admin token.

        Args:
            headers: of the request.
            client: address, for the log.

        Raises:
            HTTPError: 403, the server has none; 401, it is missing or wrong.
        """
        if self._admin is None:
            raise HTTPError(403, "control is disabled: the server has no admin token")
        if not self._is(self._given(headers.get("authorization", "")), self._admin):
            raise self._refusal("admin", client)

    def check_read(self, authorization: str, client: str) -> None:
        """Checks the read token, if there is one; the admin token will do, too.

        Raises:
            HTTPError: 401, it is missing or wrong.
        """
        if self._read is None:
            return
        given = self._given(authorization)
        is_read, is_admin = self._is(given, self._read), self._is(given, self._admin or b"")
        if not (is_read or is_admin):
            raise self._refusal("read", client)

    def _given(self, authorization: str) -> bytes:
        scheme, _, token = authorization.partition(" ")
        return self._digest(token.strip()) if scheme.lower() == "bearer" else b""

    def _digest(self, token: str) -> bytes:
        """A digest, as long for all tokens, so that comparing takes the same time for any."""
        return blake2b(token.strip().encode("utf-8", "surrogateescape"), key=self._salt, digest_size=32).digest()

    @staticmethod
    def _is(given: bytes, token: bytes) -> bool:
        return bool(token) and hmac.compare_digest(given, token)

    def _refusal(self, kind: TokenKind, client: str) -> HTTPError:
        self.refused[kind] += 1
        if self._throttle.allow():
            logger.warning("request from %s refused: the %s token is missing or wrong", client, kind)
        message = f"the {kind} token is required: send it as authorization: Bearer TOKEN"
        return HTTPError(401, message, {"www-authenticate": "Bearer"})
