"""`streamtrain verify`: two shards that learn, Redis, and a server, compared as a user does it."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from streamtrain.cluster.client import CoordinatorClient
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import CheckpointError, ShardRefused
from streamtrain.learner import Learner
from streamtrain.model.loader import load_model
from streamtrain.model.samples import SampleReader
from streamtrain.model.spec import Spec
from streamtrain.processes.ps import PsProcess
from streamtrain.processes.serving import follow
from streamtrain.ps.clock import Span
from streamtrain.ps.nodes.shards import RunTemplate, Shards
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, Retry, patiently
from streamtrain.ps.rpc.security import Security, connect
from streamtrain.publish.opening import open_published_model
from streamtrain.publish.versions import import_checkpoint
from streamtrain.serve.client import Endpoint
from streamtrain.serve.http.app import make_app
from streamtrain.serve.rows.replica import Replica
from streamtrain.serve.rows.row_store import load_rows
from streamtrain.serve.service.service import ServingConfig
from streamtrain.settings.groups import Settings
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.store.redis.versions import RedisVersions
from streamtrain.train.step import Step
from streamtrain.verify.samples import CheckpointTrainer, SamplesComparison, ShardTrainer, compare_samples
from tests import commands
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.serve.running import TOKEN, client_of, running

MODEL = """
import keras, streamtrain as st
schema = st.Schema(label="label", time="ts", features=[st.Categorical("user", dim=4), st.Numeric("x", grid=st.Grid())])
def graph(inputs):
    joined = keras.layers.Concatenate()(list(inputs.values()))
    return keras.layers.Dense(1, "sigmoid")(joined)
