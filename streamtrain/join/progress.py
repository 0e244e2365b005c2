"""What is kept with the committed offsets of a join: from where its logs are read again, as JSON of at most 4 KiB."""

import json
import math
from typing import Any

from streamtrain.errors import SourceRefused
from streamtrain.join.engine import Progress


def to_metadata(progress: Progress, sample: int | None = None, topic: str = "") -> str:
    """The metadata of a committed offset: {"start", "watermark", "steps"}, the last as differences in a row.

    Args:
        progress: from where the log is read again.
        topic: identity of the log's topic, as {"topic"}: offsets of one that is created again mean other messages.
        sample: offset after the last sample that was written, as {"sample"}: the end of its topic is after the markers
            of transactions.

    >>> to_metadata(Progress(7, 1.5, ((9, 2.0), (12, 4.25))))
    '{"start":7,"watermark":1.5,"steps":[2,500,3,2250]}'
    """
    steps: list[int] = []
    offset, time = progress.start, _milliseconds(progress.watermark)
    for at, watermark in progress.steps:
        steps += [at - offset, _milliseconds(watermark) - time]
        offset, time = at, _milliseconds(watermark)
    watermark_ = progress.watermark if math.isfinite(progress.watermark) else None
    fields: dict[str, Any] = {"start": progress.start, "watermark": watermark_, "steps": steps}
    fields |= ({} if sample is None else {"sample": sample}) | ({"topic": topic} if topic else {})
    return json.dumps(fields, separators=(",", ":"))


def sample_of_metadata(text: str | None) -> int:
    """The offset after the last sample that was written when an offset was committed; 0: none was."""
    return int(json.loads(text).get("sample", 0)) if text else 0


def topic_of_metadata(text: str | None) -> str:
    """The identity of the topic whose offset was committed; "": unknown."""
    return str(json.loads(text).get("topic", "")) if text else ""


def from_metadata(text: str | None, committed: int) -> Progress:
    """The inverse of `to_metadata`; without metadata, nothing is read again.

    Args:
        text: of the committed offset.
        committed: that offset.

    Raises:
        SourceRefused: something else has committed the offset.
    """
    if not text:
        return Progress(committed)
    try:
        fields = json.loads(text)
        offset, watermark = int(fields["start"]), fields["watermark"]
        start = -math.inf if watermark is None else float(watermark)
        time, steps, flat = _milliseconds(start), [], [int(one) for one in fields["steps"]]
        first = offset
        for gap, more in zip(flat[::2], flat[1::2], strict=True):
            offset, time = offset + gap, time + more
            steps.append((offset, time / 1000))
        return Progress(first, start, tuple(steps))
    except (ValueError, KeyError, TypeError) as exc:
        raise SourceRefused(
            f"the offset {committed} was not committed by `streamtrain join`: its metadata is {text[:80]!r}; let "
            "nothing else use the group"
        ) from exc


def _milliseconds(time: float) -> int:
    return round(time * 1000) if math.isfinite(time) else 0
