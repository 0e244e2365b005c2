"""Version schedule: makes versions of what is published at intervals, and deletes old ones."""

import logging
import threading
import time
from collections.abc import Callable

from streamtrain.errors import StreamtrainError
from streamtrain.store.origin import Publication
from streamtrain.store.redis_versions import RedisVersions

logger = logging.getLogger(__name__)

_WHO = "schedule"
_AGAIN = 10.0  # seconds after a failure, or while there is no head
_PATIENCE = 10.0


class VersionSchedule:
    """Makes versions in a thread of its own, as to copy a head may take long; what fails is tried again.

    The interval begins with the last version, whoever has made it, and with the start where there is none. A head that
    has a version already gets no other.

    Args:
        versions: where they are made.
        head: gives what is published last.
        every: seconds from one to the next.
        keep: of them are kept, beside those that labels and servers use.
        count: called with "versions_made" or "versions_failed" for each.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        versions: RedisVersions,
        head: Callable[[], Publication | None],
        *,
        every: float,
        keep: int,
        count: Callable[[str], object] = lambda name: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._versions, self._head = versions, head
        self._every, self._keep = every, keep
        self._count, self._now = count, now
        self._began = now()
        self._made: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)
        self._failing = ""

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends; a version that is being made is waited for, but not for long: what is there of it nobody sees."""
        self._stop.set()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        wait = 0.0
        while not self._stop.wait(wait):
            wait = self._attempt()

    def _attempt(self) -> float:
        """Makes a version if it is time; returns the seconds until it may be time again."""
        again = min(_AGAIN, self._every)
        try:
            left = self._left()
            if left > 0:
                return left
            made = self._make()
        except StreamtrainError as exc:
            self._fail(str(exc))
            return again
        except Exception:  # whatever it is: there are to be versions
            self._count("versions_failed")
            logger.exception("no version made")
            return again
        if self._failing:
            logger.info("makes versions again")
        self._failing = ""
        return self._every if made else again

    def _left(self) -> float:
        last = self._made
        if last is None:
            last = max((one.published for one in self._versions.all()), default=self._began)
        return min(last + self._every - self._now(), self._every)

    def _make(self) -> bool:
        head, versions = self._head(), self._versions.all()
        if head is None or any(one.number == head.number for one in versions):
            return False
        made = self._versions.make(_WHO, f"every {self._every:g} s")
        self._made = self._now()
        self._count("versions_made")
        logger.info("version %d made of publication %d", made.version or 0, made.number)
        if deleted := self._versions.retain(self._keep, _WHO, f"the last {self._keep} are kept"):
            logger.info("versions %s deleted", deleted)
        return True

    def _fail(self, why: str) -> None:
        self._count("versions_failed")
        kind = why.partition(":")[0]
        if kind != self._failing:
            logger.warning("no version made: %s", why)
        self._failing = kind
