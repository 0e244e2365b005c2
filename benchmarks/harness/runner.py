"""Runs the commands of a suite in turns, keeps what they print in a file of results, and is its command line.

A suite consists of parts, and a part of contestants: commands that print a line of JSON, of which figures are kept.
"""

import argparse
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from harness.processes import BENCHMARKS, cpu_seconds, exit_on_sigterm, machine_seconds
from harness.results import BUSY, OtherMachine, Ratio, Results
from streamtrain.errors import StreamtrainError

DOCS = BENCHMARKS.parent / "docs"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_STOP_TIMEOUT = 20.0  # seconds between SIGTERM and SIGKILL
_QUOTED = 600  # characters of what a failed command printed

Figure = tuple[str | int, ...]  # where a figure is in the JSON of a command: keys, from outside in


@dataclass(frozen=True)
class Contestant:
    """A command that is measured.

    Attributes:
        name: unique in its part.
        command: program and arguments; {tmp} stands for a temporary folder, {input} for the input of the part.
        figures: where they are in what it prints, by name; a list there has one value for each run.
        timeout: seconds.
        missing: what it needs and is not installed; empty: it can run.
    """

    name: str
    command: Sequence[str]
    figures: Mapping[str, Figure]
    timeout: float = 300.0
    missing: str = ""


@dataclass(frozen=True)
class Part:
    """Contestants that take turns.

    Attributes:
        name: on the command line.
        title: heading in the documentation.
        contestants: in the order of their turns, which is reversed in every second round.
        once: its commands make rounds of their own and are run once.
        input: provides what {input} stands for, while contestants that have it in their commands run.
    """

    name: str
    title: str
    contestants: Sequence[Contestant]
    once: bool = False
    input: Callable[[], AbstractContextManager[str]] | None = None


class Failed(Exception):
    """A command failed; the message says how."""


def python(script: str, *arguments: object) -> tuple[str, ...]:
    """The command of a script of the benchmarks."""
    return (sys.executable, str(BENCHMARKS / script), *map(str, arguments))


def adopt_orphans() -> None:
    """Makes this process the parent of processes whose parents have exited, so that they can be found and killed."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def children() -> set[psutil.Process]:
    """The child processes of this process."""
    return set(psutil.Process().children())


def run(command: Sequence[str], timeout: float) -> dict[str, Any]:
    """Runs a command to its end and returns the last line of JSON that it has printed.

    Its temporary files are in a folder of its own, which is removed, as is everything that it has started.

    Args:
        command: program and arguments; {tmp} in them stands for that folder.
        timeout: seconds after which it is stopped.

    Raises:
        Failed: it exited with an error, timed out or printed no JSON.
    """
    before = children()
    with (
        tempfile.TemporaryDirectory(prefix="streamtrain-bench-") as folder,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        process = subprocess.Popen(
            [one.replace("{tmp}", folder) for one in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=BENCHMARKS.parent,
            env=os.environ | {"TMPDIR": folder, "TF_CPP_MIN_LOG_LEVEL": "3"},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as exc:
            raise Failed(f"timed out after {timeout:g} s{_tail(err)}") from exc
        finally:
            _kill(process, before)
        out.seek(0)
        lines = [line for line in out.read().decode(errors="replace").splitlines() if line.startswith("{")]
        if code:
            raise Failed(f"exited with {code}{_tail(err)}")
        if not lines:
            raise Failed(f"printed no JSON{_tail(err)}")
        try:
            found: dict[str, Any] = json.loads(lines[-1])
        except ValueError as exc:
            raise Failed(f"printed invalid JSON: {lines[-1][:_QUOTED]}") from exc
        return found


def _kill(process: "subprocess.Popen[bytes]", before: set[psutil.Process]) -> None:
    """Stops a command, and kills everything that it has started; orphans become our children, see `adopt_orphans`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    while left := children() - before:
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.kill()
                child.wait()


def _cpu_seconds(child: psutil.Process) -> float:
    """None of one that has ended meanwhile: it is in what ended children have used."""
    try:
        return cpu_seconds(child.pid)
    except OSError:
        return 0.0


def _tail(err: Any) -> str:
    err.seek(0)
    text = err.read().decode(errors="replace").strip()
    return f": …{text[-_QUOTED:]}" if text else ""


