"""`tune`: what it varies, how it compares, when it drops and ends, and what it says."""

import inspect
import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from rich.console import Console

import streamtrain as st
from streamtrain.cli.terminal import Curve, chart
from streamtrain.cli.tune import Screen, show, tune, verdict
from streamtrain.errors import ConfigError, TooManyBadSamples
from streamtrain.tuning.compare import block_sums, difference
from streamtrain.tuning.outcome import TuningOutcome
from streamtrain.tuning.search import Search
from streamtrain.tuning.space import HEATS, Heat, changes, key, snippet, trials
from tests import commands
from tests.models import make

ROOT = Path(__file__).parents[2]
RATES: tuple[Heat, ...] = ({"embedding_rate": (0.01, 0.1, 10.0, 100.0)},)


def stream(count: int = 6000, seed: int = 0, users: int = 30) -> list[dict[str, Any]]:
    """Every user has a probability of its own, and nothing else matters."""
    rng = np.random.default_rng(seed)
    likes, who = rng.uniform(0.05, 0.95, users), rng.integers(0, users, count)
    labels = rng.random(count) < likes[who]
    return [
        {"ts": i, "label": int(label), "user": f"u{u}", "spent": float(10 * likes[u] + rng.normal())}
        for i, (u, label) in enumerate(zip(who.tolist(), labels.tolist(), strict=True))
    ]


def weights(inputs: dict[str, Any]) -> Any:
    """A weight per user, without any of the graph's own."""
    return keras.layers.Activation("sigmoid")(inputs["user"])


@cache
def per_user(rate: float = 0.001, **options: Any) -> st.Model:
    options = {"reduction": "sum", "embedding_optimizer": st.Adagrad(rate)} | options
    return make([st.Categorical("user", dim=1, init=st.Constant(0.0))], weights, **options)


def searched(model: st.Model, samples: Sequence[dict[str, Any]], **options: Any) -> Search:
    given: dict[str, Any] = {"heats": RATES, "batch_size": 64}
    search = Search(model, **(given | options))
    search.read([json.dumps(one).encode() for one in samples])
    search.run()
    return search


def test_a_batch_is_cut_as_it_is_selected() -> None:
    samples = [
        {"ts": i, "label": i % 2, "user": f"u{i}", "tags": [f"t{j}" for j in range(i % 4)], "price": i / 3}
        for i in range(11)
    ]
    model = make([st.Categorical("user", dim=2), st.Categorical("tags", dim=2), st.Numeric("price")])
    [(batch, _)] = st.Learner(model).read(samples)
    pieces = list(batch.cut(4))
    assert [len(one) for one in pieces] == [4, 4, 3]
    for k, piece in enumerate(pieces):
        mask = np.arange(11) // 4 == k
        for name, column in vars(batch.select(mask)).items():
            np.testing.assert_array_equal(getattr(piece, name), column, err_msg=name)
            assert getattr(piece, name).dtype == column.dtype
    assert list(batch.select(np.zeros(11, bool)).cut(4)) == []


def test_a_model_is_replaced_option_by_option() -> None:
    options: dict[str, Any] = {
        "loss": "binary_crossentropy",
        "embedding_optimizer": st.SGD(0.5),
        "dense_optimizer": st.SGD(0.25),
        "name": "other",
        "reduction": "sum",
        "loss_weights": {"label": 2.0},
        "micro_batch_size": 3,
        "seed": 7,
        "keep": {0: 0.5},
    }
    model = make([st.Categorical("user", dim=2)], **options)
    same, other = model.replace(), model.replace(seed=8, reduction="mean")
    for name in inspect.signature(st.Model).parameters:
        held = {"loss": "losses", "keep": "sampling"}.get(name, name)
        if held != "sampling":
            assert getattr(same, held) == getattr(model, held), name
    assert same.sampling is not None
    assert same.sampling.rates == {0: 0.5, 1: 1.0}
    assert (other.seed, other.reduction, other.embedding_optimizer) == (8, "mean", st.SGD(0.5))
    with pytest.raises(ConfigError, match="reduction"):
        model.replace(reduction="none")


