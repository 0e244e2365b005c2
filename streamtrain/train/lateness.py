"""Which samples are late: by the time of the stream, which no single sample sets, nor a hundred of a broken client.

A partition has a watermark, the event time that its samples have come to. A sample takes it on to its own event time,
but not beyond the time that the log has of its message, as nothing happens after it was written; and by more than
`late_after` at once only if the log's time says so too. Otherwise it may be one whose clock is wrong, and takes the
watermark on by a small part, as does a late one back: so a gap in old data is passed after some hundreds of samples,
and a wrong watermark is mended by them.

A sample is late if it is more than `late_after` behind both the watermark and the log's time of its message.

All of it is a function of the log, and the same however it is read in parts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PART = 1 / 256  # of late_after, by which one sample moves the watermark against the others

Times = NDArray[np.float64]


class Lateness(NamedTuple):
    """What becomes of some samples of a partition.

    Attributes:
        marks: float64 [n + 1], the watermark before each, then after all.
        late: bool [n].
    """

    marks: Times
    late: NDArray[np.bool_]


def find_late(watermark: float, times: Times, logged: Times, late_after: float) -> Lateness:
    """Goes on from a watermark with the next samples of a partition.

    Args:
        watermark: before them, in seconds; 0: there was none.
        times: [n], their event times.
        logged: [n], when the log got their messages; NaN where it does not say.
        late_after: seconds, from 0 on.
    """
    known = ~np.isnan(logged)
    bounded = np.where(known, np.minimum(times, logged), times)
    is_fresh = known & (logged - bounded <= late_after)
    marks = np.maximum.accumulate(np.concatenate([[watermark], bounded]))
    late = times < np.where(known, np.minimum(marks[:-1], logged), marks[:-1]) - late_after
    jumps = (bounded - marks[:-1] > late_after) & ~is_fresh & (marks[:-1] != 0)
    if late.any() or jumps.any():  # rarely: then each depends on the one before
        marks = _marks_one_by_one(watermark, bounded, logged, is_fresh, late_after)
        late = times < np.where(known, np.minimum(marks[:-1], logged), marks[:-1]) - late_after
    return Lateness(marks, late)


def _marks_one_by_one(
    watermark: float, bounded: Times, logged: Times, is_fresh: NDArray[np.bool_], late_after: float
) -> Times:
    marks, part = [watermark], _PART * late_after
    for time, log_time, fresh in zip(bounded.tolist(), logged.tolist(), is_fresh.tolist(), strict=True):
        if time >= watermark:
            is_near = watermark == 0 or fresh or time - watermark <= late_after
            watermark = time if is_near else watermark + part
        elif time < min(watermark, log_time) - late_after:
            watermark -= min(part, watermark - time)
        marks.append(watermark)
    return np.array(marks)
