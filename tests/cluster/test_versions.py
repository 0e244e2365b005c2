"""What is served by all: promoted as far as the gate lets it, and rolled back."""

from collections.abc import Iterator

import pytest

from streamtrain.cluster.versions import VersionControl
from streamtrain.errors import PublicationCorrupt, PublicationError
from streamtrain.store.gate import Gate, GateClosed
from tests.store.published import Published
from tests.stream.redis_fixtures import redis_binary, redis_url

__all__ = ["redis_binary", "redis_url"]


@pytest.fixture
def published(redis_url: str) -> Iterator[Published]:
    """A model with versions of AUC 0.8, 0.7 and 0.85, and a head of 0.75."""
    published = Published(redis_url)
    for number, auc in enumerate((0.8, 0.7, 0.85), 1):
        metrics = {"label": {"auc": auc, "samples": 20_000.0}}
        _ = published.publish(number, metrics=metrics) if number > 1 else published.full(1, metrics=metrics)
        published.versions.make("ann")
    published.publish(4, metrics={"label": {"auc": 0.75, "samples": 20_000.0, "non_finite": 1.0}})
    yield published
    published.close()


def test_what_is_worse_than_what_is_served_is_held_back(published: Published) -> None:
    control = VersionControl(published.versions, Gate(auc_drop=0.06))
    assert control.promote(1, "ann") == 1  # better than the head, which is served
    with pytest.raises(GateClosed, match=r"version 2 is held back: label: auc 0.70000 is worse than 0.80000"):
        control.promote(2, "ann")
    assert published.origin.labels() == {"prod": 1}
    assert control.promote(3, "ann") == 3
    with pytest.raises(GateClosed, match="the head is held back: label: 1 predictions of its window are not finite"):
        control.promote(None, "ann")
    served = control.served()
    assert served is not None
    assert served.version == 3


def test_force_is_told_in_the_history(published: Published) -> None:
    control = VersionControl(published.versions, Gate(auc_drop=0.06))
    control.promote(1, "ann")
    assert control.promote(2, "ann", "the other is broken", force=True) == 2
    deed = published.versions.history(1)[0]
    assert deed.why == ("the other is broken (forced: label: auc 0.70000 is worse than 0.80000 by more than 0.06000)")
    control.promote(3, "bob", force=True)
    assert published.versions.history(1)[0].why == ""  # there was nothing to force
    assert control.promote(None, "ann", force=True) is None
    assert published.versions.history(1)[0].why.startswith("(forced: label: 1 predictions")
    assert [control.rollback("ann", "worse") for _ in range(4)] == [3, 2, 1, None]
    served = control.served()
    assert served is not None
    assert served.number == 4
    with pytest.raises(PublicationError, match="nothing of"):
        control.rollback("ann")


def test_what_is_not_there_is_not_promoted(published: Published, redis_url: str) -> None:
    control = VersionControl(published.versions, Gate())
    published.versions.delete(2, "ann")
    for version in (2, 9):
        with pytest.raises(PublicationCorrupt, match=f"there is no version {version} of model"):
            control.promote(version, "ann")
    assert published.origin.labels() == {}
    empty = Published(redis_url)
    control = VersionControl(empty.versions, Gate())
    assert control.served() is None
    with pytest.raises(PublicationCorrupt, match="there is no head of model"):
        control.promote(None, "ann", force=True)
    empty.close()
