"""Leading: what shard 0 does for all of them beside checkpoints."""

import json
from collections.abc import Callable, Sequence
from typing import Any

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
    """

    def __init__(self, reports: Reports, count: Callable[[str], object]) -> None:
        self._reports = reports
        self._count = count
        self.schedule: PublicationSchedule | None = None

    @property
    def held(self) -> bool:
        """See Leader."""
        return self.schedule is not None and bool(self.schedule.held)

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
        if self.schedule is None:
            raise ShardRefused("nothing is published; set publish.url where shard 0 runs")
        try:
            return json.dumps(self.schedule.now(force=force).as_json())
        except PublicationError as exc:  # to whom it is told, the shard is at fault
            raise ShardError(str(exc)) from exc
