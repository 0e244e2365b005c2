"""What a server holds against Redis: equal while publications go on, and any other row is found."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError, OriginUnavailable
from streamtrain.processes.serving import follow
from streamtrain.serve.client import Endpoint, EndpointError
from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.registry import HEAD
from streamtrain.serve.rows.replica import Replica
from streamtrain.serve.rows.row_store import load_rows
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.verify.served import ServedComparison, compare_served
from tests.patience import PATIENCE, until
from tests.serve.in_redis import MODEL, InRedis
from tests.serve.published import KEYS, rows
from tests.serve.running import TOKEN, serving


@contextmanager
def served(published: InRedis, **given: Any) -> Iterator[tuple[RegistryUpdater, httpx.Client]]:
    """What a server follows with, and a client of it."""
    follower = follow(MODEL, published.settings(**given))
    with serving(follower.registry, follower) as client:
        until(lambda: client.get("/healthz/ready").status_code == 200, PATIENCE)
        yield follower, client


def endpoint_of(client: httpx.Client, token: str | None = TOKEN) -> Endpoint:
    return Endpoint(str(client.base_url), token)


def compared(published: InRedis, client: httpx.Client, patience: float = PATIENCE) -> dict[str, ServedComparison]:
    with endpoint_of(client) as endpoint:
        found = compare_served(endpoint, endpoint.model(), RedisOrigin(published.model), patience)
    return {one.name: one for one in found}


def spoil(follower: RegistryUpdater, version: int | str) -> None:
    """Changes a row that a server holds."""
    predictor = follower.registry.find(version)  # type: ignore[arg-type]
    assert predictor is not None
    assert isinstance(predictor.loaded, Replica)
    load_rows(predictor.loaded._tables["user"], KEYS[:1], rows(17, 1))


def test_what_servers_hold_is_what_is_in_redis(published: InRedis) -> None:
    published.keep(1, 2)
    published.versions.set_label("canary", 1, "ann")
    with served(published) as (follower, client):
        follower.selection.promote(2, "ann")
        follower.selection.promote(HEAD, "ann")
        until(lambda: len(follower.registry.resident) == 3, PATIENCE)
        found = compared(published, client)
        assert {name: (one.publication, one.rows, one.fault) for name, one in found.items()} == {
            "head": (2, {"user": 20}, ""),
            "1": (1, {"user": 20}, ""),
            "2": (2, {"user": 20}, ""),
        }


def test_they_are_equal_while_publications_go_on(published: InRedis) -> None:
    published.publish(1)
    stop = threading.Event()

    def publish() -> None:
        number = 1
        while not stop.is_set():
            number += 1
            published.publish(number)

    with served(published) as (_, client):
        thread = threading.Thread(target=publish)
        thread.start()
        try:
            numbers = []
            for _ in range(5):
                (found,) = compared(published, client).values()
                assert found.agrees, found
                numbers.append(found.publication)
        finally:
            stop.set()
            thread.join()
        assert numbers[-1] > numbers[0]


def test_a_row_that_a_server_has_otherwise_is_found(published: InRedis) -> None:
    published.keep(1)
    with served(published) as (follower, client):
        follower.selection.promote(1, "ann")
        spoil(follower, HEAD)
        found = compared(published, client)
        assert (found["head"].fault, found["1"].fault) == ("table user: rows differ from Redis", "")
        spoil(follower, 1)
        assert not compared(published, client)["1"].agrees
        published.publish(2)  # which mends the head
        until(lambda: client.get("/metrics").text.count('swaps_total{kind="step"} 1'), PATIENCE)
        assert compared(published, client)["head"].agrees


def test_a_row_that_redis_has_otherwise_is_found(published: InRedis) -> None:
    published.keep(1)
    with served(published) as (follower, client):
        follower.selection.promote(1, "ann")
        layout = published.versions.find(1)[1]  # type: ignore[index]
        name = published.model.keys.rows("user", layout.dictionary).of(np.array([0])).tobytes()
        field = KEYS[layout.buckets("user", KEYS) == 0][:1].astype("<u8").tobytes()
        published.server.call("HSET", name, field, b"\x00\x00\x00\x41")
        fault = compared(published, client)["1"].fault
        assert name.decode() in fault
        assert "damaged" in fault
        assert compared(published, client)["head"].agrees


def test_a_server_that_does_not_follow_is_behind(published: InRedis) -> None:
    published.publish(1)
    with served(published) as (follower, client):
        follower.close()
        published.publish(2)
        fault = compared(published, client, patience=0.3)["head"].fault
        assert fault.startswith("the server is still at publication 1 after")


def test_who_cannot_be_asked(published: InRedis) -> None:
    published.publish(1)
    with served(published, lookup="cache") as (_, client):
        with pytest.raises(EndpointError, match="404: no checksums: rows are looked up in Redis"):
            compared(published, client)
        with (
            endpoint_of(client, "wrong") as endpoint,
            pytest.raises(EndpointError, match="401: the admin token is required") as caught,
        ):
            endpoint.checksums("model")
        assert caught.value.status == 401
        with endpoint_of(client) as endpoint, pytest.raises(EndpointError, match="404: there is no model 'other'"):
            endpoint.checksums("other")
        url = str(client.base_url)
    with Endpoint(url) as endpoint, pytest.raises(EndpointError, match="does not answer") as caught:
        endpoint.model()
    assert caught.value.status == 0
    for wrong in ("localhost:8501", "ftp://x", "http://", "http://a:b"):
        with pytest.raises(ConfigError, match="an endpoint is http://host:port"):
            Endpoint(wrong)


def test_redis_away(redis_binary: str | None) -> None:
    with Valkey(binary=redis_binary) as server:
        published = InRedis(server.url)
        published.publish(1)
        with served(published) as (_, client):
            server.kill()
            with pytest.raises(OriginUnavailable):
                compared(published, client)
        published.server.close()
