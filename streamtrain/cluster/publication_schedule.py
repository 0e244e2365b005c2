"""Publication schedule: publishes a cluster at intervals, and when it is asked to."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from streamtrain.cluster.publications import Publications
from streamtrain.cluster.verify_head import HeadFound
from streamtrain.errors import ShardError, ShardUnavailable, StreamtrainError
from streamtrain.store.gate import GateClosed
from streamtrain.store.origin import Publication

logger = logging.getLogger(__name__)

_PATIENCE = 60.0


class PublicationSchedule:
    """Publishes at intervals, in a thread of its own; what fails or is held back is tried again at the next.

    Args:
        publications: what publishes; used here only.
        every: seconds from one to the next.
        count: called with "publications_published", "publications_held" or "publications_failed" for each.

    Attributes:
        published: how many there are.
        failed: how many could not be; why is logged, once in a row.
        held: why the last one was held back, which is logged as it begins; "": it was not.
        last: the publication that was published last, here or before; None: it is not known.
    """

    def __init__(
        self, publications: Publications, every: float, count: Callable[[str], object] = lambda name: None
    ) -> None:
        self._publications = publications
        self._every = every
        self._count = count
        self._stop = threading.Event()
        self._lock = threading.Lock()  # who publishes
        self._thread = threading.Thread(target=self._run, name="publications", daemon=True)
        self._failing = ""
        self.published = 0
        self.failed = 0
        self.held = ""
        self.last: Publication | None = None

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, after the publication that is under way."""
        self._stop.set()
        self._thread.join()

    def now(self, *, force: bool = False, patience: float = _PATIENCE) -> Publication:
        """Publishes what is new, and returns the head. Thread-safe.

        Args:
            force: as of `Publications.publish`.
            patience: seconds to wait for a publication that is under way.

        Raises:
            ShardUnavailable: nothing has been learned yet.
            ShardError: another publication takes too long; or errors as of `Publications.publish`.
        """
        with self._alone(patience):
            head = self._publish(force=force) or self._publications.head()
        if head is None:
            raise ShardUnavailable("nothing is published, as nothing has been learned yet")
        return head

    def verify(self, patience: float = _PATIENCE) -> HeadFound:
        """Publishes what is new, and compares what is published then with what shards have. Thread-safe.

        If the gate holds back what is new, what was published before is compared, as far as it stands.

        Args:
            patience: as of `now`.

        Raises:
            ShardError: another publication takes too long; or errors as of `Publications.verify`.
        """
        with self._alone(patience):
            with suppress(GateClosed):
                self._publish()
            return self._publications.verify()

    @contextmanager
    def _alone(self, patience: float) -> Iterator[None]:
        """While nobody else publishes."""
        if not self._lock.acquire(timeout=patience):
            raise ShardError(f"another publication has been under way for {patience:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def _run(self) -> None:
        self._find()
        due = time.monotonic() + self._every
        while not self._stop.wait(max(due - time.monotonic(), 0)):
            due = time.monotonic() + self._every
            try:
                with self._lock, suppress(StreamtrainError):  # which have been logged
                    self._publish()
            except Exception:  # whatever it is: to go on training without ever publishing again would be worse
                self._fail()
                logger.exception("not published")

    def _find(self) -> None:
        """The publication that was published before this process began."""
        try:
            with self._lock, suppress(StreamtrainError):  # which the first publication meets, and logs
                self.last = self.last or self._publications.head()
        except Exception:  # as of a publication
            logger.exception("the last publication is not known")

    def _publish(self, *, force: bool = False) -> Publication | None:
        try:
            published = self._publications.publish(force=force)
        except GateClosed as exc:
            self._hold(str(exc))
            raise
        except StreamtrainError as exc:
            self._fail(str(exc))
            raise
        if self._failing:
            logger.info("publishes again")
        if self.held:
            logger.info("no publication is held back any more")
        self._failing, self.held = "", ""
        if published is not None:
            self.published += 1
            self.last = published
            self._count("publications_published")
        return published

    def _hold(self, why: str) -> None:
        self._count("publications_held")
        if not self.held:
            logger.warning("%s; training goes on, and it is tried again", why)
        self.held = why

    def _fail(self, why: str = "") -> None:
        self.failed += 1
        self._count("publications_failed")
        kind = why.partition(":")[0]
        if kind and kind != self._failing:
            logger.warning("not published: %s", why)
        self._failing = kind or self._failing
