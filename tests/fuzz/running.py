"""Runs of fuzzers: one target for some time, from its seeds and what it has found out before."""

import hashlib
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import building, seeds

HARNESSES = ["decode", "arrays", "tensors"]
READERS = [
    "samples",
    "impressions",
    "outcomes",
    "frames",
    "checkpoints",
    "published",
    "chunks",
    "avro",
    "protobuf",
    "registry",
    "bodies",
]
TARGETS = [*HARNESSES, *READERS]
FOUND = Path(__file__).parent / "found"
"""By target the inputs that once showed something wrong: all of them are tried in tests."""

_SECONDS = 300  # that one input may take, at the lowest priority of a machine that has other things to do
_MEGABYTES = 3072  # of the process, sanitizers included
_LENGTH = 4096


@dataclass(frozen=True)
class Report:
    """What came of a run.

    Attributes:
        target: its name.
        seconds: that it took.
        executions: inputs tried.
        edges: parts of the code that were reached.
        is_clean: whether nothing was found.
        log: all that was said.
        found: the folder with the inputs that show something wrong.
    """

    target: str
    seconds: float
    executions: int
    edges: int
    is_clean: bool
    log: Path
    found: Path


def seeds_of(target: str) -> Iterator[bytes]:
    """Inputs to begin with."""
    if target in HARNESSES:
        return seeds.ALL[target]()
    made: Iterator[bytes] = importlib.import_module(f"tests.fuzz.readers.{target}").seeds()
    return made


def found_of(target: str) -> list[Path]:
    """Inputs that once showed something wrong."""
    return sorted(path for path in (FOUND / target).glob("*") if path.is_file())


def run(target: str, seconds: int, *, folder: Path | None = None, sanitize: bool = True) -> Report:
    """Tries inputs of a target.

    Args:
        target: one of `TARGETS`.
        seconds: how long.
        folder: for what it finds out; None: that of the target below build/fuzz, where later runs begin with it.
        sanitize: of readers, whether the core is one with sanitizers, which takes minutes to build once.

    Raises:
        Missing: what it needs is not there.
    """
    folder = folder or building.BUILD / target
    corpus, given, found = (folder / name for name in ("corpus", "seeds", "found"))
    for one in (corpus, given, found):
        one.mkdir(parents=True, exist_ok=True)
    for content in [*seeds_of(target), *(path.read_bytes() for path in found_of(target))]:
        (given / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={found}/", "-print_final_stats=1"]
    options += [f"-timeout={_SECONDS}", f"-rss_limit_mb={_MEGABYTES}", f"-max_len={_LENGTH}", "-len_control=0"]
    if target in ("decode", "samples", "impressions", "outcomes"):
        options.append(f"-dict={building.NATIVE / 'json.dict'}")
    command, environment = _harness(target) if target in HARNESSES else _reader(target, sanitize)
    log, begun = folder / "log", time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(
            [*command, *options, str(corpus), str(given)],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=building.ROOT,
            check=False,
        )
    return Report(target, time.monotonic() - begun, *_figures(log), done.returncode == 0, log, found)


def _figures(log: Path) -> tuple[int, int]:
    text = log.read_text(errors="replace")
    units, edges = re.findall(r"^#(\d+)", text, re.MULTILINE), re.findall(r"\bcov: (\d+)", text)
    return int(units[-1]) if units else 0, int(edges[-1]) if edges else 0


def _harness(target: str) -> tuple[list[str], dict[str, str]]:
    return [str(building.harness(target))], {}


def _reader(target: str, sanitize: bool) -> tuple[list[str], dict[str, str]]:
    folder = building.atheris()
    command = [sys.executable, "-m", "tests.fuzz.reader", target]
    environment = {"PYTHONPATH": f"{folder}{os.pathsep}{building.ROOT}"}
    if not sanitize:
        return command, environment
    # As of .ci/sanitize, for the runtime that is of a piece with libFuzzer's. Arrow's own allocators would hide, too.
    answer = subprocess.run(["g++", "-print-file-name=libstdc++.so"], capture_output=True, text=True, check=True)
    environment |= {
        "LD_PRELOAD": f"{folder / 'asan_with_fuzzer.so'} {answer.stdout.strip()}",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    return [*command, f"--core={building.sanitized_core()}"], environment
