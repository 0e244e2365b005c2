"""The tables of docs/metrics.md."""

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"


class Documented(NamedTuple):
    """A metric, as its row says."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    help: str


def on_the_page(*processes: str) -> list[Documented]:
    """The metrics of the page; with `processes` those of worker, shard, coordinator, serving or build alone."""
    prefixes = tuple(f"streamtrain_{one}_" for one in processes or ("",))
    rows = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `streamtrain_"):
            name, kind, labels, unit, help_text = (cell.strip() for cell in line.strip("|").split("|"))
            names = tuple(one.strip("`") for one in labels.split(", ") if one)
            rows.append(Documented(name.strip("`"), kind, names, unit, help_text))
    return [one for one in rows if one.name.startswith(prefixes) or not processes]
