"""More requests than a server can answer: what is answered is answered soon, the rest is told to come again."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from streamtrain.serve.errors import Overloaded
from streamtrain.serve.http.app import make_app
from streamtrain.serve.predictor import Predicted, Predictor
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.service.admission import Admission
from streamtrain.serve.service.batcher import Batcher
from streamtrain.serve.service.service import ServingConfig
from tests.patience import PATIENCE, until
from tests.serve.published import counted, origin_of, publish
from tests.serve.running import client_of, running

MODEL = counted()
PREDICT = "/v1/models/model:predict"
INFER = "/v2/models/model/infer"
BODY = {"instances": [{"user": "u1"}]}
BATCH_SECONDS = 0.05
WAIT = 0.5


class Slow:
    """What predicts takes its time, as a large graph does; on the thread, one batch after another."""

    def __init__(self, predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        predict = predictor.predict_messages

        def slowly(messages: list[bytes]) -> Predicted:
            time.sleep(BATCH_SECONDS)  # the work
            assert self.free.wait(PATIENCE)
            return predict(messages)

        monkeypatch.setattr(predictor, "predict_messages", slowly)
        monkeypatch.setattr(predictor, "predict_at_once", lambda messages: None)


@pytest.fixture
def registry() -> Registry:
    origin = origin_of(MODEL)
    publish(origin, 1)
    registry = Registry(MODEL, origin)
    registry.promote(HEAD)
    return registry


@pytest.fixture
def slow(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Slow:
    assert registry.served is not None
    return Slow(registry.served, monkeypatch)


@pytest.fixture
def url(registry: Registry, slow: Slow) -> Iterator[str]:
    """Answers about twenty requests a second, of which 32 may be under way."""
    app = make_app(registry, config=ServingConfig(max_requests=32, max_batch=1, max_wait=WAIT))
    with running(app) as url:
        yield url


def metric(url: str, name: str) -> float:
    with client_of(url) as client:
        text = client.get("/metrics").text
    found = re.search(rf"^streamtrain_serving_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def ask(url: str, clients: int, seconds: float) -> list[httpx.Response]:
    """What many clients are answered that ask again as soon as they are, for some time."""

    async def one(client: httpx.AsyncClient, until_: float) -> list[httpx.Response]:
        answers = []
        while time.monotonic() < until_:
            answers.append(await client.post(PREDICT, json=BODY))
        return answers

    async def all_() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(
            base_url=url, timeout=PATIENCE, trust_env=False, verify=False, limits=limits
        ) as client:
            until_ = time.monotonic() + seconds
            asked = await asyncio.gather(*(one(client, until_) for _ in range(clients)))
            return [answer for answers in asked for answer in answers]

    return asyncio.run(all_())


def test_overload_is_refused_and_passes(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Eighty clients for thirty-two places and ten answers in the time that one may wait."""
    answers = ask(url, clients=80, seconds=3)
    good = [one for one in answers if one.status_code == 200]
    shed = [one for one in answers if one.status_code == 503]
    assert len(good) > 5
    assert len(shed) > 20
    assert len(good) + len(shed) == len(answers)
    assert all(one.headers["retry-after"] == "1" and "try again" in one.json()["error"] for one in shed)
    reasons = {one.json()["error"].partition(" ")[2].partition(" ")[0] for one in shed}
    assert reasons == {"requests", "request"}  # too many under way, and those that waited too long
    counted_ = [metric(url, f'shed_requests_total{{reason="{reason}"}}') for reason in ("requests", "wait")]
    assert sum(counted_) == len(shed)
    assert all(counted_)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert 1 <= len(said) <= 3
    assert all(one.startswith("overloaded, ") for one in said)
    until(lambda: metric(url, "under_way_requests") == metric(url, "waiting_instances") == 0, PATIENCE)
    with client_of(url) as client:
        assert [client.post(PREDICT, json=BODY).status_code for _ in range(10)] == [200] * 10


