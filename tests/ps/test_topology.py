"""Membership: what a cluster is, from addresses and from what schedulers of TensorFlow jobs say."""

import json
import logging
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtrain.errors import ConfigError
from streamtrain.ps.nodes.topology import Cluster, Task

PS = ("ps-0:2222", "ps-1:2222")
WORKERS = ["w-0:2222", "w-1:2222"]


def tf_config(type_: Any = "ps", index: Any = 0, **jobs: Any) -> str:
    return json.dumps({"cluster": {"ps": list(PS), "worker": WORKERS} | jobs, "task": {"type": type_, "index": index}})


def test_addresses() -> None:
    assert Cluster.of_addresses("PS-0:2222, ps-1:2222") == Cluster(PS)
    assert Cluster.of_addresses("[::1]:1,unix:/run/ps.sock").ps == ("[::1]:1", "unix:/run/ps.sock")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ps.addresses is empty"),
        (" ", "ps.addresses is empty"),
        ("a:1,", "ps.addresses[1] must be"),
        ("a:0", "ps.addresses[0] must be"),
        ("a:1,b", "ps.addresses[1] must be"),
        ("a:1,A:1", "ps.addresses[1] is 'a:1', which another process has already"),
    ],
)
def test_wrong_addresses(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster.of_addresses(text)
    assert message in str(caught.value)


def test_a_task_must_be_in_the_cluster() -> None:
    assert Cluster(PS, None, Task("worker", 7)).workers is None
    for task in (Task("ps", 2), Task("worker", 2), Task("ps", -1), Task("worker", -1)):
        with pytest.raises(ConfigError, match=f"task {task.type} {task.index} is out of range: there are 2"):
            Cluster(PS, 2, task)


PLACES = Cluster(("st-shard-0-0.st-shards:2222", "st-shard-1-0.st-shards:2222"))
BACKUPS = ("st-shard-0-1.st-shards:2222", "st-shard-1-1.st-shards:2222")


@pytest.mark.parametrize(
    ("host", "place"),
    [("st-shard-0-0", (0, False)), ("st-shard-1-0", (1, False)), ("ST-Shard-1-1.ns.svc.cluster.local", (1, True))],
)
def test_a_shard_finds_itself_by_the_name_of_its_host(host: str, place: tuple[int, bool]) -> None:
    assert PLACES.own_place(host, BACKUPS) == place


@pytest.mark.parametrize(
    ("cluster", "backup", "message"),
    [
        (PLACES, True, "no address has the name of this host, st-shard-1-0, in ps.backups"),
        (Cluster(("a:1", "b:1")), False, "no address has the name of this host, st-shard-1-0, in ps.addresses"),
        (Cluster(("st-shard-1-0:1", "st-shard-1-0:2")), False, "2 addresses have the name of this host"),
        (Cluster(PS, 2, Task("worker", 1)), False, "TF_CONFIG makes this process a worker, not a ps"),
    ],
)
def test_who_cannot_find_itself_needs_an_index(cluster: Cluster, backup: bool, message: str) -> None:
    with pytest.raises(ConfigError, match="--index is required") as caught:
        cluster.own_place("st-shard-1-0", BACKUPS, backup=backup)
    assert message in str(caught.value)


CHIEF = {"chief": ["c:2222"]}


@pytest.mark.parametrize(
    ("text", "workers", "task"),
    [
        (tf_config("ps", 1), 2, Task("ps", 1)),
        (tf_config("worker", 1), 2, Task("worker", 1)),
        (tf_config("worker", "1"), 2, Task("worker", 1)),
        (tf_config("chief", 0, **CHIEF), 3, Task("worker", 0)),
        (tf_config("worker", 0, **CHIEF), 3, Task("worker", 1)),
        (tf_config("worker", 1, **CHIEF), 3, Task("worker", 2)),
        (tf_config("ps", 1, **CHIEF), 3, Task("ps", 1)),
        (tf_config("master", 0, master=["m:1"]), 3, Task("worker", 0)),
        (tf_config("master", 0, master=["m:1"], chief=[]), 3, Task("worker", 0)),
        (tf_config("chief", 0, worker=[], **CHIEF), 1, Task("worker", 0)),
        (tf_config("ps", 0, worker=[]), None, Task("ps", 0)),
        (tf_config("ps", 0, evaluator=["e:1"], tpu_worker=5), 2, Task("ps", 0)),
    ],
)
def test_a_place_from_tf_config(text: str, workers: int | None, task: Task) -> None:
    assert Cluster.of_tf_config(text) == Cluster(PS, workers, task)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "TF_CONFIG is not JSON"),
        ("{", "TF_CONFIG is not JSON"),
        ("[" * 100_000, "TF_CONFIG is not JSON"),
        ("9" * 5000, "TF_CONFIG is not JSON"),
        ("[]", "TF_CONFIG must be a JSON object, not []"),
        ("{}", "TF_CONFIG has no 'cluster'"),
        ('{"cluster": 1}', "TF_CONFIG cluster must be a JSON object, not 1"),
        ('{"cluster": {}}', "TF_CONFIG cluster.ps is missing or empty"),
        ('{"cluster": {"ps": []}}', "TF_CONFIG cluster.ps is missing or empty"),
        ('{"cluster": {"ps": "a:1"}}', "TF_CONFIG cluster.ps must be a list of addresses, not 'a:1'"),
        ('{"cluster": {"ps": {"0": "a:1"}}}', "TF_CONFIG cluster.ps must be a list"),
        ('{"cluster": {"ps": ["a:1", null]}}', "TF_CONFIG cluster.ps[1] must be"),
        ('{"cluster": {"ps": ["a:1"]}}', "TF_CONFIG has no 'task'"),
        ('{"cluster": {"ps": ["a:1"]}, "task": []}', "TF_CONFIG task must be a JSON object"),
        ('{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps"}}', "TF_CONFIG task has no 'index'"),
        ('{"cluster": {"ps": ["a:1"]}, "task": {"index": 0}}', "TF_CONFIG task has no 'type'"),
        (tf_config("boss"), "TF_CONFIG task.type must be one of ps, worker, chief, master, not 'boss'"),
        (tf_config(["ps"]), "TF_CONFIG task.type must be one of"),
        (tf_config("evaluator", evaluator=["e:1"]), "task.type is 'evaluator', which does not exist here"),
        (tf_config("ps", 2), "TF_CONFIG task.index must count the 2 of cluster.ps from 0, not be 2"),
        (tf_config("ps", -1), "not be -1"),
        (tf_config("ps", True), "not be True"),
        (tf_config("ps", 0.0), "not be 0.0"),
        (tf_config("ps", None), "not be None"),
        (tf_config("ps", "-1"), "not be '-1'"),
        (tf_config("chief"), "TF_CONFIG task.index must count the 0 of cluster.chief"),
        (tf_config(ps=["a:1", "a:1"]), "TF_CONFIG cluster.ps[1] is 'a:1', which another process has already"),
        (tf_config(worker=["w:1", "PS-0:2222"]), "which another process has already"),
        (tf_config(chief=["c:1", "c:2"]), "TF_CONFIG cluster.chief: there may be one chief or master, not 2"),
        (tf_config(chief=["c:1"], master=["c:2"]), "TF_CONFIG cluster.master: there may be one chief or master"),
    ],
    ids=lambda text: text[:30],
)
def test_a_wrong_tf_config(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster.of_tf_config(text)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_every_process_of_a_job_has_a_place_of_its_own() -> None:
    places = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
    tasks = [Cluster.of_tf_config(tf_config(*place, **CHIEF)).task for place in places]
    assert tasks == [Task("worker", 0), Task("worker", 1), Task("worker", 2), Task("ps", 0), Task("ps", 1)]


def test_explicit_addresses_go_first_and_a_conflict_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Cluster.of((), tf_config("ps", 1)) == Cluster(PS, 2, Task("ps", 1))
        assert Cluster.of(PS, tf_config("ps", 1)) == Cluster(PS, 2, Task("ps", 1))
        assert Cluster.of(["PS-0:2222", PS[1]], tf_config("ps", 1)).ps == PS
        assert Cluster.of(PS, None) == Cluster.of(PS, "\n") == Cluster(PS)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert Cluster.of(["x:1"], tf_config("worker", 1)) == Cluster(("x:1",), 2, Task("worker", 1))
    assert "['x:1'] overrides cluster.ps of TF_CONFIG ['ps-0:2222', 'ps-1:2222']" in caplog.text
    with pytest.raises(ConfigError, match="task ps 1 is out of range: there are 1"):
        Cluster.of(["x:1"], tf_config("ps", 1))
    with pytest.raises(ConfigError, match=r"ps\.addresses is not set, nor is there a TF_CONFIG"):
        Cluster.of((), None)
    with pytest.raises(ConfigError, match="TF_CONFIG is not JSON"):
        Cluster.of(PS, "{")


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["a:1", "b:2"])
)
ANY = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
JOBS = st.sampled_from(["ps", "worker", "chief", "master", "evaluator", "other"])
ADDRESS = st.from_regex(r"\A[abc]:[1-3]\Z")
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(JOBS, st.lists(ADDRESS | SCALARS, max_size=3) | ANY, max_size=5) | ANY,
        "task": st.fixed_dictionaries({}, optional={"type": JOBS | ANY, "index": st.integers(-1, 3) | ANY}) | ANY,
    },
)


