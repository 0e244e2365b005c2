"""Redis as a client knows it: how connections are made, and what its errors mean."""

import ssl
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamtrain.errors import ConfigError

LATER = frozenset({"LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"})
"""Answers of a server that can do later what it cannot do now."""

_WAYS_OUT = {
    "READONLY": "it is a replica: use the address of the primary",
    "MISCONF": "it cannot save to its disk, and refuses writes until it can: see its log",
    "NOPERM": "the user may not do this: grant it ~streamtrain:* and the commands that schemas/README.md names",
    "DENIED": "it takes no connections from elsewhere without a password: give it one",
}
_TIMES = ("socket_timeout", "socket_connect_timeout")
_READ = 1 << 20  # bytes that one system call reads at most


def connection_options(timeout: float) -> dict[str, Any]:
    """Options of every connection. Commands are never retried: the caller knows what may be repeated.

    Args:
        timeout: seconds that connecting, and any answer, may take.
    """
    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "protocol": 2,
        "decode_responses": False,
        "socket_read_size": _READ,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
    }


def open_pool(url: str, timeout: float) -> redis.ConnectionPool:
    """Connections to a server.

    Args:
        url: "redis://", "rediss://" (TLS) or "unix://"; with user, password and database.
        timeout: see `connection_options`.

    Raises:
        ConfigError: the URL is wrong.
    """
    try:
        pool = redis.ConnectionPool.from_url(url, **connection_options(timeout))
        # How answers are read is not for the URL to say, as it may of the times.
        pool.connection_kwargs |= {name: of for name, of in connection_options(timeout).items() if name not in _TIMES}
        if issubclass(pool.connection_class, redis.Connection):
            pool.connection_kwargs["socket_keepalive"] = True
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.RedisError):
        # Without the original message: parts of a password that has a "/" or "#" are taken for a port, and shown.
        raise ConfigError(
            'the URL of a Redis must be "redis://user:password@host:port/db", "rediss://…" or "unix://path", '
            "in which special characters of a password are percent-encoded"
        ) from None
    return pool


def server_name(pool: redis.ConnectionPool) -> str:
    """The server of a pool, for messages; without credentials."""
    kwargs = pool.connection_kwargs
    return f"Redis at {kwargs.get('path') or '{}:{}'.format(kwargs.get('host'), kwargs.get('port', 6379))}"


class Trouble(NamedTuple):
    """What an error means.

    Attributes:
        kind: "away": it may answer later; "refused": only who mends something helps that.
        reply: of the server, or the error of the connection.
        text: a sentence after the server's name, with the way out.
    """

    kind: Literal["away", "refused"]
    reply: str
    text: str


def describe_error(error: redis.RedisError, ways_out: Mapping[str, str]) -> Trouble:
    """What an error means.

    Args:
        error: of redis-py.
        ways_out: what to do about an error code, in addition to the general ones.
    """
    code = getattr(error, "status_code", None) or str(error).partition(" ")[0]
    reply, known = str(error).partition("\n")[0], _WAYS_OUT | dict(ways_out)
    if isinstance(error, redis.AuthenticationError):
        return Trouble("refused", reply, f"refuses the credentials: {reply}")
    if _is_certificate_refused(error):
        return Trouble("refused", reply, f"has a certificate that is not trusted: {reply}")
    away = redis.ConnectionError | redis.TimeoutError | redis.exceptions.RedisClusterException
    if isinstance(error, away) or code in LATER:
        return Trouble("away", reply, f"does not answer: {reply}")
    # The refusal of a script stands inside a sentence; servers differ in how they say what a user may not do.
    refused = next((one for one in known if code == one or f"{one} " in reply), code)
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        refused = "OOM"
    if isinstance(error, redis.ReadOnlyError):
        refused = "READONLY"
    if "ACL failure" in reply or "user executing the script" in reply:
        refused = "NOPERM"
    way_out = f"; {known[refused]}" if refused in known else ""
    return Trouble("refused", reply, f"refuses: {reply}{way_out}")


def _is_certificate_refused(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None
