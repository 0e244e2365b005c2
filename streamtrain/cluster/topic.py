"""Topic: waiting for it, making it, and where a new run begins in it."""

import logging
import threading
from datetime import datetime

from streamtrain.errors import SourceUnavailable, TopicMissing
from streamtrain.stream.source import Stream

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0


def wait_for_topic(stream: Stream, create: int, stopped: threading.Event) -> bool:
    """Waits until there is the topic, or makes it. One line of log says what is waited for.

    Args:
        stream: the topic.
        create: partitions with which it is made; 0: somebody else makes it.
        stopped: ends the waiting.

    Returns:
        Whether it is there; False only if `stopped` is set.

    Raises:
        SourceRefused: credentials are refused.
    """
    told = None
    while not stopped.is_set():
        try:
            stream.bounds()
            return True
        except TopicMissing as exc:
            if create:
                stream.create(create)
                logger.info("%s is new, with %d partitions", stream.name, create)
                return True
            missing = f"{exc}; waits until somebody makes it (stream.create makes it here)"
        except SourceUnavailable as exc:
            missing = str(exc)
        if missing != told:
            logger.warning("%s", missing)
            told = missing
        stopped.wait(_PAUSE_SECONDS)
    return False


def beginning_of(stream: Stream, start: str, group: str) -> dict[int, int]:
    """Offsets at which a new run begins, by partition.

    Args:
        stream: the topic.
        start: "earliest", "latest", "committed" (earliest where nothing is committed), or an ISO 8601 time.
        group: whose commits count.
    """
    bounds = stream.bounds()
    earliest = {partition: of.low for partition, of in bounds.items()}
    if start == "earliest":
        return earliest
    if start == "latest":
        return {partition: of.high for partition, of in bounds.items()}
    if start == "committed":
        committed = stream.committed(group)
        return earliest | {p: at for p, at in committed.items() if p in bounds and at >= bounds[p].low}
    return stream.at(datetime.fromisoformat(start).timestamp())