@given(NEARLY | ANY)
def test_json_gives_a_cluster_or_a_config_error(config: Any) -> None:
    text = json.dumps(config)
    with suppress(ConfigError):
        check(Cluster.of_tf_config(text))


@given(st.text())
def test_text_gives_a_cluster_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        check(Cluster.of_tf_config(text))
    with suppress(ConfigError):
        check(Cluster.of_addresses(text))


@given(st.sets(ADDRESS, min_size=2, max_size=9), st.data())
def test_a_well_formed_job_gives_its_cluster(addresses: set[str], data: st.DataObject) -> None:
    names = data.draw(st.permutations(sorted(addresses)))
    cut = data.draw(st.integers(1, len(names)))
    index = data.draw(st.integers(0, cut - 1))
    made = Cluster.of_tf_config(tf_config("ps", index, ps=names[:cut], worker=names[cut:]))
    assert made == Cluster(tuple(names[:cut]), len(names) - cut or None, Task("ps", index))
    assert made.own_place("elsewhere") == (index, False)


def check(cluster: Cluster) -> None:
    """What every cluster that comes out has."""
    assert cluster.ps
    assert len(set(cluster.ps)) == len(cluster.ps)
    assert cluster.workers is None or cluster.workers > 0
    assert cluster.task is None or cluster.task.index >= 0
