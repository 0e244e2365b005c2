"""Publications in Redis as those see them who serve them."""

import pytest

from streamtrain.errors import PublicationCorrupt
from tests.store.published import Published, Taken, assert_weights, loaded


def test_nothing_is_there_before_the_first_publication(published: Published) -> None:
    assert published.origin.find(None) is None
    assert published.origin.versions() == []
    assert published.origin.labels() == {}
    with pytest.raises(PublicationCorrupt, match="no longer exists"):
        published.origin.load(published.publication(1), Taken())


def test_the_head_is_what_was_published(published: Published) -> None:
    publication = published.full(metrics={"label": {"auc": 0.75, "loss": None}})
    assert published.origin.find(None) == publication
    assert loaded(published, publication) == (publication, published.rows)
    for number in range(2, 6):
        publication = published.publish(number)
        assert loaded(published, publication) == (publication, published.rows)


def test_steps_lead_from_one_publication_to_the_next(published: Published) -> None:
    first = published.full()
    taken = Taken()
    published.origin.load(first, taken)
    later = [published.publish(number) for number in (2, 3)]
    steps = list(published.origin.follow(first, 5))
    assert [step.publication for step in steps] == later
    for step in steps:
        assert_weights(step.weights, step.publication.number)
        for change in step.changes:
            taken(change)
        assert taken.rows == published.by_number[step.publication.number]
    assert list(published.origin.follow(later[-1], 0.05)) == []