def test_what_cannot_be_taken_on_is_refused_at_once(url: str, slow: Slow) -> None:
    """All places are taken by requests that hang; the next ones do not."""
    slow.free.clear()
    hanging: list[int] = []

    def hang() -> None:
        with client_of(url) as client:
            hanging.append(client.post(PREDICT, json=BODY).status_code)

    threads = [threading.Thread(target=hang) for _ in range(32)]
    for thread in threads:
        thread.start()
    until(lambda: metric(url, "under_way_requests") == 32, PATIENCE)
    with client_of(url) as client:
        for path, body in ((PREDICT, BODY), (INFER, {"inputs": []}), ("/v1/models/model:explain", BODY)):
            answer = client.post(path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
            assert answer.json()["error"] == "32 requests are in flight; try again later"
        assert client.get("/healthz/ready").status_code == 200  # it can predict; whom to ask the proxy decides
        slow.free.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert client.post(PREDICT, json=BODY).status_code == 200
    assert {*hanging} == {200, 503}  # one was at it already, the others have waited too long
    assert hanging.count(200) >= 1


def test_waiting_for_offsets_leaves_places_to_others(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks for what is never learned may not keep all others out."""
    answers: list[httpx.Response] = []

    def wait() -> None:
        with client_of(url) as client:
            answers.append(client.post(PREDICT, json=BODY, headers={"x-min-offset": "0:999"}))

    threads = [threading.Thread(target=wait) for _ in range(32)]
    for thread in threads:
        thread.start()
    until(lambda: metric(url, "under_way_requests") >= 16, PATIENCE)
    with client_of(url) as client:
        until(lambda: client.post(PREDICT, json=BODY).status_code == 200, PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
    assert {one.status_code for one in answers} == {412, 503}
    said = [one.getMessage() for one in caplog.records if one.name == "streamtrain.serve.service.service"]
    assert len(said) <= 1  # a minute, of all tests here
    assert all(
        one.startswith("1 requests timed out waiting for their x-min-offset; the last: x-min-offset: not learned")
        for one in said
    )
    assert metric(url, 'shed_requests_total{reason="offsets"}') == sum(one.status_code == 503 for one in answers)


def test_who_has_waited_too_long_is_told_and_costs_nothing(registry: Registry, slow: Slow) -> None:
    """One batch takes longer than a request may wait: those behind it are not predicted any more."""
    sizes: list[int] = []
    batcher = Batcher(max_batch=1, max_queue=10, max_wait=1.0, observe=sizes.append)
    head = registry.served
    assert head is not None
    slow.free.clear()

    async def run() -> list[Predicted | BaseException]:
        asked = [asyncio.create_task(batcher.predict(head, [b'{"user": "u1"}'])) for _ in range(4)]
        await asyncio.sleep(1.2)  # what is tested is that this time passes
        slow.free.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    first, *others = asyncio.run(run())
    batcher.close()
    assert isinstance(first, Predicted)
    assert all(isinstance(one, Overloaded) and one.reason == "wait" for one in others)
    assert (sizes, batcher.waiting) == ([1], 0)


def test_the_log_says_it_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    at = [0.0]
    admission = Admission(1, 10, now=lambda: at[0])
    with admission.admit() as admitted:
        for second in range(21):
            at[0] = float(second)
            with pytest.raises(Overloaded) as caught:
                admission.admit()
            admission.count(caught.value)
        admitted.take(10)
        with pytest.raises(Overloaded, match="bodies of 10 bytes"):
            admitted.take(1)
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == [
        "overloaded, 1 requests refused",
        "overloaded, 10 requests refused",
        "overloaded, 10 requests refused",
    ]
    assert (admission.requests, admission.body_bytes) == (0, 0)
    assert admission.refused["requests"] == 21


def test_what_is_counted_is_given_back() -> None:
    admission = Admission(3, 10)
    with admission.admit() as one:
        one.take(4)
        with admission.admit() as two:
            two.take(3)
            two.take(3)
            assert (admission.requests, admission.body_bytes) == (2, 10)
            with admission.admit(), pytest.raises(Overloaded, match=r"^3 requests are in flight; try again later$"):
                admission.admit()
            with pytest.raises(Overloaded, match=r"^bodies of 10 bytes are in flight; try again later$") as caught:
                one.take(1)  # which is not counted
            assert caught.value.reason == "bodies"
        assert (admission.requests, admission.body_bytes) == (1, 4)
        one.take(6)
    assert (admission.requests, admission.body_bytes, admission.waiting) == (0, 0, 0)


@pytest.mark.parametrize(("requests", "may_wait"), [(1, 1), (2, 1), (5, 2), (8, 4)])
def test_half_of_the_requests_may_wait(requests: int, may_wait: int) -> None:
    admission = Admission(requests, 10)
    for _ in range(may_wait):
        admission.wait()
    with pytest.raises(Overloaded, match=f"^{may_wait} requests are waiting for offsets; try again later$") as caught:
        admission.wait()
    assert (caught.value.reason, admission.waiting) == ("offsets", may_wait)
    admission.count(caught.value)
    assert admission.refused == {"requests": 0, "bodies": 0, "instances": 0, "wait": 0, "offsets": 1}
