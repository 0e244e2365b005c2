"""Security of gRPC: TLS, a shared token, and where plaintext is allowed."""

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
from streamtrain.logs import LogThrottle
from streamtrain.ps.rpc.registry import NamedChannel
from streamtrain.settings.groups import SecuritySettings

logger = logging.getLogger(__name__)

_HEADER = "authorization"
_SCHEME = "Bearer "

# Connect directly: a proxy from the environment would see even traffic within this machine.
_NO_PROXY = ("grpc.enable_http_proxy", 0)
_SOCKET_IS_LOCALHOST = ("grpc.ssl_target_name_override", "localhost")


@dataclass(frozen=True, repr=False)
class Security:
    """How the processes of a cluster authenticate each other.

    Attributes:
        certificate: PEM file with this process's certificate, followed by its chain; None: no certificate.
        key: PEM file with the certificate's private key, unencrypted; given exactly when `certificate` is.
        ca: PEM file with the certificates that sign the others'; None: a server asks clients for no certificate, a
            client trusts the roots that gRPC ships.
        token: secret shared by all processes; None: no token.
        insecure: allow plaintext, token included, to other machines if TLS is not configured.

    Raises:
        ConfigError: certificate without key or key without certificate, or a token that is not printable ASCII.
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
    def from_settings(cls, settings: SecuritySettings) -> Self:
        """What `[security]` configures; one newline at the end of the token file does not count.

        Raises:
            ConfigError: as for the class; both token and token_file are given; the file is unreadable or empty.
        """
        if settings.token is not None and settings.token_file is not None:
            raise ConfigError("security.token and security.token_file are both given; give one")
        token = settings.token.get_secret_value() if settings.token else None
        if settings.token_file is not None:
            token = _read_token(Path(settings.token_file))
        return cls(_path(settings.certificate), _path(settings.key), _path(settings.ca), token, settings.insecure)

    def __repr__(self) -> str:
        token = None if self.token is None else "***"
        files = f"certificate={self.certificate}, key={self.key}, ca={self.ca}"
        return f"Security({files}, token={token}, insecure={self.insecure})"


def listen(server: grpc.Server, address: str, security: Security) -> int:
    """Adds a listening port to a server.

    Uses TLS with a certificate, and mutual TLS (clients must present a certificate) with a CA, too. Otherwise
    plaintext, for which the address must be on this machine: 127.0.0.0/8, ::1, localhost or a Unix socket.

    Args:
        server: not started yet.
        address: "host:port", "[ipv6]:port" or "unix:path"; port 0 takes a free one.
        security: its files are read now; later changes require a restart.

    Returns:
        The port; for a Unix socket any positive number.

    Raises:
        ConfigError: the address is invalid, in use, or not allowed in plaintext; a file is missing, unreadable or
            invalid, or key and certificate do not match.
    """
    where = parse_address(address, "listen", any_port=True, names=True)
    if where.name:
        raise ConfigError(
            f"a process that is known as {where} needs an address to bind: set ps.listen or coordinator.listen, to "
            '"0.0.0.0:0" for any port'
        )
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
    """A channel to a server. It connects lazily, with the first call.

    Uses TLS with a CA or a certificate, which is presented on request; the server's certificate must name the host of
    `address` ("localhost" for a Unix socket). Otherwise plaintext, by the same rule as for `listen`.

    Args:
        address: "host:port", "[ipv6]:port", "unix:path", or "registry:name": then the certificate must name the name.
        security: its files are read now.
        options: gRPC channel options. Proxies are disabled by default.

    Raises:
        ConfigError: as for `listen`.
    """
    where = parse_address(address, "address", names=True)
    if where.name:
        named = [("grpc.ssl_target_name_override", where.name), *options]
        return NamedChannel(where.name, lambda found: connect(found, security, named))
    chosen = [_NO_PROXY, *options]
    if security.ca is None and security.certificate is None:
        _refuse_plaintext(address, security, where.is_local)
        return grpc.insecure_channel(str(where), options=chosen)
    if where.path:
        chosen.insert(0, _SOCKET_IS_LOCALHOST)
    return grpc.secure_channel(str(where), _channel_credentials(security), options=chosen)


def metadata(security: Security) -> tuple[tuple[str, str], ...]:
    """The `metadata` argument of every call: the token, or nothing.

    Create it once and pass it along: unlike an interceptor or call credentials it runs no Python code per call.
    """
    return () if security.token is None else ((_HEADER, _SCHEME + security.token),)


def authenticate(token: str, refused: Callable[[], object]) -> grpc.ServerInterceptor:
    """An interceptor that rejects calls without the token as UNAUTHENTICATED, before their request is read.

    Args:
        token: the shared secret.
        refused: called for each rejected call, from any of the server's threads.

    Raises:
        ConfigError: the token is not printable ASCII.
    """
    _check_token(token, "security.token")
    return _Authentication(token, refused)


class _Authentication(grpc.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    def __init__(self, token: str, refused: Callable[[], object]) -> None:
        self._expected = (_SCHEME + token).encode()
        self._refused = refused
        self._seldom = LogThrottle()
        # All kinds of methods are the same on the wire; a stream_unary handler can reply before it reads a request.
        self._refusal = grpc.stream_unary_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        for key, value in handler_call_details.invocation_metadata:
            if key == _HEADER and hmac.compare_digest(value.encode(errors="replace"), self._expected):
                return continuation(handler_call_details)
        self._refused()
        if times := self._seldom.allow():
            logger.warning("rejected %d calls with a missing or wrong cluster token", times)
        return self._refusal


def _refuse(_requests: Any, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no token or a wrong one; check security.token")


def _refuse_plaintext(address: str, security: Security, is_local: bool) -> None:
    if not is_local and not security.insecure:
        token = " The token would be readable on the way." if security.token is not None else ""
        raise ConfigError(
            f"{address} is not on this machine and would be contacted in plaintext: set security.certificate, "
            f"security.key and security.ca for TLS, or allow plaintext with security.insecure = true.{token}"
        )


def _server_credentials(security: Security) -> grpc.ServerCredentials:
    key, chain, roots = _read_all(security)
    return grpc.ssl_server_credentials([(key, chain)], root_certificates=roots, require_client_auth=roots is not None)


def _channel_credentials(security: Security) -> grpc.ChannelCredentials:
    key, chain, roots = _read_all(security)
    return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=chain)


def _read_all(security: Security) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Key, certificate chain and CA; validated here, as gRPC does not report why a handshake fails."""
    key, chain, roots = (_read(path) for path in (security.key, security.certificate, security.ca))
    if security.certificate is not None and security.key is not None:
        _check_pair(security.certificate, security.key)
    if security.ca is not None:
        _check_ca(security.ca)
    return key, chain, roots


def _path(path: str | None) -> Path | None:
    return None if path is None else Path(path)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc


def _check_pair(certificate: Path, key: Path) -> None:
    try:
        # With a password, OpenSSL does not prompt for one; gRPC cannot use encrypted keys anyway.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as exc:
        raise ConfigError(
            f"{certificate} and {key} are not a PEM certificate and its unencrypted private key: {_reason(exc)}"
        ) from exc


def _check_ca(ca: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=ca)
    except ssl.SSLError as exc:
        raise ConfigError(f"{ca} contains no PEM certificates: {_reason(exc)}") from exc


def _reason(exc: Exception) -> str:
    return getattr(exc, "reason", None) or str(exc)


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii")
    except OSError as exc:
        raise ConfigError(f"cannot read security.token_file {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"security.token_file {path} must be printable ASCII without spaces") from exc
    token = token.removesuffix("\n").removesuffix("\r")
    _check_token(token, f"security.token_file {path}")
    return token


def _check_token(token: str, name: str) -> None:
    if not token:
        raise ConfigError(f"{name} is empty")
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{name} must be printable ASCII without spaces")
