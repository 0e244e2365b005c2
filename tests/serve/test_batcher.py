"""Batcher: requests that come together are predicted together, and none gets another's answer."""

import asyncio
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from streamtrain._core import InputTensor, TensorSamples
from streamtrain.errors import SampleError
from streamtrain.serve.errors import Overloaded
from streamtrain.serve.predictor import Predicted, Predictor
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.service.batcher import Batcher
from tests.serve.published import counted, origin_of, publish


@pytest.fixture(scope="module")
def registry() -> Registry:
    model = counted()
    origin = origin_of(model)
    publish(origin, 1)
    origin.keep()
    publish(origin, 2)
    registry = Registry(model, origin)
    registry.promote(1)
    registry.promote(HEAD)
    return registry


@pytest.fixture
def head(registry: Registry) -> Predictor:
    assert registry.served is not None
    return registry.served


@pytest.fixture
def sizes() -> list[int]:
    return []


@pytest.fixture(params=["on the loop", "on a thread"])
def batcher(request: pytest.FixtureRequest, sizes: list[int]) -> Iterator[Batcher]:
    batcher = Batcher(max_batch=8, max_queue=16, on_loop=32 if request.param == "on the loop" else 0)
    batcher.observe = sizes.append
    yield batcher
    batcher.close()


def messages(*users: str) -> list[bytes]:
    return [b'{"user": "%s"}' % user.encode() for user in users]


def values(predicted: Predicted) -> list[float]:
    return [float(one) for one in predicted.predictions[:, 0]]


def test_what_comes_together_is_predicted_together(batcher: Batcher, head: Predictor, sizes: list[int]) -> None:
    async def run() -> list[Predicted]:
        asked = [batcher.predict(head, messages(*["u1"] * size)) for size in (1, 2, 0, 3)]
        return await asyncio.gather(*asked)

    assert [values(one) for one in asyncio.run(run())] == [[2002.0] * size for size in (1, 2, 0, 3)]
    assert sizes == [6]
    assert batcher.waiting == 0


def tensors(*users: str) -> TensorSamples:
    raw = b"".join(struct.pack("<I", len(user)) + user.encode() for user in users)
    return TensorSamples([InputTensor.of_binary("user", [len(users)], "BYTES", raw)], {"user": True})


def test_tensors_and_messages_are_predicted_together(batcher: Batcher, head: Predictor, sizes: list[int]) -> None:
    async def run() -> list[Any]:
        asked = [tensors("u1", "u1"), messages("nobody"), tensors(), tensors("u1", "x" * 300), messages("u1")]
        return await asyncio.gather(*(batcher.predict(head, one) for one in asked), return_exceptions=True)

    first, second, none, bad, last = asyncio.run(run())
    assert [values(one) for one in (first, second, none, last)] == [[2002.0] * 2, [2000.0], [], [2002.0]]
    assert isinstance(bad, SampleError)
    (one,) = bad.bad
    assert (one.index, one.reason, one.field) == (1, "id_too_long", "user")
    assert "max_id_bytes is 256" in one.detail
    assert sizes == [4]


def test_a_batch_ends_before_it_is_too_large(batcher: Batcher, head: Predictor, sizes: list[int]) -> None:
    async def run() -> list[Predicted]:
        asked = [batcher.predict(head, messages(*["u1"] * size)) for size in (5, 5, 3)]
        return await asyncio.gather(*asked)

    assert [len(one.predictions) for one in asyncio.run(run())] == [5, 5, 3]
    assert sizes == [8, 5]


def test_a_request_is_never_cut(batcher: Batcher, head: Predictor, sizes: list[int]) -> None:
    predicted = asyncio.run(batcher.predict(head, messages(*["u1"] * 20)))
    assert len(predicted.predictions) == 20
    assert sizes == [20]


def test_versions_are_predicted_apart(batcher: Batcher, registry: Registry, head: Predictor) -> None:
    first = registry.find(1)
    assert first is not None

    async def run() -> list[Predicted]:
        return await asyncio.gather(*(batcher.predict(one, messages("u1")) for one in (first, head, first, head)))

    assert [values(one) for one in asyncio.run(run())] == [[1001.0], [2002.0]] * 2


def test_a_bad_instance_fails_its_request_alone(batcher: Batcher, head: Predictor, sizes: list[int]) -> None:
    async def run() -> list[Any]:
        asked = [messages("u1"), [b"{}", *messages("u1"), b"x"], messages("u2", "u3")]
        return await asyncio.gather(*(batcher.predict(head, one) for one in asked), return_exceptions=True)

    first, bad, last = asyncio.run(run())
    assert (values(first), values(last)) == ([2002.0], [2002.0] * 2)
    assert isinstance(bad, SampleError)
    assert [(one.index, one.reason) for one in bad.bad] == [(0, "missing_field"), (2, "not_json")]
    assert len(sizes) == 1


