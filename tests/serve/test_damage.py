"""Bad input where control and Redis are concerned: the right status, one sentence, and nothing else is disturbed."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE, until
from tests.serve.in_redis import PREDICT, InRedis, predicted
from tests.serve.running import TOKEN

CONTROL = "/v1/models/model"
INFER = "/v2/models/model/infer"
BEARER = {"authorization": f"Bearer {TOKEN}"}
DEEP = b"[" * 100_000
MANY = 100_000


def tensor(count: int) -> dict[str, Any]:
    return {"inputs": [{"name": "user", "shape": [count], "datatype": "BYTES", "data": ["u1"] * count}]}


@pytest.fixture
def client(published: InRedis) -> Iterator[httpx.Client]:
    published.keep(1, 2)
    published.control.promote(2, "ann")
    with published.served() as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (f"{CONTROL}:promote", DEEP, 400, "the body must be"),
        (f"{CONTROL}:promote", b'{"version": %s' % DEEP, 400, "the body must be"),
        (f"{CONTROL}:promote", b'{"version": 1, "why": "\\ud800"}', 400, "the body must be"),
        (f"{CONTROL}:promote", b'{"version": 1, "why": "%s"}' % (b"x" * 1001), 400, "the body must be"),
        (f"{CONTROL}:promote", b'{"version": 1, "force": "yes"}', 400, "the body must be"),
        (f"{CONTROL}:promote", b'{"version": 9007199254740992}', 400, "the body must be"),
        (f"{CONTROL}:promote", b'{"version": true}', 400, "the body must be"),
        (f"{CONTROL}:promote", b" " * (10 << 20), 413, "8388608 bytes"),
        (f"{CONTROL}:promote", b'{"version": 9007199254740991}', 404, "there is no version 9007199254740991 in"),
        (f"{CONTROL}:rollback", DEEP, 400, 'the body must be empty or {"why": TEXT}'),
        (f"{CONTROL}:rollback", b'{"why": 1}', 400, "the body must be empty"),
        (f"{CONTROL}:rollback", b" " * (10 << 20), 413, "8388608 bytes"),
        ("/v1/models/other:rollback", b"", 404, "there is no model 'other'"),
        (INFER, DEEP, 400, "not an inference request"),
        (INFER, b'{"inputs": %s' % DEEP, 400, "not an inference request"),
        (INFER, b" " * (10 << 20), 413, "8388608 bytes"),
        (INFER, json.dumps(tensor(MANY)).encode(), 413, "at most 4096 instances, not 100000"),
        ("/v2/models/other/infer", json.dumps(tensor(1)).encode(), 404, "there is no model 'other'"),
        ("/v2/models/model/versions/9/infer", json.dumps(tensor(1)).encode(), 404, "version 9 is not loaded"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else None,
)
def test_bad_requests(  # noqa: PLR0917  # by name
    client: httpx.Client, published: InRedis, path: str, body: bytes, status: int, message: str
) -> None:
    answer = client.post(path, content=body, headers=BEARER)
    assert (answer.status_code, [*answer.json()]) == (status, ["error"]), answer.text[:300]
    assert message in answer.json()["error"]
    assert predicted(client) == ("2", 2)
    assert published.labels() == {"prod": 2}


def test_an_unknown_feature_changes_nothing(client: httpx.Client) -> None:
    answers = [client.post(PREDICT, json={"instances": [{"user": "u1"} | more]}).json() for more in ({}, {"x": [1]})]
    assert answers[0] == answers[1] == {"predictions": [[2002.0]]}


# What is in Redis. Version 1 is damaged, and then promoted.


def layout_of(published: InRedis) -> Any:
    found = published.versions.find(1)
    assert found is not None
    return found[1]


def bucket_of(published: InRedis) -> bytes:
    """A bucket of version 1 that has rows."""
    pattern = f"streamtrain:rows:*{published.model.keys.model}/*:user:{layout_of(published).dictionary}"
    return min(published.server.call("KEYS", pattern))  # type: ignore[no-any-return]


def row_of(published: InRedis) -> tuple[bytes, bytes]:
    """The bucket, and a key in it."""
    bucket = bucket_of(published)
    return bucket, min(published.server.call("HKEYS", bucket))


def replace_bucket(published: InRedis) -> None:
    bucket = bucket_of(published)
    published.server.call("DEL", bucket)
    published.server.call("SET", bucket, "x")


def set_row(value: bytes) -> Callable[[InRedis], object]:
    return lambda published: published.server.call("HSET", *row_of(published), value)


def set_weights(field: str, value: bytes) -> Callable[[InRedis], object]:
    return lambda published: published.server.call(
        "HSET", published.model.keys.weights(layout_of(published).dictionary), field, value
    )


def set_manifest(change: Callable[[bytes], bytes]) -> Callable[[InRedis], object]:
    def damage(published: InRedis) -> None:
        keys = published.model.keys
        manifest = published.server.call("HGET", keys.versions, 1)
        published.server.call("HSET", keys.versions, 1, change(manifest))

    return damage


DAMAGES = {
    "a row has changed": (set_row(b"\0\0\0\0"), 503, "of version 1 is damaged or missing"),
    "a row is cut off": (set_row(b"\0"), 503, "user"),
    "a row is gone": (lambda p: p.server.call("HDEL", *row_of(p)), 503, "of version 1 is damaged or missing: it has"),
    "a bucket is gone": (
        lambda p: p.server.call("DEL", bucket_of(p)),
        503,
        "of version 1 is damaged or missing: it has 0",
    ),
    "a bucket is none": (replace_bucket, 503, "a key of this model was not written by streamtrain"),
    "weights are gone": (set_weights("dense", b""), 503, r"has dense \(0,\), not"),
    "weights are cut off": (set_weights("dense", b"\0\0\0"), 503, "weights"),
    "weights are not finite": (set_weights("dense", b"\0\0\xc0\x7f" * 2), 503, "not finite"),
    "checksums are gone": (
        lambda p: p.server.call("DEL", p.model.keys.sums(layout_of(p).dictionary)),
        503,
        "the checksums of a version of",
    ),
    "the manifest is no JSON": (set_manifest(lambda _: b"7 {"), 503, "a version of .* is damaged"),
    "the manifest is cut off": (set_manifest(lambda given: given[:-40]), 503, "a version of .* is damaged"),
    "the manifest is of numbers": (set_manifest(lambda _: b"7 [1]"), 503, "a version of .* is damaged"),
    "the spec is none": (
        set_manifest(lambda given: re.sub(rb'"spec": "(\\.|[^"\\])*"', b'"spec": "{}"', given)),
        503,
        "no usable spec",
    ),
}


@pytest.mark.parametrize(("damage", "status", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_version_is_refused(
    published: InRedis, client: httpx.Client, damage: Callable[[InRedis], object], status: int, message: str
) -> None:
    damage(published)
    answer = client.post(f"{CONTROL}:promote", json={"version": 1}, headers=BEARER)
    assert (answer.status_code, [*answer.json()]) == (status, ["error"]), answer.text
    assert re.search(message, answer.json()["error"]), answer.text
    assert predicted(client) == ("2", 2)
    assert published.labels() == {"prod": 2}
    assert client.get("/healthz/ready").json()["origin"] == "ok"


def test_damaged_labels_and_a_damaged_head(published: InRedis, client: httpx.Client) -> None:
    assert client.post(f"{CONTROL}:promote", json={"version": "head"}, headers=BEARER).status_code == 200
    published.server.call("HSET", published.model.keys.labels, "canary", "x")
    answer = client.post(f"{CONTROL}:rollback", headers=BEARER)
    assert (answer.status_code, "the labels of" in answer.json()["error"]) == (503, True)
    until(lambda: "the labels of" in client.get("/healthz/ready").json()["origin"], PATIENCE)
    published.server.call("HDEL", published.model.keys.labels, "canary")
    until(lambda: client.get("/healthz/ready").json()["origin"] == "ok", PATIENCE)

    published.server.call("XADD", published.model.keys.log, "*", "c", "{", "l", "x", "a", "[]", "f", "0")
    until(lambda: client.get("/healthz/ready").json()["origin"] != "ok", PATIENCE)
    assert predicted(client) == ("head", 2)
    assert client.post(f"{CONTROL}:promote", json={"version": 1}, headers=BEARER).status_code == 200
    assert predicted(client) == ("1", 1)
