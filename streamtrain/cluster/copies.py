"""Copies of a cluster that learn the same run in one consumer group: only the one that was started last continues."""

import logging
from collections.abc import Callable

from streamtrain.errors import ShardError, ShardRefused, SourceError, SourceRefused
from streamtrain.incarnation import Incarnation
from streamtrain.periodic import PeriodicTask
from streamtrain.ps.nodes.shards import Shards
from streamtrain.stream.source import Stream

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""Between two checks of the consumer group."""


class CopyWatch:
    """Checks from time to time, in a thread, that no later copy of the cluster has joined the consumer group.

    Without it, both copies would share the partitions, and each would learn a part of the samples.

    Args:
        stream: the topic.
        group: consumer group.
        shards: of this cluster.
        stop: called once this cluster is superseded.

    Attributes:
        incarnation: of this cluster; None: not known before the first check.
    """

    def __init__(self, stream: Stream, group: str, shards: Shards, stop: Callable[[], object]) -> None:
        self._stream, self._group, self._shards, self._stop = stream, group, shards, stop
        self._failure: SourceRefused | ShardRefused | None = None
        self.incarnation: Incarnation | None = None
        self._task = PeriodicTask("copies", self._check_group, CHECK_SECONDS, delay=CHECK_SECONDS)

    def __enter__(self) -> "CopyWatch":
        self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.stop()

    def check_now(self) -> None:
        """Checks the group once; if this cluster is superseded, has its shards stop.

        Raises:
            SourceError: the service cannot be reached, or refuses.
            ShardError: a shard cannot be reached, or refuses.
        """
        latest = self._stream.latest_incarnation(self._group)
        if self.incarnation is not None and (latest is None or latest <= self.incarnation):
            return
        before, self.incarnation = self.incarnation, self._shards.claim(latest)  # shards may have been restarted
        if self.incarnation != before:
            logger.info("consumer group %s: this cluster is incarnation %d", self._group, self.incarnation.number)
        if latest is not None and latest > self.incarnation:
            reason = (
                f"{self._stream.name} is read by a later copy of this cluster in consumer group {self._group}, started "
                f"on {latest.host} (incarnation {latest.number}; this one is {self.incarnation.number}): this copy "
                "stops learning. Stop it; or, to continue with it, stop the other, then restart all shards and workers "
                "of this one"
            )
            self._failure = SourceRefused(reason)
            self._shards.supersede(latest, reason)

    def check(self) -> None:
        """Raises SourceRefused or ShardRefused once this cluster is superseded."""
        if self._failure is not None:
            raise self._failure

    def _check_group(self) -> None:
        try:
            if not self._stream.unreachable:
                self.check_now()
        except ShardRefused as exc:  # another worker of this cluster has noticed it before
            self._failure = exc
        except (SourceError, ShardError) as exc:  # the loop handles them
            logger.debug("checking for copies of the cluster failed: %s", exc)
        if self._failure is not None:
            self._task.stop()
            self._stop()
