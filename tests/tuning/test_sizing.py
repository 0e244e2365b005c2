"""`size`: how many rows there will be, what memory is worth, and what options cost that save it."""

import json
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import NDArray

import streamtrain as st
from streamtrain._core import Table, hash_integers
from streamtrain.disk import file_system
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError
from streamtrain.settings.groups import StreamSettings
from streamtrain.stream.opening import open_stream
from streamtrain.tuning.reuse import Accesses
from streamtrain.tuning.sizing import Plan, Sizing, best, disk_reads
from tests import commands
from tests.models import make
from tests.patience import PATIENCE

Keys = NDArray[np.uint64]
SAMPLES = 256  # of a batch
IDS = 4  # of a sample
OPTIONS: dict[str, Any] = {"optimizer": "rowwise_adagrad", "dtype": "float16", "rate": 0.05, "seed": 1}


def push(table: Table, keys: Keys, counts: NDArray[np.uint32], times: NDArray[np.uint32]) -> None:
    table.pull(keys)
    table.push(keys, np.full((len(keys), table.dim), 0.1, np.float32), counts, times)


class Both:
    """A table, and what is said of its accesses."""

    def __init__(self, *, most: int = 1 << 24, **options: Any) -> None:
        self.table, self.accesses = Table(16, **OPTIONS | options), Accesses(most)

    def add(self, ids: NDArray[np.int64], time: int) -> None:
        keys, counts = np.unique(hash_integers(ids), return_counts=True)
        of_batch = keys, counts.astype(np.uint32), np.full(len(keys), time, np.uint32)
        push(self.table, *of_batch)
        self.accesses.add(*of_batch, SAMPLES)


def power_law(rows: int, power: float, seed: int = 0) -> Any:
    """Draws ids of a batch, id i with a probability proportional to (i + 1)^-power."""
    weights = np.cumsum((1.0 + np.arange(rows)) ** -power)
    rng = np.random.default_rng(seed)
    return lambda: np.searchsorted(weights, rng.random(SAMPLES * IDS) * weights[-1]).astype(np.int64)


