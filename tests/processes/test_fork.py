"""`streamtrain fork` as a user runs it: a changed model that learns the same stream beside its parent."""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from streamtrain.checkpoint.shard_state import restore_shard, shard_arrays
from streamtrain.errors import ConfigError
from streamtrain.ps.shard import Shard, scan_rows
from streamtrain.service.fork import Parent, fork_settings
from streamtrain.service.local import fill_local_defaults, kept_secrets
from streamtrain.settings.load import load_settings
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from tests.patience import PATIENCE, until
from tests.processes.test_local import MODEL, TOPIC, Service, command, load, run, running, write

QUICK = (
    "publish.every=200ms", "checkpoint.every=2s", "checkpoint.keep=20", "consistency.lease=3s", "up.standby=false",
)  # fmt: skip
UP = (sys.executable, "-m", "streamtrain", "up")

# It counts with the rows that it takes over, and with new ones: twice what it has learned itself.
FORKED = MODEL.replace(
    "features=[",
    'features=[st.Categorical("more", dim=1, field="user", combiner="sum", init=st.Constant(0.0)), ',
).replace('inputs["user"])', 'inputs["user"] + inputs["more"])')

LEARNING = """
import keras
import streamtrain as st

def graph(inputs):
    x = keras.layers.Concatenate()(list(inputs.values()))
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(4, "relu")(x))

model = st.Model(st.Schema(time="ts", features=[
    st.Categorical("user", 4, min_count=2), st.Categorical("item", 2)]), graph, embedding_optimizer=st.Adam(0.01))
"""


