"""Addresses: what is one, what is of this machine, and that nothing else comes out than an address or a ConfigError."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtrain.address import Address, Hosts, free_port, parse_address, redacted, reserve_port, secrets_of
from streamtrain.errors import ConfigError
from tests.ports import free_ports


@pytest.mark.parametrize(
    ("text", "address", "local"),
    [
        ("ps-0.jobs.svc:2222", Address("ps-0.jobs.svc", 2222), False),
        ("PS-0:1", Address("ps-0", 1), False),
        ("10.0.0.1:65535", Address("10.0.0.1", 65535), False),
        ("0.0.0.0:1", Address("0.0.0.0", 1), False),
        ("[::]:1", Address("::", 1), False),
        ("127.0.0.1:1", Address("127.0.0.1", 1), True),
        ("127.8.9.10:1", Address("127.8.9.10", 1), True),
        ("[::1]:1", Address("::1", 1), True),
        ("localhost:1", Address("localhost", 1), True),
        ("LocalHost:1", Address("localhost", 1), True),
        ("localhost.evil.org:1", Address("localhost.evil.org", 1), False),
        ("127.0.0.1.evil.org:1", Address("127.0.0.1.evil.org", 1), False),
        ("unix:/run/ps.sock", Address(path="/run/ps.sock"), True),
        ("unix:///run/ps.sock", Address(path="/run/ps.sock"), True),
        ("unix:ps.sock", Address(path="ps.sock"), True),
    ],
)
def test_what_is_an_address(text: str, address: Address, local: bool) -> None:
    assert parse_address(text, "listen") == address
    assert address.is_local == local
    assert parse_address(str(address), "listen") == address


NONE = (
    ["", ":1", "a", "a:", "a:0", "a:65536", "a:-1", "a:+1", "a: 1", "a:1\n", "a b:1", "a:1:2", "a:1,b:1", "a:\u0661"],
    ["::1:1", "[::1]", "[a]:1", "127.1:1", "1.2.3:4", "999.0.0.1:1", "127.0.0.1", "2130706433:1", "0x7f000001"],
    ["ipv4:127.0.0.1:1", "dns:///a:1", "http://a:1", "unix:", "unix-abstract:a", "unix:a\0b", "unix:" + "a" * 108],
)


@pytest.mark.parametrize("text", [text for row in NONE for text in row])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="listen must be"):
        parse_address(text, "listen")


def test_any_port_is_one_where_it_is_asked_for() -> None:
    assert parse_address("[::1]:0", "listen", any_port=True) == Address("::1", 0)


@given(st.text() | st.from_regex(r"\A[\[\]:a1.-]{0,9}:\d{1,6}\Z"))
def test_an_address_or_a_config_error_comes_out(text: str) -> None:
    try:
        address = parse_address(text, "listen")
    except ConfigError:
        return
    assert parse_address(str(address), "listen") == address


LOOPBACK, ANYWHERE = "127.0.0.1:8501", "0.0.0.0:8501"


@pytest.mark.parametrize(
    ("listen", "names", "host", "allowed"),
    [
        (LOOPBACK, (), "127.0.0.1:8501", True),
        (LOOPBACK, (), "localhost", True),
        (LOOPBACK, (), "LOCALHOST.:1", True),
        (LOOPBACK, (), "demo.localhost:8501", True),
        (LOOPBACK, (), "[::1]:8501", True),
        (LOOPBACK, (), "::1", True),
        (LOOPBACK, (), "10.1.2.3", True),
        (LOOPBACK, (), "evil.example", False),
        (LOOPBACK, (), "evil.example:8501", False),
        (LOOPBACK, (), "127.0.0.1.evil.example", False),
        (LOOPBACK, (), "localhost.evil.example", False),
        (LOOPBACK, (), "evillocalhost", False),
        (LOOPBACK, (), "", False),
        ("localhost:0", (), "evil.example", False),
        ("[::1]:1", (), "evil.example", False),
        ("here.example:1", (), "here.example:1", True),
        ("here.example:1", ("a.example",), "here.example", True),
        ("here.example:1", ("a.example",), "b.example", False),
        (ANYWHERE, (), "evil.example", True),
        (None, (), "evil.example", True),
        (None, ("a.example",), "evil.example", False),
        (ANYWHERE, ("Ads.example", "*.in.example"), "ads.EXAMPLE:80", True),
        (ANYWHERE, ("ads.example", "*.in.example"), "a.b.in.example", True),
        (ANYWHERE, ("ads.example", "*.in.example"), "in.example", False),
        (ANYWHERE, ("ads.example", "*.in.example"), "xin.example", False),
        (LOOPBACK, ("*",), "evil.example", True),
    ],
)
def test_names_by_which_an_endpoint_may_be_asked(
    listen: str | None, names: tuple[str, ...], host: str, allowed: bool
) -> None:
    assert Hosts(listen, names).allows(host) == allowed


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://127.0.0.1:8501", "127.0.0.1:8501", True),
        ("http://127.0.0.1:3000", "127.0.0.1:8501", False),
        ("http://a.example", "a.example:80", True),
        ("https://a.example:443", "a.example", True),
        ("https://a.example", "a.example:80", False),
        ("https://ads.example", "127.0.0.1:8501", True),
        ("https://ads.example:8443", "127.0.0.1:8501", True),
        ("https://evil.example", "ads.example", False),
        ("https://10.1.2.3", "ads.example", False),
        ("null", "null", False),
        ("file://", "", False),
        ("", "", False),
    ],
)
def test_pages_that_may_ask(origin: str, host: str, allowed: bool) -> None:
    assert Hosts(ANYWHERE, ("ads.example",)).allows_origin(origin, host) == allowed


def test_not_even_any_host_is_any_page() -> None:
    assert not Hosts(ANYWHERE, ("*",)).allows_origin("http://evil.example", "127.0.0.1")


@pytest.mark.parametrize("name", ["", "*.", "**", "a b", "http://a.example", "a.example:80", "*.*.example"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="hosts must be a name such as"):
        Hosts(names=[name])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:zq@host", "redis://***@host"),
        ("rediss://ann:zq@host:1/0?ssl_ca_certs=/zq", "rediss://***@host:1/0?ssl_ca_certs=***"),
        ("redis://:z/q#z?q@host:1", "redis://***@host:1"),
        ("unix://:zq@/run/redis.sock", "unix://***@/run/redis.sock"),
        ("kafka://ann:zq@a:1,bob:zq@b:2", "kafka://***@b:2"),
        ("simplecache::ftp://ann:zq@host/x", "simplecache::ftp://***@host/x"),
        ("https://store.example/c?sig=zq%2B&se=zq&zq#zq=zq", "https://store.example/c?sig=***&se=***&***#zq=***"),
        ("https://store.example/c?zq", "https://store.example/c?***"),
        ("(see 'https://a:zq@h/x?k=zq', or http://b)", "(see 'https://***@h/x?k=***', or http://b)"),
        ('{"message": "http://a:zq@h\\n"}', '{"message": "http://***@h\\n"}'),
        ("/local/folder?x=1", "/local/folder?x=1"),
        ("someone@example.org", "someone@example.org"),
    ],
)
def test_urls_are_shown_without_secrets(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


@given(st.text(st.characters(exclude_categories=["Z", "C"], exclude_characters="\"'<>\\"), min_size=1))
def test_no_password_is_shown(password: str) -> None:
    assert redacted(f"cannot use redis://ann:{password}@host:1/0: no") == "cannot use redis://***@host:1/0: no"


def test_secrets_of_a_url_in_whatever_form() -> None:
    url = "s3://key:a%2Fb%3Fc@bucket/x?token=t%20oken&n=1&long"
    assert secrets_of(url) >= {"a%2Fb%3Fc", "a/b?c", "t%20oken", "t oken", "long"}
    assert secrets_of("s3://bucket/x") == secrets_of("/x") == set()


def test_a_free_port_is_given_once() -> None:
    """Kafka chooses three before it listens on the first."""
    assert len({free_port() for _ in range(500)}) == 500


def test_a_reserved_port_is_nobody_elses_while_its_process_lives() -> None:
    (wanted,) = free_ports(1)
    program = f"from streamtrain.address import reserve_port; print(reserve_port({wanted}), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert int(other.stdout.readline()) == wanted
        assert reserve_port(wanted) != wanted
        other.communicate(b"\n")
    assert reserve_port(wanted) == wanted
    assert reserve_port(wanted) == wanted, "it is this process's own"
    assert wanted not in {reserve_port() for _ in range(20)}
