"""Runs the benchmarks and writes what they found: make bench, make bench-scale, make bench-quick.

    python benchmarks/bench.py run --peers FOLDER
    python benchmarks/bench.py run --parts serving lookup --again
    python benchmarks/bench.py list
    python benchmarks/bench.py page

run: every part that the file of results lacks, one after another; contestants of a part take turns, round by round. It
can be ended at any time and goes on where it was. Peers are scripts in a folder (pss_tf.py, torch_ebc.py) whose
environments (tf, torch) are in another; those that are not there are left out. Then the page is made.
list: the parts, and how long each took.
page: makes the table of docs/performance.md, its picture and a page of its own from the file of results.
Ends with 1 if a part failed.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from processes import end_in_order
from suite import page, scale, single
from suite.bars import RATIOS
from suite.parts import Part, Peers, Scope, training
from suite.results import OtherMachine, Results
from suite.running import BENCHMARKS, adopt_orphans
from suite.turns import Turns

DOCS = BENCHMARKS.parent / "docs"
DEFAULT = BENCHMARKS / "results" / "bench.json"


def all_parts(scope: Scope) -> dict[str, list[Part]]:
    """By what they are run with."""
    return {
        "bench": [*training(scope), *single.parts(scope)],
        "freshness": single.freshness(scope),
        "scale": scale.parts(scope),
    }


def run(args: argparse.Namespace) -> int:
    """Measures what is missing."""
    places = [one and one.absolute() for one in (args.peers, args.peer_environments)]
    scope = Scope(args.rounds, args.seconds, Peers(*places))
    groups = all_parts(scope)
    every = {part.name: part for group in groups.values() for part in group}
    unknown = set(args.parts) - {*every, *groups}
    if unknown:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join([*groups, *every])}")
    chosen = [part for name in args.parts for part in (groups.get(name) or [every[name]])]
    chosen = [only(part, args.only) for part in chosen]
    results = opened(args.out)
    if args.again:
        for part in chosen:
            results.forget(part.name, [one.name for one in part.contestants])
    adopt_orphans()
    turns = Turns(results, args.rounds, lambda line: print(line, flush=True))
    for part in chosen:
        turns.part(part)
    write(args, results.found)
    failed = [f"{part.name}: {name}" for part in chosen for name in results.part(part.name)["failed"]]
    for name in failed:
        print(f"failed: {name}", flush=True)
    return bool(failed)


def only(part: Part, words: list[str]) -> Part:
    """A part with those contestants alone whose names have one of some words; all of them if there are no words."""
    kept = [one for one in part.contestants if not words or any(word in one.name for word in words)]
    return replace(part, contestants=kept)


def opened(path: Path) -> Results:
    """The file of results."""
    try:
        return Results(path, RATIOS)
    except OtherMachine as exc:
        raise SystemExit(str(exc)) from exc


def known(path: Path) -> dict[str, Any]:
    """What the file of results has."""
    if not path.exists():
        raise SystemExit(f"{path} is not there yet: run the benchmarks first")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def tell(args: argparse.Namespace) -> None:
    """The parts, and how long each took."""
    parts = known(args.out)["parts"] if args.out.exists() else {}
    for group, of_group in all_parts(Scope()).items():
        for part in of_group:
            took = f"{parts[part.name]['seconds'] / 60:.1f} min" if part.name in parts else "not run"
            print(f"{group:10}{part.name:14}{took:10}  {part.title}: {'; '.join(one.name for one in part.contestants)}")


def write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """The page beside the results, and, of the project's own, what the documentation has of them."""
    args.out.with_suffix(".md").write_text(page.page(found))
    print(f"{args.out} and {args.out.with_suffix('.md').name} are written", flush=True)
    if args.docs:
        for name, made in page.documents(found, DOCS).items():
            (DOCS / name).write_text(made)
            print(f"docs/{name} is written", flush=True)


def main() -> None:
    """Runs a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="measure what is missing")
    running.set_defaults(run=run)
    running.add_argument(
        "--parts", nargs="+", default=["bench", "freshness"], help="names of parts or of groups of them"
    )
    running.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="of contestants that have it in their name"
    )
    running.add_argument("--again", action="store_true", help="measure them anew")
    running.add_argument("--rounds", type=int, default=5)
    running.add_argument("--seconds", type=float, default=4.0, help="of one run of a contestant that trains")
    peers = os.environ.get("PEERS")
    running.add_argument("--peers", type=Path, default=Path(peers) if peers else None, help="folder; default: $PEERS")
    environments = os.environ.get("PEERS_ENVS")
    environment = Path(environments) if environments else None
    running.add_argument("--peer-environments", type=Path, default=environment, help="default: $PEERS_ENVS or venvs")
    paging = commands.add_parser("page", help="make the pages anew")
    paging.set_defaults(run=lambda args: write(args, known(args.out)))
    listing = commands.add_parser("list", help="the parts, and how long each took")
    listing.set_defaults(run=tell)
    for one in (running, paging, listing):
        one.add_argument("--out", type=Path, default=DEFAULT, help="file of results")
        one.add_argument("--docs", action=argparse.BooleanOptionalAction, help="default: those of the default file")
    args = parser.parse_args()
    args.docs = args.out == DEFAULT if args.docs is None else args.docs
    end_in_order()
    sys.exit(args.run(args))


if __name__ == "__main__":
    main()
