"""How does streamtrain compare with its peers and limits, all in one run? make bench, make bench-scale.

    python benchmarks/bench.py run --peers FOLDER
    python benchmarks/bench.py run --parts serving lookup --again
    python benchmarks/bench.py list
    python benchmarks/bench.py page

run: measures the parts that the file of results lacks, one after another; the contestants of a part take turns, round
by round. It can be interrupted at any time and continues where it was. Peers are scripts in a folder (pss_tf.py,
torch_ebc.py) with environments (tf, torch) in another; those that are not installed are left out. Then it generates the
pages.
list: lists the parts and how long each took.
page: generates the tables of docs/performance.md, docs/benchmarks.md and docs/sizing.md, the picture, and a page next
    to the results.
Exits with 1 if a contestant failed.

What is measured and what has to be reached is in harness/suite.py.
"""

import argparse
import os
from pathlib import Path

from harness import pages
from harness.processes import BENCHMARKS
from harness.runner import Part, Suite
from harness.suite import RATIOS, Peers, Scope, suite


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `run`."""
    peers = os.environ.get("PEERS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one run of a contestant that trains")
    parser.add_argument("--peers", type=Path, default=Path(peers) if peers else None, help="folder; default: $PEERS")


def groups(args: argparse.Namespace) -> dict[str, list[Part]]:
    """All parts."""
    folders = [folder and folder.absolute() for folder in (args.peers, args.peer_environments)]
    return suite(Scope(args.rounds, args.seconds, Peers(*folders)))


SUITE = Suite(
    about=__doc__ or "",
    file=BENCHMARKS / "results" / "bench.json",
    groups=groups,
    default=("bench", "freshness"),
    names="parts",
    documents=pages.documents,
    options=options,
    ratios=RATIOS,
    page=pages.page,
)

if __name__ == "__main__":
    SUITE.main()