def figure_of(printed: Any, place: Figure) -> list[float]:
    """The values of a figure in the JSON of a command: a number is a list of one."""
    for key in place:
        try:
            printed = printed[key]
        except (KeyError, IndexError, TypeError) as exc:
            raise Failed(f"its output has no {' / '.join(map(str, place))}") from exc
    return [float(one) for one in printed] if isinstance(printed, list) else [float(printed)]


class Others:
    """What other processes have used of the machine since this object was made."""

    def __init__(self) -> None:
        self._began = self._seconds()

    def share(self) -> float:
        """Share of all cores, 0 to 1."""
        foreign, whole = (now - then for now, then in zip(self._seconds(), self._began, strict=True))
        return max(foreign, 0.0) / whole if whole else 0.0

    def _seconds(self) -> tuple[float, float]:
        """Seconds of CPU of others so far, and of all cores; children of ours are not others, running or ended."""
        busy, whole = machine_seconds()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        ours = sum(one.ru_utime + one.ru_stime for one in used) + sum(map(_cpu_seconds, children()))
        return busy - ours, whole


class Turns:
    """Runs parts and reports every run in a line.

    Args:
        results: where runs are kept.
        rounds: of parts whose contestants take turns.
        report: takes a line.
    """

    def __init__(self, results: Results, rounds: int, report: Callable[[str], object] = print) -> None:
        self._results, self._rounds, self._report = results, rounds, report

    def part(self, part: Part) -> None:
        """Does all runs of a part that are missing; a contestant that fails is reported and not tried again."""
        known, names = self._results.part(part.name, part.title), [one.name for one in part.contestants]
        absent = {one.name: one.missing for one in part.contestants if one.missing}
        known["absent"] = {name: why for name, why in known["absent"].items() if name not in names} | absent
        for name, why in absent.items():
            self._report(f"{part.name}: {name} is left out: {why}")
        left = self._left(part)
        if not left:
            self._report(f"{part.name}: done")
            self._results.save()
            return
        failed: set[str] = set()
        with ExitStack() as stack:
            provided = ""
            for turn, one in left:
                if one.name in failed:
                    continue
                try:
                    if not provided and part.input and any("{input}" in word for word in one.command):
                        provided = stack.enter_context(part.input())
                    self._run(part, one, turn, provided)
                except (Failed, StreamtrainError, OSError) as exc:
                    failed.add(one.name)
                    self._results.fail(part.name, one.name, f"{type(exc).__name__}: {exc}")
                    self._report(f"{part.name}: {one.name} FAILED: {exc}")

    def _left(self, part: Part) -> list[tuple[int, Contestant]]:
        """Missing runs in the order of turns, which is reversed in every second round: no one is always first."""
        there = [one for one in part.contestants if not one.missing]
        turns = range(1 if part.once else self._rounds)
        order = [(turn, one) for turn in turns for one in (there if turn % 2 == 0 else reversed(there))]
        return [(turn, one) for turn, one in order if not self._results.has(part.name, one.name, turn)]

    def _run(self, part: Part, one: Contestant, turn: int, provided: str) -> None:
        began, others = time.monotonic(), Others()
        printed = run([word.replace("{input}", provided) for word in one.command], one.timeout)
        figures = {name: figure_of(printed, place) for name, place in one.figures.items()}
        seconds, share = time.monotonic() - began, others.share()
        self._results.add(part.name, one.name, turn, figures, seconds=seconds, others=share)
        where = part.name if part.once else f"{part.name} {turn + 1}/{self._rounds}"
        name, values = next((name, values) for name, values in figures.items() if values)
        took = f"{seconds:.0f} s" + (f", other processes used {share:.0%} of the machine" if share > BUSY else "")
        self._report(f"{where}: {one.name}: {sum(values) / len(values):,.4g} {name} ({took})")


