"""A short run of every fuzzer of a reader, and all inputs that once showed something wrong.

`make fuzz MINUTES=10` runs each for longer, the readers on a core with sanitizers; see docs/fuzzing.md.
"""

import importlib
from pathlib import Path
from typing import NoReturn

import pytest

from tests.fuzz import building, running
from tests.stream.servers import missing

SECONDS = 1
SOME = ["samples", "bodies", "checkpoints"]
"""One of a kind: others are tried for longer by `make fuzz`, and with all that was found before by each test run."""


def unavailable(why: building.Missing) -> NoReturn:
    missing("fuzzers", why)


@pytest.mark.parametrize("target", SOME)
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
