"""Security of the wire, with real servers, channels and certificates."""

import itertools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import SecretStr

from streamtrain.errors import ConfigError
from streamtrain.ps.rpc.security import Security, authenticate, connect, listen, metadata
from streamtrain.settings.groups import SecuritySettings

TOKEN = "s3cret/with+base64="
TIMEOUT = 20
PLAIN = Security()
ECHO = {
    "uu": grpc.unary_unary_rpc_method_handler(lambda request, context: request),
    "us": grpc.unary_stream_rpc_method_handler(lambda request, context: iter([request, request])),
    "su": grpc.stream_unary_rpc_method_handler(lambda requests, context: b"".join(requests)),
    "ss": grpc.stream_stream_rpc_method_handler(lambda requests, context: requests),
}
CALLS: dict[str, Callable[[grpc.Channel, Any], bytes]] = {
    "uu": lambda channel, tags: bytes(channel.unary_unary("/t/uu")(b"x", TIMEOUT, tags)),
    "us": lambda channel, tags: b"".join(channel.unary_stream("/t/us")(b"x", TIMEOUT, tags)),
    "su": lambda channel, tags: bytes(channel.stream_unary("/t/su")(iter([b"x", b"y"]), TIMEOUT, tags)),
    "ss": lambda channel, tags: b"".join(channel.stream_stream("/t/ss")(iter([b"x", b"y"]), TIMEOUT, tags)),
}
ANSWERS = {"uu": b"x", "us": b"xx", "su": b"xy", "ss": b"xy"}

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that echo; gives their port."""
    servers = []

    def start(security: Security, address: str = "127.0.0.1:0", *interceptors: grpc.ServerInterceptor) -> int:
        server = grpc.server(ThreadPoolExecutor(2), interceptors=interceptors)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t", ECHO)])
        port = listen(server, address, security)
        server.start()
        servers.append(server)
        return port

    yield start
    for server in servers:
        server.stop(0).wait()


def echo(address: str, security: Security) -> bytes:
    with connect(address, security) as channel:
        return CALLS["uu"](channel, metadata(security))


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    status: grpc.StatusCode = caught.value.code()
    return status


class Files:
    """Certificates of one authority: `both` for localhost and 127.0.0.1, `elsewhere` for another host."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        self.both = self._issue(authority, folder / "both", "localhost", "127.0.0.1", "::1")
        self.elsewhere = self._issue(authority, folder / "elsewhere", "ps.example.org")
        self.strange = self._issue(trustme.CA(), folder / "strange", "localhost", "127.0.0.1")

    @staticmethod
    def _issue(authority: trustme.CA, stem: Path, *hosts: str) -> Security:
        issued = authority.issue_cert(*hosts)
        certificate, key = stem.with_suffix(".crt"), stem.with_suffix(".key")
        issued.private_key_pem.write_to_path(key)
        for i, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(certificate, append=i > 0)
        return Security(certificate, key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


def test_tls_for_those_who_know_the_ca(serve: Serve, files: Files) -> None:
    port = serve(files.both)
    assert echo(f"127.0.0.1:{port}", Security(ca=files.ca)) == b"x"
    assert echo(f"localhost:{port}", Security(ca=files.ca)) == b"x"
    assert code_of(lambda: echo(f"127.0.0.1:{port}", files.both)) == grpc.StatusCode.UNAVAILABLE  # public roots
    assert code_of(lambda: echo(f"127.0.0.1:{port}", PLAIN)) == grpc.StatusCode.UNAVAILABLE


def test_tls_beyond_the_machine_needs_no_leave(serve: Serve, files: Files) -> None:
    port = serve(files.both, "0.0.0.0:0")
    assert echo(f"127.0.0.1:{port}", Security(ca=files.ca, token=TOKEN)) == b"x"
    connect("ps.example.org:1", Security(ca=files.ca, token=TOKEN)).close()


def test_tls_over_a_socket(serve: Serve, files: Files, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/ps.sock"
    serve(files.both, address)
    assert echo(address, Security(ca=files.ca)) == b"x"


def test_mutual_tls_refuses_clients_that_show_none_or_a_strange_certificate(serve: Serve, files: Files) -> None:
    address = f"127.0.0.1:{serve(replace(files.both, ca=files.ca))}"
    assert echo(address, replace(files.both, ca=files.ca)) == b"x"
    assert code_of(lambda: echo(address, Security(ca=files.ca))) == grpc.StatusCode.UNAVAILABLE
    assert code_of(lambda: echo(address, replace(files.strange, ca=files.ca))) == grpc.StatusCode.UNAVAILABLE


def test_the_certificate_must_name_the_host(serve: Serve, files: Files) -> None:
    port = serve(files.elsewhere)
    assert code_of(lambda: echo(f"127.0.0.1:{port}", Security(ca=files.ca))) == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.0.0.2:0", "localhost:0", "[::1]:0"])
def test_plaintext_within_the_machine(serve: Serve, address: str) -> None:
    if address.startswith("[") and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    port = serve(PLAIN, address)
    assert echo(f"{address[:-1]}{port}", PLAIN) == b"x"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_plaintext_over_a_socket(serve: Serve, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/ps.sock"
    assert serve(Security(token=TOKEN), address) > 0
    assert echo(address, Security(token=TOKEN)) == b"x"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "ps-0.jobs:2222"])
@pytest.mark.parametrize("security", [PLAIN, Security(token=TOKEN)])
def test_plaintext_beyond_the_machine_is_refused(serve: Serve, address: str, security: Security) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(security, address)
    for word in (address, "security.certificate", "security.insecure"):
        assert word in str(caught.value)
    assert TOKEN not in str(caught.value)
    with pytest.raises(ConfigError, match=r"in plaintext.*security\.insecure"):
        connect(address.replace(":0", ":1"), security)


def test_plaintext_beyond_the_machine_where_it_is_allowed(serve: Serve) -> None:
    security = Security(token=TOKEN, insecure=True)
    port = serve(security, "0.0.0.0:0", authenticate(TOKEN, lambda: None))
    assert echo(f"127.0.0.1:{port}", security) == b"x"
    connect("ps.example.org:1", security).close()


def test_no_proxy_comes_between(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert echo(f"127.0.0.1:{serve(PLAIN)}", PLAIN) == b"x"


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("tls", [False, True], ids=["plaintext", "tls"])
def test_calls_without_the_token_are_refused_and_counted(serve: Serve, files: Files, method: str, tls: bool) -> None:
    refusals = itertools.count()
    interceptor = authenticate(TOKEN, lambda: next(refusals))
    address = f"127.0.0.1:{serve(files.both if tls else PLAIN, '127.0.0.1:0', interceptor)}"
    security = Security(ca=files.ca if tls else None, token=TOKEN)
    wrong = [(), (("authorization", "Bearer"),), (("authorization", TOKEN),), (("authorization", f"Bearer {TOKEN}x"),)]
    wrong += [(("authorization", "Bearer other"),), (("x-token", f"Bearer {TOKEN}"),)]
    with connect(address, security) as channel:
        assert CALLS[method](channel, metadata(security)) == ANSWERS[method]
        assert next(refusals) == 0
        for tags in wrong:
            with pytest.raises(grpc.RpcError) as caught:
                CALLS[method](channel, tags)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert TOKEN not in caught.value.details()
        assert next(refusals) == 1 + len(wrong)


def test_methods_are_not_told_to_strangers(serve: Serve) -> None:
    address = f"127.0.0.1:{serve(PLAIN, '127.0.0.1:0', authenticate(TOKEN, lambda: None))}"
    with connect(address, PLAIN) as channel:
        call = channel.unary_unary("/t/none")
        assert code_of(lambda: call(b"x", TIMEOUT)) == grpc.StatusCode.UNAUTHENTICATED
        known = metadata(Security(token=TOKEN))
        assert code_of(lambda: call(b"x", TIMEOUT, known)) == grpc.StatusCode.UNIMPLEMENTED


def test_calls_without_a_token_carry_nothing() -> None:
    assert metadata(PLAIN) == ()


@pytest.mark.parametrize("text", [TOKEN, f"{TOKEN}\n", f"{TOKEN}\r\n"])
def test_a_token_from_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(text.encode())
    assert Security.from_settings(SecuritySettings(token_file=str(file))) == Security(token=TOKEN)


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"", "is empty"), (b"\n", "is empty"), (b"a b", "printable"), (b"a\n\n", "printable"), (b"\xff", "printable")],
)
def test_a_file_without_a_token(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=f"security.token_file {file} .*{message}"):
        Security.from_settings(SecuritySettings(token_file=str(file)))


