"""`streamtrain versions`, `promote`, `rollback` and `label`."""

import getpass
import re
import socket
from collections.abc import Iterator

import pytest

from tests.cli.commands import Commands
from tests.store.published import Published
from tests.stream.redis_fixtures import valkey

__all__ = ["valkey"]

STRICT = ("gate.auc_drop=0.05", "gate.min_samples=1")


@pytest.fixture
def published(valkey: str) -> Iterator[Published]:
    """A model with version 1, of AUC 0.8, and version 2 and the head, of 0.7."""
    published = Published(valkey)
    for number, auc in ((1, 0.8), (2, 0.7)):
        metrics = {"label": {"auc": auc, "log_loss": None, "samples": 20_000.0}}
        _ = published.publish(number, metrics=metrics) if number > 1 else published.full(1, metrics=metrics)
        published.versions.make("ann", "a [bold] try")
    yield published
    published.close()


def test_versions_are_promoted_and_rolled_back(published: Published) -> None:
    commands = Commands.of(published)
    assert "serving version 1, was the head" in commands.told("promote", "1", "--why", "best")
    line = commands.refused("promote", "2", settings=STRICT)
    assert line == "version 2 is held back: label: auc 0.70000 is worse than 0.80000 by more than 0.05000"
    assert commands.json("promote", "2", "--force", "--who", "bob", settings=STRICT) == {"served": 2, "was": 1}
    assert "serving version 1, was version 2" in commands.told("rollback", "--why", "worse")
    assert commands.json("promote", "head") == {"served": "head", "was": 1}
    assert commands.json("rollback") == {"served": 1, "was": "head"}
    deeds = published.versions.history(6)
    here = f"{getpass.getuser()}@{socket.gethostname()}"
    assert [(deed.what, deed.who, deed.version) for deed in deeds] == [
        ("rollback", here, 1),
        ("label", here, None),
        ("rollback", here, 1),
        ("label", "bob", 2),
        ("label", here, 1),
        ("version", "ann", 2),
    ]
    assert [deed.why for deed in deeds[2:5]] == ["worse", deeds[3].why, "best"]
    assert deeds[3].why.startswith("(forced: label: auc 0.70000")


def test_what_there_is_is_listed(published: Published) -> None:
    commands = Commands.of(published)
    published.versions.acquire(1, "host-a:8501", 600)
    published.versions.promote(2, "ann", "better")
    published.versions.set_label("canary", 1, "bob")
    text = commands.told("versions")
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if "float32" in line}
    assert list(rows) == ["1", "2", "head"]
    for version, parts in {"1": ["canary", "host-a:8501", "0.8000"], "2": ["prod, served", "0.7000"]}.items():
        assert all(part in rows[version] for part in parts), rows
    assert "served" not in rows["1"] + rows["head"]
    history = commands.told("versions", "--history")
    assert "canary: none -> 1" in history
    assert "prod: head -> 2" in history
    assert "a [bold] try" in history
    assert "history" not in commands.json("versions")
    found = commands.json("versions", "--history", "--count", "3")
    assert (found["model"], found["served"]) == (published.model.keys.model, 2)
    assert (found["head"]["number"], found["head"]["version"]) == (2, None)
    assert [(one["version"], one["labels"], one["servers"]) for one in found["versions"]] == [
        (1, ["canary"], ["host-a:8501"]),
        (2, ["prod"], []),
    ]
    assert found["versions"][0]["rows"] == dict(published.origin.versions()[0].rows)
    assert [(one["what"], one["version"], one["label"]) for one in found["history"]] == [
        ("label", 1, "canary"),
        ("label", 2, "prod"),
        ("version", 2, ""),
    ]


def test_labels_are_given_and_taken_away(published: Published) -> None:
    commands = Commands.of(published)
    assert "label canary set to version 2" in commands.told("label", "canary", "2", "--why", "a look")
    assert published.origin.labels() == {"canary": 2}
    assert published.versions.history(1)[0].why == "a look"
    assert commands.json("label", "canary", "none") == {"label": "canary", "version": None}
    assert published.origin.labels() == {}
    assert commands.refused("label", "canary", "9").endswith("has no version 9")
    assert "promote and rollback change what is served" in commands.refused("label", "prod", "2")
    assert "the head cannot have a label" in commands.refused("label", "canary", "head")
    assert published.origin.labels() == {}


def test_where_nothing_is_published(valkey: str) -> None:
    commands = Commands(valkey, "nothing-here")
    assert commands.json("versions") == {"model": "nothing-here", "served": None, "head": None, "versions": []}
    assert "model nothing-here" in commands.told("versions")
    assert commands.refused("promote", "head").endswith("has no head")
    assert "nothing-here" in commands.refused("rollback")


def test_what_is_wrong_is_one_line(published: Published) -> None:
    commands = Commands.of(published)
    published.versions.delete(1, "ann")
    assert commands.refused("promote", "1").endswith("has no version 1")
    assert commands.refused("promote", "x") == "VERSION must be a number from 1, or head, not 'x'"
    assert commands.refused("versions", settings=("publish.every=x",)).startswith("publish.every on the command line")
    nobody = Commands("redis://127.0.0.1:1", "model")
    for arguments in (["versions"], ["promote", "1"], ["rollback"]):
        assert "Redis at 127.0.0.1:1" in nobody.refused(*arguments)
    assert commands.refused("versions", settings=("publish.url=kafka://x",)).startswith("the URL of a Redis must be")
    assert published.origin.labels() == {}


def test_a_model_that_nobody_publishes_is_dropped(published: Published) -> None:
    commands, keys = Commands.of(published), published.model.keys
    published.versions.promote(2, "ann", "better")
    published.versions.set_label("canary", 1, "bob")
    published.versions.acquire(1, "host-a:8501", 600)
    assert commands.refused("drop", keys.model) == f"{published.model.name} is in use by host-a:8501"
    published.versions.release(1, "host-a:8501")
    published.model.acquire_lease("run", 0, "holder", "elsewhere", 600)
    assert "is published by another cluster (publisher on elsewhere" in commands.refused("drop", keys.model)
    published.model.end_lease("holder")
    other = Published(published.url)
    other.full(1)
    assert commands.json("drop", keys.model) == {"dropped": keys.model}
    left = " ".join(name.decode() for name in published.server.call("KEYS", "streamtrain:*"))
    assert not re.search(rf"{{{keys.model}[}}/]", left)
    assert re.search(rf"{{{other.model.keys.model}}}:head", left)
    assert commands.refused("drop", keys.model) == f"there is no {published.model.name}"
    other.close()
