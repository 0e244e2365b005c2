"""A short run of every fuzzer of the native core, and all inputs that once showed something wrong.

They are built of the core's headers alone, so `make test` runs them with the sanitizers: if these have changed.
"""

import subprocess
from pathlib import Path

import pytest

from tests.fuzz import building, running
from tests.fuzz.test_fuzz import SECONDS, unavailable


@pytest.mark.parametrize("target", running.HARNESSES)
def test_harness_finds_nothing(target: str, tmp_path: Path) -> None:
    try:
        report = running.run(target, SECONDS, folder=tmp_path)
    except building.Missing as exc:
        unavailable(exc)
    assert report.is_clean, report.log.read_text(errors="replace")[-4000:]
    assert report.executions > len([*running.seeds_of(target)])


@pytest.mark.parametrize("target", running.HARNESSES)
def test_harness_withstands_what_was_found(target: str) -> None:
    try:
        harness = building.harness(target)
    except building.Missing as exc:
        unavailable(exc)
    for path in running.found_of(target):
        done = subprocess.run([str(harness), str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
