"""Report: what was done to the services, and what came of it, as JSON and as Markdown."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Injected:
    """A fault.

    Attributes:
        kind: of fault.
        what: where, and for how long.
        recovered: seconds from its end until all was well again.
    """

    kind: str
    what: str
    recovered: float


@dataclass(frozen=True)
class Outcome:
    """Of one service; times in seconds.

    Attributes:
        samples: that were written, bad ones included.
        bad: of these.
        lost: samples, or occurrences of ids, that were not counted.
        doubled: that were counted too often.
        training: longest time without anything learned.
        standstill: longest time for which nothing of a partition that was not at its end was learned.
        standstill_of: that partition.
        serving: longest time without an answer to any client.
        freshness: longest time from the latest sample that an answer had learned from to that answer.
        requests: how they ended.
        wrong: all that was not exact, and answers that could not be.
        starts: how often its processes were started.
    """

    samples: int
    bad: int
    lost: int
    doubled: int
    training: float
    standstill: float
    standstill_of: str
    serving: float
    freshness: float
    requests: Mapping[str, int]
    wrong: list[str]
    starts: int


@dataclass
class Report:
    """Of a run.

    Attributes:
        seed: of what was chosen at random.
        deadline: seconds that services had to be well again.
        missing: kinds of faults that were not possible, and why.
        faults: in order.
        services: by name.
        seconds: that the run took.
        join: what came of the joiners; None: there were none.
    """

    seed: int
    deadline: float
    missing: Mapping[str, str] = field(default_factory=dict)
    faults: list[Injected] = field(default_factory=list)
    services: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0
    join: Mapping[str, Any] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether nothing was wrong."""
        return not any(one.wrong for one in self.services.values()) and not (self.join or {}).get("wrong")

    def by_kind(self) -> dict[str, dict[str, float]]:
        """How many faults, and seconds until all was well again."""
        found = {}
        for kind in dict.fromkeys(one.kind for one in self.faults):
            times = [one.recovered for one in self.faults if one.kind == kind]
            found[kind] = {"count": len(times), "median": statistics.median(times), "worst": max(times)}
        return found

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {"exact": self.is_exact, "by_kind": self.by_kind()} | asdict(self)

    def as_markdown(self) -> str:
        """Tables for people."""
        kinds = [
            (kind, f"{of['count']:g}", f"{of['median']:.1f}", f"{of['worst']:.1f}")
            for kind, of in self.by_kind().items()
        ]
        kinds += [(kind, "0", "not possible here:", why) for kind, why in self.missing.items()]
        services = {name: _rows(one) for name, one in self.services.items()}
        about = f"{len(self.faults)} faults of {len(self.by_kind())} kinds in {self.seconds / 60:.1f} minutes"
        wrong = [f"* {name}: {one}" for name, of in self.services.items() for one in of.wrong]
        join = []
        if self.join is not None:
            told = (
                "{samples:,} samples, longest standstill {standstill} s, {standstill_of}, {starts} starts of processes"
            )
            join = ["", f"Join: {told.format(**self.join)}."]
            wrong += [f"* join: {one}" for one in self.join["wrong"]]
        head = ("fault", "times", "median recovery time, s", "worst")
        return "\n".join(
            [
                f"{about}, seed {self.seed}: {'all is exact' if self.is_exact else 'NOT EXACT'}.",
                "",
                *_table(head, kinds),
                "",
                *_table(("", *services), zip(_ROWS, *services.values(), strict=True)),
                *join,
                *(["", *wrong] if wrong else []),
            ]
        )


_ROWS = (
    "messages written",
    "bad, all dead letters",
    "lost",
    "learned twice",
    "longest gap of training, s",
    "longest standstill of a partition, s",
    "longest gap of serving, s",
    "oldest answer, s behind its samples",
    "requests answered",
    "refused or broken",
    "starts of processes",
)


def _rows(of: Outcome) -> list[str]:
    failed = {how: count for how, count in of.requests.items() if how != "answered"}
    return [
        *(f"{of.samples:,}", f"{of.bad:,}", str(of.lost), str(of.doubled)),
        *(f"{of.training:.1f}", f"{of.standstill:.1f}, {of.standstill_of}", f"{of.serving:.1f}", f"{of.freshness:.1f}"),
        f"{of.requests.get('answered', 0):,}",
        ", ".join(f"{count} {how}" for how, count in sorted(failed.items())) or "0",
        str(of.starts),
    ]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in [head, *rows]]
    return [lines[0], "|" + "---|" * (lines[0].count("|") - 1), *lines[1:]]