@pytest.mark.parametrize(("power", "share"), [(0.0, 0.7), (0.8, 0.5), (1.05, 0.35)])
def test_reads_from_disk_are_as_predicted(tmp_path: Path, power: float, share: float) -> None:
    rows, batches = 200_000, 600
    nbytes = Table(16, **OPTIONS).stats()["row_bytes"] + 8
    both = Both(memory=int(rows * nbytes * share), folder=str(tmp_path))
    draw, before = power_law(rows, power), 0
    both.add(np.random.default_rng(1).permutation(rows), 1)
    for batch in range(batches):
        if batch == batches // 2:
            before = both.table.stats()["disk_reads"]
        both.add(draw(), batch + 1)
    stats, reuse = both.table.stats(), both.accesses.reuse()
    assert stats["rows_on_disk"] > 10_000
    assert round(reuse.rows) == stats["rows"]
    samples = SAMPLES * (batches - batches // 2)
    read = (stats["disk_reads"] - before) / samples
    predicted = reuse.reads(stats["rows"] - stats["rows_on_disk"], 0)
    assert read / 1.4 < predicted < read * 1.4


def test_some_of_the_keys_tell_what_all_of_them_tell() -> None:
    draw, all_, some = power_law(100_000, 1.0), Accesses(1 << 24), Accesses(20_000)
    for batch in range(1000):
        keys, counts = np.unique(hash_integers(draw()), return_counts=True)
        for accesses in (all_, some):
            times = np.full(len(keys), batch + 1, np.uint32)
            accesses.add(keys, counts.astype(np.uint32), times, SAMPLES)
    assert all_.share == 1
    assert some.share < 0.1
    for options in ({}, {"min_count": 3}, {"expire_after": 200.0}):
        exact, about = all_.reuse(**options), some.reuse(**options)
        assert about.rows == pytest.approx(exact.rows, rel=0.1)
        assert about.growth == pytest.approx(exact.growth, abs=0.1)
        assert about.accesses == pytest.approx(exact.accesses, rel=0.15)  # a few keys have many of them
        assert about.reads(10_000, 1e9) == pytest.approx(exact.reads(10_000, 1e9), rel=0.15)
    assert some.seconds() == all_.seconds() == 999


@pytest.mark.parametrize("min_count", [1, 2, 5])
@pytest.mark.parametrize("expire_after", [0, 40, 300])
def test_rows_are_those_of_a_table_with_the_same_options(min_count: int, expire_after: int) -> None:
    both, draw = Both(min_count=1, expire_after=expire_after), power_law(20_000, 0.9)
    admitting = Table(16, **OPTIONS, min_count=min_count)
    for batch in range(200):
        ids = draw()
        both.add(ids, batch + 1)
        keys, counts = np.unique(hash_integers(ids), return_counts=True)
        push(admitting, keys, counts.astype(np.uint32), np.full(len(keys), batch + 1, np.uint32))
    if expire_after:
        both.table.expire(200, 1 << 30)
        assert both.accesses.reuse(expire_after=expire_after).rows == len(both.table)
    assert both.accesses.reuse(min_count=min_count).rows == len(admitting)


def test_rows_grow_as_they_have_grown() -> None:
    closed, open_ = Accesses(), Accesses()
    for batch in range(200):
        for accesses, ids in ((closed, np.arange(500)), (open_, np.arange(500) + 500 * batch)):
            ones = np.ones(500, np.uint32)
            accesses.add(hash_integers(ids.astype(np.int64)), ones, ones, 100)
    assert closed.reuse().growth == 0
    assert closed.reuse().rows_after(1e9) == 500
    assert open_.reuse().growth == pytest.approx(1)
    assert open_.reuse().rows_after(2_000_000) == pytest.approx(100 * 100_000)
    assert open_.reuse().reads(10, 2_000_000) == 0  # none is ever needed again
    assert closed.reuse().reads(499, 0) == 5  # who needs all again and again finds none of those needed last
    assert closed.reuse().reads(500, 0) == 0
    half = Accesses()
    for batch in range(400):
        ids = np.unique(np.random.default_rng(batch).integers(0, 200_000, 500))
        half.add(hash_integers(ids), np.ones(len(ids), np.uint32), np.ones(len(ids), np.uint32), 100)
    later = half.reuse()
    assert later.reads(1000, 1e9) > 1.5 * later.reads(1000, 0)  # what is new in these samples has a row by then


def samples(count: int = 8000, seed: int = 0) -> list[dict[str, Any]]:
    """The user decides; a request has an id of its own, which says nothing and never comes back."""
    rng = np.random.default_rng(seed)
    likes, who, pages = rng.uniform(0.05, 0.95, 50), rng.integers(0, 50, count), rng.integers(0, 2000, count)
    labels = rng.random(count) < likes[who]
    return [
        {"ts": 60.0 * i, "label": int(label), "user": f"u{u}", "request": f"r{seed}-{i}", "page": page}
        for i, (u, label, page) in enumerate(zip(who.tolist(), labels.tolist(), pages.tolist(), strict=True))
    ]


def graph(inputs: dict[str, Any]) -> Any:
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([inputs["user"], inputs["request"]]))


def model(**options: Any) -> st.Model:
    features = [st.Categorical("user", dim=8), st.Categorical("request", dim=8, **options)]
    return make(features, graph)


def sized(given: st.Model, count: int = 8000) -> Sizing:
    sizing = Sizing(given, batch_size=256)
    for batch, bad in st.Learner(given, batch_size=sizing.chunk).read(samples(count)):
        assert not bad
        sizing.add(batch)
    return sizing


def named(plans: list[Plan]) -> dict[str, Plan]:
    return {plan.name: plan for plan in plans}


def test_ids_that_never_come_back_get_a_min_count() -> None:
    sizing = sized(model())
    plans = sizing.plans(7e6, samples=1e6)
    chosen = best(plans)
    assert chosen is not None
    assert chosen.changes == {"request.min_count": "2"}
    assert chosen.worse is not None
    assert abs(chosen.worse.mean) < 0.01
    assert [round(one.rows) for one in chosen.tables] == [50, 0]
    given = plans[0]
    assert [round(one.rows) for one in given.tables] == [50, 1_000_000]
    assert not given.fits  # the index of a million rows on disk takes 10 MB
    found = named(plans)
    assert found["dtype='float16'"].nbytes < 0.85 * given.nbytes
    assert found["dtype='float16'"].changes == {"request.dtype": '"float16"'}
    assert found["expire_after='1h'"].tables[1].rows <= 256  # those of the last batch
    assert found["expire_after='1h'"].changes == {"request.expire_after": '"1h"'}  # users come back
    assert "min_count=5" not in found  # saves no more than 2
    assert sizing.plans(1e9, samples=1e6)[0].tables[1].in_memory == pytest.approx(1e6)
    assert len(sizing.plans(1e9)) == 1  # all have room