def test_errors_of_differences_are_honest_where_samples_hang_together() -> None:
    rng = np.random.default_rng(1)
    ones, zeros = np.full(2048, 16.0), np.zeros(2048)
    independent = rng.normal(0.5, 1, (2048, 16))
    found = difference(independent.sum(axis=1), zeros, ones)
    assert found.mean == pytest.approx(independent.mean())
    assert found.error == pytest.approx(1 / math.sqrt(2048 * 16), rel=0.35)
    bursts = np.repeat(rng.normal(0.5, 1, 64), 32 * 16).reshape(2048, 16)
    assert difference(bursts.sum(axis=1), zeros, ones).error == pytest.approx(1 / math.sqrt(64), rel=0.35)
    assert found.margin() == pytest.approx(2.0395 * found.error, rel=1e-4)  # Student's, 31 degrees of freedom
    assert found.margin(10) == pytest.approx(3.0221 * found.error, rel=1e-3)
    few = difference(np.ones(3), np.zeros(3), np.ones(3))
    assert (few.mean, few.error, few.margin()) == (1, math.inf, math.inf)
    assert block_sums(np.ones(35)).tolist() == [16, 16, 3]


def test_what_a_setting_changes() -> None:
    features = [
        st.Categorical("user", dim=4, optimizer=st.Adagrad(0.3)),
        st.Categorical("item", dim=4),
        st.Categorical("history", table="item", dim=4, init=st.Uniform(0.1)),
        st.Categorical("wide", dim=1, init=st.Constant(0.0)),
    ]
    given = make(features, embedding_optimizer=st.FTRL(0.1, l1=0.5), micro_batch_size=8)

    def after(**settings: Any) -> dict[str, str]:
        [model] = trials({name: [value] for name, value in settings.items()}, given)
        return changes(given, model)

    both = after(embedding_rate=2.0)
    assert both == {"embedding_optimizer": "st.FTRL(0.2, l1=0.5)", "user.optimizer": "st.Adagrad(0.6)"}
    assert after(embedding_optimizer=st.Adam(0.01)) == {"embedding_optimizer": "st.Adam(0.01)"}
    assert after(dense_rate=3.0) == {"dense_optimizer": "st.Adagrad(0.09, initial_accumulator=0.1, decay=0.999)"}
    assert after(dim=2.0) == {"user.dim": "8", "item.dim": "8", "history.dim": "8"}
    births = {"user.init": "st.Uniform(0.005)", "item.init": "st.Uniform(0.01)", "history.init": "st.Uniform(0.01)"}
    assert after(init_scale=0.1) == births
    assert set(after(initial_accumulator=1.0)) == {"embedding_optimizer", "user.optimizer"}
    assert after(micro_batch_size=4, reduction="sum") == {"reduction": '"sum"', "micro_batch_size": "4"}
    assert after(embedding_rate=1.0, micro_batch_size=8) == {}
    [model] = trials({"dim": [2.0], "embedding_rate": [2.0], "micro_batch_size": [4]}, given)
    pasted = snippet(given, model)
    assert "embedding_optimizer=st.FTRL(0.2, l1=0.5)," in pasted
    assert 'st.Categorical("user", ..., dim=8, optimizer=st.Adagrad(0.6))' in pasted
    assert "micro_batch_size=4," in pasted
    compile(pasted, "snippet", "exec")


def test_every_value_of_the_table_can_be_tried() -> None:
    given = make([st.Categorical("user", dim=4)])
    for heat in HEATS:
        assert {key(model) for model in trials(heat, given)} - {key(given)}
    assert len({key(model) for model in trials({"seed": [0, 1, 2]}, given)}) == 3


def test_it_finds_the_rate_and_drops_the_hopeless_early() -> None:
    search = searched(per_user(), stream())
    assert search.best is not None
    rate = search.best.model.embedding_optimizer.rate
    assert 0.05 <= rate <= 1, rate  # what is best on this stream; it goes on from the outermost one that was listed
    by_rate = {one.model.embedding_optimizer.rate: one for one in search.tried}
    assert by_rate[1e-5].chunks < search.chunks
    assert "not among the best" in by_rate[1e-5].ended or "hopeless" in by_rate[1e-5].ended
    outcome = TuningOutcome.of(search)
    assert outcome.is_better
    assert outcome.given is not None
    assert outcome.best is not None
    assert outcome.better is not None
    assert outcome.best.loss < outcome.given.loss - 0.05
    assert outcome.margin < -outcome.better.mean
    assert outcome.confirmed is not None
    assert outcome.warnings == []
    alone = st.Learner(search.best.model, batch_size=64)
    alone.learn(stream())
    metrics = alone.metrics()["label"]
    assert outcome.best.all["label"].auc == pytest.approx(metrics.auc, abs=1e-6)
    assert search.best.loss(search.decoded, 0, search.chunks) == pytest.approx(metrics.log_loss, abs=1e-5)


