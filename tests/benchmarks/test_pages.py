"""What is made of the results of benchmarks: ratios and bars, pages, the picture, the size of a cluster."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import charts, pages, sizing  # noqa: E402
from harness.results import Ratio, Results  # noqa: E402
from harness.suite import COLOCATED, PLAIN, PSS, RATIOS, Scope, suite  # noqa: E402


def test_ratios_are_of_the_same_round() -> None:
    runs: Any = {"p": {"a": [{"samples/s": [10.0]}, None, {"samples/s": [30.0]}], "b": [{"samples/s": [5.0]}] * 3}}
    ratio = Ratio("a / b", "p", "a", "b", bar=3)
    assert ratio.runs(runs) == [2.0, 6.0]
    assert ratio.judge(runs)["median"] == 4.0
    assert ratio.judge(runs)["met"] is True
    assert Ratio("a / b", "p", "a", "b", bar=3, most=True).judge(runs)["met"] is False
    assert Ratio("a / c", "p", "a", "c", bar=3).judge(runs) == {
        **{"what": "a / c", "part": "p", "bar": "≥ 3"},
        **{"runs": [], "median": None, "met": None},
    }


def test_every_bar_is_of_something_that_is_measured() -> None:
    parts = [part for group in suite(Scope()).values() for part in group]
    assert len({part.name for part in parts}) == len(parts)
    measured = {(part.name, one.name): set(one.figures) for part in parts for one in part.contestants}
    for ratio in RATIOS:
        for contestant in filter(None, (ratio.over, ratio.under)):
            assert ratio.figure in measured[ratio.part, contestant], ratio.what
    scripts = {word for part in parts for one in part.contestants for word in one.command if word.endswith(".py")}
    assert scripts
    assert all(Path(script).exists() for script in scripts)


def made(tmp_path: Path) -> dict[str, Any]:
    """What a run leaves."""
    found = Results(tmp_path / "r.json", RATIOS)
    for turn, rate in enumerate((300.0, 100.0, 200.0)):
        found.part("w1", "W1, batch 1024")
        found.add("w1", COLOCATED, turn, {"samples/s": [4 * rate], "memory MB": [2000.0]}, seconds=1.0, others=0.0)
        found.add("w1", PLAIN, turn, {"samples/s": [2 * rate]}, seconds=1.0, others=0.3)
        found.add("w1", PSS, turn, {"samples/s": [rate]}, seconds=1.0, others=0.4)
    found.part("swaps", "Swaps").update(absent={"x": "not installed"})
    found.save()
    return found.found


def test_the_page_tells_medians_ratios_and_bars(tmp_path: Path) -> None:
    text = pages.page(made(tmp_path))
    assert f"| W1 colocated / {PSS} | 4 | 4 to 4 | ≥ 3 | yes |" in text
    assert re.search(r"Not measured: W1 colocated / dense step only, 2 processes; W1 colocated / TorchRec; ", text)
    assert f"| {COLOCATED} | 800 | 400 to 1,200 | 2 | 4 | 2,000 |  |" in text
    assert text.index(f"| {COLOCATED} | 800") < text.index(f"| {PLAIN} | 400") < text.index(f"| {PSS} | 200")
    assert "x was left out: not installed" in text
    assert "rounds in turns: 3;" in text
    assert "Other processes used 30% of the machine." in text


def test_figures_stand_side_by_side_where_they_have_the_same_names() -> None:
    side = pages.figures({"1M rows": {"rows/s": 2000.0, "restore s": 1.5}, "50M rows": {"rows/s": 1000.0}})
    assert side.splitlines()[2:] == ["| 1M rows | 2,000 | 1.50 |", "| 50M rows | 1,000 |  |"]
    assert pages.figures({"a": {"x": 1.0}, "b": {"y": 2.0}}).splitlines()[2:] == ["| a | x | 1 |", "| b | y | 2 |"]


def test_only_what_is_between_the_marks_changes(tmp_path: Path) -> None:
    docs = ROOT / "docs"
    made_pages = pages.documents(made(tmp_path), docs)
    for page, mark, row in (
        ("performance.md", "ratios", f"| W1 colocated / {PSS} | 4 |"),
        ("benchmarks.md", "results", f"| {COLOCATED} | 800 |"),
    ):
        old, new = (docs / page).read_text(), made_pages[page]
        begin, end = pages.BEGIN.format(mark), pages.END
        assert old.partition(begin)[0] == new.partition(begin)[0]
        assert old.partition(begin)[2].partition(end)[2] == new.partition(begin)[2].partition(end)[2]
        assert row in new
    with pytest.raises(ValueError, match="the page has no"):
        pages.between("text", "results", "new")


def test_the_picture_is_an_svg_with_bars_as_long_as_rates() -> None:
    drawn = ElementTree.fromstring(charts.bars([("A & B", {"x": (100.0, True), "y < z": (25.0, False)})]))
    bars = [one for one in drawn.iter("{http://www.w3.org/2000/svg}rect") if one.get("rx") == "3"]
    assert [float(one.get("width", 0)) for one in bars] == [charts.LONGEST, charts.LONGEST / 4]
    assert len({one.get("fill") for one in bars}) == 2


MEASURED = sizing.Measured(
    **{"worker": 10e-6, "shard": 4e-6, "message": 200e-6, "wire": 1000, "row": 70, "written": 1e6, "restored": 5e5},
    **{"served": 1e5, "replica": 80, "redis": 40, "published": 2e5},
)


def test_a_cluster_is_as_large_as_its_formulas_say() -> None:
    wanted = sizing.Wanted(
        parameters=16e9, dim=16, samples=1e6, batch=1000, busy=0.5, memory=35e9, away=200, predictions=1e6
    )
    needed = sizing.needed(MEASURED, wanted)
    assert needed.rows == 1e9
    assert needed.memory == pytest.approx(70e9)
    # 1,000 messages a second to each shard, of 200 µs, half of them there: 0.1 cores
    assert (needed.for_memory, needed.for_work, needed.for_restore) == (2, 10, 10)
    assert needed.shards == 10
    assert needed.shard_memory == pytest.approx(7e9)
    # and half of them in workers, for 10 shards: 1 core, beside 10 for the samples
    assert needed.workers == 22
    assert needed.checkpoint == pytest.approx(100)
    assert needed.restore == pytest.approx(200)
    assert needed.servers == 20
    assert needed.wire == pytest.approx(1e9)
    with pytest.raises(ValueError, match="larger"):
        sizing.needed(MEASURED, replace(wanted, batch=200))


def test_what_messages_cost_is_taken_from_more_shards() -> None:
    def cluster(worker: float, shard: float) -> dict[str, float]:
        return {"worker CPU µs/sample": worker, "shard CPU µs/sample": shard, "bytes/sample": 900.0}

    medians = {
        "workers": {"2 workers, 2 shards": cluster(10, 5)},
        "shards": {"2 workers, 1 shard": cluster(9.5, 4.5), "2 workers, 4 shards": cluster(11, 6)},
        "tables": {"50M rows": {"peak bytes/row": 70.0, "checkpoint s": 100.0, "restore rows/s": 4e5}},
        "serving-rows": {"1M rows": {"512 by 16, requests/s": 400.0}},
        "lookup-rows": {"1M rows": {"bytes/row": 90.0}, "50M rows": {"bytes/row": 80.0}},
        "redis": {"1M rows": {"float16, bytes/row": 40.0, "float16, published rows/s": 3e5}},
    }
    of = sizing.measured(medians)
    assert of is not None
    # three shards more cost 3 µs a sample: one of them 1 µs, half of it on either side
    assert (of.worker, of.shard) == pytest.approx((9e-6, 4e-6))
    assert of.message == pytest.approx(1024e-6)
    assert (of.written, of.replica, of.served) == (5e5, 80.0, 512 * 400)
    found: dict[str, Any] = {"medians": medians, "parts": {"tables": {"others": [0.4]}, "redis": {}}}
    text = sizing.markdown(found)
    assert "| rows | `P / d` | 625 M |" in text
    assert "Other processes used 40% of the machine" in text
    del medians["shards"]["2 workers, 4 shards"]
    assert sizing.measured(medians) is None


def test_sizing_says_what_was_not_measured() -> None:
    assert "Not measured" in sizing.markdown({"medians": {"workers": {}}})


def test_committed_results_are_those_of_the_documentation() -> None:
    path = ROOT / "benchmarks" / "results" / "bench.json"
    if not path.exists():
        pytest.skip("nothing is committed yet")
    for name, text in pages.documents(json.loads(path.read_text()), ROOT / "docs").items():
        assert (ROOT / "docs" / name).read_text() == text, f"make it anew: benchmarks/bench.py page ({name})"
