"""Lease: which cluster publishes a model, and learns its run, where there are two; see schemas/README.md.

A cluster that is started with a run takes the lease over from another that still has it, which stops then. Whoever
begins another run under the same name is refused while the lease is in force.
"""

import logging
import secrets
import socket
import threading
from collections.abc import Callable

from streamtrain.errors import PublicationError, TakenOver
from streamtrain.periodic import PeriodicTask
from streamtrain.store.redis.model import RedisModel

logger = logging.getLogger(__name__)

SECONDS = 15.0
"""How long a lease is in force after its holder last renewed it."""


class Lease:
    """The lease as its holder, the publisher of the cluster, knows it. Thread-safe.

    Args:
        host: of this process, for messages; None: its name in the network.
        seconds: for which it is in force after each sign.
    """

    def __init__(self, model: RedisModel, host: str | None = None, *, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._model, self._host = model, host or socket.gethostname()
        self._holder = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._run, self._generation = "", 0

    def acquire(self, run: str, generation: int) -> int:
        """Takes or renews it; returns the generation of the cluster.

        Args:
            run: that is published.
            generation: that shards have had; 0: none.

        Raises:
            TakenOver: another cluster has it.
            OriginUnavailable: Redis does not answer.
        """
        with self._lock:
            had = max(self._generation, generation)
            self._generation = had  # also if it is not the last any more, so that this one stays refused
            self._generation = self._model.acquire_lease(run, had, self._holder, self._host, self.seconds)
            self._run = run
            if self._generation != had:
                logger.info("publishing %s as generation %d", self._model.name, self._generation)
            return self._generation

    def renew(self) -> None:
        """Gives a sign, if the lease was ever held; raises the errors of `acquire`."""
        if self._run:
            self.acquire(self._run, 0)

    def end(self) -> None:
        """Lets go of it, so that others need not wait; raises the errors of `acquire`, but for TakenOver."""
        with self._lock:
            if self._run:
                self._model.end_lease(self._holder)


class LeaseWatch:
    """Checks in a thread whether a shard's cluster still has the lease, also while it has no coordinator.

    Args:
        check: raises TakenOver if it has not.
        every: seconds between two checks.
    """

    def __init__(self, check: Callable[[], object], every: float = 2.0) -> None:
        self._check = check
        self._task = PeriodicTask("lease", self._run, every, delay=every)
        self.start, self.stop = self._task.start, self._task.close

    def _run(self) -> None:
        try:
            self._check()
        except TakenOver as exc:
            if exc.same_run:  # the shard is fenced
                self._task.stop()
        except PublicationError as exc:  # Redis is unreachable: it cannot have been taken over
            logger.debug("checking the lease failed: %s", exc)
