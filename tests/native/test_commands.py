"""Commands of Redis on the fields of buckets, against plain Python."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamtrain import _core
from tests.oracles.commands import command, grouped, last_of_each, name_of

BUCKETS = st.lists(st.integers(0, 5) | st.integers(0, 2**24 - 1), max_size=60)
WIDTHS = st.none() | st.integers(0, 130)
NAMES = st.binary(max_size=12)


def buckets_of(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


@given(BUCKETS)
def test_buckets_group_in_order(buckets: list[int]) -> None:
    order, there, starts = _core.group_by_bucket(buckets_of(buckets))
    parts = [order[a:b].tolist() for a, b in pairwise(starts)]
    assert dict(zip(there.tolist(), parts, strict=True)) == grouped(buckets)
    assert there.tolist() == sorted({*buckets})
    assert order.tolist() == [i for part in parts for i in part]


def test_many_things_group_as_a_stable_sort_does() -> None:
    buckets = np.random.default_rng(1).integers(0, 2**24, 100_000)
    order, there, starts = _core.group_by_bucket(buckets)
    assert order.tolist() == np.argsort(buckets, kind="stable").tolist()
    assert there.tolist() == np.unique(buckets).tolist()
    assert np.repeat(there, np.diff(starts)).tolist() == np.sort(buckets).tolist()


@pytest.mark.parametrize("bucket", [-1, 2**24, 2**63 - 1, -(2**63)])
def test_a_bucket_out_of_range_is_refused(bucket: int) -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        _core.group_by_bucket(buckets_of([0, bucket]))


@given(st.lists(st.integers(0, 6) | st.integers(0, 2**64 - 1), max_size=60))
def test_of_equal_keys_the_last_is_found(keys: list[int]) -> None:
    assert _core.last_of_each(np.array(keys, np.uint64)).tolist() == last_of_each(keys)


def test_of_many_equal_keys_the_last_is_found() -> None:
    keys = np.random.default_rng(2).integers(0, 30_000, 100_000).astype(np.uint64)
    assert _core.last_of_each(keys).tolist() == last_of_each(keys.tolist())


@given(st.data(), st.tuples(st.binary(min_size=1, max_size=8), NAMES, NAMES), BUCKETS, WIDTHS)
def test_commands_are_those_of_the_protocol(
    data: Any, texts: tuple[bytes, bytes, bytes], buckets: list[int], width: int | None
) -> None:
    verb, before, after = texts
    rng = np.random.default_rng(len(buckets))
    keys = rng.integers(0, 2**64, len(buckets), dtype=np.uint64)
    rows = None if width is None else rng.integers(0, 256, (len(buckets), width), dtype=np.uint8)
    order, there, starts = _core.group_by_bucket(buckets_of(buckets))
    first = data.draw(st.integers(0, len(there)))
    end = data.draw(st.integers(first, len(there)))  # any run of buckets may be packed by itself
    packed = _core.pack_fields(
        *texts, order=order, buckets=there[first:end], starts=starts[first : end + 1], keys=keys, rows=rows
    )
    expected = b"".join(
        command(verb, name_of(before, bucket, after), [part for i in members for part in field(keys, rows, i)])
        for bucket, members in [*grouped(buckets).items()][first:end]
    )
    assert packed.tobytes() == expected


def field(keys: NDArray[np.uint64], rows: NDArray[np.uint8] | None, i: int) -> list[bytes]:
    key = int(keys[i]).to_bytes(8, "little")
    return [key] if rows is None else [key, rows[i].tobytes()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"order": buckets_of([0, 3])}, "indices of keys"),
        ({"order": buckets_of([0, -1])}, "indices of keys"),
        ({"buckets": buckets_of([2**24])}, "between 0 and"),
        ({"buckets": buckets_of([-1])}, "between 0 and"),
        ({"buckets": buckets_of([0, 1])}, "one more than buckets"),
        ({"starts": buckets_of([])}, "one more than buckets"),
        ({"starts": buckets_of([0, 3])}, "within order"),
        ({"starts": buckets_of([-1, 2])}, "within order"),
        ({"starts": buckets_of([2, 1])}, "within order"),
        ({"rows": np.zeros((1, 4), np.uint8)}, "as many rows as keys"),
    ],
)
def test_what_does_not_fit_together_is_refused(given: dict[str, Any], message: str) -> None:
    fitting: dict[str, Any] = {
        "order": buckets_of([0, 1]),
        "buckets": buckets_of([7]),
        "starts": buckets_of([0, 2]),
        "keys": np.arange(2, dtype=np.uint64),
        "rows": np.zeros((2, 4), np.uint8),
    }
    assert len(_core.pack_fields(b"HSET", b"a", b"b", **fitting))
    with pytest.raises(ValueError, match=message):
        _core.pack_fields(b"HSET", b"a", b"b", **(fitting | given))
