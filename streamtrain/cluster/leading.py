"""Leading: what shard 0 does for all of them beside checkpoints."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from streamtrain.cluster.checkpoints import Schedule
from streamtrain.cluster.publication_schedule import PublicationSchedule
from streamtrain.cluster.reports import Reports
from streamtrain.errors import PublicationError, ShardError, ShardRefused


class Leading:
    """See `Leader` of ps/leader.py.

    Args:
        reports: where windows are kept.
        count: called with "refused_reports" for each.

    Attributes:
        schedule: of publications; None: it is published nowhere.
        checkpoints: their schedule; None: there is no place for them.
    """

    def __init__(self, reports: Reports, count: Callable[[str], object]) -> None:
        self._reports = reports
        self._count = count
        self.schedule: PublicationSchedule | None = None
        self.checkpoints: Schedule | None = None

    @property
    def held(self) -> bool:
        """See Leader."""
        return self.schedule is not None and bool(self.schedule.held)

    @property
    def checkpointed(self) -> float | None:
        """See Leader."""
        return self.checkpoints.last.at if self.checkpoints and self.checkpoints.last else None

    @property
    def published(self) -> float | None:
        """See Leader."""
        return self.schedule.last.published if self.schedule and self.schedule.last else None

    def report(self, worker: str, windows: Sequence[Any]) -> None:
        """See Leader."""
        try:
            self._reports.take(worker, windows)
        except ShardRefused:
            self._count("refused_reports")
            raise

    def leave(self, worker: str) -> None:
        """See Leader."""
        self._reports.leave(worker)

    def publish_now(self, *, force: bool = False) -> str:
        """See Leader."""
        with _of_shard():
            return json.dumps(self._publishing().now(force=force).as_json())

    def verify(self) -> str:
        """See Leader."""
        with _of_shard():
            return json.dumps(self._publishing().verify().as_json())

    def _publishing(self) -> PublicationSchedule:
        if self.schedule is None:
            raise ShardRefused("nothing is published; set publish.url where shard 0 or the coordinator runs")
        return self.schedule


@contextmanager
def _of_shard() -> Iterator[None]:
    """To whom it is told, the shard is at fault."""
    try:
        yield
    except PublicationError as exc:
        raise ShardError(str(exc)) from exc
