"""Security of the wire: TLS, a shared token, and what may be said in the clear."""

import hmac
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from streamtrain.address import parse_address
from streamtrain.errors import ConfigError
from streamtrain.logs import Seldom

logger = logging.getLogger(__name__)

_HEADER = "authorization"
_SCHEME = "Bearer "

# Shards are spoken to directly: a proxy that the process inherits would see even what is said to its own machine.
_NO_PROXY = ("grpc.enable_http_proxy", 0)
_SOCKET_IS_LOCALHOST = ("grpc.ssl_target_name_override", "localhost")


@dataclass(frozen=True, repr=False)
class Security:
    """How the processes of one cluster trust each other.

    Attributes:
        certificate: PEM file with this process's certificate, followed by its chain; None: has none.
        key: PEM file with the certificate's private key, unencrypted; given exactly when `certificate` is.
        ca: PEM file with the certificates that sign the others'; None: a server asks clients for no certificate, a
            client trusts the roots that gRPC ships.
        token: secret that all processes share; None: calls carry none.
        insecure: speak plaintext, token included, beyond this machine where there is no TLS.

    Raises:
        ConfigError: certificate without key or key without certificate, or a token that no header can carry.
    """

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    token: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given, missing = ("certificate", "key") if self.certificate else ("key", "certificate")
            raise ConfigError(f"security.{given} is given without security.{missing}; TLS needs both")
        if self.token is not None:
            _check_token(self.token, "security.token")

    @classmethod
    def read(
        cls,
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        ca: str | Path | None = None,
        token: str | None = None,
        token_file: str | Path | None = None,
        insecure: bool = False,
    ) -> Self:
        """From settings as `[security]` holds them; the token may lie in a file, whose last newline does not count.

        Raises:
            ConfigError: as for the class; token and token_file are both given; the file is unreadable or has no token.
        """
        if token is not None and token_file is not None:
            raise ConfigError("security.token and security.token_file are both given; give one")
        if token_file is not None:
            token = _read_token(Path(token_file))
        return cls(_path(certificate), _path(key), _path(ca), token, insecure)

    def __repr__(self) -> str:
        token = None if self.token is None else "***"
        files = f"certificate={self.certificate}, key={self.key}, ca={self.ca}"
        return f"Security({files}, token={token}, insecure={self.insecure})"


def listen(server: grpc.Server, address: str, security: Security) -> int:
    """Adds the port at which a server is to be reached.

    TLS where there is a certificate, and mutual TLS (clients must show a certificate) where there is a CA too.
    Otherwise plaintext, for which the address must be of this machine: 127.0.0.0/8, ::1, localhost or a Unix socket.

    Args:
        server: not started yet.
        address: "host:port", "[ipv6]:port" or "unix:path"; port 0 takes a free one.
        security: files are read now; a change of them counts from the next start.

    Returns:
        The port; for a Unix socket any positive number.

    Raises:
        ConfigError: the address is none, is taken, or may not be spoken to in the clear; a file is missing,
            unreadable or no such thing, or key and certificate do not belong together.
    """
    where = parse_address(address, "listen", any_port=True)
    if security.ca is not None and security.certificate is None:
        raise ConfigError("security.ca is given without security.certificate and security.key: listening needs all")
    try:
        if security.certificate is not None:
            return int(server.add_secure_port(str(where), _server_credentials(security)))
        _refuse_plaintext(address, security, where.is_local)
        return int(server.add_insecure_port(str(where)))
    except RuntimeError as exc:
        raise ConfigError(f"cannot listen on {address}: {exc}") from exc


