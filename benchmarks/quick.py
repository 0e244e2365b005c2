"""Has a change made anything slower? A few ratios in short rounds, compared with accepted ones: make bench-quick.

    python benchmarks/quick.py
    python benchmarks/quick.py --accept

Exits with 1 if a ratio has lost more than a fifth, or cannot be measured any more. A ratio counts as lost only after
--tries measurements, as one may be off on a machine that others use. --accept writes what was measured to quick.json,
as what is compared with from then on. Parts can be chosen; what is accepted of others stays.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.processes import BENCHMARKS, exit_on_sigterm
from harness.results import Ratio, Results, measured
from harness.runner import Contestant, Figure, Part, Turns, adopt_orphans, python
from harness.suite import DENSE, RATE

ACCEPTED = BENCHMARKS / "quick.json"
LOSS = 0.2  # of an accepted ratio that is too much
OURS, PEER = "ours", "peer"
PUSH = "push / NumPy gather-update-scatter"


@dataclass(frozen=True)
class Verdict:
    """One ratio.

    Attributes:
        name: of the ratio.
        now: measured; None: it could not be measured.
        accepted: what it is compared with; None: nothing was accepted yet.
    """

    name: str
    now: float | None
    accepted: float | None

    @property
    def lost(self) -> bool:
        """Whether it has lost more than is allowed, or was accepted and cannot be measured any more."""
        if self.accepted is None:
            return False
        return self.now is None or self.now < (1 - LOSS) * self.accepted

    def __str__(self) -> str:
        now = "not measured" if self.now is None else f"{self.now:.3f}"
        if self.accepted is None:
            return f"{self.name}: {now}, nothing accepted yet"
        change = "" if self.now is None else f" ({self.now / self.accepted - 1:+.0%})"
        return f"{'LOST ' if self.lost else ''}{self.name}: {now}, accepted {self.accepted:.3f}{change}"


def compare(now: Mapping[str, float | None], accepted: Mapping[str, float]) -> list[Verdict]:
    """Verdicts on all ratios that were measured or accepted; more is better in all of them."""
    return [Verdict(name, now.get(name), accepted.get(name)) for name in dict.fromkeys((*now, *accepted))]


def _part(name: str, *contestants: Contestant) -> Part:
    """A script alone makes rounds of its own; several take turns."""
    return Part(name, name, contestants, once=len(contestants) == 1)


def _ours(figures: Mapping[str, Figure], *command: object) -> Contestant:
    return Contestant(OURS, python(*map(str, command)), figures, timeout=180)


def parts() -> dict[str, tuple[Part, list[Ratio]]]:
    """Parts by name, with the ratios that are made of them."""
    table = ("core.py", "table", "--rows", 1_000_000, "--growths", 1, "--rounds", 3, "--json")
    serving = ("serving.py", "--rows", 50_000, "--rounds", 3, "--seconds", 0.7, "--instances", 1)
    loads: dict[str, Figure] = {load: ("by_load", load, "ratio") for load in ("1 by 1", "1 by 16")}
    calls: dict[str, Figure] = {f"{load}, gRPC": ("by_load", load, "grpc_to_http") for load in loads}
    micro = ("step.py", "--micro", 8, "--rounds", 3, "--seconds", 1, "--workload")
    steps: dict[str, Figure] = {one: (f"ratio_to_{one}", "8") for one in ("large", "plain_tf")}
    kafka = ("stream.py", "--messages", 1_500_000, "--seconds", 4, "--warmup", 2, "--rounds", 1)
    step = ("step.py", "--rounds", 5, "--seconds", 1, "--batches")
    small = ("--workload", "w2", "--batch", 64, "--vocabulary", 500_000, "--only", "plain_tf", "batch")
    cluster = ("cluster.py", "--topologies", "colocated", "--batches", 60, "--seconds", 3, "--warmup", 2, "--rounds", 1)
    one_id = (*cluster, "--topologies", "dedicated", "--workload", "w2", "--batch", 64)
    dense, dense_one_id = (
        Contestant(PEER, python("step.py", "--processes", 2, "--seconds", 2, *of), RATE, timeout=180)
        for of in ((), ("--workload", "w2", "--batch", 64))
    )
    return {
        "decode": (
            _part("decode", _ours({"ratio": ("ratio",)}, "core.py", "decode", "--ids", "text", "--rounds", 5)),
            [Ratio("decode / msgspec and xxhash", "decode", OURS, figure="ratio")],
        ),
        "table": (
            _part("table", _ours({one: (one,) for one in ("pull / numpy.take", PUSH)}, *table)),
            [
                Ratio("pull / numpy.take", "table", OURS, figure="pull / numpy.take"),
                Ratio("push / NumPy", "table", OURS, figure=PUSH),
            ],
        ),
        "predict": (
            _part("predict", _ours(loads | calls, *serving, "--concurrency", 1, 16)),
            [
                *(Ratio(f"predict {load} / empty FastAPI", "predict", OURS, figure=load) for load in loads),
                *(Ratio(f"predict {call} / over HTTP", "predict", OURS, figure=call) for call in calls),
            ],
        ),
        **{
            f"micro-{workload}": (
                _part(f"micro-{workload}", _ours(steps, *micro, workload)),
                [
                    Ratio(f"{title}, steps of 8 / one step", f"micro-{workload}", OURS, figure="large"),
                    Ratio(f"{title}, steps of 8 / plain TensorFlow", f"micro-{workload}", OURS, figure="plain_tf"),
                ],
            )
            for workload, title in (("w1", "W1"), ("readme", "README's model"))
        },
        "kafka": (
            _part("kafka", _ours({"ratio": ("ratio_to_ready",)}, *kafka)),
            [Ratio("W1 colocated, JSON from Kafka / ready batches", "kafka", OURS, figure="ratio")],
        ),
        "w1": (
            _part("w1", _ours({"ratio": ("ratio_to_dense", "batch")}, *step, 60, "--only", "dense", "batch")),
            [Ratio("W1 one process / dense step only", "w1", OURS, figure="ratio")],
        ),
        "w2": (
            _part("w2", _ours({"ratio": ("ratio_to_plain_tf", "batch")}, *step, 300, *small)),
            [Ratio("W2 batch 64, one process / plain TensorFlow", "w2", OURS, figure="ratio")],
        ),
        "cluster": (
            _part("cluster", _ours(RATE, *cluster), dense),
            [Ratio(f"W1 colocated / {DENSE}", "cluster", OURS, PEER)],
        ),
        "requests": (
            _part("requests", _ours(RATE, *one_id), dense_one_id),
            [Ratio(f"W2 batch 64, dedicated / {DENSE}", "requests", OURS, PEER)],
        ),
    }


def measure(names: list[str], rounds: int) -> dict[str, float | None]:
    """The median of each ratio of some parts; None: it could not be measured."""
    with tempfile.TemporaryDirectory() as folder:
        results = Results(Path(folder) / "quick.json", ())
        turns = Turns(results, rounds, lambda line: print(f"  {line}", flush=True))
        found: dict[str, float | None] = {}
        for part, ratios in (one for name, one in parts().items() if name in names):
            turns.part(part)
            for ratio in ratios:
                runs = ratio.runs(measured(results.found))
                found[ratio.what] = round(statistics.median(runs), 3) if runs else None
        return found


def main() -> None:
    """Measures and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", choices=[*parts()], nargs="+", default=[*parts()])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=2, help="measurements of a ratio before it counts as lost")
    parser.add_argument("--accept", action="store_true", help="accept what is measured")
    parser.add_argument("--accepted", type=Path, default=ACCEPTED, help="file of accepted ratios")
    args = parser.parse_args()
    exit_on_sigterm()
    adopt_orphans()
    known: dict[str, float] = json.loads(args.accepted.read_text()) if args.accepted.exists() else {}
    part_of = {ratio.what: name for name, (_, ratios) in parts().items() for ratio in ratios}
    accepted = {name: value for name, value in known.items() if part_of.get(name, "") in args.parts}
    began, now, left = time.monotonic(), dict[str, float | None](), list(args.parts)
    for _ in range(1 if args.accept else args.tries):
        if left:
            now |= {name: _better(value, now.get(name)) for name, value in measure(left, args.rounds).items()}
            left = sorted({part_of[one.name] for one in compare(now, accepted) if one.lost})
    verdicts = compare(now, accepted)
    for one in verdicts:
        print(one, flush=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    missing = [name for name, value in now.items() if value is None]
    if args.accept and not missing:
        args.accepted.write_text(json.dumps(known | now, indent=1) + "\n")
        print(f"wrote {args.accepted.name}")
        return
    sys.exit(bool(missing) or any(one.lost for one in verdicts))


def _better(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


if __name__ == "__main__":
    main()
