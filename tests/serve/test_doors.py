"""Doors of the endpoint: who is let in with which token, what answers carry, and what a page of elsewhere may not."""

import base64
import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator

import httpx
import pytest

from streamtrain.cluster.verify_endpoint import Endpoint, EndpointError
from streamtrain.errors import ConfigError
from streamtrain.logs import set_up_logs
from streamtrain.serve.answers import Refused
from streamtrain.serve.app import make_app
from streamtrain.serve.follower import Follower
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.tokens import Tokens
from tests.serve.published import counted, origin_of, publish
from tests.serve.running import client_of, running

MODEL = counted()
URL = "/v1/models/model"
INSTANCE = {"instances": [{"user": "u1"}]}
ADMIN, READ = "the-admin-token", "the-read-token"
OPEN = ("/", "/console/main.js", "/healthz/live", "/healthz/ready", "/v2/health/live", "/v2/health/ready")
READING = (
    ("POST", f"{URL}:predict"),
    ("POST", f"{URL}/versions/head:predict"),
    ("POST", "/v2/models/model/infer"),
    ("POST", f"{URL}:explain"),
    ("GET", URL),
    ("GET", f"{URL}/process"),
    ("GET", f"{URL}/rows/user/u1"),
    ("GET", "/v2"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
)
CONTROL = (("POST", f"{URL}:promote"), ("POST", f"{URL}:rollback"), ("GET", f"{URL}/versions"))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def registry_of() -> Registry:
    origin = origin_of(MODEL)
    publish(origin, 1)
    registry = Registry(MODEL, origin)
    registry.promote(HEAD)
    return registry


@pytest.fixture(scope="module")
def locked() -> Iterator[httpx.Client]:
    """A server with both tokens."""
    registry = registry_of()
    app = make_app(registry, Follower(registry, every=0.05), admin_token=ADMIN, read_token=READ)
    with running(app) as url, client_of(url) as client:
        yield client


@pytest.fixture(scope="module")
def open_() -> Iterator[httpx.Client]:
    """A server without tokens."""
    with running(make_app(registry_of())) as url, client_of(url) as client:
        yield client


# Tokens.


@pytest.mark.parametrize("path", OPEN)
def test_health_and_the_page_need_no_token(locked: httpx.Client, path: str) -> None:
    assert locked.get(path).status_code == 200


@pytest.mark.parametrize(("method", "path"), READING)
def test_reading_needs_one_of_the_tokens(locked: httpx.Client, method: str, path: str) -> None:
    wrong: tuple[dict[str, str], ...] = (
        {},
        bearer("wrong"),
        bearer("?"),
        bearer(READ[:-1]),
        {"authorization": f"Basic {READ}"},
    )
    for headers in (*wrong, {"authorization": READ}, {"x-read-token": READ}, {"cookie": f"token={READ}"}):
        answer = locked.request(method, path, headers=headers, json=INSTANCE)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"] == "Bearer"
        assert READ not in answer.text
    for token in (READ, ADMIN):
        assert locked.request(method, path, headers=bearer(token), json=INSTANCE).status_code not in (401, 403)


@pytest.mark.parametrize(("method", "path"), CONTROL)
def test_the_read_token_may_not_control(locked: httpx.Client, method: str, path: str) -> None:
    for headers in ({}, bearer(READ), bearer(ADMIN + "x")):
        assert locked.request(method, path, headers=headers, json={"version": "head"}).status_code == 401
    assert locked.request(method, path, headers=bearer(ADMIN), json={"version": "head"}).status_code in (200, 404, 409)


@pytest.mark.parametrize("token", [READ, ADMIN])
def test_verify_asks_with_the_token_that_it_has(locked: httpx.Client, token: str) -> None:
    endpoint = Endpoint(str(locked.base_url), token)
    predictions, headers = endpoint.predict(endpoint.model(), [b'{"user": "u1"}'])
    assert (predictions, headers["x-publication"]) == ([[1001.0]], "1")
    with pytest.raises(EndpointError, match="needs the read token"):
        Endpoint(str(locked.base_url)).predict("model", [b'{"user": "u1"}'])


@pytest.mark.parametrize("path", ["/console/../v1/models/model", "/console/%2e%2e/metrics", "/./metrics"])
def test_no_way_round(locked: httpx.Client, path: str) -> None:
    answer = locked.get(path)
    assert answer.status_code in (401, 404)
    assert "streamtrain_" not in answer.text


def test_tokens_are_said_nowhere(locked: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    for token in (ADMIN, READ, "guess-of-a-token"):
        locked.post(f"{URL}:promote", headers=bearer(token), json={"version": 7})
    said = [locked.get(path, headers=bearer(READ)).text for path in ("/metrics", f"{URL}/process", "/openapi.json")]
    tokens = Tokens(ADMIN, READ)
    said += [caplog.text, repr(tokens), str(vars(tokens))]
    for token in (ADMIN, READ, "guess-of-a-token"):
        assert token not in "".join(said)
    assert re.search(r'streamtrain_serving_unauthorized_requests_total{token="admin"} [1-9]', said[0])


@pytest.mark.parametrize(
    ("admin", "read", "message"),
    [("", None, "admin token is empty"), (None, " ", "read token is empty"), ("a", "a", "are the same")],
)
def test_tokens_that_cannot_be(admin: str | None, read: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_app(registry_of(), admin_token=admin, read_token=read)


def test_who_tries_tokens_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    at = [0.0]
    tokens = Tokens("a", "b", now=lambda: at[0])
    for second in range(25):
        at[0] = float(second)
        with pytest.raises(Refused):
            tokens.check_read("Bearer x", "10.0.0.9")
    assert tokens.refused == {"admin": 0, "read": 25}
    assert [one.getMessage() for one in caplog.records] == 3 * [
        "10.0.0.9 came without the read token, or with a wrong one"
    ]


# What answers carry.


@pytest.mark.parametrize("path", ["/", "/docs", "/console/main.js"])
def test_pages_run_nothing_of_elsewhere(open_: httpx.Client, path: str) -> None:
    answer = open_.get(path)
    assert answer.status_code == 200
    policy = dict(one.split(" ", 1) for one in answer.headers["content-security-policy"].split("; "))
    assert "unsafe" not in policy.get("script-src", policy["default-src"])
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    for script in re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy["script-src"]
    assert not re.search(r"\son\w+=", answer.text if path == "/" else "")


@pytest.mark.parametrize("path", ["/", "/metrics", URL, "/nowhere", "/healthz/live"])
def test_nothing_is_shared_with_pages_of_another_origin(open_: httpx.Client, path: str) -> None:
    asked = {"origin": "https://evil.example"}
    preflight = asked | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for answer in (open_.get(path, headers=asked), open_.options(path, headers=preflight)):
        assert not [name for name in answer.headers if name.startswith("access-control-")]
        assert answer.headers["x-content-type-options"] == "nosniff"


# Request ids.


def test_every_answer_has_an_id(locked: httpx.Client) -> None:
    answers = [locked.get(path) for path in ("/healthz/live", "/metrics", "/nowhere", "/healthz/live")]
    answers.append(locked.post(f"{URL}:predict", json=INSTANCE, headers=bearer(READ)))
    ids = [one.headers["x-request-id"] for one in answers]
    assert len({*ids}) == len(ids)
    given = locked.get("/healthz/live", headers={"x-request-id": "trace:1-a_b"})
    assert given.headers["x-request-id"] == "trace:1-a_b"


@pytest.mark.parametrize("given", [b"", b"a b", b"\xff", b"a\tb", b'"', b"{}", b"x" * 129])
def test_an_id_that_could_forge_a_line_is_replaced(open_: httpx.Client, given: bytes) -> None:
    answer = open_.get("/healthz/live", headers=[(b"x-request-id", given)])
    assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])


def test_a_fault_is_found_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails inside is answered with the id alone, and the log has it with the traceback."""
    registry, log = registry_of(), io.StringIO()
    app = make_app(registry)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("of the inside")

    monkeypatch.setattr(app.state.service.batcher, "predict", fail)
    handler = logging.StreamHandler(log)
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", log)
        set_up_logs("json", "info", "serve")
    try:
        with running(app) as url, client_of(url) as client:
            answer = client.post(f"{URL}:predict", json=INSTANCE, headers={"x-request-id": "find-me"})
    finally:
        set_up_logs(level="warning")
        logging.getLogger().removeHandler(handler)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "find-me")
    assert answer.json() == {"error": "internal error: ZeroDivisionError"}
    (line,) = (json.loads(one) for one in log.getvalue().splitlines() if "find-me" in one)
    assert (line["request_id"], line["level"]) == ("find-me", "error")
    assert "ZeroDivisionError: of the inside" in line["exc_info"]
