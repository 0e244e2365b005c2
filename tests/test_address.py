"""Addresses: what is one, what is of this machine, and that nothing else comes out than an address or a ConfigError."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtrain.address import Address, parse_address
from streamtrain.errors import ConfigError


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
