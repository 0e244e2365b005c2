"""Caches: what is asked of the origin and when, what is kept, and what happens when the origin is away or moves on."""

import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import OriginUnavailable, PublicationCorrupt, PublicationError
from streamtrain.serve.graph import Graph
from streamtrain.serve.predictor import Predictor
from streamtrain.serve.rows.cache import PAUSE, Cache
from streamtrain.store.publication import LookupResult, PublicationStep, RowLookup
from tests.serve.published import KEYS, USERS, counted, origin_of, publish
from tests.serve.redis_published import NO_KEYS, RedisPublished

MODEL = counted()
SAMPLES = [{"user": user} for user in USERS]


class Watched:
    """A lookup that says what was looked up, and lets something happen before its answer arrives."""

    def __init__(self, lookup: RowLookup) -> None:
        self._lookup = lookup
        self.asked: list[int] = []
        self.meanwhile: list[Callable[[], object]] = []

    def look_up(self, keys: Mapping[str, NDArray[np.uint64]]) -> LookupResult:
        self.asked.append(len(keys.get("user", ())))
        found = self._lookup.look_up(keys)
        if self.meanwhile:
            self.meanwhile.pop(0)()
        return found

    def follow(self, step: PublicationStep) -> None:
        self._lookup.follow(step)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph(MODEL)


@pytest.fixture
def published(redis_url: str) -> Iterator[RedisPublished]:
    published = RedisPublished(redis_url, MODEL)
    yield published
    published.close()


class Cached:
    """A predictor of the head, whose cache holds so many bytes."""

    def __init__(self, published: RedisPublished, graph: Graph, nbytes: int = 1 << 20, patience: float = 30.0) -> None:
        head = published.origin.find(None)
        assert head is not None
        first, lookup = published.origin.open(head)
        self._origin = published.origin
        self.lookup, self.clock = Watched(lookup), Clock()
        self.cache = Cache(
            first, self.lookup, ["user"], graph.tensors, nbytes=nbytes, patience=patience, now=self.clock
        )
        self.predictor = Predictor(MODEL, graph, self.cache, "head")

    def predict(self, *users: str) -> list[float]:
        values: list[float] = self.predictor.predict([{"user": user} for user in users])[:, 0].tolist()
        return values

    def follow(self) -> None:
        for step in self._origin.follow(self.cache.publication, 0):
            self.cache.apply(step)