def test_settings_that_do_not_fit_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read security.token_file {tmp_path}/none: No such file"):
        Security.from_settings(SecuritySettings(token_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="both given"):
        Security.from_settings(SecuritySettings(token=SecretStr("a"), token_file="b"))
    with pytest.raises(ConfigError, match=r"security\.token is empty"):
        Security(token="")
    with pytest.raises(ConfigError, match=r"security\.token is empty"):
        authenticate("", lambda: None)
    with pytest.raises(ConfigError, match=r"security\.certificate is given without security\.key"):
        Security.from_settings(SecuritySettings(certificate="a"))
    with pytest.raises(ConfigError, match=r"security\.key is given without security\.certificate"):
        Security.from_settings(SecuritySettings(key="a"))


def test_a_ca_alone_serves_nobody(serve: Serve, files: Files) -> None:
    with pytest.raises(ConfigError, match=r"security\.ca is given without security\.certificate"):
        serve(Security(ca=files.ca))


def test_files_that_are_wrong_are_named(serve: Serve, files: Files, tmp_path: Path) -> None:
    other, none, empty = files.elsewhere.key, tmp_path / "none", tmp_path / "empty"
    empty.touch()
    for security, message in [
        (replace(files.both, key=other), f"{files.both.certificate} and {other} .*MISMATCH"),
        (replace(files.both, key=files.ca), f"{files.both.certificate} and {files.ca} "),
        (replace(files.both, key=_encrypted(files, tmp_path)), "unencrypted private key"),
        (replace(files.both, certificate=empty), f"{empty} and "),
        (replace(files.both, certificate=none), f"cannot read {none}: No such file"),
        (replace(files.both, key=none), f"cannot read {none}: No such file"),
        (replace(files.both, ca=none), f"cannot read {none}: No such file"),
        (replace(files.both, ca=tmp_path), f"cannot read {tmp_path}: Is a directory"),
        (replace(files.both, ca=empty), f"{empty} contains no PEM certificates"),
        (replace(files.both, ca=files.both.key), f"{files.both.key} contains no PEM certificates"),
    ]:
        with pytest.raises(ConfigError, match=message):
            serve(security)
        with pytest.raises(ConfigError, match=message):
            connect("localhost:1", security)


def _encrypted(files: Files, folder: Path) -> Path:
    assert files.both.key is not None
    key = load_pem_private_key(files.both.key.read_bytes(), None)
    file = folder / "encrypted.key"
    format_, password = PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(b"password")
    file.write_bytes(key.private_bytes(Encoding.PEM, format_, password))
    return file


def test_addresses_that_are_wrong_are_named(serve: Serve) -> None:
    with pytest.raises(ConfigError, match=r"listen must be .*'nowhere'"):
        serve(PLAIN, "nowhere")
    with pytest.raises(ConfigError, match=r"address must be .*'127.0.0.1:0'"):
        connect("127.0.0.1:0", PLAIN)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}"):
            serve(PLAIN, f"127.0.0.1:{taken.getsockname()[1]}")


def test_the_token_does_not_show() -> None:
    security = Security(token=TOKEN)
    assert TOKEN not in repr(security) + str(security)
    assert "token=***" in repr(security)
    assert "token=None" in repr(PLAIN)
