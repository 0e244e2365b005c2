"""A short run of every fuzzer, and all inputs that once showed something wrong.

`make fuzz MINUTES=10` runs each for longer, the readers on a core with sanitizers; see docs/fuzzing.md.
"""

import importlib
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from tests.fuzz import building, running
from tests.stream.servers import missing

SECONDS = 1


def unavailable(why: building.Missing) -> NoReturn:
    missing("fuzzers", why)


@pytest.mark.parametrize("target", running.HARNESSES)
def test_harness_finds_nothing(target: str, tmp_path: Path) -> None:
    try:
        report = running.run(target, SECONDS, folder=tmp_path)
    except building.Missing as exc:
        unavailable(exc)
    assert report.is_clean, report.log.read_text(errors="replace")[-4000:]
    assert report.executions > len([*running.seeds_of(target)])


@pytest.mark.parametrize("target", running.READERS)
def test_reader_finds_nothing(target: str, tmp_path: Path) -> None:
    """Without sanitizers, for which a core would have to be built: `make fuzz` has them."""
    try:
        report = running.run(target, SECONDS, folder=tmp_path, sanitize=False)
    except building.Missing as exc:
        unavailable(exc)
    assert report.is_clean, report.log.read_text(errors="replace")[-4000:]
    assert report.edges > 100, "is the code instrumented?"


@pytest.mark.parametrize("target", running.READERS)
def test_reader_withstands_its_seeds_and_what_was_found(target: str) -> None:
    run = importlib.import_module(f"tests.fuzz.readers.{target}").run
    for content in [*running.seeds_of(target), *(path.read_bytes() for path in running.found_of(target))]:
        run(content)


@pytest.mark.parametrize("target", running.HARNESSES)
def test_harness_withstands_what_was_found(target: str) -> None:
    try:
        harness = building.harness(target)
    except building.Missing as exc:
        unavailable(exc)
    for path in running.found_of(target):
        done = subprocess.run([str(harness), str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