def test_a_batch_asks_once_and_what_is_known_is_not_asked_again(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    cached = Cached(published, graph)
    assert cached.cache.rows == {"user": 0}
    assert cached.predict("u0", "u1", "never") == [1001, 1001, 1000]
    assert cached.predict("u1", "never", "u0") == [1001, 1000, 1001]
    assert cached.predict("u1", "never", "u2") == [1001, 1000, 1001]
    assert cached.lookup.asked == [3, 1]
    assert cached.cache.rows == {"user": 4}
    assert cached.cache.lookups == {("user", "hit"): 5, ("user", "miss"): 4, ("user", "failed"): 0}
    plan = MODEL.planner(1).plan(KEYS, np.array([0, 20]), np.array([[0, 20]], np.int32), np.zeros(1))
    assert cached.cache.read_at_once([plan]) is None


def test_what_the_head_changes_is_known(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    cached = Cached(published, graph)
    assert cached.predict("u0", "u1", "u2") == [1001] * 3
    published.publish(2, KEYS[:1], KEYS[1:2].tolist())
    published.publish(3, NO_KEYS)
    cached.follow()
    assert cached.predict("u0", "u1", "u2") == [3002, 3000, 3001]
    assert cached.lookup.asked == [3]


def test_ids_of_a_lost_bucket_are_not_taken_for_unborn(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    cached = Cached(published, graph)
    assert cached.predict("u0", "never") == [1001, 1000]
    lose(published)
    for user in ("u1", "other"):  # which of them had a row nobody knows any more
        with pytest.raises(PublicationCorrupt, match="has lost its rows"):
            cached.predict(user)
    assert "has lost its rows" in cached.cache.fault
    assert cached.predict("u0", "never") == [1001, 1000]
    with pytest.raises(PublicationCorrupt, match="has 0 rows, not 20"):
        Cached(published, graph)


def lose(published: RedisPublished) -> None:
    """The bucket that has all rows of the head."""
    layout = published.dictionaries.stored()[1].layout
    names = published.model.keys.rows("user", layout.dictionary).of(np.array([0]))
    assert published.server.call("DEL", names.tobytes()) == 1


def test_a_bucket_whose_rows_have_all_gone_is_not_lost(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    cached = Cached(published, graph)
    published.publish(2, NO_KEYS, KEYS[:12].tolist())
    cached.follow()
    published.publish(3, NO_KEYS, KEYS[12:].tolist())
    cached.follow()
    assert cached.predict("u0", "u15", "never") == [3000] * 3
    published.publish(4, KEYS[:1])
    published.publish(5, NO_KEYS)
    cached.follow()
    assert cached.predict("u0", "u1") == [5004, 5000]
    assert Cached(published, graph).predict("u0", "u1") == [5004, 5000]


def test_rows_that_have_gone_are_not_missed_before_they_are_followed(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    cached = Cached(published, graph)
    published.publish(2, NO_KEYS, KEYS.tolist())  # the bucket is empty in Redis
    following = threading.Thread(target=cached.follow)
    cached.lookup.meanwhile.append(following.start)
    assert cached.predict("u0") == [2000]
    following.join()


def test_a_version_whose_bucket_is_lost_says_so(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    version = published.versions.make("ann")
    first, lookup = published.origin.open(version)
    names = published.model.keys.rows("user", published.versions.find(1)[1].dictionary)  # type: ignore[index]
    assert lookup.look_up({"user": KEYS}).tables["user"][1].all()
    assert published.server.call("DEL", names.of(np.array([0])).tobytes()) == 1
    with pytest.raises(PublicationCorrupt, match="has lost its rows"):
        lookup.look_up({"user": KEYS})
    assert first.publication == version


def test_rows_that_were_overtaken_are_fetched_again(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    cached = Cached(published, graph)

    def overtake() -> None:
        """The rows that are on their way are changed; then comes a publication that says nothing of them."""
        published.publish(2)
        published.publish(3, NO_KEYS)
        cached.follow()

    cached.lookup.meanwhile.append(overtake)
    assert cached.predict("u0", "u1") == [3002] * 2
    assert cached.lookup.asked == [2, 2]


def test_what_was_fetched_as_it_was_before_is_not_kept(published: RedisPublished, graph: Graph) -> None:
    """It is read of publication 2, whose change of it is not in the dictionary yet, while the step to 3 begins."""
    published.publish(1, full=True)
    cached = Cached(published, graph)
    published.publish(2, KEYS[:1], applied=False)

    def begin_step() -> None:
        cached.follow()
        cached.cache._settle()

    cached.lookup.meanwhile.append(begin_step)
    assert cached.predict("u0") == [2002]
    published.publish(3, NO_KEYS)
    (step,) = published.origin.follow(cached.cache.publication, 30)
    cached.cache._exchange(step, graph.tensors(step.weights))
    assert cached.predict("u0") == [3002]


def test_rows_may_be_older_than_what_the_head_is_afterwards(published: RedisPublished, graph: Graph) -> None:
    """They were read of publication 1; then the head and the cache are at publication 3, which has other ones."""
    published.publish(1, full=True)
    cached = Cached(published, graph)

    class Slow:
        def look_up(self, keys: Mapping[str, NDArray[np.uint64]]) -> LookupResult:
            found = lookup.look_up(keys)
            if found.number > 1:
                return found
            published.publish(2)
            published.publish(3, NO_KEYS)
            cached.follow()
            return found._replace(number=lookup.look_up({}).number)

        def follow(self, step: PublicationStep) -> None:
            lookup.follow(step)

    lookup = cached.lookup
    cached.cache._lookup = Slow()
    assert cached.predict("u0") == [3002]


def test_a_head_that_is_ahead_is_waited_for(published: RedisPublished, graph: Graph) -> None:
    """What was fetched of publication 3 is not used with the weights of publication 1."""
    published.publish(1, full=True)
    cached = Cached(published, graph)
    published.publish(2)
    published.publish(3, KEYS[:1])
    following = threading.Thread(target=cached.follow)
    cached.lookup.meanwhile.append(following.start)
    assert cached.predict("u0", "u1") == [3003, 3002]
    following.join()


def test_a_head_that_nobody_follows(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    cached = Cached(published, graph, patience=0.01)
    assert cached.predict("u0") == [1001]
    published.publish(2)
    cached.lookup.meanwhile.append(lambda: setattr(cached.clock, "now", 200.0))
    with pytest.raises(OriginUnavailable, match="they are of publication 2, but publication 1 is loaded"):
        cached.predict("u1")
    assert cached.predict("u0") == [1001]


def test_a_head_that_was_replaced(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    cached = Cached(published, graph)
    assert cached.predict("u0") == [1001]
    published.publish(2, full=True)
    with pytest.raises(PublicationCorrupt, match="was replaced: load it again"):
        cached.predict("u1")
    assert cached.predict("u0") == [1001]


def test_memory_is_bounded_and_what_is_asked_for_stays(published: RedisPublished, graph: Graph) -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 40_000, dtype=np.uint64)
    published.publish(1, np.concatenate([KEYS, keys]), full=True)
    cached = Cached(published, graph, nbytes=1 << 20)
    planner = MODEL.planner(1)
    for start in range(0, len(keys), 1000):
        cached.clock.now += 20
        part = keys[start : start + 1000]
        plan = planner.plan(part, np.array([0, 1000]), np.array([[0, 1000]], np.int32), np.zeros(1))
        assert (cached.cache.read([plan]).rows[0] == 1).all()
        assert cached.predict(*USERS) == [1001] * 20
        assert cached.cache.nbytes <= 1.05 * (1 << 20)
    assert cached.lookup.asked[:2] == [1000, 20]
    assert set(cached.lookup.asked[2:]) == {1000}  # the users were never fetched again
    assert 20_000 < cached.cache.rows["user"] < 40_000


def test_a_row_that_is_damaged(published: RedisPublished, graph: Graph) -> None:
    published.publish(1, full=True)
    cached = Cached(published, graph)
    published.publish(2, KEYS[:1])
    bad = LookupResult(1, {"user": (np.full((1, 1), np.nan, np.float32), np.ones(1, np.bool_))})
    cached.lookup.look_up = lambda keys: bad  # type: ignore[method-assign]
    with pytest.raises(PublicationCorrupt, match="rows are not finite"):
        cached.predict("u5")


def test_an_origin_that_is_away(redis_binary: str | None, graph: Graph) -> None:
    with Valkey(binary=redis_binary) as own:
        published = RedisPublished(own.url, MODEL)
        published.publish(1, full=True)
        cached = Cached(published, graph)
        assert cached.predict("u0", "never") == [1001, 1000]
        own.kill()
        for _ in range(3):
            with pytest.raises(OriginUnavailable, match="does not answer"):
                cached.predict("u0", "u1")
        assert len(cached.lookup.asked) == 2  # it was left alone after the first time
        assert cached.predict("u0", "never") == [1001, 1000]
        cached.clock.now += PAUSE
        with pytest.raises(OriginUnavailable, match="does not answer"):
            cached.predict("u1")
        assert len(cached.lookup.asked) == 3
        assert cached.cache.lookups["user", "failed"] == 1 * 4
        published.close()


def test_an_origin_without_lookups(graph: Graph) -> None:
    origin = origin_of(MODEL)
    publication = publish(origin, 1)
    with pytest.raises(PublicationError, match="rows of memory cannot be cached, only loaded whole"):
        Predictor.load(MODEL, graph, origin, publication, "head", cache_bytes=1 << 20)
