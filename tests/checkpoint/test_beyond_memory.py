"""A shard with five times as many rows as it has memory for learns, is killed and restored, and has counted exactly."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "beyond_memory.py"


def test_a_shard_learns_more_rows_than_it_has_memory_for(tmp_path: Path) -> None:
    options = ["--rows=1000000", "--memory=20MB", "--seconds=2", f"--disk={tmp_path}", f"--place={tmp_path}"]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["rows"] == 1_000_000
    assert figures["compared_ids"] == 100_000
    assert figures["disk_gb"] > 0.03
    assert not list(tmp_path.iterdir())
