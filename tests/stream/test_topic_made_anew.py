"""A topic that is deleted and made again under its name: its offsets are not those that the clock has."""

from collections.abc import Callable
from typing import Any

import pytest

from streamtrain.errors import SourceRefused, TopicMissing
from streamtrain.settings.groups import Settings
from streamtrain.settings.load import load_settings
from streamtrain.stream.opening import open_stream
from streamtrain.stream.source import Stream
from tests.cluster.counted import messages_of
from tests.patience import until
from tests.processes.test_worker import Running, counted, fill, learned
from tests.ps.served import Served
from tests.stream.kinds import KINDS, Place


@pytest.fixture(params=["kafka", "valkey"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param, KINDS[request.param].server(request))


@pytest.fixture
def settings(place: Place) -> Callable[..., Settings]:
    url = f"kafka://{place.server}" if place.name == "kafka" else place.server

    def make(**more: object) -> Settings:
        named = {key.replace("__", "."): value for key, value in more.items()}
        names = {"stream.url": url, "stream.topic": place.topic, "stream.group": place.topic}
        return load_settings(overrides=names | named)

    return make


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamtrain.stream.opening.CHECK_SECONDS", 0.2)


def filled(place: Place, samples: int) -> Stream:
    stream = place.make(2)
    fill(stream, {p: messages_of(p, samples) for p in range(2)})
    return stream


def after_learning(place: Place, settings: Callable[..., Settings], where: Served) -> str:
    """Learns a thousand samples of each partition; gives the identity of their topic, which is then another."""
    stream = filled(place, 1000)
    running = Running(where, settings())
    until(learned(where, 1000))
    running.stop()
    assert running.failure is None
    before = stream.identity()
    place.remove()
    after = filled(place, 1500).identity()
    assert before != after
    return before


def test_it_is_refused_although_it_has_more_than_was_learned(place: Place, settings: Callable[..., Settings]) -> None:
    with counted() as where:
        before = after_learning(place, settings, where)
        refused = Running(where, settings())
        refused.join()
        assert isinstance(refused.failure, SourceRefused)
        after = open_stream(settings().stream).identity()
        for words in (place.topic, before, after, "has been deleted and created again", f'stream.topic_id = "{after}"'):
            assert words in str(refused.failure)
        assert where.held[0].clock() == {0: 1000, 1: 1000}
        assert [shard.run.topic for shard in where.held] == [before] * 2


def test_it_is_taken_if_that_is_said(place: Place, settings: Callable[..., Settings]) -> None:
    """Also by a worker that is not told so later on; and not another one."""
    with counted() as where:
        before = after_learning(place, settings, where)
        mistaken = Running(where, settings(stream__topic_id=before))
        mistaken.join()
        assert isinstance(mistaken.failure, SourceRefused)
        after = open_stream(settings().stream).identity()
        for more in ({"stream__topic_id": after}, {}):
            running = Running(where, settings(**more))
            until(learned(where, 1500))
            running.stop()
            assert running.failure is None
        assert [shard.run.topic for shard in where.held] == [after] * 2


def test_shards_that_do_not_know_theirs_hear_of_it(place: Place, settings: Callable[..., Settings]) -> None:
    """As those restored from an older checkpoint."""
    stream = filled(place, 100)
    with counted() as where:
        running = Running(where, settings())
        until(learned(where, 100))
        running.stop()
        for shard in where.held:
            shard.run = shard.run._replace(topic="")
        running = Running(where, settings())
        until(lambda: [shard.run.topic for shard in where.held] == [stream.identity()] * 2)
        running.stop()
        where.held[1].run = where.held[1].run._replace(topic="")
        running = Running(where, settings())
        until(lambda: [shard.run.topic for shard in where.held] == [stream.identity()] * 2)
        running.stop()
        assert running.failure is None


def test_it_is_noticed_while_it_is_learned(place: Place, settings: Callable[..., Settings]) -> None:
    filled(place, 1000)
    with counted() as where:
        running = Running(where, settings())
        until(learned(where, 1000))
        place.remove()
        filled(place, 1500)
        running.join()
        if isinstance(running.failure, TopicMissing):  # it looked between the two
            running = Running(where, settings())
            running.join()
        assert isinstance(running.failure, SourceRefused)
        assert "has been deleted and created again" in str(running.failure)


class Nameless:
    """A service without identities of topics, such as Kafka before 2.8."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def identity(self) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def test_where_the_service_names_none_it_goes_on(
    place: Place, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(place, 100)
    monkeypatch.setattr("streamtrain.processes.worker.open_stream", lambda of, _=None: Nameless(open_stream(of)))
    with counted() as where:
        for topic in ("", "another"):
            running = Running(where, settings())
            until(learned(where, 100))
            running.stop()
            assert running.failure is None
            assert where.held[0].run.topic == topic
            where.held[0].run = where.held[0].run._replace(topic="another")
