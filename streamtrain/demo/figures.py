"""The demo's figures, as people and scripts read them."""

import json
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from streamtrain.demo.traffic import FLIGHTS, Traffic
from streamtrain.demo.visitors import Seen

LABEL = "label"
NOTHING: dict[str, object] = dict.fromkeys(("samples", "samples_per_s", "auc", "freshness_ms_p99", "version"))
"""Figures of a demo that was stopped before it began."""


class Figures:
    """What the coordinator, the stream and visitors tell. Belongs to one thread.

    Args:
        traffic: the flights.
        seen: by visitors.
    """

    def __init__(self, traffic: Traffic, seen: Seen) -> None:
        self._traffic, self._seen = traffic, seen
        self._status: dict[str, Any] = {}
        self._seconds = 0.0

    def take(self, status: dict[str, Any], seconds: float | None) -> None:
        """The cluster was so, so many seconds after the first flight; None: as many as the last time."""
        if status.get("samples"):  # none while shards are being started again
            self._status, self._seconds = status, seconds or self._seconds

    def as_json(self, version: int | None) -> dict[str, object]:
        """For scripts; see the command."""
        auc, samples, fresh = self._auc(), self._status.get("samples", 0), self._seen.learned_ms(0.99)
        return {
            "samples": samples,
            "samples_per_s": round(samples / self._seconds) if self._seconds else 0,
            "auc": None if auc is None else round(auc, 4),
            "freshness_ms_p99": None if fresh is None else round(fresh),
            "version": version,
        }

    def line(self) -> str:
        """For a log."""
        return "; ".join(f"{name} {value}" for name, value in self._rows().items())

    def table(self) -> Table:
        """For a terminal."""
        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, value in self._rows().items():
            table.add_row(name, f"[bold]{value}[/]")
        return table

    def _rows(self) -> dict[str, str]:
        status, seen, last = self._status, self._seen, self._seen.last
        rows = sum(sum(shard.get("rows", {}).values()) for shard in status.get("shards", []))
        per_second, header = status.get("samples_per_s"), last.get("x-freshness-ms")
        return {
            "day": self._day(),
            "flights": f"{status.get('samples', 0):,} learned of {self._traffic.written:,}, of {FLIGHTS:,} in the year",
            "samples/s": _number(per_second, ",.0f"),
            "AUC": _number(self._auc(), ".4f"),
            "lag": _number(status.get("lag"), ",d", " samples"),
            "freshness": f"{_ms(seen.learned_ms(0.5))} from a flight to a prediction that has learned it, "
            f"{_ms(seen.learned_ms(0.99))} at the 99th percentile; of the last prediction "
            f"{_ms(float(header) if header else None)}",
            "rows": f"{rows:,}",
            "version": f"{last.get('x-model-version', '-')}, publication {last.get('x-publication', '-')}",
            "predictions": f"{seen.predictions:,} in {_ms(seen.answer_ms(0.5))}, {_ms(seen.answer_ms(0.99))} at the "
            f"99th percentile; {seen.failures:,} failed",
        }

    def _auc(self) -> float | None:
        auc = self._status.get("figures", {}).get(LABEL, {}).get("auc")
        return None if auc is None else float(auc)

    def _day(self) -> str:
        latest = self._traffic.latest
        return (
            "-" if latest is None else datetime.fromtimestamp(json.loads(latest)["departs"], UTC).strftime("%-d %B %Y")
        )


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"
