"""What is late: the watermark is what the stream says, whatever single samples say, and however it is read."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtrain.train.lateness import find_late

HOUR = 3600.0
NOW = 1_700_000_000.0
REST = NOW + np.arange(12_000) / 10


def late(times: np.ndarray, logged: np.ndarray | None = None, late_after: float = HOUR) -> int:
    """How many are, where the log got each in its time, unless other times are given."""
    return int(find_late(NOW - 1, times, times if logged is None else logged, late_after).late.sum())


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("ahead", [0.9 * HOUR, 9 * HOUR, 23 * HOUR])
@pytest.mark.parametrize("log", ["its time", "the same", "much later", "none"])
def test_a_broken_client_makes_nothing_late(count: int, ahead: float, log: str) -> None:
    """Whether the log has times of its own, or those of producers, or the samples are read years later, or none."""
    broken = np.full(count, NOW + ahead)
    times = np.concatenate([broken, REST])
    logged = {
        "its time": np.concatenate([np.full(count, NOW), REST]),
        "the same": times,
        "much later": np.full(len(times), NOW + 1e8),
        "none": np.full(len(times), np.nan),
    }[log]
    assert late(times, logged) == 0
    spread = np.insert(REST, np.linspace(0, 9_000, count).astype(int), broken)
    logged = {
        "its time": np.insert(REST, np.linspace(0, 9_000, count).astype(int), NOW),
        "the same": spread,
        "much later": np.full(len(spread), NOW + 1e8),
        "none": np.full(len(spread), np.nan),
    }[log]
    assert late(spread, logged) == 0


@pytest.mark.parametrize("logged", [NOW + 1e8, math.nan])
def test_late_ones_are_found_in_old_data(logged: float) -> None:
    old = REST - 1.5 * HOUR
    times = np.concatenate([REST, old[:500]])
    found = find_late(NOW, times, np.full(len(times), logged), HOUR)
    assert not found.late[:12_000].any()
    (ends,) = np.flatnonzero(np.diff(found.late[12_000:].astype(int)))  # after so many it is what the stream says
    assert 200 < ends < 256


@pytest.mark.parametrize("log", ["its time", "the same", "none"])
def test_late_ones_are_found_as_they_come(log: str) -> None:
    """Also where producers give their messages the event time, so that the log knows no other."""
    times = REST.copy()
    times[5_000:5_100] -= 2 * HOUR
    logged = {"its time": REST, "the same": times, "none": np.full(len(times), np.nan)}[log]
    found = find_late(NOW, times, logged, HOUR)
    assert np.flatnonzero(found.late).tolist() == list(range(5_000, 5_100))


@pytest.mark.parametrize("log", ["its time", "the same", "much later", "none"])
def test_a_gap_is_passed(log: str) -> None:
    """After some hundreds of samples, of which none is late; then a late one is found, whatever the log's times are."""
    after = REST + 9 * HOUR
    times = np.concatenate([REST, after, [NOW]])
    logged = {
        "its time": np.concatenate([REST, after, after[-1:]]),
        "the same": times,
        "much later": np.full(len(times), NOW + 1e8),
        "none": np.full(len(times), np.nan),
    }[log]
    found = find_late(NOW, times, logged, HOUR)
    assert found.marks[12_000 + 256 * 9] >= after[0] - HOUR
    assert np.flatnonzero(found.late).tolist() == [24_000]


def test_a_wrong_watermark_is_mended() -> None:
    """As of a first sample of old data that is ahead by ten hours."""
    times = np.concatenate([[NOW + 10 * HOUR], REST])
    found = find_late(0.0, times, np.full(len(times), NOW + 1e8), HOUR)
    assert 2000 < found.late.sum() < 256 * 10
    assert not found.late[3000:].any()


TIMES = st.floats(1.0, 2000.0)


@given(
    st.lists(st.tuples(TIMES, st.one_of(st.just(math.nan), TIMES)), max_size=30),
    st.sampled_from([0.0, 1.0, 100.0, 1500.0]),
    st.one_of(st.just(0.0), TIMES),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_parts_come_to_the_same(
    samples: list[tuple[float, float]], late_after: float, watermark: float, cuts: list[int]
) -> None:
    times, logged = (np.array([one[i] for one in samples], np.float64) for i in (0, 1))
    whole = find_late(watermark, times, logged, late_after)
    at, marks, late = watermark, [watermark], []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(samples)], strict=True):
        part = find_late(at, times[begin:end], logged[begin:end], late_after)
        at = float(part.marks[-1])
        marks += part.marks[1:].tolist()
        late += part.late.tolist()
    assert (marks, late) == (whole.marks.tolist(), whole.late.tolist())
