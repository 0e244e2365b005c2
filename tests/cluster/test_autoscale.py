"""What other numbers of shards and workers are proposed, and by what."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamtrain.cluster.autoscale import SECONDS, Load, LoadWatch, Proposal, ShardLoad, propose

GB = 10**9


def shards(count: int, cpu: float, memory: float = 1.0, free: float = 100.0, *, host: str = "127.0.0.1") -> Any:
    """Some that are alike; in each `{}` of the host is its number."""
    return [ShardLoad(f"{host.format(i)}:{4000 + i}", cpu, int(memory * GB), int(free * GB)) for i in range(count)]


def load(of: Any, **options: Any) -> Load:
    given: dict[str, Any] = {"workers": 2, "for_samples": 0.3, "for_shards": 0.1, "partitions": 8, "lag": 0}
    return Load(of, **(given | {"is_behind": False} | options))


APART = "10.0.0.{}"


@pytest.mark.parametrize(
    ("of", "options", "expected", "why"),
    [
        (shards(2, 0.4), {}, (2, 2), ""),
        (shards(2, 0.9), {}, (4, 2), "shards use 0.90 of a core each"),
        (shards(2, 3.0), {}, (4, 2), "shards use 3.00 of a core each"),  # at most twice as many at a time
        (shards(4, 0.05), {}, (1, 2), "shards use 0.05 of a core each"),
        (shards(4, 0.05), {"is_behind": True, "for_samples": 0.0}, (4, 3), "samples behind"),  # rather more workers
        (shards(4, 0.25), {}, (3, 2), "shards use 0.25 of a core each"),
        (shards(1, 0.01), {}, (1, 2), ""),
        # Memory, where each has its own.
        (shards(2, 0.4, 60, 5, host=APART), {}, (3, 2), "60.0 GB of rows and 5.0 GB are free there"),
        (shards(2, 0.4, 60, 20, host=APART), {}, (2, 2), ""),
        (shards(1, 0.4, 60, 5, host="registry"), {}, (1, 2), ""),  # as of shards that Ray starts
        (shards(2, 0.9, 60, 5, host="registry"), {}, (4, 2), "shards use 0.90 of a core each"),
        (shards(1, 0.4, 60, 5, host="[::1]"), {}, (1, 2), ""),
        (shards(1, 0.4, 60, 5, host="[fd00::1]"), {}, (2, 2), "60.0 GB of rows and 5.0 GB are free there"),
        (shards(2, 0.4, 60, 5), {}, (2, 2), ""),  # others of this machine would take the same memory
        (shards(4, 0.05, 60, 20, host=APART), {}, (4, 2), ""),  # three would not hold the rows
        (shards(4, 0.05, 20, 60, host=APART), {}, (2, 2), "shards use 0.05 of a core each"),
        # What workers wait for.
        (
            shards(2, 0.5),
            {"is_behind": True, "for_shards": 0.6, "for_samples": 0.0, "lag": 10**6},
            (3, 2),
            "wait for shards 60%",
        ),
        (shards(2, 0.5), {"is_behind": True, "for_samples": 0.0, "lag": 10**6}, (2, 3), "1,000,000 samples behind"),
        (
            shards(2, 0.5),
            {"is_behind": True, "for_samples": 0.0, "partitions": 2},
            (2, 2),
            "need more than 2 partitions",
        ),
        (shards(2, 0.5), {"is_behind": True, "for_samples": 0.5}, (2, 2), ""),  # neither would help
        (shards(2, 0.5), {"workers": 8, "for_samples": 0.9}, (2, 2), "wait for samples 90% of their time"),
        (shards(2, 0.5), {"workers": 1, "for_samples": 0.99}, (2, 1), ""),
        (shards(2, 0.5), {"workers": 0}, (2, 0), ""),
        # Of a process that does other work, too, it is not known.
        (shards(2, float("nan")), {}, (2, 2), ""),
    ],
)
def test_what_helps_is_proposed(of: Any, options: dict[str, Any], expected: tuple[int, int], why: str) -> None:
    found = propose(load(of, **options))
    assert (found.shards, found.workers) == expected
    assert why in " ".join(found.why)
    assert bool(found.why) == bool(why)


def test_what_is_proposed_is_enough() -> None:
    """What follows from a proposal is not undone by the next one."""
    for cpu in (0.01, 0.1, 0.3, 0.6, 0.8, 1.5, 6.0):
        now, used = 4, 4 * cpu
        for _ in range(10):
            proposed = propose(load(shards(now, used / now))).shards
            if proposed == now:
                break
            now = proposed
        assert propose(load(shards(now, used / now))).shards == now, (cpu, now)
    for memory in (1, 30, 90, 300, 2000):
        now, each = 4, 100
        for _ in range(10):
            of = shards(now, 0.3, memory / now, max(0.0, each - memory / now), host=APART)
            proposed = propose(load(of)).shards
            if proposed == now:
                break
            now = proposed
        of = shards(now, 0.3, memory / now, max(0.0, each - memory / now), host=APART)
        assert propose(load(of)).shards == now, (memory, now)


def status(cpu_ms: int, *, ready: bool = True) -> Any:
    return SimpleNamespace(ready=ready, cpu_ms=cpu_ms, free_memory=GB, tables=[SimpleNamespace(bytes=1000)])


class Looks:
    """Looks at a cluster once a second, whose two shards use some of a core."""

    def __init__(self) -> None:
        self.watch, self.at, self.used = LoadWatch(), 0.0, 100_000

    def look(
        self, seconds: float, cpu: float, *, lag: int = 0, lag_per_s: float = 0.0, **worker: float
    ) -> Proposal | None:
        worker = {"waits_for_samples": 0.5, "waits_for_shards": 0.0} | worker
        for second in range(round(seconds)):
            self.at += 1
            self.used += int(1000 * cpu)
            of = {f"127.0.0.1:{port}": status(self.used) for port in (1, 2)}
            workers = [{**worker, "partitions": [0, 1]}, {**worker, "partitions": [2]}]
            self.watch.look(self.at, of, workers, int(lag + lag_per_s * second), 1000.0)
        return self.watch.proposal


def test_the_last_minute_counts() -> None:
    looks = Looks()
    assert looks.look(SECONDS, 0.9) is None  # too early to tell
    assert looks.look(1, 0.9) == (4, 2, ("shards use 0.90 of a core each",))
    assert looks.look(SECONDS + 1, 0.4) == (2, 2, ())
    looks.used = 0  # they have started again
    assert looks.look(1, 0.4) is None
    assert looks.look(SECONDS, 0.4) == (2, 2, ())
    looks.watch.look(looks.at + 1, {"127.0.0.1:1": None, "127.0.0.1:2": status(1)}, [], 0, 0.0)
    assert looks.watch.proposal is None
    looks.watch.look(looks.at + 1, {}, [], 0, 0.0)
    assert looks.watch.proposal is None


def test_a_lag_counts_that_does_not_go_away() -> None:
    busy = {"waits_for_samples": 0.0}

    def proposed(**options: float) -> Any:
        return Looks().look(SECONDS + 1, 0.5, **{**busy, **options})  # type: ignore[arg-type]

    assert proposed(lag=5_000).workers == 2  # five seconds of learning
    assert proposed(lag=50_000).workers == 3
    assert proposed(lag=50_000, lag_per_s=-400).workers == 2  # gone within two minutes
    assert proposed(lag=500_000, lag_per_s=-400).workers == 3
    (why,) = proposed(lag=50_000, lag_per_s=100).why
    assert why.startswith("workers are 56,000 samples behind, and wait for samples 0% of their time")
    assert proposed(lag=50_000, waits_for_shards=0.7).shards == 3
    assert Looks().look(SECONDS + 1, 0.5, waits_for_samples=float("nan")).workers == 2  # type: ignore[union-attr]
