"""Clients that are slow, or say too much: each is refused alone, and the others are answered meanwhile."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from streamtrain.serve.http.app import make_app
from streamtrain.serve.http.connection import Connections
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.service.service import ServingConfig
from tests.patience import PATIENCE, until
from tests.serve.published import counted, origin_of, publish
from tests.serve.running import client_of, running

MODEL = counted()
PREDICT = "/v1/models/model:predict"
BODY = json.dumps({"instances": [{"user": "u1"}]}).encode()
HEAD_OF_POST = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % (PREDICT.encode(), len(BODY))
RECEIVE_SECONDS = 2.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    origin = origin_of(MODEL)
    publish(origin, 1)
    registry = Registry(MODEL, origin)
    registry.promote(HEAD)
    config = ServingConfig(max_bodies=1 << 20, max_connections=20, receive_timeout=RECEIVE_SECONDS)
    with running(make_app(registry, config=config)) as url:
        yield url


def connect(url: str) -> socket.socket:
    place = urlsplit(url)
    assert place.hostname
    assert place.port
    return socket.create_connection((place.hostname, place.port), PATIENCE)


def heard(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:  # it closed while more was sent to it
        pass
    return b"".join(parts)


def works(url: str) -> bool:
    with client_of(url) as client:
        return client.post(PREDICT, content=BODY).status_code == 200


def refused(url: str, reason: str) -> int:
    with client_of(url) as client:
        found = re.search(rf'refused_connections_total{{reason="{reason}"}} (\d+)', client.get("/metrics").text)
    assert found
    return int(found[1])


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"", b""),
        (b"POST /v1/mod", b"HTTP/1.1 408 "),
        (HEAD_OF_POST, b"HTTP/1.1 408 "),
        (HEAD_OF_POST + b"\r\n", b"HTTP/1.1 408 "),
        (HEAD_OF_POST + b"\r\n" + BODY[:-1], b"HTTP/1.1 408 "),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc", b"HTTP/1.1 405 "),
    ],
    ids=["nothing", "a line", "headers", "no body", "nearly all of a body", "chunks of what is refused anyway"],
)
def test_who_never_ends_is_let_go(url: str, said: bytes, answer: bytes) -> None:
    before = refused(url, "slow")
    with connect(url) as client:
        client.sendall(said)
        told = heard(client)
    assert told.startswith(answer), told
    assert bool(told) == bool(answer)
    until(lambda: refused(url, "slow") == before + 1, PATIENCE)
    assert works(url)


def test_bytes_one_by_one_gain_no_time(url: str) -> None:
    """Slowloris: there is always something new, and never an end."""
    before, began = refused(url, "slow"), time.monotonic()
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(url)) for _ in range(10)]
        for client in clients:
            client.sendall(HEAD_OF_POST)
        left = {*clients}
        while left and time.monotonic() - began < PATIENCE:
            for client in [*left]:
                try:
                    client.sendall(b"x-a: b\r\n")
                except (BrokenPipeError, ConnectionResetError):
                    left.discard(client)
            assert works(url)
        assert not left
    until(lambda: refused(url, "slow") == before + 10, PATIENCE)


def test_a_pause_between_requests_is_no_slowness(url: str) -> None:
    """Kept alive, a connection may rest longer than a request may take."""
    before = refused(url, "slow")
    with connect(url) as client:
        client.sendall(HEAD_OF_POST + b"\r\n" + BODY)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        time.sleep(1.5 * RECEIVE_SECONDS)  # what is tested is that this time passes
        client.sendall(HEAD_OF_POST + b"connection: close\r\n\r\n" + BODY)
        assert heard(client).startswith(b"HTTP/1.1 200 ")
    assert refused(url, "slow") == before


@pytest.mark.parametrize(
    "said",
    [
        b"GET /healthz/live HTTP/1.1\r\n" + b"".join(b"x-%d: 1\r\n" % i for i in range(101)) + b"\r\n",
        b"GET /healthz/live HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * (65 << 10) + b"\r\n\r\n",
        b"GET /" + b"a" * (65 << 10) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /healthz/live HTTP/1.1\r\n" + b"x-a: " + b"a" * (1 << 20),
    ],
    ids=["many", "large", "a long path", "without an end"],
)
def test_headers_have_bounds(url: str, said: bytes) -> None:
    before = refused(url, "headers")
    with connect(url) as client:
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(said)
        told = heard(client)
    assert told.startswith(b"HTTP/1.1 431 ") or len(said) > 1 << 20, told[:200]
    until(lambda: refused(url, "headers") == before + 1, PATIENCE)
    assert works(url)


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\x02", b"GET / HTTP/9\r\n\r\n", b"GET \xff HTTP/1.1\r\n\r\n", b"\0" * 99]
)
def test_what_is_no_http(url: str, said: bytes) -> None:
    with connect(url) as client:
        client.sendall(said)
        told = heard(client)
    assert told.startswith(b"HTTP/1.1 400 "), told
    assert json.loads(told.partition(b"\r\n\r\n")[2]) == {"error": "not an HTTP/1.1 request"}


def test_connections_have_a_bound(url: str) -> None:
    before = refused(url, "many")
    with ExitStack() as stack:
        told = [stack.enter_context(connect(url)) for _ in range(30)]
        answers = [heard(one) for one in told]  # those that were taken are let go when they say nothing
    busy = [one for one in answers if one]
    assert busy
    assert all(one.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in one for one in busy)
    assert answers.count(b"") <= 20
    until(lambda: refused(url, "many") == before + len(busy), PATIENCE)
    assert works(url)


def test_bodies_of_all_have_a_bound(url: str) -> None:
    """Each is small enough, all together are not; what is refused is told so, and they are gone with their clients."""
    with ExitStack() as stack:
        half = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 800000\r\n\r\n" % PREDICT.encode() + b" " * 600_000
        clients = [stack.enter_context(connect(url)) for _ in range(4)]
        for client in clients:
            client.sendall(half)
        answers = [heard(one) for one in clients]
    assert {answer[9:12] for answer in answers} == {b"503", b"408"}, answers
    assert sum(answer.startswith(b"HTTP/1.1 503 ") for answer in answers) == 3
    assert works(url)
    with client_of(url) as one:
        assert one.post(PREDICT, content=b" " * 900_000).status_code == 400


def test_answers_that_are_not_read_are_let_go(url: str) -> None:
    """Answers of some megabytes, more than is buffered on the way, to one who reads nothing."""
    before = refused(url, "unread")
    with connect(url) as client:
        client.sendall(200 * b"GET /console/uplot/uPlot.iife.min.js HTTP/1.1\r\nhost: x\r\n\r\n")
        until(lambda: refused(url, "unread") == before + 1, PATIENCE)
    assert works(url)


def test_a_client_that_goes_away_is_no_fault(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with connect(url) as client:
        client.sendall(HEAD_OF_POST + b"\r\n" + BODY[:-1])
    with client_of(url) as one:
        until(lambda: 'code="408"' in one.get("/metrics").text, PATIENCE)
    assert caplog.text == ""


def test_closed_connections_are_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    limits = Connections()
    for _ in range(9):
        limits.count("slow")
    limits.count("many")
    assert limits.refused == {"many": 1, "slow": 9, "headers": 0, "unread": 0}
    assert [one.getMessage() for one in caplog.records] == [
        "1 connections closed: requests were not complete in time",
        "1 connections closed: too many connections (serve.max_connections)",
    ]


def test_limits_are_of_each_server() -> None:
    origin = origin_of(MODEL)
    assert make_app(Registry(MODEL, origin)).state.connections == Connections()


def test_httpx_is_answered(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False, verify=False) as client:
        assert [client.post(PREDICT, content=BODY).status_code for _ in range(50)] == [200] * 50
