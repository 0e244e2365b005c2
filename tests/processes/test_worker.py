"""The process of a worker on a real stream: it waits, begins where it should, drains, and refuses what does not fit."""

import logging
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamtrain as st
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError, ShardRefused, SourceRefused, TooManyBadSamples
from streamtrain.model.bad_samples import WINDOW
from streamtrain.model.loader import load_model
from streamtrain.model.spec import Spec
from streamtrain.processes.worker import WorkerProcess
from streamtrain.ps.clock import Progress
from streamtrain.ps.nodes.shards import RunTemplate
from streamtrain.settings.groups import Settings
from streamtrain.settings.load import load_settings
from streamtrain.stream.opening import open_stream
from streamtrain.stream.source import Stream
from streamtrain.train.step import Step
from tests import commands
from tests.cluster.counted import beginning, is_bad, messages_of, stepping
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.probes import is_ready, probe
from tests.ps.served import Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with Valkey() as one:
        yield one


@pytest.fixture
def settings(server: Valkey, request: pytest.FixtureRequest) -> Callable[..., Settings]:
    """Settings with a topic of its own."""

    def make(**more: object) -> Settings:
        named = {key.replace("__", "."): value for key, value in more.items()}
        return load_settings(
            overrides={"stream.url": server.url, "stream.topic": request.node.name, "worker.batch_age": "10ms"} | named
        )

    return make


@contextmanager
def counted(count: int = 2) -> Iterator[Served]:
    with served(count, beginning=beginning(tensorflow=False)) as where:
        yield where


class Running:
    """A worker process, in a thread."""

    def __init__(self, where: Served, settings: Settings, **options: Any) -> None:
        made, step, spec = stepping(tensorflow=False)
        addresses = [target for _, target in where.channels]
        self.process = WorkerProcess(made, step, spec, addresses, settings, **options)
        self.stopped = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.process.run(self.stopped)
        except BaseException as exc:
            self.failure = exc

    def stop(self) -> None:
        self.stopped.set()
        self.join()

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def fill(stream: Stream, messages: Mapping[int, list[bytes]]) -> None:
    with closing(stream.writer()) as writer:
        for partition, of_partition in messages.items():
            for message in of_partition:
                writer.write(message, partition=partition)
        assert writer.flush(PATIENCE) == 0


def filled(settings: Settings, samples: int) -> Stream:
    stream = open_stream(settings.stream)
    stream.create(2)
    fill(stream, {p: messages_of(p, samples) for p in range(2)})
    return stream


def learned(where: Served, samples: int) -> Callable[[], bool]:
    return lambda: all(node.ready for node in where.nodes) and where.held[0].clock() == dict.fromkeys(range(2), samples)


