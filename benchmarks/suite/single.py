"""Parts that are one script each, which makes rounds of its own."""

from typing import Any

from suite.parts import Contestant, Figure, Part, Scope
from suite.running import python

LOADS = ("1 by 1", "1 by 16", "512 by 1", "512 by 16")


def parts(scope: Scope) -> list[Part]:
    """All but freshness."""
    return [
        _serving(scope),
        _lookup(scope),
        _core(scope),
        _checkpoint(),
        _swaps(scope),
        _publish(scope),
    ]


def serving_figures() -> dict[str, Figure]:
    """By how many instances and connections."""
    names = {"requests/s": "requests_per_s", "p99 ms": "p99_ms", "rate / empty": "ratio", "p99 / empty": "p99_ratio"}
    return {f"{load}, {name}": ("by_load", load, key) for load in LOADS for name, key in names.items()}


def _serving(scope: Scope) -> Part:
    command = python("serving.py", "--rounds", scope.rounds, "--seconds", min(2.0, scope.seconds))
    whole = Contestant("predict", command, serving_figures() | {"memory MB": ("memory_mb",)}, timeout=600)
    return Part("serving", "Predictions over HTTP, instances by connections", [whole], once=True)


def lookup_figures(instances: int) -> dict[str, Figure]:
    """Of the first size at so many instances, of which there are one or two."""
    at = 0 if instances == 1 else 1
    stages = ("whole", "decode", "plan", "pull", "graph")
    figures: dict[str, Figure] = {f"{instances}, {name} µs": ("results", at, "us", name) for name in stages}
    return figures | {f"{instances}, pull / numpy.take": ("results", at, "pull_to_take")}


def _lookup(scope: Scope) -> Part:
    command = python("lookup.py", "--rows", 1_000_000, "--rounds", scope.rounds)
    one = Contestant("1M rows", command, lookup_figures(1) | lookup_figures(512), timeout=600)
    return Part("lookup", "A prediction without HTTP, by instances", [one], once=True)


def _core(scope: Scope) -> Part:
    names = {
        "pull / numpy.take": "pull / numpy.take",
        "push / NumPy": "push / NumPy gather-update-scatter",
        "peak memory / payload": "peak memory / payload, growth included",
        "insert / pull": "insert / pull, growth included, median push",
        "longest / median push": "longest / median push of a growth, without new memory",
    }
    table = python("core_table.py", "--growths", 1, "--rounds", scope.rounds, "--json")
    decode = python("core_decode.py", "--ids", "text", "--runs", max(9, scope.rounds))
    contestants = [
        Contestant("table of 10M rows", table, {name: (key,) for name, key in names.items()}, timeout=900),
        Contestant(
            "decoder",
            decode,
            {"decode / msgspec and xxhash": ("ratio",), "MB/s": ("native_mb_per_s",)},
        ),
    ]
    return Part("core", "The native core, one thread", contestants, once=True)


def _checkpoint() -> Part:
    restore: dict[str, Figure] = {
        "write MB/s": ("full_mb_per_s",),
        "restore rows/s": ("restore_rows_per_s",),
        "restore / what it has to do": ("restore_over_limits",),
    }
    pause: dict[str, Figure] = {
        "full, pause p99 ms": ("full", "pause_ms", "p99"),
        "delta, pause p99 ms": ("delta", "pause_ms", "p99"),
        "delta, push p99 / without": ("push_p99_ratio", "delta"),
    }
    contestants = [
        Contestant("restore", python("checkpoint.py", "restore", "--rows", 5_000_000), restore, timeout=600),
        Contestant("pause", python("checkpoint.py", "pause", "--seconds", 15), pause, timeout=600),
    ]
    return Part("checkpoint", "Checkpoints", contestants, once=True)


def _swaps(scope: Scope) -> Part:
    figures: dict[str, Figure] = {
        "p99 during / before": ("ratio_p99",),
        "failed": ("failed",),
        "mixed": ("mixed",),
        "rollback ms": ("large", "rollback_resident_ms"),
        "promotion from Redis s": ("large", "promote_from_redis_s"),
    }
    options = ("--rounds", scope.rounds, "--seconds", 5, "--swaps", 20 * scope.rounds)
    return Part(
        "swaps", "Swaps of versions under load", [Contestant("swaps", python("swaps.py", *options), figures)], True
    )


def _publish(scope: Scope) -> Part:
    command: list[Any] = ["--topology", "colocated", "--rounds", scope.rounds, "--warmup", 4, "--seconds", 6]
    one = Contestant("colocated", python("publish.py", *command), {"samples/s, on / off": ("ratio",)}, timeout=900)
    return Part("publish", "What publishing every second costs training", [one], once=True)


def freshness(scope: Scope) -> list[Part]:
    """From a sample that is written to a prediction that has learned it."""
    contestants = []
    for every in ("1s", "100ms"):
        figures: dict[str, Figure] = {}
        for form, key in (("asked again", "asked_again"), ("x-min-offset", "x_min_offset")):
            names = {"p50 ms": "p50_ms", "p99 ms": "p99_ms", "longest ms": "max_ms"}
            figures |= {f"{form}, {name}": (key, of_form) for name, of_form in names.items()}
        command = python("freshness.py", "--every", every)
        contestants.append(Contestant(f"published every {every}", command, figures, timeout=600))
    return [Part("freshness", "From a sample written to a prediction that has learned it", contestants, once=True)]
