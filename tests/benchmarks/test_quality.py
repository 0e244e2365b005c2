"""The benchmark of quality against speed: its figures, its tables and its picture."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import quality  # noqa: E402
from harness import charts, learners  # noqa: E402
from harness.charts import Axes, Panel, Point, Series  # noqa: E402
from harness.runner import figure_of  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def test_auc_and_log_loss_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    labels = random.random(500) < 0.3
    predictions = np.round(np.clip(random.random(500) * 0.5 + labels * 0.2, 0.01, 0.99), 2)  # with ties
    assert learners.auc(predictions, labels) == pytest.approx(roc_auc_score(labels, predictions))
    assert learners.log_loss(predictions, labels) == pytest.approx(log_loss(labels, predictions))


def messages(count: int) -> list[bytes]:
    """Every other one of a user whose label is always the same, the others of users who come once, with any label."""
    random = np.random.default_rng(1)
    samples: list[dict[str, Any]] = [
        {"ts": i, "user": 1000 + i if i % 2 else int(random.integers(20)), "words": ["a", f"b{i % 7}"], "age": i % 50}
        for i in range(count)
    ]
    known = [{**one, "label": int(random.integers(2) if i % 2 else one["user"] % 2)} for i, one in enumerate(samples)]
    return [json.dumps(sample).encode() for sample in known]


def arguments(**changed: Any) -> argparse.Namespace:
    """Of a learner."""
    fields = {"categorical": ["user", "words"], "lists": ["words"], "numeric": ["age"]}
    options: dict[str, Any] = {"batch": 64, "micro_batch": 8, "seed": 0, "rate": 1e-2, "shape": "one layer"}
    options |= {"as_it_was": False, "plain_numbers": False, "replace": ""}
    return argparse.Namespace(**(fields | options | changed))


@pytest.mark.parametrize(
    ("learner", "changed"),
    [
        (learners.plain_keras, {}),
        (learners.streamtrain, {}),
        (learners.streamtrain, {"shape": "factorization machine, all pairs"}),
        (learners.streamtrain, {"shape": quality.NO_GRAPH, "micro_batch": None}),
    ],
)
def test_a_learner_predicts_every_sample_before_it_learns_it(learner: Any, changed: dict[str, Any]) -> None:
    lines = messages(64 * 60)
    made = learner(arguments(**changed))
    parts = [made.learn(made.prepare(lines[i : i + 64])) for i in range(0, len(lines), 64)]
    predictions = np.concatenate(parts)
    labels = np.array([json.loads(one)["label"] for one in lines], bool)
    assert predictions.shape == (len(lines),)
    assert learners.auc(predictions[::2], labels[::2]) > 0.9
    assert learners.auc(predictions[1::2], labels[1::2]) == pytest.approx(0.5, abs=0.05)


class Trees(ModuleType):
    """In place of LightGBM, which the tests do not have: it predicts how many samples it was trained on."""

    Dataset = staticmethod(lambda x, labels, categorical_feature: (x, [*labels], categorical_feature))

    @staticmethod
    def train(settings: dict[str, Any], past: Any, num_boost_round: int) -> Any:
        x, labels, categories = past
        assert (settings["objective"], num_boost_round, categories) == ("binary", 100, [0])
        assert x.shape == (len(labels), 2)
        return SimpleNamespace(predict=lambda of: np.full(len(of), float(len(labels))))


def test_trees_are_trained_on_all_of_the_past_at_each_twentieth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", Trees("lightgbm"))
    lines = messages(1000)
    (tmp_path / "samples").write_bytes(b"\n".join(lines))
    made = learners.lightgbm(arguments(stream=str(tmp_path / "samples"), samples=None))
    parts = [made.learn(made.prepare(lines[i : i + 10])).tolist() for i in range(0, 1000, 10)]
    assert parts[0] == [0.5] * 10
    positive = sum(json.loads(one)["label"] for one in lines[:40])
    assert parts[4] == [(positive + 0.5) / 41] * 10
    assert [part[0] for part in parts[5:]] == [i // 5 * 50 for i in range(5, 100)]


def test_one_that_is_stopped_has_no_figure_of_the_whole(tmp_path: Path) -> None:
    (tmp_path / "samples").write_bytes(b"\n".join(messages(4096)))
    slow = learners.Learner(lambda batch: batch, lambda batch: spin(len(batch)))

    def parts() -> Iterator[learners.Ready]:
        return learners.ready_for(slow, learners.batches(str(tmp_path / "samples"), 1024, None))

    found = learners.figures(slow, parts(), 0.0)
    assert found["samples"] == 1024
    assert found["auc"] == found["log_loss"] == []
    assert found["samples_per_s"] > 0
    found = learners.figures(slow, parts(), 60.0)
    assert found["samples"] == 4096
    assert found["auc_at"] == {mark: [] for mark in learners.MARKS}
    printed = json.loads(json.dumps(found))
    assert all(isinstance(figure_of(printed, place), list) for place in quality.FIGURES.values())


def spin(count: int) -> np.ndarray[Any, Any]:
    """Predictions, after some work."""
    return np.sort(np.random.default_rng(0).random(300_000))[:count]


def test_peers_that_are_not_installed_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "quality" / "bin").mkdir(parents=True)
    program = tmp_path / "quality" / "bin" / "python"
    program.write_text('#!/bin/sh\ncase "$2" in *river*) exit 0;; esac\nexit 1\n')
    program.chmod(0o755)
    made = {one.name: one for one in quality.learners("tweets", tmp_path, 60.0)}
    assert made[quality.RIVER_SGD].command[0] == str(program)
    assert not made[quality.RIVER_SGD].missing
    assert set(made) >= {quality.micro(8), quality.micro(None), quality.as_it_was(8), quality.keras(1024)}
    few = {one.name: one for one in quality.at_defaults("pets", tmp_path)}
    assert [*few][:2] == [quality.ONE_LAYER, quality.NO_GRAPH]
    assert [name for name, one in few.items() if one.missing] == [quality.VW_LINEAR, quality.VW_PAIRS, quality.LIGHTGBM]


def figures(auc: float, loss: float, rate: float, *, whole: bool = True) -> dict[str, float]:
    """Medians of a learner."""
    made = {"samples/s": rate, "samples": 100_000.0 if whole else 60_000.0, "CPU s": 3.0}
    made |= {
        "AUC at 20000": auc - 0.02,
        "log loss at 20000": loss,
        "AUC at 50000": auc - 0.01,
        "log loss at 50000": loss,
    }
    later = {"AUC later": auc + 0.01, "log loss later": loss - 0.01}
    return made | ({"AUC": auc, "log loss": loss, **later} if whole else {})


def found() -> dict[str, Any]:
    """What a run leaves."""
    medians = {
        quality.micro(8): figures(0.76, 0.57, 200_000.0),
        quality.micro(None): figures(0.55, 0.95, 600_000.0),
        quality.VW_LINEAR: figures(0.75, 0.58, 300_000.0),
        quality.keras(8): figures(0.70, 0.60, 900.0, whole=False),
    }
    defaults = {
        quality.ONE_LAYER: figures(0.76, 0.57, 200_000.0),
        quality.NO_GRAPH: figures(0.765, 0.565, 100_000.0),
        quality.VW_LINEAR: figures(0.75, 0.58, 300_000.0),
        quality.LIGHTGBM: figures(0.74, 0.585, 1000.0),
    }
    found = {"ratings": medians, "ratings: defaults": defaults}
    return {"medians": found, "parts": {"ratings": {"absent": {"River, SGD": "x"}, "failed": {}}}}


def test_the_tables_tell_who_was_stopped_and_compare_on_the_same_samples() -> None:
    text = quality.of_frontier(found())
    assert "| **micro-batches of 8** | .7600 / .570; 200k |" in text
    assert "| Keras, batches of 8 | stopped after 60,000; 0.9k |" in text
    assert "The first 50,000 ratings, as some learners were stopped:" in text
    assert text.count("| Keras, batches of 8 | .6900 / .600 |") == 1
    assert "* ratings: River, SGD was left out: x" in text
    row = "| ratings (MovieLens 100K) | 100,000, 55% |"
    assert f"{row} .7500 / .580 |  | .7600 / .570 | **.7650 / .565** |" in quality.of_defaults(found())
    assert f"{row}  | .7500 / .575 | **.7750 / .555** |" in quality.of_later(found())


def test_options_are_compared_stream_by_stream() -> None:
    """A change that does not apply to a stream counts as none there."""
    defaults, changed = {"AUC": 0.76, "log loss": 0.5}, {"AUC": 0.74, "log loss": 0.6}
    medians = {
        "ratings: options": {quality.AT_DEFAULTS: defaults, quality.PLAIN: changed, quality.with_decay("1"): changed},
        "pets: options": {quality.AT_DEFAULTS: defaults},
    }
    assert (
        "| numbers without a transform | \N{MINUS SIGN}.0100 | +10.0% | ratings \N{MINUS SIGN}.0200 |"
        in quality.of_changes({"medians": medians})
    )
    text = quality.of_decays({"medians": medians})
    assert "| `decay` | ratings | pets |" in text
    assert [row for row in text.splitlines() if ".7" in row] == ["| 1 | .7400 |  |", "| **0.999** | .7600 | .7600 |"]


def test_every_seed_is_a_pass(tmp_path: Path) -> None:
    (tmp_path / "samples").write_bytes(b"\n".join(messages(2048)))
    made = arguments(learner="streamtrain", stream=str(tmp_path / "samples"), samples=None, seconds=60.0, seeds=2)
    made.batch = 1024
    found, alone = learners.of_seeds(made), []
    for seed in (0, 1):
        made.seed, made.seeds = seed, 1
        alone += learners.of_seeds(made)["auc"]
    assert found["auc"] == alone
    assert len({*alone}) == 2


def test_the_picture_shows_what_is_far_worse_at_its_edge_with_its_value() -> None:
    drawn = ElementTree.fromstring(quality.picture(found()))
    texts = [one.text for one in drawn.iter(f"{SVG}text")]
    assert {"streamtrain", "VW linear", "8", "AUC", "log loss", "none ↓ 0.55", "none ↓ 0.95"} <= {*texts}
    assert "Keras" not in texts  # it has no figure of the whole stream


def test_better_is_further_up_and_faster_further_right() -> None:
    points = [Point("a", 1000.0, 0.5), Point("b", 100_000.0, 0.6)]
    for less in (False, True):
        axes = Axes(Panel("t", "f", [Series("s", "ours", points)], reach=0.2, less=less), (1000.0, 100_000.0))
        assert (axes.y(0.6) < axes.y(0.5)) is not less
        assert axes.x(1000.0) < axes.x(100_000.0)
        assert axes.is_beyond(0.9 if less else 0.1)
    assert set(charts.COLOURS) == set(charts.SHAPES)


def test_committed_results_are_those_of_the_documentation() -> None:
    path = ROOT / "benchmarks" / "results" / "quality.json"
    for name, text in quality.documents(json.loads(path.read_text()), ROOT / "docs").items():
        assert (ROOT / "docs" / name).read_text() == text, f"make it anew: benchmarks/quality.py page ({name})"


def test_no_path_of_a_machine_is_in_the_results() -> None:
    assert not re.search(r"/(home|root|tmp|work)/", (ROOT / "benchmarks" / "results" / "quality.json").read_text())
