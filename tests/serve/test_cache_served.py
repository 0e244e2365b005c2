"""Serving from a cache over HTTP: swaps under load mix nothing, and what is cached is served while Redis is away."""

import asyncio
import random
import threading
import time
from collections import Counter
from itertools import count

import httpx
import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import OriginUnavailable
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.predictor import Predicted, Predictor
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.rows.cache import Cache
from streamtrain.serve.service.batcher import Batcher
from tests.patience import PATIENCE, until
from tests.serve.published import KEYS, USERS, counted, origin_of, publish
from tests.serve.redis_published import RedisPublished
from tests.serve.running import TOKEN, client_of, serving
from tests.serve.test_cache import lose

PUBLICATIONS = 60
URL = "/v1/models/model"


def expected(number: int, user: int) -> float:
    """Of a publication after the first, each of which changes half of the rows."""
    return 1000.0 * number + max(1, number - (user - number) % 2)


def has_seen_enough(versions: Counter[str]) -> bool:
    return "head" in versions and len(versions) > 1


@pytest.mark.parametrize("cache_bytes", [1 << 20, 1])
def test_swaps_under_load(redis_url: str, cache_bytes: int) -> None:
    published = RedisPublished(redis_url, counted())
    published.publish(1, full=True)
    for number in (2, 3, 4):
        published.publish(number, KEYS[number % 2 :: 2])
        published.versions.make("ann")
    registry = Registry(counted(), published.origin, cache_bytes=cache_bytes)
    done = threading.Event()
    failed: list[object] = []
    seen = [Counter[str]() for _ in range(3)]

    def ask(url: str, client_number: int, size: int) -> None:
        rng = random.Random(size)
        with client_of(url) as client:
            while not done.is_set():
                users = [rng.randrange(len(USERS)) for _ in range(size)]
                body = {"instances": [{"user": USERS[user]} for user in users]}
                try:
                    answer = client.post(f"{URL}:predict", json=body)
                except httpx.HTTPError as exc:
                    failed.append(exc)
                    continue
                number = int(answer.headers.get("x-publication", 0))
                if answer.status_code != 200 or answer.json()["predictions"] != [[expected(number, u)] for u in users]:
                    failed.append((number, answer.text))
                seen[client_number][answer.headers.get("x-model-version", "none")] += 1

    registry.promote(HEAD)
    head = registry.resident[HEAD].loaded
    assert isinstance(head, Cache)
    head._patience = 60.0  # publications follow one another without a pause
    with serving(registry, RegistryUpdater(registry, every=0.02)) as admin:
        threads = [threading.Thread(target=ask, args=(str(admin.base_url), i, n)) for i, n in enumerate((1, 7, 40))]
        for thread in threads:
            thread.start()
        rng = random.Random(0)
        deadline = time.monotonic() + PATIENCE
        for number in count(5):
            if number >= 5 + PUBLICATIONS and all(map(has_seen_enough, seen)):
                break
            assert time.monotonic() < deadline, seen
            published.publish(number, KEYS[number % 2 :: 2])
            body = {"version": rng.choice([1, 2, 3, "head", "head"])}
            answer = admin.post(f"{URL}:promote", json=body, headers={"authorization": f"Bearer {TOKEN}"})
            assert answer.status_code == 200, answer.text
        done.set()
        for thread in threads:
            thread.join()
        metrics = admin.get("/metrics").text
    published.close()
    assert failed == []
    assert 'streamtrain_serving_lookups_total{outcome="miss",table="user",version="head"}' in metrics


def test_redis_is_away(redis_binary: str | None) -> None:
    with Valkey(binary=redis_binary) as own:
        published = RedisPublished(own.url, counted())
        published.publish(1, full=True)
        registry = Registry(counted(), published.origin, cache_bytes=1 << 20)
        registry.promote(HEAD)
        known, unknown = ({"instances": [{"user": user}]} for user in ("u0", "u1"))
        with serving(registry, RegistryUpdater(registry, every=0.02)) as client:
            assert client.post(f"{URL}:predict", json=known).json() == {"predictions": [[1001]]}
            own.kill()
            refused = client.post(f"{URL}:predict", json=unknown)
            assert refused.status_code == 503
            assert "does not answer" in refused.json()["error"]
            assert refused.headers["retry-after"] == "1"
            assert client.post(f"{URL}:predict", json=known).json() == {"predictions": [[1001]]}
            assert client.get("/healthz/ready").status_code == 200
            metrics = client.get("/metrics").text
        assert 'streamtrain_serving_lookups_total{outcome="failed",table="user",version="head"} 1.0' in metrics
        published.close()


