"""What is published, as tables for people and as JSON for scripts."""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple, Self

from rich.console import Console
from rich.table import Table

from streamtrain.store.gate import Figures
from streamtrain.store.origin import Publication
from streamtrain.store.redis_history import Deed
from streamtrain.store.redis_scripts import PROD
from streamtrain.store.redis_versions import RedisVersions

_SHOWN = ("auc", "log_loss", "mean_squared_error", "calibration")
WIDE = 200
"""Characters of a line, where there is no terminal to say how many."""


class Listing(NamedTuple):
    """What is published of a model.

    Attributes:
        head: the head, if there is one.
        versions: ascending.
        labels: version by label.
        holders: servers by version.
        history: the last deed first.
    """

    head: Publication | None
    versions: list[Publication]
    labels: Mapping[str, int]
    holders: Mapping[int, list[str]]
    history: list[Deed]

    @classmethod
    def of(cls, versions: RedisVersions, deeds: int = 0) -> Self:
        """As it is now, with so many deeds of the history."""
        history = versions.history(deeds) if deeds else []
        return cls(versions.head(), versions.all(), versions.labels(), versions.holders(), history)

    @property
    def served(self) -> int | str | None:
        """The version that servers serve; "head"; None: nothing."""
        return self.labels.get(PROD) or (None if self.head is None else "head")

    def as_json(self, *, with_history: bool) -> dict[str, object]:
        """It as values of JSON."""
        found: dict[str, object] = {
            "served": self.served,
            "head": self.head.as_json() if self.head else None,
            "versions": [
                one.as_json() | {"labels": self.labels_of(one), "servers": self.servers_of(one)}
                for one in self.versions
            ],
        }
        return found | ({"history": [deed._asdict() for deed in self.history]} if with_history else {})

    def labels_of(self, publication: Publication) -> list[str]:
        """Labels of a version, sorted."""
        return sorted(label for label, version in self.labels.items() if version == publication.version)

    def servers_of(self, publication: Publication) -> list[str]:
        """Servers that use a version, sorted."""
        return sorted(self.holders.get(publication.version or 0, []))

    def table(self, title: str) -> Table:
        """Versions and the head, for people."""
        columns = ("version", "published, UTC", "trained through", "rows", "type", "labels", "servers", "figures")
        table = new_table(title, columns, right=("version", "rows"))
        for one in [*self.versions, *([self.head] if self.head else [])]:
            is_served = self.served == (one.version or "head")
            table.add_row(
                str(one.version or "head"),
                shown_time(one.published),
                shown_time(one.watermark),
                "\n".join(f"{name} {count:,}" for name, count in one.rows.items()),
                one.dtype,
                ", ".join([*self.labels_of(one), *(["served"] if is_served else [])]),
                ", ".join(self.servers_of(one)),
                shown_figures(one.metrics),
            )
        return table

    def history_table(self) -> Table:
        """What was done, for people."""
        table = new_table("history", ("when, UTC", "who", "what", "why", "figures"), right=())
        for deed in self.history:
            table.add_row(shown_time(deed.at), deed.who, _told(deed), deed.why, shown_figures(deed.metrics))
        return table


def show(table: Table) -> None:
    """Prints a table."""
    Console(width=None if sys.stdout.isatty() else WIDE, markup=False).print(table)


def new_table(title: str, columns: tuple[str, ...], *, right: tuple[str, ...]) -> Table:
    """A table without rows; columns named in `right` are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def _told(deed: Deed) -> str:
    if not deed.label:
        return f"{'made' if deed.what == 'version' else 'deleted'} version {deed.version}"
    none = "the head" if deed.label == PROD else "none"
    version, was = (none if one is None else str(one) for one in (deed.version, deed.was))
    back = " again" if deed.what == "rollback" else ""
    return f"{deed.label} is {version}{back}, before it was {was}"


def shown_time(at: float) -> str:
    """Seconds since the epoch, for people, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(" ", "seconds").removesuffix("+00:00") if at else "-"


def shown_figures(figures: Figures) -> str:
    """Figures by label, a line for each."""
    lines = []
    for label, one in figures.items():
        shown = [f"{name} {value:.4f}" for name in _SHOWN if (value := one.get(name)) is not None]
        lines.append(f"{label}: {', '.join(shown)}" if shown else "")
    return "\n".join(filter(None, lines))
