"""The short way to predictions: it answers as the routes do, and leaves everything else to them."""

import pytest

from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.service.batcher import Batcher
from tests.serve.published import counted, origin_of, publish
from tests.serve.running import serving


@pytest.fixture(scope="module")
def registry() -> Registry:
    model = counted()
    origin = origin_of(model)
    publish(origin, 2)
    registry = Registry(model, origin)
    registry.promote(HEAD)
    return registry


def test_both_ways_answer_the_same(registry: Registry) -> None:
    with serving(registry) as client:
        bodies: list[object] = [{"instances": [{"user": "u1"}, {"user": "never"}]}, {"instances": [{}]}, 1]
        for body in bodies:
            short = client.post("/v1/models/model:predict", json=body)
            long = client.post("/v1/models/model/versions/head:predict", json=body)
            assert (short.status_code, short.json()) == (long.status_code, long.json())
            assert {*short.headers} == {*long.headers}
        assert client.post("/v1/models/other:predict", json={"instances": []}).status_code == 404
        assert client.get("/v1/models/model:predict").status_code == 405


def test_what_fails_unexpectedly_is_an_internal_error(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(Batcher, "predict", fail)
    for path in ("/v1/models/model:predict", "/v1/models/model/versions/head:predict"):
        with serving(registry) as client:
            answer = client.post(path, json={"instances": [{"user": "u1"}]})
            assert (answer.status_code, answer.json()) == (500, {"error": "internal error: RuntimeError"})