def test_a_lost_bucket_is_neither_answered_from_nor_ready_until_it_is_published_anew(redis_url: str) -> None:
    published = RedisPublished(redis_url, counted())
    published.publish(1, full=True)
    registry = Registry(counted(), published.origin, cache_bytes=1 << 20)
    registry.promote(HEAD)
    known, lost = ({"instances": [{"user": user}]} for user in ("u0", "u1"))
    with serving(registry, RegistryUpdater(registry, every=0.02)) as client:
        assert client.post(f"{URL}:predict", json=known).json() == {"predictions": [[1001]]}
        lose(published)
        refused = client.post(f"{URL}:predict", json=lost)
        assert (refused.status_code, "has lost its rows" in refused.json()["error"]) == (503, True)
        for path in ("/healthz/ready", "/v2/health/ready"):
            assert client.get(path).status_code == 503
        assert client.post(f"{URL}:predict", json=known).json() == {"predictions": [[1001]]}
        published.publish(2, full=True)
        until(lambda: client.get("/healthz/ready").status_code == 200)
        assert client.post(f"{URL}:predict", json=lost).json() == {"predictions": [[2002]]}
    published.close()


def test_a_new_server_whose_head_is_damaged_is_not_ready_on_an_older_one(redis_url: str) -> None:
    published = RedisPublished(redis_url, counted())
    published.publish(1, full=True)
    lose(published)
    older = origin_of(counted())
    publish(older, 0)
    registry = Registry(counted(), published.origin)
    with serving(registry, RegistryUpdater(registry, fallback=older, every=0.02)) as client:
        until(lambda: "has 0 rows, not 20" in client.get("/healthz/ready").text, PATIENCE)
        until(lambda: registry.served is not None, PATIENCE)
        until(lambda: "older publication" in client.get("/healthz/ready").text, PATIENCE)
        assert client.get("/healthz/ready").status_code == 503
        published.publish(2, full=True)
        until(lambda: client.get("/healthz/ready").status_code == 200, PATIENCE)
        answer = client.post(f"{URL}:predict", json={"instances": [{"user": "u0"}]})
        assert answer.json() == {"predictions": [[2002]]}
    published.close()


def test_who_waits_for_redis(redis_binary: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread does, not the event loop; and not those who need nothing of it, though they were in the same batch."""
    threads: list[int] = []
    patient = Predictor.predict_messages

    def predict(predictor: Predictor, messages: list[bytes]) -> Predicted:
        threads.append(threading.get_ident())
        return patient(predictor, messages)

    monkeypatch.setattr(Predictor, "predict_messages", predict)
    batcher = Batcher()

    async def ask(*users: str) -> list[float | BaseException]:
        asked = [batcher.predict(head, [b'{"user": "%s"}' % user.encode()]) for user in users]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [float(one.predictions[0, 0]) if isinstance(one, Predicted) else one for one in answers]

    with Valkey(binary=redis_binary) as own:
        published = RedisPublished(own.url, counted())
        published.publish(1, full=True)
        registry = Registry(counted(), published.origin, cache_bytes=1 << 20)
        registry.promote(HEAD)
        head = registry.resident[HEAD]
        assert asyncio.run(ask("u0", "u1")) == [1001] * 2
        assert asyncio.run(ask("u1", "u0")) == [1001] * 2
        assert len(threads) == 1
        own.kill()
        first, lacking, last = asyncio.run(ask("u1", "u2", "u0"))
        assert (first, last) == (1001, 1001)
        assert isinstance(lacking, OriginUnavailable)
        published.close()
    batcher.close()
    assert threading.get_ident() not in threads
