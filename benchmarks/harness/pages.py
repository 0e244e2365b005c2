"""Pages generated from the file of results of bench.py: one of its own, and the marked parts of the documentation."""

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import charts, sizing
from harness.figures import number, table
from harness.results import BUSY
from harness.suite import ONE, PLAIN, PSS

TRAINING = ("w1", "w2-64", "w2-1024")
BEGIN, END = "<!-- bench: {} -->", "<!-- bench: end -->"


def about(found: Mapping[str, Any]) -> str:
    """Where and when results were measured."""
    machine, versions = found["machine"], found["versions"]
    rounds = sorted({len(runs) for name in TRAINING for runs in found["parts"].get(name, {}).get("runs", {}).values()})
    turns = f", rounds in turns: {' to '.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))}" if rounds else ""
    kind = " virtual" if machine["virtual"] else ""
    names = ("python", "tensorflow", "numpy", "grpcio", "fastapi")
    used = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    return (
        f"Last measured {found['date']} at commit {found['commit'] or '(none)'}{turns}; medians. What was not measured "
        "again then has figures of an earlier run on such a machine. "
        f"{machine['cores']}{kind} cores ({machine['cpu']}, {machine['simd']}), {machine['memory_gb']:g} GiB; {used}."
    )


def bars(found: Mapping[str, Any]) -> str:
    """The ratios and their targets."""
    rows, missing = [], []
    for one in found["ratios"]:
        if one["median"] is None:
            missing.append(one["what"])
            continue
        met = {True: "yes", False: "**no**", None: ""}[one["met"]]
        spread = f"{number(min(one['runs']))} to {number(max(one['runs']))}" if len(one["runs"]) > 1 else ""
        rows.append((one["what"], number(one["median"]), spread, one["bar"] or "", met))
    text = table(("ratio", "median", "range", "target", "met"), rows)
    return f"{text}\n\nNot measured: {'; '.join(missing)}." if missing else text


def training(part: Mapping[str, Any], medians: Mapping[str, Mapping[str, float]]) -> str:
    """A part of contestants that train, the fastest first."""
    rates = {name: figures["samples/s"] for name, figures in medians.items() if "samples/s" in figures}
    rows = []
    for name, rate in sorted(rates.items(), key=lambda one: -one[1]):
        runs = [value for run in part["runs"][name] if run for value in run["samples/s"]]
        of_peers = [number(rate / rates[peer]) if rates.get(peer) else "" for peer in (PLAIN, PSS)]
        more = [number(medians[name][one]) if one in medians[name] else "" for one in ("memory MB", "bytes/sample")]
        rows.append((name, f"{rate:,.0f}", f"{min(runs):,.0f} to {max(runs):,.0f}", *of_peers, *more))
    head = ("system", "samples/s", "range", f"/ {PLAIN}", f"/ {PSS}", "memory, MB", "bytes/sample on the wire")
    return table(head, rows)


def figures(medians: Mapping[str, Mapping[str, float]]) -> str:
    """Any part: a row for each contestant if they share the names of figures, else a row for each figure."""
    names = list(dict.fromkeys(name for one in medians.values() for name in one))
    if len(medians) > 1 and all(names[0] in one for one in medians.values()):
        cells = ([number(one[name]) if name in one else "" for name in names] for one in medians.values())
        return table(("", *names), ((who, *row) for who, row in zip(medians, cells, strict=True)))
    rows = [(who, name, number(value)) for who, one in medians.items() for name, value in one.items()]
    return table(("contestant", "figure", "median"), rows)


def left_out(found: Mapping[str, Any]) -> list[str]:
    """What was left out, and what failed."""
    lines = []
    for name, part in found["parts"].items():
        lines += [f"* {name}: {who} was left out: {why}" for who, why in part["absent"].items()]
        lines += [f"* {name}: {who} failed: {' '.join(why.split())[:200]}" for who, why in part["failed"].items()]
    return lines


def sections(found: Mapping[str, Any]) -> list[str]:
    """A heading and a table for every part."""
    made = []
    for name, part in found["parts"].items():
        medians = found["medians"].get(name)
        if medians:
            body = training(part, medians) if name in TRAINING else figures(medians)
            others = statistics.median(part.get("others") or [0.0])
            disturbed = f"Other processes used {others:.0%} of the machine." if others > BUSY else ""
            made += [f"### {part['title']}", *filter(None, [disturbed]), body]
    return made


def page(found: Mapping[str, Any]) -> str:
    """The page next to the file of results."""
    return "\n\n".join(["# Benchmarks", about(found), bars(found), *sections(found), "\n".join(left_out(found))]) + "\n"


def between(text: str, mark: str, new: str) -> str:
    """A page with new text between its marks.

    Raises:
        ValueError: it has no such mark.
    """
    begin = BEGIN.format(mark)
    if begin not in text:
        raise ValueError(f"the page has no {begin}")
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(END)})", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{new}\n\n{found[2]}", text, count=1)


def documents(found: Mapping[str, Any], docs: Path) -> dict[str, str]:
    """The generated files of the documentation, by name."""
    drawn = [name for name in TRAINING if found["medians"].get(name)]
    picture = ["![Samples per second of streamtrain and of its peers](performance.svg)"] if drawn else []
    marked = {
        "performance.md": ("ratios", [about(found), bars(found), *picture]),
        "benchmarks.md": ("results", [about(found), *sections(found), "\n".join(left_out(found))]),
    }
    made = {
        name: between((docs / name).read_text(), mark, "\n\n".join(parts).strip())
        for name, (mark, parts) in marked.items()
    }
    if drawn:
        panels = [(found["parts"][name]["title"], _rates(found["medians"][name])) for name in drawn]
        made["performance.svg"] = charts.bars(panels)
    made["sizing.md"] = between((docs / "sizing.md").read_text(), "sizing", sizing.markdown(found))
    return made


def _rates(medians: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, bool]]:
    """Samples per second and whether they are ours, the fastest first."""
    ours = [name for name in medians if name == ONE or "worker" in name]
    rates = {name: (one["samples/s"], name in ours) for name, one in medians.items() if "samples/s" in one}
    return dict(sorted(rates.items(), key=lambda one: -one[1][0]))
