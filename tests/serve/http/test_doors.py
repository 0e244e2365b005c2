"""Doors of the endpoint: who is let in with which token, what answers carry, and what a page of elsewhere may not."""

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from streamtrain.address import Hosts
from streamtrain.errors import ConfigError
from streamtrain.logs import set_up_logs
from streamtrain.serve.client import Endpoint, EndpointError
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.http.app import make_app
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.service.service import ServingConfig
from streamtrain.serve.service.tokens import Tokens
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
    app = make_app(registry, RegistryUpdater(registry, every=0.05), ServingConfig(admin_token=ADMIN, read_token=READ))
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
    with Endpoint(str(locked.base_url), token) as endpoint:
        predictions, headers = endpoint.predict(endpoint.model(), [b'{"user": "u1"}'])
    assert (predictions, headers["x-publication"]) == ([[1001.0]], "1")
    with (
        Endpoint(str(locked.base_url)) as endpoint,
        pytest.raises(EndpointError, match="the read token is required"),
    ):
        endpoint.predict("model", [b'{"user": "u1"}'])


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
    [
        ("", None, "admin token is empty"),
        (None, " ", "read token is empty"),
        ("a", "a", "are the same"),
        ("a", " a ", "are the same"),
    ],
)
def test_tokens_that_cannot_be(admin: str | None, read: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_app(registry_of(), config=ServingConfig(admin_token=admin, read_token=read))


def test_who_tries_tokens_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    at = [0.0]
    tokens = Tokens("a", "b", now=lambda: at[0])
    for second in range(25):
        at[0] = float(second)
        with pytest.raises(HTTPError):
            tokens.check_read("Bearer x", "10.0.0.9")
    assert tokens.refused == {"admin": 0, "read": 25}
    assert [one.getMessage() for one in caplog.records] == 3 * [
        "request from 10.0.0.9 refused: the read token is missing or wrong"
    ]


def is_let_in(check: Callable[[], None]) -> int:
    """0, or the status of the refusal."""
    try:
        check()
    except HTTPError as exc:
        return exc.status
    return 0


@pytest.mark.parametrize(
    ("admin", "read", "given", "may_read", "may_control"),
    [
        (None, None, "", 0, 403),
        (None, None, "Bearer x", 0, 403),
        ("a", None, "", 0, 401),
        ("a", None, "Bearer a", 0, 0),
        (None, "r", "Bearer r", 0, 403),
        (None, "r", "", 401, 403),
        (None, "r", "Bearer", 401, 403),
        ("a", "r", "bearer   r ", 0, 401),
        ("a ", "r", "BEARER a", 0, 0),
        ("a", "r", "Basic a", 401, 401),
        ("a", "r", "a", 401, 401),
        ("a", "r", "Bearer ", 401, 401),
        ("a", "r", "Bearer \udcff", 401, 401),
    ],
)
def test_who_is_let_in(admin: str | None, read: str | None, given: str, may_read: int, may_control: int) -> None:
    tokens = Tokens(admin, read)
    assert (tokens.has_admin, tokens.has_read) == (admin is not None, read is not None)
    assert is_let_in(lambda: tokens.check_read(given, "ann")) == may_read
    assert is_let_in(lambda: tokens.check_admin({"authorization": given}, "ann")) == may_control
    assert tokens.refused == {"admin": int(may_control == 401), "read": int(may_read == 401)}


def test_who_is_refused_hears_how_to_ask() -> None:
    with pytest.raises(HTTPError, match="the read token is required: send it as authorization: Bearer TOKEN") as caught:
        Tokens("a", "b").check_read("", "ann")
    assert caught.value.headers == {"www-authenticate": "Bearer"}


def test_digests_differ_by_process_and_are_of_one_length() -> None:
    """So what is in memory here tells nothing of another process, and to compare takes as long for any token."""
    one, other = Tokens("a", "b"), Tokens("a", "b" * 500)
    assert one._admin != other._admin
    assert len(one._salt) >= 16
    assert len({len(digest or b"") for digest in (one._admin, one._read, other._admin, other._read)}) == 1
    assert len(one._admin or b"") >= 32


# What answers carry.


@pytest.mark.parametrize("path", ["/", "/docs", "/console/main.js"])
def test_pages_run_nothing_of_elsewhere(open_: httpx.Client, path: str) -> None:
    answer = open_.get(path, headers={"accept": "text/html"})
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

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of the inside")

    monkeypatch.setattr(app.state.service.batcher, "predict", fail)
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", log)
        set_up_logs("json", "info", "serve")
    with running(app) as url, client_of(url) as client:
        answer = client.post(f"{URL}:predict", json=INSTANCE, headers={"x-request-id": "find-me"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "find-me")
    assert answer.json() == {"error": "internal error: ZeroDivisionError"}
    (line,) = (json.loads(one) for one in log.getvalue().splitlines() if "find-me" in one)
    assert (line["request_id"], line["level"]) == ("find-me", "error")
    assert "ZeroDivisionError: of the inside" in line["exc_info"]


@pytest.fixture(scope="module")
def at_loopback() -> Iterator[httpx.Client]:
    """A server as it is at a loopback address, with a name of its own, behind a proxy."""
    app = make_app(
        registry_of(), config=ServingConfig(admin_token=ADMIN, hosts=Hosts("127.0.0.1:8501", ["ads.example"]))
    )
    with running(app) as url, client_of(url) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), [*READING, *CONTROL, ("GET", "/"), ("GET", "/console/main.js")])
