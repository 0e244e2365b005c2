"""The examples learn what they are for, from made-up samples with a known answer, and predict by their own graphs."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import pytest

import streamtrain as st

EXAMPLES = Path(__file__).parent.parent / "examples"
Sample = dict[str, Any]


def example(name: str) -> st.Model:
    return st.load_model(str(EXAMPLES / f"{name}.py"))


def made(count: int, one: Callable[[random.Random], Sample]) -> Iterator[Sample]:
    rng = random.Random(5)
    for i in range(count):
        yield {"ts": 1_700_000_000 + i} | one(rng)


def flight(rng: random.Random) -> Sample:
    """Late are those of one carrier from one airport, nine times in ten."""
    carrier, origin = rng.choice(["AA", "UA"]), rng.choice(["JFK", "EWR"])
    late = (carrier == "AA" and origin == "JFK") == (rng.random() < 0.9)
    sample: Sample = {"carrier": carrier, "origin": origin, "dest": "LAX", "route": f"{origin}-LAX"}
    sample |= {"tail": f"N{rng.randrange(300)}", "flight": rng.randrange(300), "hour": rng.randrange(24)}
    return sample | {"weekday": rng.randrange(7), "month": 1, "label": int(late)}


def movie(rng: random.Random) -> Sample:
    """Every user likes one of two genres."""
    user, genre = rng.randrange(20), rng.randrange(2)
    item = 2 * rng.randrange(10) + genre
    return {"user": user, "item": item, "genres": [f"g{genre}"], "year": 1990, "zip": "1", "label": user % 2 ^ genre}


def history(rng: random.Random) -> Sample:
    """The candidate is wanted if its kind (the remainder by 2) is that of all of the history."""
    kind = rng.randrange(2)
    items = [2 * rng.randrange(10) + kind for _ in range(rng.randrange(1, 8))]
    item = rng.randrange(20)
    return {"user": "u", "item": item, "history": items, "label": int(item % 2 == kind)}


def ad(rng: random.Random) -> Sample:
    """Ads below 5 are clicked; of those that are, users below 10 buy. Whoever does not click has no second label."""
    user, of = rng.randrange(20), rng.randrange(10)
    sample: Sample = {"user": user, "ad": of, "advertiser": of % 3, "page": "p", "device": "phone", "price": 1.0}
    return sample | ({"click": 1, "purchase": int(user < 10)} if of < 5 else {"click": 0})


CASES = {  # samples, how many, and of a batch
    "flights": (flight, 4000, 16),
    "lr_ftrl": (flight, 4000, 16),
    "movielens": (movie, 4000, 8),
    "sequence": (history, 12_000, 16),
    "wide_deep": (ad, 4000, 16),
}


@pytest.mark.parametrize("name", CASES)
def test_it_learns(name: str) -> None:
    one, count, batch_size = CASES[name]
    learner = st.Learner(example(name), batch_size=batch_size, window=1000)
    samples = list(made(count, one))
    assert not learner.learn(samples).bad
    latest = learner.metrics(window=True)
    assert all(figures.auc > 0.8 for figures in latest.values()), latest
    asked = [{key: value for key, value in sample.items() if key not in latest} for sample in samples[-200:]]
    predictions = learner.predict(asked)
    assert predictions.shape == (200, len(latest))
    assert np.isfinite(predictions).all()


def test_every_example_is_tested() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*CASES}


def test_both_tasks_are_learned_where_their_labels_are() -> None:
    learner = st.Learner(example("wide_deep"), batch_size=16)
    samples = list(made(4000, ad))
    learner.learn(samples)
    figures = learner.metrics()
    assert figures["click"].samples == 4000
    assert figures["purchase"].samples == sum("purchase" in sample for sample in samples)


def test_l1_keeps_what_says_nothing_at_exactly_zero(tmp_path: Path) -> None:
    learner = st.Learner(example("lr_ftrl"), batch_size=16)
    learner.learn(list(made(4000, flight)))
    learner.save(tmp_path / "saved")

    def zeros(table: str) -> float:
        rows = pyarrow.dataset.dataset(tmp_path / "saved" / "tables" / table).to_table(columns=["embedding"])
        return float((np.array(rows["embedding"].to_pylist()) == 0).mean())

    assert zeros("tail") > 0.9
    assert zeros("carrier_origin") == 0


def test_the_notebook_runs_and_follows_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / "learn.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    curve = names["curve"]
    assert curve[4] < curve[3] - 0.1, "tastes have changed"
    assert curve[-1] > curve[4] + 0.1
    assert names["again"].samples == 40_000
    assert "to sample 40,000: AUC" in capsys.readouterr().out


def test_the_notebook_has_no_outputs() -> None:
    cells = json.loads((EXAMPLES / "learn.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
