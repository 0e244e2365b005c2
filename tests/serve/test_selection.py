"""Which version is served: the label in Redis says so to all servers; each loads it before it flips, or stays."""

import re
from collections.abc import Iterator

import httpx
import pytest

import streamtrain as stm
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import PublicationError
from streamtrain.processes.serving import follow
from streamtrain.serve.selection import Selection
from tests.patience import PATIENCE, until
from tests.serve.in_redis import MODEL, InRedis, predicted
from tests.serve.running import TOKEN

CONTROL = "/v1/models/model"
BEARER = {"authorization": f"Bearer {TOKEN}"}
OTHER = stm.Model(MODEL.schema, MODEL.graph, loss="mean_squared_error", seed=9)


def promote(client: httpx.Client, version: int | str, **more: object) -> httpx.Response:
    return client.post(f"{CONTROL}:promote", json={"version": version, **more}, headers=BEARER)


def rollback(client: httpx.Client, **more: object) -> httpx.Response:
    return client.post(f"{CONTROL}:rollback", json=more, headers=BEARER)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


@pytest.fixture
def own(redis_binary: str | None) -> Iterator[Valkey]:
    """A server of the test's own."""
    with Valkey(binary=redis_binary) as server:
        yield server


def damage(published: InRedis, version: int) -> None:
    """Takes the weights of a version away."""
    found = published.versions.find(version)
    assert found is not None
    published.server.call("DEL", published.model.keys.weights(found[1].dictionary))


def test_two_servers_follow_one_label(published: InRedis) -> None:
    published.keep(1, 2)
    published.publish(3)
    with published.served() as one, published.served() as two:
        assert predicted(one) == predicted(two) == ("head", 3)
        assert promote(one, 1, why="a try").json()["served"] == "1"
        assert predicted(one) == ("1", 1)
        until(lambda: predicted(two) == ("1", 1), PATIENCE)
        assert promote(two, 2).json()["served"] == "2"
        until(lambda: predicted(one) == ("2", 2), PATIENCE)
        assert rollback(one, why="worse").json()["served"] == "1"
        assert predicted(one) == ("1", 1)
        until(lambda: predicted(two) == ("1", 1), PATIENCE)
        assert rollback(two).json()["served"] == "head"
        until(lambda: predicted(one) == predicted(two) == ("head", 3), PATIENCE)
        assert promote(one, "head").json()["served"] == "head"
    assert published.labels() == {}
    deeds = [(one.what, one.who, one.why, one.version) for one in published.versions.history() if one.label == "prod"]
    assert deeds[-1] == ("label", "HTTP from 127.0.0.1", "a try", 1)
    assert deeds[2] == ("rollback", "HTTP from 127.0.0.1", "worse", 1)


def test_what_the_command_line_promotes_is_followed(published: InRedis) -> None:
    published.keep(1, 2)
    published.control.promote(1, "ann")
    with published.served() as client:
        assert predicted(client) == ("1", 1)
        published.control.promote(None, "ann")
        until(lambda: predicted(client) == ("head", 2), PATIENCE)
        published.publish(3)
        until(lambda: predicted(client) == ("head", 3), PATIENCE)


def test_what_cannot_be_served_is_refused_before_the_label_changes(published: InRedis) -> None:
    published.keep(1, 2)
    damage(published, 1)
    published.publish(3, model=OTHER)
    published.versions.make("ann")
    published.publish(4)
    with published.served() as client:
        assert promote(client, 2).status_code == 200
        status, message = error_of(promote(client, 1))
        assert (status, "the weights of a version of" in message) == (503, True)
        status, message = error_of(promote(client, 3, force=True))
        assert (status, message) == (400, "version 3 is of another model: different seed")
        status, message = error_of(promote(client, 9))
        assert (status, "there is no version 9" in message) == (404, True)
        assert predicted(client) == ("2", 2)
        assert published.labels() == {"prod": 2}


def test_a_server_that_cannot_load_what_is_labelled_serves_on_and_says_so(published: InRedis) -> None:
    published.keep(1, 2, 3)
    damage(published, 2)
    with published.served() as client:
        for good in (1, 3):
            published.control.promote(good, "ann")
            until(lambda good=good: predicted(client) == (str(good), good), PATIENCE)  # type: ignore[misc]
            published.control.promote(2, "ann")
            until(lambda: "weights" in client.get("/healthz/ready").json()["origin"], PATIENCE)
            about = client.get("/healthz/ready").json()
            assert (about["version"], about["wanted"]) == (str(good), "2")
            assert "streamtrain_serving_as_wanted 0.0" in client.get("/metrics").text
            assert predicted(client) == (str(good), good)
        published.control.rollback("ann")
        until(lambda: client.get("/healthz/ready").json()["origin"] == "ok", PATIENCE)
        assert "streamtrain_serving_as_wanted 1.0" in client.get("/metrics").text


