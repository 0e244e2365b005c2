"""Ratios that the suite is judged by, and their bars."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite.parts import COLOCATED, DEDICATED, DENSE, ONE, PLAIN, PSS, TORCH, over_grpc

FULL = "50M rows, float32 and Adagrad"
Runs = Mapping[str, Mapping[str, Sequence[Mapping[str, Any] | None]]]  # by part and contestant; by figure in each


@dataclass(frozen=True)
class Ratio:
    """One figure over another of the same round, or a figure that is a ratio already.

    Attributes:
        what: for people.
        part: whose figures they are.
        over: the contestant above the line.
        under: the one below it; empty: the figure is taken as it is.
        figure: name of both.
        bar: what it has to reach; None: it has none.
        most: whether the bar is the most that is allowed, not the least.
    """

    what: str
    part: str
    over: str
    under: str = ""
    figure: str = "samples/s"
    bar: float | None = None
    most: bool = False

    def runs(self, measured: Runs) -> list[float]:
        """By round, of those rounds that have both."""
        over = self._of(measured, self.over)
        if not self.under:
            return [one for of_round in over for one in of_round]
        pairs = zip(over, self._of(measured, self.under), strict=False)
        return [a[0] / b[0] for a, b in pairs if a and b and b[0]]

    def _of(self, measured: Runs, contestant: str) -> list[list[float]]:
        found = [one or {} for one in measured.get(self.part, {}).get(contestant, [])]
        return [[value for value in one.get(self.figure, []) if value is not None] for one in found]

    def judge(self, measured: Runs) -> dict[str, Any]:
        """What it is, as JSON: `met` is None where it was not measured, or has no bar."""
        runs = self.runs(measured)
        median = statistics.median(runs) if runs else None
        met = None
        if median is not None and self.bar is not None:
            met = median <= self.bar if self.most else median >= self.bar
        bar = None if self.bar is None else f"{'≤' if self.most else '≥'} {self.bar:g}"
        found = {"what": self.what, "part": self.part, "bar": bar, "runs": [round(one, 4) for one in runs]}
        return found | {"median": None if median is None else round(median, 4), "met": met}


def _training(part: str, what: str, over: str, bars: Sequence[tuple[str, float]]) -> list[Ratio]:
    return [Ratio(f"{what} / {under}", part, over, under, bar=bar) for under, bar in bars]


def _kafka(part: str, what: str, over: str, bar: float | None = None) -> Ratio:
    return Ratio(f"{what}: JSON from Kafka / ready batches", part, f"{over}, from Kafka", over, bar=bar)


def _predict(load: str, connections: str) -> list[Ratio]:
    what = f"predict 1 instance, {connections}"
    return [
        Ratio(f"{what}: requests/s / empty FastAPI", "serving", "predict", figure=f"{load}, rate / empty", bar=0.5),
        Ratio(f"{what}: p99 / its p99", "serving", "predict", figure=f"{load}, p99 / empty", bar=3, most=True),
    ]


def _fresh(every: str, bar: float) -> list[Ratio]:
    forms = ("asked again", "x-min-offset")
    return [
        Ratio(
            f"published every {every}, {form}: p99, ms",
            "freshness",
            f"published every {every}",
            "",
            f"{form}, p99 ms",
            bar,
            True,
        )
        for form in forms
    ]


RATIOS: tuple[Ratio, ...] = (
    *_training("w1", "W1 colocated", COLOCATED, [(PSS, 3), (DENSE, 0.6), (TORCH, 1.6), (PLAIN, 1.8)]),
    *_training("w1", "W1 dedicated", DEDICATED, [(PSS, 1.7)]),
    *_training("w1", "W1 dedicated, over gRPC", over_grpc(DEDICATED), [(PSS, 1.7)]),
    Ratio(f"W1 {ONE} / {PLAIN}", "w1", ONE, PLAIN),
    *_training("w2-64", "W2 batch 64, dedicated", DEDICATED, [(PSS, 5)]),
    *_training("w2-64", "W2 batch 64, dedicated, over gRPC", over_grpc(DEDICATED), [(PSS, 5)]),
    *_training("w2-64", "W2 batch 64, colocated", COLOCATED, [(PSS, 8)]),
    Ratio(f"W2 batch 64, {ONE} / {PLAIN}", "w2-64", ONE, PLAIN),
    *_training("w2-1024", "W2 batch 1024, colocated", COLOCATED, [(PSS, 4), (PLAIN, 1)]),
    Ratio(f"W2 batch 1024, {ONE} / {PLAIN}", "w2-1024", ONE, PLAIN),
    *(_kafka("w1", f"W1 {name.partition(',')[0]}", name, 0.6) for name in (COLOCATED, DEDICATED)),
    *(_kafka("w2-64", f"W2 batch 64, {name.partition(',')[0]}", name) for name in (COLOCATED, DEDICATED)),
    Ratio("decode / msgspec and xxhash", "core", "decoder", figure="decode / msgspec and xxhash", bar=5),
    Ratio("pull / numpy.take, 10M rows", "core", "table of 10M rows", figure="pull / numpy.take", bar=0.5),
    Ratio("push / NumPy, 10M rows", "core", "table of 10M rows", figure="push / NumPy", bar=0.5),
    Ratio("peak memory / payload, 10M rows", "core", "table of 10M rows", "", "peak memory / payload", 1.25, True),
    Ratio("peak memory / payload, 50M float16 rows", "tables", "50M rows", "", "peak memory / payload", 1.25, True),
    Ratio("peak memory / payload, 50M float32 rows", "tables", FULL, "", "peak memory / payload", 1.25, True),
    *_predict("1 by 1", "1 connection"),
    *_predict("1 by 16", "16 connections"),
    *_fresh("1s", 2000),
    *_fresh("100ms", 500),
    Ratio("p99 while versions swap / before", "swaps", "swaps", figure="p99 during / before", bar=2, most=True),
    Ratio("samples/s while publishing every second / without", "publish", "colocated", "", "samples/s, on / off", 0.9),
)