def test_candidates_that_differ_in_rates_have_their_graphs_together() -> None:
    heats = ({"embedding_rate": (3.0, 10.0), "dense_rate": (1.0, 3.0)},)
    model = make([st.Categorical("user", dim=4)], micro_batch_size=8)
    search = searched(model, stream(2500), heats=heats)
    assert len(search.tried) >= 4
    assert len(search.given._graphs.compiled) == (1 if search.confirmed is None else 2)  # the other seed's


def test_it_is_deterministic() -> None:
    one, other = (TuningOutcome.of(searched(per_user().replace(), stream(4096))).as_json() for _ in range(2))
    for outcome in (one, other):
        outcome.pop("seconds")
        for figures in (outcome["given"], outcome["best"]):
            figures.pop("samples_per_s")
    assert one == other


def test_it_says_that_nothing_is_better() -> None:
    search = searched(per_user(0.3), stream(), heats=({"embedding_rate": (1e-4, 1e-3)},))
    outcome = TuningOutcome.of(search)
    assert search.best is search.given
    assert not outcome.is_better
    assert outcome.better is None
    assert "No candidate is known to be better than the model as given" in verdict(outcome)
    outcome = TuningOutcome.of(searched(per_user(0.3), stream(), heats=({"embedding_rate": (1.2,)},)))
    assert outcome.better is not None
    assert abs(outcome.better.mean) < outcome.margin
    assert "No candidate is significantly better than the model as given" in verdict(outcome)


