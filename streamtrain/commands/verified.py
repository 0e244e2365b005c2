"""What came of `verify`, as a table for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from streamtrain.commands.tables import show

Row = tuple[str, str]


def show_parts(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints what came of each part."""
    table = Table(title="verify", title_justify="left")
    for column in ("compared", "what", "result"):
        table.add_column(column)
    rows = {"shards": _shards, "served": _served, "samples": _samples}
    names = {"shards": "shards and Redis", "served": "Redis and server", "samples": "trainer and server"}
    for part, found in parts.items():
        if "passed_over" in found:
            table.add_row(names[part], "", f"not compared: {found['passed_over']}")
        elif "failed" in found:
            table.add_row(names[part], "", f"FAILED: {found['failed']}")
        else:
            for row in rows[part](found):
                table.add_row(names[part], *row)
    show(table)


def _shards(found: Mapping[str, Any]) -> Iterator[Row]:
    for name, one in found["tables"].items():
        what = f"publication {found['publication']}, table {name}: {one['rows']:,} rows in {one['buckets']:,} buckets"
        left_out = f"; {one['changing']:,} keys left out, which are changing" if one["changing"] else ""
        faults = [*one["first"]]
        if one["differing"] > len(faults):
            faults.append(f"and {one['differing'] - len(faults):,} buckets more")
        if one["published"] != one["there"]:
            faults.append(f"Redis has {one['there']:,} rows, the publication says {one['published']:,}")
        yield what + left_out, _result(faults)


def _served(found: Mapping[str, Any]) -> Iterator[Row]:
    if not found["loaded"]:
        yield "", "DIFFERS: the server has loaded nothing"
    for one in found["loaded"]:
        name = "head" if one["name"] == "head" else f"version {one['name']}"
        rows = ", ".join(f"{count:,} rows of {table}" for table, count in one["rows"].items())
        yield f"{name} (publication {one['publication']}): {rows}", _result([one["fault"]] if one["fault"] else [])


def _samples(found: Mapping[str, Any]) -> Iterator[Row]:
    refused = f", {found['refused']:,} cannot be read" if found["refused"] else ""
    largest, mean = found["largest"], found["mean"]
    apart = "some are not finite" if largest is None else f"apart by {largest:.2g} at most, {mean:.2g} on average"
    what = f"{found['samples']:,} samples{refused}: {apart}"
    for label, (trainer, server) in found["auc"].items():
        if trainer is not None and server is not None:
            what += f"; AUC of {label} {trainer:.5f} and {server:.5f}"
    if found["tolerance"] is None:
        yield what, "not judged: they had not learned the same; --tolerance judges all the same"
    else:
        yield what, _result([] if found["agrees"] else [f"more than {found['tolerance']:g} apart"])


def _result(faults: list[str]) -> str:
    return f"DIFFERS: {'; '.join(faults)}" if faults else "equal"
