"""How long do workers wait for a slow one, by the staleness that they are allowed? make bench-staleness.

    python benchmarks/staleness.py

Four workers in threads, a real shard and its `bounded` consistency; a step is a sleep of some milliseconds, as if every
worker had a machine of its own. There are two kinds of slow workers: one whose steps all take twice as long, and one
that is as fast on average but stalls for the time of 16 steps once in 32 steps. Prints a table: the share of their time
for which the three others wait.
"""

import argparse
import random
import threading
import time

import numpy as np
from harness.figures import table_header, table_row

from streamtrain.model.spec import Spec
from streamtrain.ps.clock import Span
from streamtrain.ps.consistency import Bounded
from streamtrain.ps.push import Push
from streamtrain.ps.shard import InitialState, Run, Shard

WORKERS = 4
STALENESS = (0, 1, 2, 4, 8, 16)
STALL, EVERY = 16, 32


def steps(kind: str, slow: bool, step: float, rng: random.Random) -> float:
    """Seconds that the next step takes; all vary by up to 10%."""
    usual = step * rng.uniform(0.9, 1.1)
    if kind == "twice":
        return usual * (2 if slow else 1)
    if not slow:
        return usual * (EVERY + STALL) / EVERY
    return usual * (STALL + 1 if rng.randrange(EVERY) == 0 else 1)


def waiting(kind: str, staleness: int, step: float, seconds: float) -> float:
    """Share of their time for which workers wait for the slow one."""
    none = np.empty(0, np.float32)
    spec = Spec("", 0, "sum", (), (), (), {"optimizer": "sgd", "rate": 1.0})
    shard = Shard(InitialState(Run("run", {}), spec, none, none), 0, 1)
    bounded = Bounded(shard, staleness, 60.0, time.monotonic)
    waited = [0.0] * WORKERS
    until = time.monotonic() + seconds
    for worker in range(WORKERS):
        bounded.join(str(worker), None)

    def work(worker: int) -> None:
        rng = random.Random(worker)
        offset = 0
        while time.monotonic() < until:
            began = time.monotonic()
            while not bounded.pull(str(worker), 0, 1.0):
                continue
            waited[worker] += time.monotonic() - began
            time.sleep(steps(kind, worker == 0, step, rng))
            bounded.push(str(worker), Push([Span(worker, offset, offset + 1)], 0, [], none, none, 0))
            offset += 1
        bounded.leave(str(worker))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(waited[1:]) / (WORKERS - 1) / seconds


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", type=float, default=0.01, help="seconds of a normal step")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    args = parser.parse_args()
    print(table_header(("staleness", *STALENESS)))
    for kind, name in (("twice", "always twice as slow"), ("stalls", "as fast on average, with stalls")):
        shares = [f"{waiting(kind, s, args.step, args.seconds):.0%}" for s in STALENESS]
        print(table_row((name, *shares)), flush=True)


if __name__ == "__main__":
    main()