class Ticking:
    """A clock that goes on by so much whenever it is looked at."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.mark.parametrize("tick", [0.3, 3.0])
def test_it_holds_its_time(tick: float) -> None:
    clock = Ticking(tick)
    search = searched(per_user(), stream(), minutes=0.5, clock=clock, heats=HEATS)
    assert clock.now <= 30 + 40 * tick
    outcome = TuningOutcome.of(search)
    assert search.ended == "the time limit was reached"
    assert any("the time limit was reached" in one for one in outcome.not_tried)
    assert bool(outcome.cut) == (outcome.samples < 6000)
    assert search.alive == []


def test_it_holds_its_memory() -> None:
    samples = stream(users=20_000)
    alone = st.Learner(per_user(), batch_size=64)
    alone.learn(samples)
    [(batch, _)] = st.Learner(per_user(), batch_size=6000).read(samples)
    needed = sum(column.nbytes for column in vars(batch).values()) + 6000 * 16 + alone.nbytes
    many: Heat = {"embedding_rate": [10.0**-k for k in range(12)]}
    search = searched(per_user(), samples, megabytes=2.2 * needed / 1e6, heats=(many,))
    assert not search.cut
    assert any("out of memory: it used" in one.ended for one in search.tried)
    assert not all("out of memory: it used" in one.ended for one in search.tried)
    cut = searched(per_user(), stream(), megabytes=0.1, heats=())
    assert cut.cut == "decoded samples use half of the memory limit"
    assert 0 < TuningOutcome.of(cut).samples < 6000


def test_a_graph_that_does_not_take_a_dim_is_dropped_with_the_reason() -> None:
    def rigid(inputs: dict[str, Any]) -> Any:
        return keras.layers.Dense(1, "sigmoid")(keras.layers.Reshape((4,))(inputs["user"]))

    model = make([st.Categorical("user", dim=4)], rigid)
    search = searched(model, stream(3000), heats=({"dim": (0.5, 2.0)},))
    assert len(search.tried) == 2
    assert all("graph fails with" in one.ended for one in search.tried)


def test_what_is_not_finite_is_dropped() -> None:
    linear = make(
        [st.Categorical("user", dim=1)],
        lambda inputs: keras.layers.Dense(1)(inputs["user"]),
        loss="mean_squared_error",
        label="spent",
        reduction="sum",
        embedding_optimizer=st.SGD(0.001),
    )
    search = searched(linear, stream(), heats=({"embedding_rate": (1e20,)},))
    assert [one.ended for one in search.tried] == ["its loss is no longer finite"]
    broken = linear.replace(embedding_optimizer=st.SGD(1e20))
    mended = searched(broken, stream(), heats=({"embedding_rate": (1e-23, 1e-22)},))
    outcome = TuningOutcome.of(mended)
    assert outcome.given is None
    assert outcome.best is not None
    assert outcome.is_better
    assert any("the model as given fails" in one for one in outcome.warnings)
    json.dumps(outcome.as_json(), allow_nan=False)
    hopeless = TuningOutcome.of(searched(broken, stream(), heats=({"embedding_rate": (10.0,)},)))
    assert hopeless.best is None
    assert "No result" in verdict(hopeless)
    assert not hopeless.is_better


def test_several_labels_and_other_losses() -> None:
    def two(inputs: dict[str, Any]) -> dict[str, Any]:
        x = inputs["user"]
        return {"label": keras.layers.Dense(1, "sigmoid")(x), "spent": keras.layers.Dense(1)(x)}

    def absolute(labels: Any, predictions: Any) -> Any:
        return keras.ops.abs(labels - predictions)

    model = make(
        [st.Categorical("user", dim=4)],
        two,
        label=["label", st.Label("spent", optional=True)],
        loss={"label": "binary_crossentropy", "spent": absolute},
        loss_weights={"label": 2.0},
    )
    samples = [one if i % 3 else one | {"spent": None} for i, one in enumerate(stream(4096))]
    both = TuningOutcome.of(searched(model, samples, heats=()))
    assert both.given is not None
    assert set(both.given.all) == {"label", "spent"}
    spent = TuningOutcome.of(searched(model, samples, heats=(), label="spent"))
    assert spent.given is not None
    assert spent.given.loss == pytest.approx(spent.given.later["spent"].mean_absolute_error, rel=1e-4)
    log_loss = both.given.later["label"].log_loss
    of_both = 2 * log_loss + spent.given.loss * both.given.later["spent"].samples / both.judged
    assert both.given.loss == pytest.approx(of_both, rel=1e-3)
    with pytest.raises(ConfigError, match="unknown label 'other'"):
        Search(model, label="other")


def test_down_sampled_negatives_count_for_those_left_out() -> None:
    model = per_user(0.1).replace(keep={0: 0.5})
    outcome = TuningOutcome.of(searched(model, stream(), heats=({"embedding_rate": (0.1,)},)))
    assert outcome.given is not None
    assert outcome.given.loss == pytest.approx(outcome.given.later["label"].log_loss, rel=1e-5)


def test_it_warns_where_nothing_is_learned() -> None:
    rng = np.random.default_rng(5)
    noise = [one | {"user": f"u{rng.integers(10)}", "label": int(rng.random() < 0.3)} for one in stream(4096)]
    outcome = TuningOutcome.of(searched(per_user(), noise, heats=({"embedding_rate": (10.0,)},)))
    assert any("not significantly better than predicting the label's mean" in one for one in outcome.warnings)
    constant = [one | {"label": 1} for one in stream(3000)]
    outcome = TuningOutcome.of(searched(per_user(), constant, heats=()))
    assert "label is always 1: there is nothing to learn" in outcome.warnings
    open_end = make([st.Categorical("user", dim=2)], lambda inputs: keras.layers.Dense(1)(inputs["user"]))
    outcome = TuningOutcome.of(searched(open_end, stream(3000), heats=()))
    assert any("does its graph end in a sigmoid" in one for one in outcome.warnings)


def test_options_that_are_wrong() -> None:
    model = per_user()
    with pytest.raises(ConfigError, match="unknown setting 'depth'"):
        Search(model, without=["depth"])
    with pytest.raises(ConfigError, match="minutes must be a finite number > 0"):
        Search(model, minutes=0)
    with pytest.raises(ConfigError, match="there are no samples"):
        searched(model, [])
    kept = searched(model, stream(2500), without=["embedding_rate"])
    assert kept.tried == []
    assert kept.skipped["embedding_rate"] == "excluded by request"
    assert kept.skipped.keys() == {"embedding_rate"}


def test_a_chart_has_its_curves() -> None:
    falling, rising = np.linspace(1, 0, 20), np.linspace(0, 1, 10)
    lines = chart([Curve("red", falling), Curve("blue", rising)], width=39, height=6)
    assert len(lines) == 6
    assert {len(line) for line in lines} == {39}
    assert lines[0].plain.startswith("  0.9") or lines[0].plain.startswith("  1.0")
    drawn = [line.plain[9:] for line in lines]
    assert drawn[0][0] != "⠀"
    assert drawn[-1][-1] != "⠀"
    assert drawn[0][-1] == "⠀"
    assert chart([Curve("red", np.array([1.0]))]) == []
    assert chart([Curve("red", np.full(9, np.nan))]) == []
    assert len(chart([Curve("red", np.ones(9))], height=3)) == 3


def test_it_draws_while_it_runs_and_at_the_end() -> None:
    terminal = Console(force_terminal=True, width=100, height=40, record=True, file=io.StringIO())
    screen = Screen(terminal, "samples.jsonl")
    with screen.live():
        search = searched(per_user(), stream(8192), on_progress=screen)
    show(search, TuningOutcome.of(search), terminal)
    text = terminal.export_text()
    assert "candidates in" in text
    assert "── given" in text
    assert "Better than the model as given" in text
    assert "Not tried:" in text


MODEL = """
import keras
import streamtrain as st

