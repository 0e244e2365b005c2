"""The short form of `make chaos`: a few faults of the whole service that counts, one of a kind."""

import json
import subprocess
import sys
from pathlib import Path

from streamtrain.embedded.jars import resolve
from streamtrain.errors import StreamtrainError
from tests.chaos.report import Injected, Outcome, Report
from tests.stream.servers import missing

KINDS = ["kill ps", "kill worker", "another worker", "kill joiner", "poison"]
OUTCOME = Outcome(
    *(970, 10, 0, 0),
    training=1.5,
    standstill=1.7,
    standstill_of="partition 3",
    serving=0.5,
    freshness=2.0,
    requests={"answered": 7},
    wrong=[],
    starts=6,
)


def test_all_counts_are_exact_whatever_happens(tmp_path: Path) -> None:
    try:
        resolve()
    except StreamtrainError as exc:
        missing("kafka", exc)
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "tests.chaos",
        "--models=counting",
        "--backups",  # none: tests/cluster/test_backups.py has them
        f"--faults={len(KINDS)}",
        "--kinds",
        *KINDS,
    ]
    command += [
        "--loopback",
        "--every=0.3",
        "--longest=3",
        "--pause=0.5",
        "--deadline=300",
        "--seed=1",
        f"--report={report}",
    ]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=1200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(report.read_text())
    assert sorted(found["by_kind"]) == sorted(KINDS)
    (counting,) = found["services"].values()
    assert found["exact"]
    assert 0 < counting["standstill"] < 300
    assert counting["samples"] > counting["bad"] > 0
    assert counting["requests"]["answered"] > 0


def test_a_report_tells_what_is_wrong() -> None:
    report = Report(3, 60.0, {"clock jump": "not here"}, [Injected("kill ps", "ps0", one) for one in (1.0, 5.0, 2.0)])
    report.services["counting"] = OUTCOME
    assert report.is_exact
    assert "| kill ps | 3 | 2.0 | 5.0 |" in report.as_markdown()
    assert "| clock jump | 0 | not possible here: | not here |" in report.as_markdown()
    report.services["flights"] = Outcome(**{**vars(OUTCOME), "wrong": ["id 3: 4 instead of 5"], "lost": 1})
    assert not report.is_exact
    assert "NOT EXACT" in report.as_markdown()
    assert "* flights: id 3: 4 instead of 5" in report.as_markdown()
    assert "| longest standstill of a partition, s | 1.7, partition 3 | 1.7, partition 3 |" in report.as_markdown()
    assert "| lost | 0 | 1 |" in report.as_markdown()
    assert json.loads(json.dumps(report.as_json()))["by_kind"]["kill ps"] == {"count": 3, "median": 2.0, "worst": 5.0}
