"""Those who read the head, or copy it, while it is published: all they get is of one publication."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.publication import Publication, RowChange
from tests.store.published import Published, Rows, Taken, assert_weights, loaded


@contextmanager
def publishing(published: Published, number: int = 2) -> Iterator[threading.Event]:
    """Publishes again and again; the event is set at each one, and may be cleared to wait for the next."""
    stop, moved = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        at = number
        try:
            while not stop.is_set():
                published.publish(at)
                moved.set()
                at += 1
        except BaseException as error:
            failures.append(error)
            moved.set()

    publisher = threading.Thread(target=run)
    publisher.start()
    try:
        yield moved
    finally:
        stop.set()
        publisher.join()
    assert not failures, failures


def wait(moved: threading.Event) -> None:
    moved.clear()
    assert moved.wait(120)


def of_head(published: Published) -> Publication:
    head = published.origin.find(None)
    assert head is not None
    return head


def slowly(take: Callable[[RowChange], object], moved: threading.Event) -> Callable[[RowChange], None]:
    """Takes parts, the first after the head has moved on."""
    waited: list[bool] = []

    def slow(change: RowChange) -> None:
        take(change)
        if not waited:
            waited.append(True)
            wait(moved)
            wait(moved)

    return slow


def test_a_load_is_of_exactly_one_publication(published: Published) -> None:
    published.full(1)
    published.publish(2)
    with publishing(published, 3) as moved:
        seen = set()
        for _ in range(6):
            head = of_head(published)
            taken = Taken()
            found, weights = published.origin.load(head, slowly(taken, moved))
            assert_weights(weights, found.number)
            assert found.number > head.number
            assert taken.rows == published.by_number[found.number]
            seen.add(found.number)
    assert len(seen) == 6


def test_a_version_is_of_exactly_one_publication(published: Published) -> None:
    published.full(1)
    made: list[Publication] = []
    with publishing(published) as moved:
        for _ in range(5):
            wait(moved)
            made.append(published.versions.make("ann"))
    assert [version.version for version in made] == [1, 2, 3, 4, 5]
    assert published.origin.versions() == made
    for version in made:
        assert loaded(published, version) == (version, published.by_number[version.number])
    assert len({version.number for version in made}) > 1


def test_followers_see_every_publication(published: Published) -> None:
    publication = published.full(1)
    taken = Taken()
    published.origin.load(publication, taken)
    states: dict[int, Rows] = {}
    with publishing(published):
        while publication.number < 15:
            for step in published.origin.follow(publication, 10):
                for change in step.changes:
                    taken(change)
                assert_weights(step.weights, step.publication.number)
                assert step.publication.number == publication.number + 1
                publication = step.publication
                states[publication.number] = {table: dict(rows) for table, rows in taken.rows.items()}
    assert states == {number: published.by_number[number] for number in states}


def test_a_follower_that_is_too_slow_is_told(redis_url: str) -> None:
    published = Published(redis_url, log_bytes=1)
    first = published.full(1)
    second = published.publish(2)
    assert [step.publication for step in published.origin.follow(first, 1)] == [second]
    third = published.publish(3)
    with pytest.raises(PublicationCorrupt, match=r"no longer has what follows publication 1"):
        list(published.origin.follow(first, 1))
    assert [step.publication for step in published.origin.follow(second, 1)] == [third]
    assert loaded(published, first) == (third, published.rows)
    steps = published.origin.follow(second, 5)
    assert next(steps).publication.number == 3
    published.publish(4)
    steps = published.origin.follow(third, 5)
    assert next(steps).publication.number == 4
    for number in (5, 6, 7):
        published.publish(number)
    with pytest.raises(PublicationCorrupt, match=r"no longer"):
        list(published.origin.follow(third, 1))
    published.close()


def test_a_follower_of_another_history_is_told(published: Published) -> None:
    published.full(1)
    second = published.publish(2, published=100.0)
    for key in published.server.call("KEYS", f"streamtrain:model:{{{published.model.keys.model}}}:*"):
        published.server.call("DEL", key)
    anew = Published(published.url)
    anew.model, anew.dictionaries, anew.versions = published.model, published.dictionaries, published.versions
    anew.full(1)
    other = anew.publish(2, published=200.0)
    third = anew.publish(3)
    with pytest.raises(PublicationCorrupt, match=r"publication 2 .* was replaced"):
        list(published.origin.follow(second, 1))
    assert [step.publication for step in published.origin.follow(other, 1)] == [third]


def test_the_log_keeps_no_more_than_it_may(redis_url: str) -> None:
    published = Published(redis_url, log_bytes=100_000)
    published.full(1)
    sizes = []
    for number in range(2, 20):
        published.publish(number)
        entries = published.server.call("XRANGE", published.model.keys.log, "-", "+")
        sizes.append(sum(len(value) for _, fields in entries for value in fields))
    assert max(sizes) < 200_000
    assert of_head(published).number == 19
    published.close()


def test_a_full_publication_replaces_the_head_at_once(published: Published) -> None:
    published.full(1)
    published.publish(2)
    old = dict(published.rows)
    layout = published.begin()
    parts = published.parts(3, layout)
    second = of_head(published)
    found, rows = loaded(published, second)
    assert (found.number, rows) == (2, old)
    published.commit(3, parts, layout)
    third = of_head(published)
    assert loaded(published, second) == (third, published.rows)
    with pytest.raises(PublicationCorrupt, match="full one"):
        list(published.origin.follow(second, 1))
    assert published.server.call("HLEN", published.model.keys.dictionaries) == 1
    fourth = published.publish(4)
    assert [step.publication for step in published.origin.follow(third, 1)] == [fourth]
    assert loaded(published, fourth) == (fourth, published.rows)


def test_a_head_that_is_replaced_while_it_is_read(published: Published) -> None:
    first = published.full(1)
    taken: list[RowChange] = []

    def take(change: RowChange) -> None:
        if not taken:
            published.full(2)
        taken.append(change)

    with pytest.raises(PublicationCorrupt, match="was replaced while it was read: load it again"):
        published.origin.load(first, take)
    assert loaded(published, first)[0].number == 2
