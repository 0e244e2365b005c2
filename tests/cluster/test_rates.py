"""Learning rates that are set while a cluster learns: exact, kept by checkpoints and backups, and refused if wrong."""

from pathlib import Path

import keras
import numpy as np
import pytest

import streamtrain as st
from streamtrain.cli.status import describe_rates
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError, ShardRefused
from streamtrain.model.spec import Rates, Spec
from streamtrain.ps.clock import Span
from streamtrain.ps.replication.primary import State
from streamtrain.ps.rpc import ps_pb2 as pb
from streamtrain.ps.rpc import wire
from streamtrain.ps.session import PullBuffers
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.versions import RedisVersions
from tests.cluster.coordinated import Coordinated
from tests.patience import PATIENCE, until
from tests.ps.counting import SPEC, new_shard, pushes
from tests.ps.paired import Paired, answered


def make(rows: float, weights: float) -> st.Model:
    def graph(inputs):  # type: ignore[no-untyped-def]
        return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(list(inputs.values())))

    wide = st.Categorical("wide", field="user", dim=1, optimizer=st.SGD(0.3))  # its rate stays
    schema = st.Schema(label="click", features=[wide, st.Categorical("user", dim=4), st.Categorical("item", dim=4)])
    return st.Model(schema, graph, embedding_optimizer=st.Adagrad(rows), dense_optimizer=st.Adam(weights), seed=3)


def samples(seed: int, count: int) -> list[dict[str, int]]:
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, 40, (2, count)).tolist()
    return [{"user": u, "item": i, "click": int(u < i)} for u, i in zip(users, items, strict=True)]


def test_a_rate_that_is_set_learns_as_one_of_the_model_to_the_bit(tmp_path: Path) -> None:
    """Of two shards only shard 0 is told, as in a cluster; batches of several steps and of one."""
    learner = st.Learner(make(0.2, 0.01), shards=2, batch_size=64)
    learner.learn(samples(1, 500))
    learner.save(tmp_path / "saved")
    learner._shards[0].set_rates({"embedding_optimizer": 0.05, "dense_optimizer": 0.002})
    other = st.Learner.load(tmp_path / "saved", make(0.05, 0.002), shards=2, batch_size=64)
    unchanged = st.Learner.load(tmp_path / "saved", make(0.2, 0.01), shards=2, batch_size=64)
    for part in (samples(2, 300), samples(3, 4)):
        learned = [one.learn(part).predictions for one in (learner, other, unchanged)]
        assert learned[0].tobytes() == learned[1].tobytes()
    assert learned[0].tobytes() != learned[2].tobytes()


def test_set_rates_are_in_the_status_the_history_and_checkpoints(tmp_path: Path, server: Valkey) -> None:
    with Coordinated(tmp_path, publish__url=server.url, publish__model="rated", publish__every="1h") as cluster:
        cluster.learn()
        client = cluster.client()
        found = client.set_rates({"embedding_optimizer": 0.25}, "ann", "too fast", timeout=PATIENCE)
        assert found["rates"]["embedding_optimizer"] == {"rate": 0.25, "was": 1.0, "initial": 1.0}
        assert (
            describe_rates(found, is_changed=True)[0]
            == "embedding_optimizer.rate is 0.25, was 1 (the run began with 1)"
        )
        redis = RedisServer(server.url)
        (entry,) = RedisVersions(RedisModel(redis, "rated")).history()
        redis.close()
        assert (entry.what, entry.who, entry.why) == ("setting", "ann", "too fast")
        assert (entry.setting_was, entry.setting) == ("embedding_optimizer.rate=1", "embedding_optimizer.rate=0.25")
        changed = {"rate": 0.25, "initial": 1.0}
        assert client.status()["rates"]["embedding_optimizer"] == changed
        for index in (0, 1):
            cluster.stop_shard(index)
        for index in (1, 0):
            cluster.start_shard(index)
        controls = [cluster.control(index) for index in (0, 1)]
        until(lambda: all(one.status().ready for one in controls))
        restored = [one.status() for one in controls]
        assert [Spec.from_json(one.spec).rates["embedding_optimizer"] for one in restored] == [0.25, 0.25]
        assert [one.epoch for one in restored] == [found["epoch"]] * 2
        cluster.status(lambda status: status["rates"] and status["rates"]["embedding_optimizer"] == changed)

        for changes, message in (
            ({"embedding_optimizer": 0.25}, "nothing would change"),
            ({"user": 0.1}, "there is no rate of 'user'"),
            ({"dense_optimizer": float("nan")}, "must be a finite number > 0"),
            ({"dense_optimizer": 1e39}, "must be a finite number > 0"),
        ):
            with pytest.raises(ShardRefused, match=message):
                client.set_rates(changes, "ann", timeout=PATIENCE)
        found = client.set_rates({"embedding_optimizer": None}, "ann", timeout=PATIENCE)
        assert found["rates"]["embedding_optimizer"] == {"rate": 1.0, "was": 0.25, "initial": 1.0}
        assert client.set_rates({}, "ann", timeout=PATIENCE)["rates"]["embedding_optimizer"]["rate"] == 1.0