model = st.Model(schema, graph, name="clicks", embedding_optimizer=st.Adagrad(0.5), dense_optimizer=st.Adam(0.05))
wider = st.Schema(label="label", time="ts", features=[st.Categorical("user", dim=5), st.Numeric("x")])
other = st.Model(wider, graph, name="clicks")
"""


def messages(count: int, start: int = 0) -> list[bytes]:
    return [
        b'{"ts":%d,"user":"u%d","x":%d.5,"label":%d}' % (1_700_000_000 + i, i % 300, i % 7, (i % 300) % 3 == 0)
        for i in range(start, start + count)
    ]


class Whole:
    """Everything of a service in this process, but for the command."""

    def __init__(self, folder: Path, url: str, stack: ExitStack, dtype: str = "float32") -> None:
        (folder / "model.py").write_text(MODEL)
        self.folder, self.model = folder, load_model(f"{folder}/model.py:model")
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        given: dict[str, Any] = {
            "model": f"{folder}/model.py:model",
            "ps": {"addresses": self.addresses},
            "publish": {"url": url, "model": "clicks", "every": 0.05, "dtype": dtype},
            "serve": {"admin_token": TOKEN},
        }
        self.settings = Settings.model_validate(given)
        for index in range(2):
            process = PsProcess(index, self.addresses, self.settings)
            process.start()
            stack.callback(process.stop)
        self.step = Step(self.model)
        beginning = RunTemplate(Spec.of(self.model), self.step.initial_dense, self.step.initial_statistics, {})
        security = Security.from_settings(self.settings.security)
        shards = Shards([(connect(one, security, CHANNEL_OPTIONS), one) for one in self.addresses], beginning)
        # Shard 0 calls shard 1 from its start on; channels of one process share what they found until a backoff ends.
        run = patiently(shards.agree, Retry(), threading.Event())
        self.worker = shards.client("worker", run)
        self.worker.join()
        stack.callback(self.worker.close)
        self.learned = 0
        for _ in range(6):
            self.learn(100)
        self.follower = follow(self.model, self.settings)
        self.url = stack.enter_context(
            running(make_app(self.follower.registry, self.follower, ServingConfig(admin_token=TOKEN)))
        )
        client = stack.enter_context(client_of(self.url))
        until(lambda: client.get("/healthz/ready").status_code == 200, PATIENCE)

    def learn(self, count: int) -> None:
        batch, bad = SampleReader(self.model).decode(messages(count, self.learned))
        assert not bad
        plan = self.model.planner(2).plan(batch.keys, batch.starts, batch.offsets, batch.times)
        pulled = self.worker.pull(plan).wait()
        made = self.step.train(pulled.parameters, plan, pulled.rows, batch)
        self.worker.push(
            plan,
            plan.unpool(made.row_gradient),
            made.dense_gradient,
            made.statistics_change,
            spans=[Span(0, self.learned, self.learned + count)],
            watermark=1_700_000_000,
        ).wait()
        self.learned += count

    def compared(self, **given: Any) -> SamplesComparison:
        with (
            ShardTrainer(self.model, self.step, ShardMap(0, tuple(self.addresses)), self.settings) as trainer,
            open_published_model(self.settings.publish) as published,
            Endpoint(self.url) as endpoint,
        ):
            return compare_samples(self.model, trainer, endpoint, RedisOrigin(published), messages(700), **given)

    def verify(self, *arguments: str, **settings: str | None) -> tuple[int, dict[str, Any], str]:
        """Exit code, what is told as JSON, and errors."""
        options = self.options(**settings)
        command = [*commands.COMMAND, "verify", "--url", self.url, "--json", *arguments, *options]
        done = commands.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=self.folder)
        return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr

    def options(self, **settings: str | None) -> list[str]:
        """The settings of the command; None: without this one."""
        chosen = {
            "model": self.settings.model,
            "ps.addresses": ",".join(self.addresses),
            "publish.url": self.settings.publish.url,
            "publish.model": "clicks",
            "serve.admin_token": TOKEN,
        } | {name.replace("__", "."): value for name, value in settings.items()}
        return [part for key, value in chosen.items() if value is not None for part in ("--set", f"{key}={value}")]


@contextmanager
def whole(folder: Path, dtype: str = "float32") -> Iterator[tuple[Whole, Valkey]]:
    with ExitStack() as stack:
        server = stack.enter_context(Valkey())
        yield Whole(folder, server.url, stack, dtype), server


def test_all_of_it_agrees_and_whatever_differs_is_found(tmp_path: Path) -> None:
    with whole(tmp_path) as (made, server):
        file = tmp_path / "samples.jsonl"
        file.write_bytes(b"\n".join([*messages(900), b"no sample", b'{"x": 1}']))
        code, found, error = made.verify("--samples", str(file))
        assert (code, found["agrees"], error) == (0, True, ""), found
        assert found["shards"]["tables"]["user"]["rows"] == 300
        assert found["served"]["loaded"][0]["rows"] == {"user": 300, "x_cells": 32}
        samples = found["samples"]
        assert (samples["samples"], samples["refused"], samples["same"], samples["tolerance"]) == (900, 2, True, 1e-5)
        assert samples["auc"]["label"][0] == pytest.approx(samples["auc"]["label"][1], abs=1e-6)
        assert samples["auc"]["label"][0] > 0.5

        replica = made.follower.registry.resident["head"].loaded
        assert isinstance(replica, Replica)
        number = replica.publication.number
        table = replica._tables["user"]
        _, rows = table.scan(0, 1 << 20)
        load_rows(table, rows.keys[:1].copy(), np.full((1, 4), 3, np.float32))
        code, found, _ = made.verify("--samples", str(file))
        assert (code, found["agrees"]) == (1, False)
        assert [found[part]["agrees"] for part in ("shards", "served", "samples")] == [True, False, False]
        assert found["samples"]["largest"] > 1e-5
        with redis.Redis.from_url(server.url) as client:
            name = next(iter(client.keys("streamtrain:rows:*:user:*")))
            client.hset(name, next(iter(client.hkeys(name))), bytes(16))
        code, found, _ = made.verify()
        assert (code, found["shards"]["agrees"]) == (1, False)
        assert name.decode() in found["shards"]["tables"]["user"]["first"][0]
        until(lambda: made.follower.registry.resident["head"].publication.number > number, PATIENCE)  # published anew
        code, found, _ = made.verify("--samples", str(file))
        assert (code, found["agrees"]) == (0, True)


LIGHT = """
import sys
from streamtrain.cli import main
sys.argv = ["streamtrain", *sys.argv[1:]]
try:
    main()
except SystemExit as exc:
    assert exc.code == 0, exc.code