def test_no_name_of_another_site_leads_here(at_loopback: httpx.Client, method: str, path: str) -> None:
    """Else a page could have its own name lead to this address, and read answers as its own (DNS rebinding)."""
    answer = at_loopback.request(method, path, headers={"host": "evil.example:8501"} | bearer(ADMIN), json=INSTANCE)
    assert answer.status_code == 403
    assert answer.json() == {"error": "unknown host 'evil.example:8501': add it to serve.hosts"}


@pytest.mark.parametrize("host", ["localhost:8501", "127.0.0.1", "[::1]:8501", "ads.example"])
def test_names_that_lead_here(at_loopback: httpx.Client, host: str) -> None:
    assert at_loopback.post(f"{URL}:predict", json=INSTANCE, headers={"host": host}).status_code == 200


def test_health_is_told_to_whoever_asks(at_loopback: httpx.Client) -> None:
    for path in OPEN[2:]:
        assert at_loopback.get(path, headers={"host": "probe.example"}).status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize(
    "page",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [f"{URL}:predict", f"{URL}:promote", f"{URL}:rollback", "/v2/models/model/infer"])
def test_no_page_of_another_site_asks(at_loopback: httpx.Client, path: str, page: dict[str, str], kind: str) -> None:
    """Neither to change something nor to have this process work."""
    body = json.dumps(INSTANCE | {"version": "head"}).encode()
    answer = at_loopback.post(path, content=body, headers={"content-type": kind} | page | bearer(ADMIN))
    assert answer.status_code == 403, answer.text
    assert "requests from pages of" in answer.json()["error"]


def test_own_pages_and_programs_ask(at_loopback: httpx.Client) -> None:
    own = str(at_loopback.base_url).rstrip("/")
    pages = [{"origin": own, "sec-fetch-site": "same-origin"}, {"origin": "https://ads.example"}]
    for given in [*pages, {}, {"sec-fetch-site": "none"}, {"content-type": "text/plain"}]:
        answer = at_loopback.post(f"{URL}:predict", content=json.dumps(INSTANCE), headers=given)
        assert answer.status_code == 200, answer.text
    assert at_loopback.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link may lead here


def test_any_name_leads_to_an_address_of_the_network(open_: httpx.Client) -> None:
    assert open_.get(URL, headers={"host": "models.svc.cluster.example:8501"}).status_code == 200