def test_a_backup_has_the_rates_once_they_are_set() -> None:
    with Paired(1) as pairs:
        answered(pairs.shards().agree)
        primary = pairs.wait()
        assert primary.node is not None
        replication = primary.node.role.replication
        assert replication is not None
        until(lambda: replication.state is State.IN_STEP, PATIENCE)
        primary.node.shard.set_rates({"dense_optimizer": 0.5})
        primary.kill()
        status = answered(pairs.shards().controls[0].status)
        assert Spec.from_json(status.spec).rates == {"dense_optimizer": 0.5}


def test_the_rates_of_a_push_are_those_with_which_it_is_applied() -> None:
    log = {0: [[1], [1]]}
    (push,) = pushes(log, [Span(0, 0, 2)], 1)
    push = push._replace(rates=Rates(0.25, 0.5))
    data = wire.encode_request(push, None, "float32")
    request, bulk = wire.unframe(pb.Request, data)
    shard = new_shard(0, 1)
    taken, _ = wire.decode_request(request, bulk, wire.Sizes.of(shard), "float32")
    assert taken is not None
    assert taken.rates == push.rates
    shard.push(taken)
    assert shard.tables[0].pull(push.updates[0].keys).tolist() == [[0.5]]
    assert shard.dense.pull().tolist() == [1.0] * 5  # half of two samples

    answer, _ = wire.unframe(pb.Answer, wire.encode_answer(None, wire.PullResult([], rates=push.rates), "float32"))
    into = PullBuffers([], np.empty(0, np.float32), np.empty(0, np.float32))
    wire.decode_pulled(answer.pulled, wire.ArrayReader(memoryview(b""), "float32"), into)
    assert into.rates == push.rates
    request.push.rates[:] = [0.25, -1.0]
    with pytest.raises(ShardRefused, match="learning rates must be 2 finite numbers > 0"):
        wire.decode_request(request, bulk, wire.Sizes.of(shard), "float32")


def test_evolving_keeps_a_rate_unless_the_model_has_another() -> None:
    learned = SPEC.with_rates({"embedding_optimizer": 0.5, "dense_optimizer": 0.25})
    assert Spec.from_json(learned.to_json()).rates == learned.rates
    assert learned.identity == SPEC.identity
    assert SPEC.keeping_rates(learned).rates == learned.rates
    tables = tuple(one | {"rate": 2.0} for one in SPEC.tables)
    changed = Spec(**vars(SPEC) | {"tables": tables})
    assert changed.keeping_rates(learned).rates == {"dense_optimizer": 0.25}
    ftrl = Spec(**vars(SPEC) | {"tables": tuple(one | {"optimizer": "ftrl"} for one in SPEC.tables)})
    with pytest.raises(ConfigError, match="the rate of FTRL cannot be set"):
        ftrl.with_rates({"embedding_optimizer": 0.5})
