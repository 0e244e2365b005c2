"""Changes of a table that were read in parts, as one."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamtrain._core import Table
from streamtrain.publish.published_table import PublishedTable, merge_changes
from streamtrain.store.publication import RowChange

KEYS = st.dictionaries(st.integers(0, 8), st.none() | st.integers(-9, 9), max_size=6)


def change_of(rows: dict[int, int | None]) -> RowChange:
    """None: the key is gone."""
    there = {key: value for key, value in rows.items() if value is not None}
    values = np.array([[value, -value] for value in there.values()], np.float32).reshape(-1, 2)
    gone = [key for key in rows if key not in there]
    return RowChange("ids", np.array([*there], np.uint64), values, np.array(gone, np.uint64))


def as_dict(change: RowChange) -> dict[int, int | None]:
    rows = dict(zip(change.keys.tolist(), change.rows.tolist(), strict=True))
    assert all(second == -first for first, second in rows.values())
    assert len(rows) == len(change.keys)
    assert len({*change.gone.tolist()}) == len(change.gone)
    assert not {*rows} & {*change.gone.tolist()}
    return {key: int(first) for key, (first, _) in rows.items()} | dict.fromkeys(change.gone.tolist())


@given(st.lists(KEYS, min_size=1, max_size=5))
def test_later_changes_prevail(parts: list[dict[int, int | None]]) -> None:
    expected: dict[int, int | None] = {}
    for part in parts:
        expected |= part
    assert as_dict(merge_changes([change_of(part) for part in parts])) == expected


def test_changes_of_more_rows_than_are_read_in_one_turn() -> None:
    settings: dict[str, Any] = {"name": "ids", "dim": 4, "optimizer": "sgd", "rate": 1.0}
    table = Table(4, optimizer="sgd", rate=1.0, init="constant", init_scale=0.0)
    published = PublishedTable(settings, table)
    keys = np.arange(10_000, dtype=np.uint64)
    gradients = np.repeat(-keys.astype(np.float32)[:, None], 4, axis=1)
    ones = np.ones(len(keys), np.uint32)
    table.push(keys, gradients, ones, ones)
    table.remove(keys[::3].copy())
    change = published.changes()
    assert sorted(change.gone.tolist()) == keys[::3].tolist()
    rows = dict(zip(change.keys.tolist(), change.rows.tolist(), strict=True))
    assert rows == {key: [float(key)] * 4 for key in keys.tolist() if key % 3}
    assert published.rows == len(rows) == len(table)
    assert not len(published.changes().keys)
    published.close()