schema = st.Schema(features=[st.Categorical("user", dim=1)], time="ts")
model = st.Model(
    schema, lambda inputs: keras.layers.Activation("sigmoid")(inputs["user"]), embedding_optimizer=st.Adagrad(0.001)
)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "m.py"
    file.write_text(MODEL)
    return str(file)


def run(file: Path, model: str, **options: Any) -> None:
    tune(
        [str(file)],
        model,
        batch_size=256,
        without="micro_batch_size,embedding_optimizer,initial_accumulator,reduction",
        **options,
    )


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of TensorFlow's threads cannot be set any more."""
    module = sys.modules["streamtrain.cli.tune"]  # the package has the command under the same name
    monkeypatch.setattr(module, "load_tensorflow", lambda threads: None)


def test_the_command(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samples.csv"
    rows = stream(6000)
    file.write_text("ts,label,user\n" + "".join(f"{one['ts']},{one['label']},{one['user']}\n" for one in rows))
    run(file, model)
    out, said = capsys.readouterr()
    figures = json.loads(out)
    assert figures["samples"] == 6000
    assert figures["is_better"]
    assert figures["better_by"] > figures["margin"] > 0
    assert figures["best"]["metrics"]["label"]["auc"] > figures["given"]["metrics"]["label"]["auc"]
    assert figures["snippet"].splitlines()[2].strip() in said
    assert "loss given" in said
    assert "Not tried:" in said


def test_files_with_little_in_them(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="has no samples"):
        run(file, model)
    file.write_bytes(b"{}\n" * 20)
    with pytest.raises(TooManyBadSamples, match="20 of 20 samples were refused"):
        run(file, model)
    file.write_bytes(b'{"ts": 1, "label": 1, "user": "u1"}\n')
    run(file, model)
    figures = json.loads(capsys.readouterr().out)
    assert not figures["is_better"]
    assert "label is always 1: there is nothing to learn" in figures["warnings"]


def test_a_signal_ends_it_and_it_says_what_it_knows(tmp_path: Path, model: str) -> None:
    command = [*commands.COMMAND, "tune", "-", "--model", model]
    with commands.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        lines = b"".join(json.dumps(one).encode() + b"\n" for one in stream(30_000))
        process.stdin.write(lines)  # far more than the pipe holds: it learns while it reads
        process.stdin.flush()
        process.send_signal(signal.SIGTERM)
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM, err
    figures = json.loads(out)
    assert figures["ended"] == "interrupted"
    assert figures["samples"] > 0
    assert "The search ended early" in err.decode()