def connect(address: str, security: Security, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """A channel to a server, made lazily: whether it answers shows in the first call.

    TLS where there is a CA or a certificate, which is shown to a server that asks; the server's certificate must name
    the host of `address` ("localhost" for a Unix socket). Otherwise plaintext, by the same rule as for `listen`.

    Args:
        address: "host:port", "[ipv6]:port" or "unix:path".
        security: files are read now.
        options: of the channel, as gRPC takes them. Proxies are off unless they say otherwise.

    Raises:
        ConfigError: as for `listen`.
    """
    where = parse_address(address, "address")
    chosen = [_NO_PROXY, *options]
    if security.ca is None and security.certificate is None:
        _refuse_plaintext(address, security, where.is_local)
        return grpc.insecure_channel(str(where), options=chosen)
    if where.path:
        chosen.insert(0, _SOCKET_IS_LOCALHOST)
    return grpc.secure_channel(str(where), _channel_credentials(security), options=chosen)


def metadata(security: Security) -> tuple[tuple[str, str], ...]:
    """What every call has to carry, as its `metadata` argument: the token, or nothing.

    Make it once and pass it along: unlike an interceptor or call credentials it costs a call no Python.
    """
    return () if security.token is None else ((_HEADER, _SCHEME + security.token),)


def authenticate(token: str, refused: Callable[[], object]) -> grpc.ServerInterceptor:
    """Refuses calls that do not carry the token with UNAUTHENTICATED, before anything of their request is read.

    Args:
        token: the shared secret.
        refused: called once for each refused call, from any of the server's threads.

    Raises:
        ConfigError: no header can carry the token.
    """
    _check_token(token, "security.token")
    return _Authentication(token, refused)


class _Authentication(grpc.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    def __init__(self, token: str, refused: Callable[[], object]) -> None:
        self._expected = (_SCHEME + token).encode()
        self._refused = refused
        self._seldom = Seldom()
        # Methods of every kind are one on the wire. A handler of a stream of requests need not wait for any of them.
        self._refusal = grpc.stream_unary_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        for key, value in handler_call_details.invocation_metadata:
            if key == _HEADER and hmac.compare_digest(value.encode(errors="replace"), self._expected):
                return continuation(handler_call_details)
        self._refused()
        if times := self._seldom.due():
            logger.warning("%d calls came without the token of the cluster, or with a wrong one", times)
        return self._refusal


def _refuse(_requests: Any, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no token or a wrong one; check security.token")


def _refuse_plaintext(address: str, security: Security, is_local: bool) -> None:
    if not is_local and not security.insecure:
        token = " The token would be readable on the way." if security.token is not None else ""
        raise ConfigError(
            f"{address} is not of this machine and would be spoken to in plaintext: give security.certificate, "
            f"security.key and security.ca for TLS, or allow it by security.insecure = true.{token}"
        )


def _server_credentials(security: Security) -> grpc.ServerCredentials:
    key, chain, roots = _read_all(security)
    return grpc.ssl_server_credentials([(key, chain)], root_certificates=roots, require_client_auth=roots is not None)


def _channel_credentials(security: Security) -> grpc.ChannelCredentials:
    key, chain, roots = _read_all(security)
    return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=chain)


def _read_all(security: Security) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Key, certificate chain and CA; found wrong here rather than in every handshake, where gRPC does not say why."""
    key, chain, roots = (_read(path) for path in (security.key, security.certificate, security.ca))
    if security.certificate is not None and security.key is not None:
        _check_pair(security.certificate, security.key)
    if security.ca is not None:
        _check_ca(security.ca)
    return key, chain, roots


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc


def _check_pair(certificate: Path, key: Path) -> None:
    try:
        # An encrypted key asks for its password, at the terminal if need be; gRPC could not use it anyway.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as exc:
        raise ConfigError(
            f"{certificate} and {key} are no PEM certificate and its unencrypted private key: {_reason(exc)}"
        ) from exc


def _check_ca(ca: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=ca)
    except ssl.SSLError as exc:
        raise ConfigError(f"{ca} has no PEM certificates: {_reason(exc)}") from exc


def _reason(exc: Exception) -> str:
    return getattr(exc, "reason", None) or str(exc)


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii")
    except OSError as exc:
        raise ConfigError(f"cannot read security.token_file {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"security.token_file {path} may hold printable ASCII without spaces only") from exc
    token = token.removesuffix("\n").removesuffix("\r")
    _check_token(token, f"security.token_file {path}")
    return token


def _check_token(token: str, name: str) -> None:
    if not token:
        raise ConfigError(f"{name} is empty")
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{name} may hold printable ASCII without spaces only")
