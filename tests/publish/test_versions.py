"""What is served by all: promoted as far as the gate lets it, and rolled back."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from streamtrain.errors import CheckpointError, ConfigError, GateClosed, PublicationCorrupt, PublicationError
from streamtrain.publish.opening import open_published_model
from streamtrain.publish.versions import VersionControl, import_checkpoint
from streamtrain.settings.groups import GateSettings, PublishSettings
from streamtrain.store.checkpoint.checkpoint import commit, write_part
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.checkpoint.parquet import TablePart
from tests.ps.counting import DENSE, SPEC
from tests.store.checkpoint.checkpoints import delete, rows_of, set_manifest
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
    control = VersionControl(published.versions, GateSettings(auc_drop=0.06))
    assert control.promote(1, "ann") == 1  # better than the head, which is served
    with pytest.raises(GateClosed, match=r"version 2 is held back: label: auc 0.70000 is worse than 0.80000"):
        control.promote(2, "ann")
    assert published.origin.labels() == {"prod": 1}
    assert control.promote(3, "ann") == 3
    with pytest.raises(GateClosed, match="the head is held back: label: 1 predictions in the window are not finite"):
        control.promote(None, "ann")
    served = control.served()
    assert served is not None
    assert served.version == 3


def test_force_is_told_in_the_history(published: Published) -> None:
    control = VersionControl(published.versions, GateSettings(auc_drop=0.06))
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
    with pytest.raises(PublicationError, match="has no earlier prod version"):
        control.rollback("ann")


def test_what_is_served_may_be_damaged(published: Published, caplog: pytest.LogCaptureFixture) -> None:
    control = VersionControl(published.versions, GateSettings(auc_drop=0.06))
    control.promote(1, "ann")
    published.server.call("HSET", published.model.keys.versions, 1, "1 {}")
    assert control.promote(2, "ann") == 2
    assert "a version of model" in caplog.text
    assert "is damaged: 'publication'; the quality gate does not compare with it" in caplog.text
    assert control.label() == 2


def test_what_is_not_there_is_not_promoted(published: Published, redis_url: str) -> None:
    control = VersionControl(published.versions, GateSettings())
    published.versions.delete(2, "ann")
    for version in (2, 9):
        with pytest.raises(PublicationCorrupt, match=f"has no version {version}"):
            control.promote(version, "ann")
    assert published.origin.labels() == {}
    empty = Published(redis_url)
    control = VersionControl(empty.versions, GateSettings())
    assert control.served() is None
    with pytest.raises(PublicationCorrupt, match="has no head"):
        control.promote(None, "ann", force=True)
    empty.close()


def save(root: str, epoch: int, spec: str = SPEC.to_json()) -> None:
    url = Epochs(root).directory(epoch)
    arrays = {"dense": np.zeros(DENSE, np.float32), "statistics": np.zeros(2, np.float32)}
    about = {"clock": {"0": epoch}, "watermark": 7.5}
    part = write_part(url, 0, arrays, [TablePart("ids", 1, 0, [rows_of(5, 1, 0)])], about=about)
    commit(url, {"run": "a run", "spec": spec, "aligned": True}, [part])


def test_the_newest_epoch_that_is_not_damaged_becomes_a_version(redis_url: str, tmp_path: Path) -> None:
    place = str(tmp_path)
    for epoch in (3, 4, 5):
        save(place, epoch)
    set_manifest(f"{place}/epoch-000000005", rows={"ids": 7})
    delete(place, "epoch-000000004/tables/ids/shard-0.parquet")
    with open_published_model(PublishSettings(url=redis_url, model="saved")) as model:
        version = import_checkpoint(model, place, "float16", "ann")
        assert (version.number, version.version, version.dtype, version.rows) == (3, 1, "float16", {"ids": 5})
        with pytest.raises(PublicationCorrupt, match=f"no epoch at {place}/none can be imported"):
            import_checkpoint(model, f"{place}/none", "float32", "ann")
        save(f"{place}/other", 1, spec="{}")
        with pytest.raises(PublicationCorrupt, match="no epoch at"):
            import_checkpoint(model, f"{place}/other", "float32", "ann")
        with pytest.raises(CheckpointError, match="xyz"):
            import_checkpoint(model, "xyz://nowhere", "float32", "ann")


def test_a_model_needs_a_place() -> None:
    with pytest.raises(ConfigError, match=r"publish\.url is not set"), open_published_model(PublishSettings()):
        pass
