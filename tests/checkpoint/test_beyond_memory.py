"""A shard with five times as many rows as it has memory for learns, is killed and restored, and has counted exactly."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from streamtrain.checkpoint.shard_checkpoint import CheckpointWriter
from streamtrain.ps.row_memory import RowMemory
from tests.checkpoint.saved import Cluster
from tests.ps.counting import assert_exact, key

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "beyond_memory.py"


def test_a_shard_learns_more_rows_than_it_has_memory_for(tmp_path: Path) -> None:
    options = ["--rows=1000000", "--memory=20MB", "--seconds=2", f"--disk={tmp_path}", f"--place={tmp_path}"]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["rows"] == 1_000_000
    assert figures["compared_ids"] == 100_000
    assert figures["disk_gb"] > 0.03
    assert not list(tmp_path.iterdir())


def test_what_changed_last_is_in_memory_after_a_restart(tmp_path: Path) -> None:
    """And no row is read from disk for it: the newest rows are loaded first, and each once."""
    log = {0: [[i] for i in [*range(250_000), *range(2_000)]]}
    cluster = Cluster(str(tmp_path / "epochs"), 1)
    cluster.learn(log, (0, 0, 250_000))
    cluster.take()
    cluster.learn(log, (0, 250_000, 252_000))
    assert cluster.take().kind == "delta"
    memory = RowMemory(4_000_000, str(tmp_path))
    restored = CheckpointWriter(cluster.epochs, memory=memory).restore(0, 1)
    assert restored is not None
    (table,) = restored.shard.tables
    assert table.stats()["rows_on_disk"] > 100_000
    table.pull(np.array([key(i) for i in range(2_000)], np.uint64))
    assert table.stats()["disk_reads"] < 10, "now and then one of another key, which looks the same in the index"
    assert_exact([restored.shard], log)
    memory.close()
