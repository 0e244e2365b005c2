"""A few ratios in short rounds, in turns, beside those that were accepted: make bench-quick.

    python benchmarks/quick.py
    python benchmarks/quick.py --accept

Ends with 1 if a ratio has lost more than a fifth, or cannot be measured any more. A ratio is looked at again, as long
as --tries says, before it counts as lost: on a machine that others use a single look may be off. --accept
writes what is measured as what is compared with from now on. Parts can be chosen; what is accepted of others stays.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from processes import end_in_order
from suite.bars import Ratio
from suite.guard import compare
from suite.parts import DENSE, Contestant, Figure, Part
from suite.results import Results, measured
from suite.running import BENCHMARKS, adopt_orphans, python
from suite.turns import Turns

ACCEPTED = BENCHMARKS / "quick.json"
OURS, PEER = "ours", "peer"


def part(name: str, ours: Contestant, *others: Contestant) -> Part:
    """One whose contestants take turns, or a script that makes rounds of its own."""
    return Part(name, name, (ours, *others), once=not others)


def _script(figure: Figure, *command: object) -> Contestant:
    return Contestant(OURS, python(*map(str, command)), {"ratio": figure}, timeout=180)


def _rate(name: str, figure: Figure, *command: object) -> Contestant:
    return Contestant(name, python(*map(str, command)), {"samples/s": figure}, timeout=180)


def parts() -> dict[str, tuple[Part, list[Ratio]]]:
    """By name, with what is made of them."""
    table = Contestant(
        OURS,
        python("core_table.py", "--rows", 1_000_000, "--growths", 1, "--rounds", 3, "--json"),
        {"pull": ("pull / numpy.take",), "push": ("push / NumPy gather-update-scatter",)},
        timeout=180,
    )
    predict = Contestant(
        OURS,
        python(
            "serving.py", "--rows", 50_000, "--rounds", 3, "--seconds", 0.7, "--concurrency", 1, 16, "--instances", 1
        ),
        {load: ("by_load", load, "ratio") for load in ("1 by 1", "1 by 16")},
        timeout=180,
    )
    step = ("step.py", "--rounds", 5, "--seconds", 1, "--batches")
    small = ("--workload", "w2", "--batch", 64, "--vocabulary", 500_000, "--only", "plain_tf", "batch")
    cluster = ("cluster.py", "--topologies", "colocated", "--batches", 60, "--seconds", 3, "--warmup", 2, "--rounds", 1)
    return {
        "decode": (
            part("decode", _script(("ratio",), "core_decode.py", "--ids", "text", "--runs", 5)),
            [Ratio("decode / msgspec and xxhash", "decode", OURS, figure="ratio")],
        ),
        "table": (
            part("table", table),
            [
                Ratio("pull / numpy.take", "table", OURS, figure="pull"),
                Ratio("push / NumPy", "table", OURS, figure="push"),
            ],
        ),
        "predict": (
            part("predict", predict),
            [Ratio(f"predict {load} / empty FastAPI", "predict", OURS, figure=load) for load in ("1 by 1", "1 by 16")],
        ),
        "w1": (
            part("w1", _script(("ratio_to_dense", "batch"), *step, 60, "--only", "dense", "batch")),
            [Ratio("W1 one process / dense step only", "w1", OURS, figure="ratio")],
        ),
        "w2": (
            part("w2", _script(("ratio_to_plain_tf", "batch"), *step, 300, *small)),
            [Ratio("W2 batch 64, one process / plain TensorFlow", "w2", OURS, figure="ratio")],
        ),
        "cluster": (
            part(
                "cluster",
                _rate(OURS, ("samples_per_s",), *cluster),
                _rate(PEER, ("samples_per_s",), "dense_only.py", "--processes", 2, "--seconds", 2),
            ),
            [Ratio(f"W1 colocated / {DENSE}", "cluster", OURS, PEER)],
        ),
    }


def look(names: list[str], rounds: int) -> dict[str, float | None]:
    """Measures some; the median of each ratio."""
    chosen = {name: one for name, one in parts().items() if name in names}
    with tempfile.TemporaryDirectory() as folder:
        results = Results(Path(folder) / "quick.json", ())
        turns = Turns(results, rounds, lambda line: print(f"  {line}", flush=True))
        found: dict[str, float | None] = {}
        for one, ratios in chosen.values():
            turns.part(one)
            for ratio in ratios:
                runs = ratio.runs(measured(results.found))
                found[ratio.what] = round(statistics.median(runs), 3) if runs else None
        return found


def main() -> None:
    """Measures and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", choices=[*parts()], nargs="+", default=[*parts()])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=2, help="looks at a ratio before it counts as lost")
    parser.add_argument("--accept", action="store_true", help="what is measured is what is compared with from now on")
    parser.add_argument("--accepted", type=Path, default=ACCEPTED, help="file of what was accepted")
    args = parser.parse_args()
    end_in_order()
    adopt_orphans()
    known: dict[str, float] = json.loads(args.accepted.read_text()) if args.accepted.exists() else {}
    part_of = {ratio.what: name for name, (_, ratios) in parts().items() for ratio in ratios}
    accepted = {name: value for name, value in known.items() if part_of.get(name, "") in args.parts}
    began, now, left = time.monotonic(), dict[str, float | None](), list(args.parts)
    for _ in range(1 if args.accept else args.tries):
        if left:
            now |= {name: _better(value, now.get(name)) for name, value in look(left, args.rounds).items()}
            left = sorted({part_of[one.name] for one in compare(now, accepted) if one.lost})
    verdicts = compare(now, accepted)
    for one in verdicts:
        print(one, flush=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    missing = [name for name, value in now.items() if value is None]
    if args.accept and not missing:
        args.accepted.write_text(json.dumps(known | now, indent=1) + "\n")
        print(f"accepted: {args.accepted.name}")
        return
    sys.exit(bool(missing) or any(one.lost for one in verdicts))


def _better(one: float | None, other: float | None) -> float | None:
    """The better of two looks."""
    return max((value for value in (one, other) if value is not None), default=None)


if __name__ == "__main__":
    main()
