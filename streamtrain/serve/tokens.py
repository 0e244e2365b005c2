"""Tokens: who may do what over HTTP."""

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Literal, get_args

from streamtrain.errors import ConfigError
from streamtrain.logs import Seldom
from streamtrain.serve.answers import Refused

logger = logging.getLogger(__name__)

Kind = Literal["admin", "read"]

_SAY_SECONDS = 10.0  # whoever tries one token after another does not fill the log


class Tokens:
    """The tokens of an endpoint. They show in no text of it.

    Args:
        admin: what control needs; whoever has it may read, too. None: control is refused.
        read: what everything but health and the console's own page and files needs; None: nothing.
        now: seconds of a clock that never goes back.

    Attributes:
        refused: requests without the token that they need, by kind.

    Raises:
        ConfigError: a token is empty, or both are the same.
    """

    def __init__(
        self, admin: str | None = None, read: str | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        if admin is not None and not admin.strip():
            raise ConfigError("the admin token is empty; leave it out to turn control off")
        if read is not None and not read.strip():
            raise ConfigError("the read token is empty; leave it out to let everybody read")
        if admin is not None and admin == read:
            raise ConfigError("the admin token and the read token are the same: whoever may read could promote")
        self._salt = secrets.token_bytes(16)
        self._admin = None if admin is None else self._digest(admin)
        self._read = None if read is None else self._digest(read)
        self._seldom = Seldom(_SAY_SECONDS, now)
        self.refused: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)

    @property
    def has_admin(self) -> bool:
        """Whether anybody may control."""
        return self._admin is not None

    @property
    def has_read(self) -> bool:
        """Whether reading needs a token."""
        return self._read is not None

    def check_admin(self, headers: Mapping[str, str], client: str) -> None:
        """Lets through who has the admin token.

        Args:
            headers: of the request.
            client: who asks, for the log.

        Raises:
            Refused: 403, there is no admin token; 401, it is missing or wrong.
        """
        if self._admin is None:
            raise Refused(403, "control is off: the server has no admin token")
        if not self._is(self._given(headers.get("authorization", "")), self._admin):
            raise self._refusal("admin", client)

    def check_read(self, authorization: str, client: str) -> None:
        """Lets through who has the read token or the admin token, or everybody where there is no read token.

        Raises:
            Refused: 401, it is missing or wrong.
        """
        if self._read is None:
            return
        given = self._given(authorization)
        may_read, may_all = self._is(given, self._read), self._is(given, self._admin or b"")
        if not (may_read or may_all):
            raise self._refusal("read", client)

    def _given(self, authorization: str) -> bytes:
        scheme, _, token = authorization.partition(" ")
        return self._digest(token.strip()) if scheme.lower() == "bearer" else b""

    def _digest(self, token: str) -> bytes:
        """Of the same length for all, so that to compare takes as long for any token."""
        return blake2b(token.strip().encode("utf-8", "surrogateescape"), key=self._salt, digest_size=32).digest()

    @staticmethod
    def _is(given: bytes, token: bytes) -> bool:
        return bool(token) and hmac.compare_digest(given, token)

    def _refusal(self, kind: Kind, client: str) -> Refused:
        self.refused[kind] += 1
        if self._seldom.due():
            logger.warning("%s came without the %s token, or with a wrong one", client, kind)
        message = f"this needs the {kind} token: send it as authorization: Bearer TOKEN"
        return Refused(401, message, {"www-authenticate": "Bearer"})