def test_a_rollback_to_what_cannot_be_served_leaves_the_label(published: InRedis) -> None:
    published.keep(1, 2)
    published.control.promote(1, "ann")
    published.control.promote(2, "ann")
    damage(published, 1)
    with published.served() as client:
        status, message = error_of(rollback(client))
        assert (status, "weights" in message) == (503, True)
        assert predicted(client) == ("2", 2)
        assert published.labels() == {"prod": 2}


def test_nothing_to_roll_back_to(published: InRedis) -> None:
    published.publish(1)
    with published.served() as client:
        status, message = error_of(rollback(client))
        assert (status, "has no earlier prod version to roll back to" in message) == (409, True)


@pytest.mark.parametrize("is_away", [True, False])
def test_a_rollback_that_redis_does_not_take_is_to_be_tried_again(own: Valkey, is_away: bool) -> None:
    published = InRedis(own.url)
    published.keep(1, 2)
    for version in (1, 2):
        published.control.promote(version, "ann")
    with published.served() as client:
        if is_away:
            own.kill()
        else:
            published.server.call("CONFIG", "SET", "min-replicas-to-write", 1)  # it refuses to write
        answer = rollback(client)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert ("does not answer" if is_away else "NOREPLICAS") in answer.json()["error"]
        assert predicted(client) == ("2", 2)


def test_a_closed_gate_names_the_way_out(published: InRedis) -> None:
    published.keep(1, metrics={"label": {"samples": 10.0, "auc": 0.9}})
    published.keep(2, metrics={"label": {"samples": 10.0, "auc": 0.5}})
    with published.served() as client:
        assert promote(client, 1, force=True).status_code == 200
        status, message = error_of(promote(client, 2))
        assert status == 409
        assert re.search(
            r"version 2 is held back: label: auc .* is worse .*to serve it anyway, send \"force\": true", message
        )
        assert predicted(client) == ("1", 1)
        assert published.labels() == {"prod": 1}
        assert promote(client, 2, force=True, why="we know").json()["served"] == "2"
        assert published.versions.history()[0].why.startswith("we know (forced: label: auc")


@pytest.mark.parametrize(("pinned", "name"), [("1", "version 1"), ("head", "the head")])
def test_a_pinned_server_stays(published: InRedis, pinned: str, name: str) -> None:
    published.keep(1, 2)
    published.control.promote(2, "ann")
    with published.served(version=pinned) as client:
        served = predicted(client)
        assert served == (pinned, 2 if pinned == "head" else 1)
        for answer in (promote(client, 2), rollback(client)):
            status, message = error_of(answer)
            assert (status, f"this server is pinned to {name}: set serve.version to" in message) == (409, True)
        published.publish(3)
        until(
            lambda: client.get(f"{CONTROL}/versions", headers=BEARER).json()["versions"][1]["labels"] == ["prod"],
            PATIENCE,
        )
        assert predicted(client)[0] == pinned
        assert published.labels() == {"prod": 2}


def test_while_redis_is_away_nothing_changes() -> None:
    with Valkey() as server:
        published = InRedis(server.url)
        published.keep(1, 2)
        with published.served() as client:
            assert promote(client, 1).status_code == 200
            server.stop()
            for answer in (promote(client, "head"), rollback(client)):
                assert answer.status_code == 503
                assert "does not answer" in answer.json()["error"]
            assert predicted(client) == ("1", 1)
            until(lambda: "away for" in client.get("/healthz/ready").json()["origin"], PATIENCE)
        published.server.close()


def test_a_label_that_changes_while_a_version_is_loaded(published: InRedis) -> None:
    """What was loaded meanwhile is not served."""
    published.keep(1, 2)
    follower = follow(MODEL, published.settings())
    selection: Selection = follower.selection
    published.control.promote(1, "ann")
    assert selection.pending() == 1
    published.control.promote(2, "ann")
    selection.apply(1)
    assert follower.registry.served is None
    assert selection.pending() == 2
    selection.apply(2)
    assert (selection.pending(), selection.wanted, follower.registry.served_version) == (None, 2, 2)


# Holds.


def test_what_a_server_has_loaded_is_not_deleted(published: InRedis) -> None:
    published.keep(1, 2, 3, 4)
    with published.served() as client:
        assert promote(client, 1).status_code == 200
        assert promote(client, "head").status_code == 200
        until(lambda: len(held(published)) == 1, PATIENCE)
        assert published.versions.retain(1, "ann") == [2, 3]
        with pytest.raises(PublicationError, match=r"version 1 of .* is in use by the server .*:[0-9]+"):
            published.versions.delete(1, "ann")
        published.keep(5, 6)
        # As long as the server knows 1 by its label, it drops others before it.
        until(
            lambda: client.post("/v1/models/model/labels/prod:predict", json={"instances": []}).status_code == 404,
            PATIENCE,
        )
        for version in (5, 6):
            assert promote(client, version).status_code == 200
        until(lambda: held(published) == {5, 6}, PATIENCE)
    assert held(published) == set()
    published.versions.delete(1, "ann")


def held(published: InRedis) -> set[int]:
    """Versions that servers lease, without the head."""
    leases = published.server.call("ZRANGE", published.model.keys.holds, 0, -1)
    return {int(one.partition(b":")[0]) for one in leases} - {0}