@dataclass(frozen=True)
class Suite:
    """A suite of benchmarks, and its command line: run, list and page.

    Attributes:
        about: the docstring of its script.
        file: the default file of results.
        groups: makes its parts by group, from the arguments of the command line.
        default: names of groups or parts that are run by default.
        names: the option that chooses parts.
        documents: makes files of the documentation, by name, from results and the folder of the documentation.
        ratios: that the file of results has.
        page: makes a page next to the file of results, if there is one.
        options: adds options to the command `run`.
    """

    about: str
    file: Path
    groups: Callable[[argparse.Namespace], Mapping[str, Sequence[Part]]]
    default: Sequence[str]
    names: str
    documents: Callable[[Mapping[str, Any], Path], Mapping[str, str]]
    options: Callable[[argparse.ArgumentParser], object]
    ratios: Sequence[Ratio] = ()
    page: Callable[[Mapping[str, Any]], str] | None = None

    def main(self) -> None:
        """Runs a command, and exits with 1 if a contestant failed."""
        parser = argparse.ArgumentParser(description=self.about.partition("\n")[0])
        commands = parser.add_subparsers(required=True)
        run_ = commands.add_parser("run", help="measure what the file of results lacks")
        run_.add_argument(f"--{self.names}", dest="parts", nargs="+", default=[*self.default], metavar="NAME")
        run_.add_argument("--only", nargs="+", default=[], metavar="WORD", help="contestants with a word in their name")
        run_.add_argument("--again", action="store_true", help="measure again what the file of results has")
        environments = os.environ.get("PEERS_ENVS")
        environment = Path(environments) if environments else None
        run_.add_argument("--peer-environments", type=Path, default=environment, help="default: $PEERS_ENVS")
        self.options(run_)
        list_ = commands.add_parser("list", help="list the parts and how long each took")
        page = commands.add_parser("page", help="generate the documentation from the file of results")
        list_.set_defaults(**vars(run_.parse_args([])))
        for command, call in ((run_, self.run), (list_, self.list_parts), (page, self._page)):
            command.set_defaults(call=call)
            command.add_argument("--out", type=Path, default=self.file, help="file of results")
            command.add_argument(
                "--docs",
                action=argparse.BooleanOptionalAction,
                help="generate docs/, too; default: if the file of results is the default one",
            )
        args = parser.parse_args()
        args.docs = args.out == self.file if args.docs is None else args.docs
        exit_on_sigterm()
        sys.exit(args.call(args))

    def run(self, args: argparse.Namespace) -> int:
        """Measures what is missing; the exit code."""
        groups = self.groups(args)
        every = {part.name: part for group in groups.values() for part in group}
        unknown = set(args.parts) - {*every, *groups}
        if unknown:
            known = ", ".join([*groups, *every])
            raise SystemExit(f"unknown --{self.names}: {', '.join(sorted(unknown))}; expected {known}")
        parts = [only(part, args.only) for name in args.parts for part in (groups.get(name) or [every[name]])]
        try:
            results = Results(args.out, self.ratios)
        except OtherMachine as exc:
            raise SystemExit(str(exc)) from exc
        if args.again:
            for part in parts:
                results.forget(part.name, [one.name for one in part.contestants])
        adopt_orphans()
        turns = Turns(results, args.rounds, lambda line: print(line, flush=True))
        for part in parts:
            turns.part(part)
        self._write(args, results.found)
        failed = [f"{part.name}: {name}" for part in parts for name in results.part(part.name)["failed"]]
        for name in failed:
            print(f"failed: {name}", flush=True)
        return bool(failed)

    def list_parts(self, args: argparse.Namespace) -> None:
        """Lists the parts, and how long each took."""
        known = _load(args.out)["parts"] if args.out.exists() else {}
        for group, parts in self.groups(args).items():
            for part in parts:
                took = f"{known[part.name]['seconds'] / 60:.1f} min" if part.name in known else "not run"
                contestants = "; ".join(one.name for one in part.contestants)
                print(f"{group:10}{part.name:14}{took:10}  {part.title}: {contestants}")

    def _page(self, args: argparse.Namespace) -> None:
        self._write(args, _load(args.out))

    def _write(self, args: argparse.Namespace, found: Mapping[str, Any]) -> None:
        made: dict[Path, str] = {}
        if self.page:
            made[args.out.with_suffix(".md")] = self.page(found)
        if args.docs:
            made |= {DOCS / name: text for name, text in self.documents(found, DOCS).items()}
        for path, text in made.items():
            path.write_text(text)
            print(f"wrote {path}", flush=True)


def only(part: Part, words: Iterable[str]) -> Part:
    """A part reduced to contestants that have one of some words in their names; unchanged if there are no words."""
    kept = [one for one in part.contestants if not words or any(word in one.name for word in words)]
    return replace(part, contestants=kept)


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise SystemExit(f"{path} does not exist: run the benchmarks first")
    found: dict[str, Any] = json.loads(path.read_text())
    return found
