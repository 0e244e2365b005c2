"""Which samples are late: by the time of the stream, which no single sample sets, nor a hundred of a broken client.

A partition has a watermark, the event time that its samples have come to; one that is more than `late_after` behind it
is late. A sample takes the watermark on to its own event time, but not beyond the time that the log has of its message,
as nothing happens after it was written. One that is ahead by more than `late_after` may have a wrong clock, so it takes
the watermark on by a small part only, as does a late one back: a gap in the data is passed after some hundreds of
samples, none of which is late, and a wrong watermark is mended by them.

Whether the log's time says that such a sample is right does not count: many producers set it to the event time, or by
the same wrong clock.

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
    times = np.fmin(times, logged)
    marks = np.maximum.accumulate(np.concatenate([[watermark], times]))
    behind = times - marks[:-1]
    if (behind < -late_after).any() or ((behind > late_after) & (marks[:-1] != 0)).any():
        marks = _marks_one_by_one(watermark, times, late_after)  # rarely: then each depends on the one before
    return Lateness(marks, times < marks[:-1] - late_after)


def _marks_one_by_one(watermark: float, times: Times, late_after: float) -> Times:
    marks, part = [watermark], _PART * late_after
    for time in times.tolist():
        if time >= watermark:
            is_near = watermark == 0 or time - watermark <= late_after
            watermark = time if is_near else watermark + part
        elif time < watermark - late_after:
            watermark -= min(part, watermark - time)
        marks.append(watermark)
    return np.array(marks)