def test_a_request_after_a_lone_one_is_answered_at_once(head: Predictor, sizes: list[int]) -> None:
    batcher = Batcher(observe=sizes.append)

    async def run() -> list[Predicted]:
        await batcher.predict(head, messages("u1"))
        await asyncio.sleep(0)  # as between two requests of a connection
        with pytest.raises(StopIteration) as answered:
            batcher.predict(head, messages("u2")).send(None)
        others = (batcher.predict(head, messages("u1")) for _ in range(3))
        together = await asyncio.gather(*others)
        more = await asyncio.gather(*(batcher.predict(head, messages("u2")) for _ in range(2)))
        return [answered.value.value, *together, *more]

    assert [values(one) for one in asyncio.run(run())] == [[2002.0]] * 6
    assert sizes == [1, 1, 1, 2, 2]  # the first of three may come alone, but none does after others have
    batcher.close()


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_calls_that_come_one_by_one_are_predicted_together(head: Predictor, sizes: list[int]) -> None:
    """As over gRPC: each is waited for, but not for long, and no request over HTTP waits with them."""
    batcher = Batcher(observe=sizes.append)

    async def run() -> list[Predicted]:
        asked = []
        for of in (messages("u1"), tensors("u1"), tensors("u1")):
            asked.append(asyncio.ensure_future(batcher.predict(head, of, one_by_one=True)))
            await iterations(5)
        assert not any(one.done() for one in asked)
        asked.append(asyncio.ensure_future(batcher.predict(head, messages("u1"))))
        await iterations(3)
        assert all(one.done() for one in asked)
        asked.append(asyncio.ensure_future(batcher.predict(head, messages("u1"), one_by_one=True)))
        return await asyncio.gather(*asked)

    assert [values(one) for one in asyncio.run(run())] == [[2002.0]] * 5
    assert sizes == [4, 1]
    batcher.close()


def test_a_call_is_predicted_though_others_come_all_the_time(head: Predictor) -> None:
    batcher = Batcher(on_loop=100_000, max_queue=100_000)

    async def run() -> None:
        first = asyncio.ensure_future(batcher.predict(head, messages("u1"), one_by_one=True))
        others: list[asyncio.Future[Predicted]] = []
        while not first.done():
            assert len(others) < 10_000
            others.append(asyncio.ensure_future(batcher.predict(head, messages("u1"), one_by_one=True)))
            await iterations(1)
        await asyncio.gather(*others)

    asyncio.run(run())
    batcher.close()


def test_a_batch_of_calls_that_is_large_enough_begins(head: Predictor, sizes: list[int]) -> None:
    batcher = Batcher(observe=sizes.append, on_loop=3)

    async def run() -> None:
        asked = [asyncio.ensure_future(batcher.predict(head, messages("u1"), one_by_one=True)) for _ in range(3)]
        await iterations(3)
        assert all(one.done() for one in asked)

    asyncio.run(run())
    assert sizes == [3]
    batcher.close()


def test_what_fails_at_once_fails_alone(head: Predictor, sizes: list[int]) -> None:
    batcher = Batcher(observe=sizes.append)

    async def run() -> Predicted:
        await batcher.predict(head, messages("u1"))
        await asyncio.sleep(0)
        with pytest.raises(SampleError):
            await batcher.predict(head, [b"{}"])
        return await batcher.predict(head, messages("u1"))

    assert values(asyncio.run(run())) == [2002.0]
    assert sizes == [1, 1]
    batcher.close()


def test_too_many_are_refused(batcher: Batcher, head: Predictor) -> None:
    async def run() -> list[Any]:
        asked = [batcher.predict(head, messages(*["u1"] * 6)) for _ in range(4)]
        return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [type(one) for one in outcomes] == [Predicted, Predicted, Overloaded, Overloaded]
    assert "12 instances are waiting" in str(outcomes[-1])
    assert batcher.waiting == 0


def test_a_request_that_is_given_up(batcher: Batcher, head: Predictor) -> None:
    async def run() -> list[Any]:
        asked = [asyncio.ensure_future(batcher.predict(head, messages("u1"))) for _ in range(3)]
        await asyncio.sleep(0)
        asked[0].cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    given_up, *others = asyncio.run(run())
    assert isinstance(given_up, asyncio.CancelledError)
    assert [values(one) for one in others] == [[2002.0]] * 2
    assert batcher.waiting == 0


def test_a_failure_reaches_all_and_the_next_batch_works(batcher: Batcher, head: Predictor) -> None:
    async def run() -> list[Any]:
        broken = head.__class__.__new__(head.__class__)  # has nothing of a predictor
        asked = [batcher.predict(broken, messages("u1")) for _ in range(2)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        return [*outcomes, await batcher.predict(head, messages("u1"))]

    *failed, worked = asyncio.run(run())
    assert [type(one) for one in failed] == [AttributeError] * 2
    assert values(worked) == [2002.0]


def test_the_loop_answers_others_while_a_large_batch_runs(head: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = Batcher(on_loop=1)
    threads: set[int] = set()

    async def run() -> None:
        await batcher.predict(head, messages("u1"))
        assert threads == {threading.get_ident()}
        await batcher.predict(head, messages("u1", "u2"))
        assert len(threads) == 2

    predict = Predictor._predict

    def seen(predictor: Predictor, *given: Any) -> Predicted | None:
        threads.add(threading.get_ident())
        return predict(predictor, *given)

    monkeypatch.setattr(Predictor, "_predict", seen)
    asyncio.run(run())
    batcher.close()