def test_options_of_the_model_count_and_stay() -> None:
    sizing = sized(model(min_count=2, expire_after="1h"))
    found = named(sizing.plans(1e4))
    assert found["as given"].tables[1].rows == 0
    assert {option for plan in found.values() for option in plan.options} <= {"dtype"}
    capped = sized(model(capacity=1000)).plans(1e4)[0]
    assert [round(one.rows) for one in capped.tables] == [50, 1000]
    assert capped.tables[1].reads == 0  # what is evicted is on no disk


def test_without_time_nothing_but_the_model_as_given_is_learned() -> None:
    sizing = sized(model(), 3000)
    plans = sizing.plans(1e5, seconds=0)
    assert math.isfinite(plans[0].loss)
    assert len(plans) > 1
    assert all(math.isnan(plan.loss) and plan.worse is None for plan in plans[1:])
    assert best(plans) is plans[0]


def test_there_must_be_samples() -> None:
    with pytest.raises(ConfigError, match="there are no samples"):
        Sizing(model()).plans(1e9)


def test_the_speed_of_a_disk_is_measured(tmp_path: Path) -> None:
    assert disk_reads(str(tmp_path), seconds=0.1, rows=400_000) > 100


MODEL = """
import keras
import streamtrain as st

def graph(inputs):
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(list(inputs.values())))

features = [st.Categorical(name, dim=8) for name in ("user", "request", "page")]
model = st.Model(st.Schema(features=features, time="ts"), graph)
"""


def test_of_a_file_and_of_a_topic_the_same_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    lines = [json.dumps(one) for one in samples()]
    (tmp_path / "samples.jsonl").write_text("\n".join([*lines, "{}"]))

    def size(*args: str, disk: Path = tmp_path, said: str = "") -> Any:
        command = [*commands.COMMAND, "size", "--memory", "150kB", "--disk", str(disk), *args]
        done = commands.run(command, capture_output=True, cwd=tmp_path, timeout=PATIENCE, text=True)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        return done.stdout

    of_file = ("samples.jsonl", "--model", "model.py:model")
    file = json.loads(size(*of_file, "--json"))
    assert (file["samples"], file["horizon"], file["learned"]) == (8000, 8000, 8000)
    assert file["disk_reads_per_s"] > 100
    given, chosen = file["plans"][0], file["plans"][file["best"]]
    assert given["reads_per_sample"] > 0  # of pages
    assert given["tables"]["page"]["rows_in_memory"] < 2000
    assert chosen["options"]["request.expire_after"] == '"1h"'
    assert chosen["reads_per_sample"] < given["reads_per_sample"]
    if file_system("/dev/shm") == "tmpfs":
        unknown = "the speed of the disk is not known: /dev/shm is itself in memory (tmpfs); set --disk to a folder on"
        assert "samples/s" not in size(*of_file, "--minutes", "0", disk=Path("/dev/shm"), said=unknown)
    with Valkey() as server:
        stream = open_stream(StreamSettings(url=server.url, topic="clicks"))
        stream.create(1)
        writer = stream.writer()
        for line in lines:
            writer.write(line.encode())
        assert writer.flush(PATIENCE) == 0
        writer.close()
        (tmp_path / "streamtrain.toml").write_text(
            f'model = "model.py:model"\nstream.url = "{server.url}"\nstream.topic = "clicks"\n'
        )
        topic = json.loads(size("--json"))
        shown = size("--horizon", "1e6", "--minutes", "0")
    for one in ("plans", "samples", "best"):
        assert topic[one] == file[one]
    assert "planned for 1,000,000" in shown
    assert "does not fit" in shown
    assert "with all rows on disk, their index takes" in shown