assert not {"tensorflow", "keras"} & set(sys.modules)
"""


def test_a_table_for_people_and_no_tensorflow(tmp_path: Path) -> None:
    with whole(tmp_path) as (made, _):
        command = [sys.executable, "-c", LIGHT, "verify", "--url", made.url, *made.options()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        assert "table user: 300 rows in " in done.stdout
        assert "300 rows of user" in done.stdout
        assert done.stdout.count("equal") == 3
        assert "not compared: --samples is not given" in done.stdout


def test_what_is_not_configured_or_away_is_said(tmp_path: Path) -> None:
    with whole(tmp_path) as (made, server):
        code, found, _ = made.verify(serve__admin_token=None)
        assert (code, found["agrees"]) == (0, True)
        assert found["served"] == {"passed_over": "serve.admin_token is not set"}
        assert found["samples"] == {"passed_over": "--samples is not given"}
        code, found, _ = made.verify(ps__addresses=None, serve__admin_token="wrong")
        assert code == 1
        assert "ps.addresses" in found["shards"]["passed_over"]
        assert "401: the admin token is required" in found["served"]["failed"]
        code, found, error = made.verify(ps__addresses=None, serve__admin_token=None)
        assert (code, found["agrees"], error) == (1, False, "")  # nothing is compared
        server.kill()
        code, found, _ = made.verify()
        assert code == 1
        assert "does not answer" in found["shards"]["failed"]
        assert "does not answer" in found["served"]["failed"]
        code, _, error = made.verify("--checkpoint", str(tmp_path))
        assert (code, "requires --samples" in error) == (2, True)
        code, _, error = made.verify("--lists", "genres")
        assert (code, "require --samples" in error) == (2, True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_predictions_agree_at_rest(tmp_path: Path, dtype: str) -> None:
    with whole(tmp_path, dtype) as (made, _):
        found = made.compared()
        assert (found.same, found.agrees, found.samples) == (True, True, 700)
        assert dtype == "float32" or found.largest > 0
        made.learn(100)  # and published soon
        found = made.compared()
        assert (found.same, found.agrees) == (True, True)


def test_what_moves_on_meanwhile_is_judged_only_if_asked_for(tmp_path: Path) -> None:
    with whole(tmp_path) as (made, _):
        until(lambda: made.compared().same, PATIENCE)
        made.follower.close()
        made.learn(300)
        with CoordinatorClient(made.addresses[:1], Security(insecure=True)) as client:
            client.publish_now(timeout=PATIENCE)
        found = made.compared()
        assert (found.same, found.tolerance, found.agrees) == (False, None, None)
        assert found.largest > 1e-5
        assert made.compared(tolerance=1e-6).agrees is False
        assert found._replace(tolerance=1.0).agrees is True


def test_another_model_is_refused(tmp_path: Path) -> None:
    with whole(tmp_path) as (made, _):
        other = load_model(f"{tmp_path}/model.py:other")
        with pytest.raises(ShardRefused, match="has another model; differing"):
            ShardTrainer(other, made.step, ShardMap(0, tuple(made.addresses)), made.settings)
        with (
            ShardTrainer(made.model, made.step, ShardMap(0, tuple(made.addresses)), made.settings) as trainer,
            pytest.raises(ShardRefused, match="the request is for 0 tables, but the model has 2"),
        ):
            trainer._controls[0].read([])
        with pytest.raises(ShardRefused, match="belongs to 2 shards, not 1"):
            ShardTrainer(made.model, made.step, ShardMap(0, tuple(made.addresses[:1])), made.settings)


def test_shards_are_asked_where_they_are(tmp_path: Path) -> None:
    """At the place of the backup, which has taken over: nobody is at the other one."""
    with whole(tmp_path) as (made, _):
        nobody = [f"127.0.0.1:{port}" for port in free_ports(2)]
        file = tmp_path / "samples.jsonl"
        file.write_bytes(b"\n".join(messages(700)))
        places = {"ps__addresses": ",".join(nobody), "ps__backups": ",".join(made.addresses)}
        code, found, error = made.verify("--samples", str(file), **places)
        assert (code, found["shards"]["agrees"], found["samples"]["samples"]) == (0, True, 700), error


@pytest.mark.parametrize("is_learner", [True, False])
def test_a_checkpoint_and_a_version_made_of_it(tmp_path: Path, is_learner: bool) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    model = load_model(f"{tmp_path}/model.py:model")
    learner = Learner(model, batch_size=100)
    learner.learn(messages(600))
    url = tmp_path / "saved"
    learner.save(url if is_learner else url / "epoch-000000003")
    with Valkey() as server:
        settings = Settings.model_validate({"publish": {"url": server.url, "model": "clicks", "every": 0.05}})
        with open_published_model(settings.publish) as published:
            import_checkpoint(published, str(url), "float32", "ann")
            RedisVersions(published).promote(1, "ann")
            follower = follow(model, settings)
            with running(make_app(follower.registry, follower)) as at, Endpoint(at) as endpoint:
                until(endpoint.is_ready, PATIENCE)
                trainer = CheckpointTrainer(str(url), model)
                found = compare_samples(model, trainer, endpoint, RedisOrigin(published), messages(700))
                assert (found.same, found.agrees, found.samples) == (True, True, 700)
                learner.learn(messages(100, 600))
                learner.save(url if is_learner else url / "epoch-000000004")
                later = CheckpointTrainer(str(url), model)
                found = compare_samples(model, later, endpoint, RedisOrigin(published), messages(700))
                assert (found.same, found.agrees) == (False, None)
                assert found.largest > 1e-5
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        CheckpointTrainer(str(tmp_path / "none"), model)