def forked(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """What `fork` says, run in the folder of its parent."""
    done = run(folder, "fork", name, "--config", str(parent_file(folder)), *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(folder: Path, name: str, *words: str) -> str:
    """The one line with which it is refused; nothing is left."""
    before = {*folder.glob("*")}
    done = run(folder, "fork", name, "--config", str(parent_file(folder)), *words, "--json")
    assert (done.returncode in (1, 2), done.stdout) == (True, ""), done
    assert {*folder.glob("*")} == before
    return done.stderr.splitlines()[-1].removeprefix("streamtrain: ")


def parent_file(folder: Path) -> Path:
    return folder / "data" / "service.toml" if (folder / "data").exists() else folder / "streamtrain.toml"


def has_learned(folder: Path) -> bool:
    done = run(folder, "status", "--json", "--config", str(parent_file(folder)))
    return done.returncode == 0 and (json.loads(done.stdout)["samples"] or 0) > 0  # None until it has polled the shards


def contents(shard: Shard) -> dict[str, Any]:
    """All that a shard holds, in bits, without its predictions of samples."""
    arrays = shard_arrays(shard).items()
    found: dict[str, Any] = {name: of.tobytes() for name, of in arrays if not name.startswith("predictions/")}
    for settings, table in zip(shard.spec.tables, shard.tables, strict=True):
        for rows in scan_rows(table):
            for i, key in enumerate(rows.keys.tolist()):
                row = (rows.embeddings[i].tobytes(), rows.state[i].tobytes(), int(rows.counts[i]))
                found[f"{settings['name']}/{key}"] = row
    return found | {
        "progress": shard.progress()._replace(predictions={}),
        "samples": shard.samples,
        "watermark": shard.watermark,
    }


def test_with_the_same_model_it_is_its_parent_bit_by_bit_and_what_is_taken_is_refused(tmp_path: Path) -> None:
    words = command(tmp_path, "--topic", TOPIC, settings=(*QUICK, "up.ps=2"))
    (tmp_path / "model.py").write_text(LEARNING)
    with running(tmp_path, words) as parent:
        parent.until_ready()
        rng = np.random.default_rng(7)
        lines = [
            {"ts": i, "label": int(i % 3 == 0), "user": f"u{rng.integers(50)}", "item": int(rng.integers(30))}
            for i in range(2000)
        ]
        until(lambda: bool(parent.stream.bounds()), PATIENCE)
        writer = parent.stream.writer()
        for sample in lines:
            writer.write(json.dumps(sample).encode())
        until(lambda: not writer.flush(1.0), PATIENCE)
        writer.close()
        until(lambda: has_learned(tmp_path), PATIENCE)
        of_parent = Epochs(tmp_path / "data" / "checkpoints")

        made = forked(tmp_path, "same")
        assert made["pause_ms"] is not None
        theirs = Epochs(tmp_path / "same" / ".streamtrain" / "checkpoints")
        chains = of_parent.open(made["epoch"]), theirs.open(1)
        for index in range(2):
            restored, copied = (restore_shard(chain, index, 2) for chain in chains)
            assert contents(restored) == contents(copied)
            assert restored.samples > 0
            assert restored.run.id != copied.run.id
            assert (bool(restored.progress().predictions), copied.progress().predictions) == (True, {})
        settings = load_settings(tmp_path / "same" / "streamtrain.toml")
        assert (settings.publish.model, settings.stream.group) == ("same", "streamtrain-same")
        assert (settings.publish.url, settings.stream.url) == (parent.settings.publish.url, parent.settings.stream.url)
        assert (tmp_path / "same" / "streamtrain.toml").stat().st_mode & 0o777 == 0o600

        refusals(tmp_path, parent)
        starts(tmp_path, parent, of_parent)
        assert parent.stop() == 0


def refusals(folder: Path, parent: Service) -> None:
    """What is taken is refused before anything is written."""
    assert f"{folder / 'same'} already exists" in refused(folder, "same")
    assert "publish.model is 'model', as its parent's" in refused(folder, "other", "--set", "publish.model=model")
    assert "stream.group is 'streamtrain', as its parent's" in refused(
        folder, "other", "--set", "stream.group=streamtrain"
    )
    assert "NAME must be letters" in refused(folder, "../other")
    settings = parent.settings
    address = settings.ps.addresses[0]
    assert f"{address} is an address of the parent" in refused(folder, "other", "--set", f"ps.addresses={address},a:1")
    (folder / "without.py").write_text(LEARNING.replace('st.Categorical("item", 2)', ""))
    said = refused(folder, "other", "--model", "without.py:model")
    assert "table item: " in said
    assert "would be lost (allow 'drop')" in said
    assert settings.publish.url
    with closing(RedisServer(settings.publish.url)) as server:
        RedisModel(server, "live").acquire_lease("run", 0, "holder", "elsewhere", PATIENCE)
    assert re.match("model live at .* is published by a cluster on elsewhere: choose", refused(folder, "live"))
    with closing(parent.stream.source("streamtrain-busy", "job", Nothing())):
        assert refused(folder, "busy").startswith("consumer group streamtrain-busy has 1 members: choose")


class Nothing:
    """Listens to a membership."""

    def assigned(self, partitions: Sequence[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, 0)

    def revoked(self, partitions: Sequence[int]) -> None:
        pass

    def lost(self, partitions: Sequence[int]) -> None:
        pass


def starts(folder: Path, parent: Service, epochs: Epochs) -> None:
    """A fork begins at an epoch, at the newest one of a time, or at a time of the stream."""
    oldest = min(epochs.numbers())
    assert forked(folder, "old", "--from", str(oldest))["epoch"] == oldest
    assert "there is no epoch 999 at" in refused(folder, "none", "--from", "999")
    since = forked(folder, "since", "--from", "7d")
    assert (since["epoch"], since["url"]) == (None, None)
    assert load_settings(folder / "since" / "streamtrain.toml").stream.start == since["start"]
    with redis.Redis.from_url(parent.settings.stream.url) as client:
        for stream in client.scan_iter(f"streamtrain:{{{TOPIC}}}:stream:*"):
            client.xtrim(stream, maxlen=1, approximate=False)
    assert re.search(
        r"of topic clicks .* begins at offset \d+, .*earliest possible is --from \d+s",
        refused(folder, "gone", "--from", "7d"),
    )
    assert forked(folder, "late", "--from", "now")["epoch"] > oldest


KILLED = (["ps"], ["worker"], ["coordinator"], ["serve"])


def kill_both(services: Sequence[Service], words: Sequence[str]) -> None:
    """Kills a process of each service at the same moment, and waits for those that take their places."""
    pids = [service.pid(*words) for service in services]
    assert None not in pids, words
    for pid in pids:
        os.kill(pid or 0, signal.SIGKILL)
    for service, pid in zip(services, pids, strict=True):
        until(lambda: service.pid(*words) not in (pid, None), PATIENCE)  # noqa: B023


def test_parent_and_forks_count_exactly_whoever_is_killed(tmp_path: Path) -> None:
    """Its fork, and a fork of that, learn everything once; also after the parent, whose servers they use, was away."""
    (tmp_path / "forked.py").write_text(FORKED)
    words = command(tmp_path, "--topic", TOPIC, settings=QUICK)
    with running(tmp_path, words) as parent:
        parent.until_ready()
        total = before = write(parent.stream, 0, 500)
        assert parent.counted() == total
        made = forked(tmp_path, "more", "--model", "forked.py:model")
        assert made["rows"] == {"more": 0, "user": 1}
        folder = tmp_path / "more"
        total = write(parent.stream, total, 100)
        with running(folder, UP) as child:
            child.until_ready()
            assert child.counted() == total + total - before
            for words in KILLED:
                kill_both((parent, child), words)
                total = write(parent.stream, total, 100)
                assert (parent.counted(), child.counted()) == (total, 2 * total - before), words
            parent.kill("streamtrain.embedded.valkey")
            total = write(parent.stream, total, 100)
            assert (parent.counted(), child.counted()) == (total, 2 * total - before)

            url = parent.settings.publish.url
            assert parent.stop() == 0
            with running(tmp_path, command(tmp_path, "--topic", TOPIC, settings=QUICK)) as again:
                again.until_ready()
                assert again.settings.publish.url == url
                total = write(again.stream, total, 100)
                assert (again.counted(), child.counted()) == (total, 2 * total - before)
                done = run(folder, "fork", "again", "--json")
                assert done.returncode == 0, done.stderr
                total = write(again.stream, total, 100)
                with running(folder / "again", UP) as grandchild:
                    grandchild.until_ready()
                    assert grandchild.counted() == child.counted() == 2 * total - before
                    assert grandchild.stop() == 0
                assert child.stop() == 0
                assert again.stop() == 0


def parent(**given: object) -> Parent:
    return Parent(load(**given), None)


def test_on_the_machine_of_its_parent_a_fork_has_addresses_of_its_own(tmp_path: Path) -> None:
    of = parent(
        ps__addresses="127.0.0.1:1,127.0.0.1:2", coordinator__address="127.0.0.1:3", serve__listen="0.0.0.0:8501",
        worker__metrics="127.0.0.1:9", checkpoint__url="s3://bucket/checkpoints/", stream__topic=TOPIC,
        stream__kafka='{"ssl.ca.location": "ca.pem", "sasl.password": "x"}', security__token="secret", ps__sessions=7,
    )  # fmt: skip
    made = fork_settings(of, "b", tmp_path / "b", "model.py:model", {"worker.batch_size": "64"})
    assert made.model == f"{Path.cwd()}/model.py:model"
    assert not {*made.ps.addresses, made.coordinator.address} & {"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"}
    assert (len(made.ps.addresses), made.ps.sessions, made.worker.batch_size) == (2, 7, 64)
    assert made.serve.listen.startswith("0.0.0.0:")
    assert made.serve.listen != "0.0.0.0:8501"
    assert made.worker.metrics is None
    assert made.checkpoint.url == "s3://bucket/checkpoints-b"
    assert made.stream.kafka == {"ssl.ca.location": f"{Path.cwd()}/ca.pem", "sasl.password": "x"}
    assert made.security.token is not None
    assert made.security.token.get_secret_value() == "secret"
    assert not made.stream.dead_letters


def test_on_other_machines_its_addresses_must_be_given(tmp_path: Path) -> None:
    of = parent(
        ps__addresses="a:1,b:1", coordinator__address="c:1", checkpoint__url="s3://b/c", serve__listen="0.0.0.0:80"
    )
    with pytest.raises(
        ConfigError, match=r"on other machines: give the fork's ps.addresses and coordinator.address by --set"
    ):
        fork_settings(of, "b", tmp_path / "b", "model.py", {})
    made = fork_settings(of, "b", tmp_path / "b", "model.py", {"ps.addresses": "d:1,e:1", "coordinator.address": "f:1"})
    assert (made.ps.addresses, made.coordinator.address, made.serve.listen) == (("d:1", "e:1"), "f:1", "0.0.0.0:80")
    with pytest.raises(ConfigError, match="b:1 is an address of the parent: a fork needs its own"):
        fork_settings(of, "b", tmp_path / "b", "model.py", {"ps.addresses": "b:1,e:1", "coordinator.address": "f:1"})


def test_the_password_of_embedded_servers_stays(tmp_path: Path) -> None:
    settings = load(up__data=str(tmp_path))
    opened = fill_local_defaults(settings, kafka=True)
    with kept_secrets(settings, opened):
        pass
    assert (tmp_path / "servers.json").stat().st_mode & 0o777 == 0o600
    again = fill_local_defaults(settings, kafka=True)
    assert [again[key] for key in KEPT] == [opened[key] for key in KEPT]
    assert again["security.token"] != opened["security.token"]
    (tmp_path / "servers.json").write_text("{")
    with pytest.raises(ConfigError, match=r"servers.json is damaged: delete it"):
        fill_local_defaults(settings, kafka=True)


KEPT = ("stream.url", "stream.kafka", "publish.url")
