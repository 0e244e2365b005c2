"""Soak: the whole service at full speed, then with four times as much as it can learn: make soak MINUTES=20.

    python -m tests.chaos.soak --minutes 20 --report soak.json --plot soak.svg

Real flights are written as fast as they are learned, and predictions are asked for, while memory, open files and
latency of all processes are looked at. Then for a while four times as much is written as was learned, and then
nothing: the lag grows and goes again, and no process may end. All that was written has to be learned in the end. The
figures go to standard output and to --report, as JSON, and to --plot.
"""

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.asking import Seen
from tests.chaos.figures import Figure, Figures, slope
from tests.chaos.looking import Looking
from tests.chaos.plot import Line, draw
from tests.chaos.samples import Flights
from tests.chaos.service import PARTITIONS, until
from tests.chaos.whole import Running, Whole

_BACKLOG = 5_000  # messages of a partition that wait to be learned at full speed
_FIRST = 100.0  # samples per second of each partition until all is there: what waits is to be due to the load
_FAST = 1e6  # as many as nobody learns
_TIMES = 4  # of what can be learned is written to overload it
_OVERLOAD = 0.07  # of the time at full speed it takes
_EVERY = 10.0  # seconds over which latency is taken
_WARM = 0.3  # share of the time at full speed in which memory may still grow
_SETTINGS = {  # small batches; and a log in Redis that is full after some minutes
    "worker.batch_size": "64",
    "checkpoint.every": "30s",
    "publish.log_bytes": str(16 << 20),
}


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run; raises SystemExit if not all is learned in the end."""
    seconds = 60 * args.minutes
    with Whole(
        folder, [Flights()], rate=_FIRST, every=0.02, contained=False, clocks=False, settings=_SETTINGS
    ) as whole:
        (one,) = whole.running
        one.load.room = lambda: one.training.learned / PARTITIONS + _BACKLOG - one.load.written[0]
        one.load.set_rate(_FAST)
        figures = Figures(lambda: one.service.pids() | whole.servers.pids(), args.every)
        lag = Lag(one, figures.began)
        figures.start()
        lag.start()
        full = phase(one, seconds)
        one.load.set_rate(_TIMES * full["samples_per_s"] / PARTITIONS)
        one.load.room = lambda: float("inf")
        over = phase(one, args.overload or _OVERLOAD * seconds)
        one.load.set_rate(0)
        began = time.monotonic()
        is_over = until(lambda: one.training.learned >= sum(one.load.written), args.deadline)
        recovered = time.monotonic() - began
        lag.stop()
        figures.stop()
        if not is_over:
            raise SystemExit(f"{lag.points[-1][1]:g} messages are not learned within {args.deadline:g} s")
        outcome = whole.come_to_rest(args.deadline)[one.service.name]
    warm = _WARM * full["seconds"]
    steady = {name: [f for f in of if warm <= f.at <= full["seconds"]] for name, of in figures.of.items()}
    latency = latencies(one.seen, figures.began)
    report = {
        "full_speed": full,
        "overload": over | {"most_lag": max(n for _, n in lag.points), "caught_up_s": round(recovered, 1)},
        "processes": {name: about(of, steady[name]) for name, of in figures.of.items()},
        "ended_by_themselves": outcome.starts - len(one.service.names),
        "latency_ms": {name: spread(line, full["seconds"]) for name, line in latency.items()},
        "requests": outcome.requests,
        "longest_gap_of_serving_s": round(outcome.serving, 2),
        "wrong": outcome.wrong,
    }
    if args.plot:
        memory = {name: [(f.at, f.mb) for f in of] for name, of in figures.of.items()}
        files = {name: [(f.at, float(f.files)) for f in of] for name, of in figures.of.items()}
        panels: dict[str, Mapping[str, Line]] = {"memory, MB": memory, "open files": files}
        panels |= {"latency of predictions, ms": latency, "lag, messages": {"lag": lag.points}}
        args.plot.write_text(draw(panels, "Memory, open files, latency of predictions and lag over time"))
    return report


class Lag(Looking):
    """A thread that notes how many messages wait to be learned.

    Attributes:
        points: seconds since the start, and messages.
    """

    def __init__(self, running: Running, began: float) -> None:
        super().__init__("lag", 1.0)
        self._running, self._began = running, began
        self.points: list[tuple[float, float]] = [(0.0, 0.0)]

    def look(self) -> None:
        """At what waits."""
        waiting = sum(self._running.load.written) - self._running.training.learned
        self.points.append((time.monotonic() - self._began, float(waiting)))


def phase(one: Running, seconds: float) -> dict[str, float]:
    """Lets it run for so long; what was written and learned."""
    began, learned, written = time.monotonic(), one.training.learned, sum(one.load.written)
    threading.Event().wait(seconds)
    took = time.monotonic() - began
    return {
        "seconds": round(took, 1),
        "samples_per_s": round((one.training.learned - learned) / took, 1),
        "written_per_s": round((sum(one.load.written) - written) / took, 1),
    }


def about(of: Sequence[Figure], steady: Sequence[Figure]) -> dict[str, float]:
    """What became of a process: MB, and MB per hour while it was warm and at full speed."""
    return {
        "mb_first": round(of[0].mb, 1),
        "mb_last": round(of[-1].mb, 1),
        "mb_most": round(max(f.mb for f in of), 1),
        "mb_per_hour": round(slope([(f.at, f.mb) for f in steady]), 1),
        "files_first": of[0].files,
        "files_most": max(f.files for f in of),
        "files_last": of[-1].files,
    }


def latencies(seen: Seen, began: float) -> dict[str, Line]:
    """Percentiles of latency over time."""
    spans: dict[int, list[float]] = {}
    for at, ms in seen.ms:
        spans.setdefault(int((at - began) / _EVERY), []).append(ms)
    return {
        f"p{percent}": [(span * _EVERY, float(np.percentile(of, percent))) for span, of in sorted(spans.items())]
        for percent in (50, 99)
    }


def spread(line: Line, seconds: float) -> dict[str, float]:
    """A percentile in the first and the last third of the time at full speed, and over it all."""
    values = [value for at, value in line if 0 <= at <= seconds]
    third = max(1, len(values) // 3)
    parts = {"first_third": values[:third], "last_third": values[-third:], "all": [value for _, value in line]}
    return {name: round(float(np.median(of)), 2) for name, of in parts.items() if of}


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="at full speed")
    parser.add_argument("--overload", type=float, help="seconds of it; 7 %% of the minutes at full speed")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks at processes")
    parser.add_argument("--deadline", type=float, default=1200.0, help="seconds for catching up")
    parser.add_argument("--report", type=Path, help="file for the report as JSON")
    parser.add_argument("--plot", type=Path, help="file for the figures over time, as SVG")
    return parser.parse_args(given)


def main() -> None:
    """Runs it."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="streamtrain-soak-") as folder:
        report = run(args, Path(folder))
    text = json.dumps(report, indent=1)
    if args.report:
        args.report.write_text(text + "\n")
    print(text)
    sys.exit(1 if report["wrong"] or report["ended_by_themselves"] else 0)


if __name__ == "__main__":
    main()