def test_it_waits_for_a_topic_and_says_so_once(
    settings: Callable[..., Settings], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamtrain")
    with counted() as where:
        running = Running(where, settings())
        until(lambda: "waiting until it is created" in caplog.text)
        filled(settings(), 300)
        until(learned(where, 300))
        running.stop()
    assert running.failure is None
    assert caplog.text.count("waiting until it is created") == 1


def test_it_makes_a_topic_if_it_may(settings: Callable[..., Settings]) -> None:
    chosen = settings(stream__create=2)
    with counted() as where:
        running = Running(where, chosen)
        until(lambda: all(node.ready for node in where.nodes))
        fill(open_stream(chosen.stream), {p: messages_of(p, 200) for p in range(2)})
        until(learned(where, 200))
        running.stop()
    assert running.failure is None


def test_a_broken_stream_is_not_eaten_by_workers_that_are_started_again(settings: Callable[..., Settings]) -> None:
    """As by a supervisor, two at a time: each ends with a sentence, and all together bury a window for each at most."""
    chosen = settings()
    stream = open_stream(chosen.stream)
    stream.create(2)
    fill(stream, {p: [b"{"] * 30_000 for p in range(2)})
    with counted() as where:
        for _ in range(5):
            pair = [Running(where, chosen), Running(where, chosen)]
            for running in pair:
                running.join()
                assert isinstance(running.failure, TooManyBadSamples)
                assert "stream.max_bad_ratio" in str(running.failure)
        assert sum(where.held[0].clock().values()) <= 2 * WINDOW
        through = Running(where, settings(stream__max_bad_ratio=1.0))
        until(learned(where, 30_000))
        through.stop()
    dead = open_stream(chosen.stream.model_copy(update={"topic": f"{stream.topic}.dead"}))
    assert len({record.key for record in dead.records(dead.bounds())}) == 60_000


@pytest.mark.parametrize(("start", "first"), [("earliest", 0), ("latest", 500), ("committed", 0)])
def test_where_a_new_run_begins(settings: Callable[..., Settings], start: str, first: int) -> None:
    chosen = settings(stream__start=start)
    stream = filled(chosen, 500)
    with counted() as where:
        running = Running(where, chosen)
        until(lambda: all(node.ready for node in where.nodes))
        until(lambda: where.held[0].clock().keys() == {0, 1} or start != "latest")
        fill(stream, {p: messages_of(p, 600)[500:] for p in range(2)})
        until(learned(where, 600))
        running.stop()
        assert running.failure is None
        assert where.held[0].run.start == {0: first, 1: first}
        good = int((~is_bad(np.arange(first, 600))).sum())
        assert where.held[0].samples == 2 * good


def test_committed_is_where_another_consumer_was(settings: Callable[..., Settings]) -> None:
    stream = filled(settings(), 400)

    class Mine:
        def assigned(self, partitions: Any) -> dict[int, int]:
            return dict.fromkeys(partitions, 0)

        def revoked(self, partitions: Any) -> None:
            """Nothing is under way."""

        lost = revoked

    with closing(stream.source("streamtrain", "consumer", Mine())) as source:
        until(lambda: source.poll(1, 0.1) and len(source.positions()) == 2)
        source.commit({0: 100, 1: 250})
        until(lambda: stream.committed("streamtrain") == {0: 100, 1: 250})
    with counted() as where:
        running = Running(where, settings(stream__start="committed"))
        until(learned(where, 400))
        running.stop()
        assert where.held[0].run.start == {0: 100, 1: 250}


def test_two_jobs_in_one_group_are_refused(settings: Callable[..., Settings]) -> None:
    filled(settings(), 100)
    with counted() as where, counted() as elsewhere:
        first = Running(where, settings())
        until(learned(where, 100))
        second = Running(elsewhere, settings())
        second.join()
        assert isinstance(second.failure, SourceRefused)
        first.stop()
        assert first.failure is None


def test_another_model_is_refused_by_the_shards(settings: Callable[..., Settings]) -> None:
    filled(settings(), 100)
    with served(2) as where:
        where.shards().agree()
        running = Running(where, settings())
        running.join()
    assert isinstance(running.failure, ShardRefused)
    assert "holds another model" in str(running.failure)


def test_metrics_are_served_and_lag_shows(settings: Callable[..., Settings]) -> None:
    port = free_ports(1)[0]
    with counted() as where:
        running = Running(where, settings(worker__metrics=f"127.0.0.1:{port}"))
        until(lambda: "not yet a member" in probe(port)[1])  # it waits for the topic
        filled(settings(), 300)
        until(learned(where, 300))
        bad = 2 * int(is_bad(np.arange(300)).sum())

        def text() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                return str(answer.read().decode())

        # The shards know that a batch is learned before its worker hears so and counts it.
        until(lambda: f"streamtrain_worker_samples_total {600 - bad}.0" in text())
        assert 'streamtrain_worker_stage_seconds_count{stage="decode"}' in text()
        assert is_ready(port)
        running.stop()


def test_a_topic_of_nobody_is_a_configuration_error(settings: Callable[..., Settings]) -> None:
    made, step, spec = stepping(tensorflow=False)
    with pytest.raises(ConfigError, match=r"stream\.topic is not set"):
        WorkerProcess(made, step, spec, ["127.0.0.1:1"], load_settings())


MODEL = """
import keras, streamtrain as st
schema = st.Schema(label="label", time="ts", features=[st.Categorical(f"id{i}", table="ids", dim=4) for i in range(3)])
def graph(inputs):
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(list(inputs.values())))
model = st.Model(schema, graph)
"""


def test_the_command_line_colocated(settings: Callable[..., Settings], tmp_path: Path) -> None:
    """Two workers as a user starts them, each with a shard of its own; SIGTERM drains them."""
    chosen = settings()
    stream = filled(chosen, 2000)
    (tmp_path / "model.py").write_text(MODEL)
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    options = ["--model", "model.py:model", "--ps", addresses, "--topic", str(chosen.stream.topic)]
    command = [*commands.COMMAND, "worker", *options, "--set", f"stream.url={chosen.stream.url}"]
    workers = [
        commands.start([*command, "--shard", str(i)], cwd=tmp_path, stderr=subprocess.PIPE, text=True) for i in range(2)
    ]
    try:
        until(lambda: stream.committed("streamtrain") == {0: 2000, 1: 2000}, PATIENCE)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        said = [worker.communicate(timeout=PATIENCE)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert any("partitions assigned" in one for one in said)  # the other may have come too late
    dead = open_stream(chosen.stream.model_copy(update={"topic": f"{chosen.stream.topic}.dead"}))
    assert sum(of.high for of in dead.bounds().values()) >= 2 * is_bad(np.arange(2000)).sum()


def test_a_run_of_the_defaults_of_an_earlier_release_is_gone_on_with(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    chosen = settings()
    filled(chosen, 200)
    (tmp_path / "model.py").write_text(MODEL)
    made = load_model(f"{tmp_path / 'model.py'}:model")
    earlier = made.replace(embedding_optimizer=st.Adagrad(decay=0.999), dense_optimizer=st.Adam(beta1=0.0))
    step = Step(earlier)
    began = RunTemplate(Spec.of(earlier), step.initial_dense, step.initial_statistics, {})
    with served(1, beginning=began) as where:
        where.shards().agree()
        options = ["--model", "model.py:model", "--ps", where.channels[0][1], "--topic", str(chosen.stream.topic)]
        command = [*commands.COMMAND, "worker", *options, "--set", f"stream.url={chosen.stream.url}"]
        worker = commands.start(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        try:
            until(lambda: where.shards().clocks() == [{0: 200, 1: 200}], PATIENCE)
            worker.send_signal(signal.SIGTERM)
            said = worker.communicate(timeout=PATIENCE)[1]
        finally:
            worker.kill()
            worker.wait()
    assert worker.returncode == 0, said
    assert "the run began with the defaults of an earlier release, and keeps them" in said


def test_stands_have_watermarks(settings: Callable[..., Settings]) -> None:
    filled(settings(), 300)
    with counted() as where:
        running = Running(where, settings())
        until(learned(where, 300))
        running.stop()
        stands: list[Progress] = where.shards().progress()
    last = max(offset for offset in range(300) if not is_bad(np.arange(300))[offset])
    assert [dict(stand.watermarks) for stand in stands] == [{0: last, 1: last}] * 2


def test_help_does_not_load_tensorflow() -> None:
    code = "import sys, runpy; sys.argv = ['streamtrain', 'worker', '--help']\n"
    code += "try: runpy.run_module('streamtrain', run_name='__main__')\nexcept SystemExit: pass\n"
    code += "assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"COLUMNS": "80"}, capture_output=True)
