"""Publications of a whole cluster: all shards write what they have learned, then the head moves."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from streamtrain.errors import (
    GateClosed,
    OriginUnavailable,
    PublicationCorrupt,
    PublicationError,
    ShardError,
    ShardUnavailable,
    StreamtrainError,
    TakenOver,
)
from streamtrain.model.spec import Spec
from streamtrain.periodic import Backoff, FailureLog, PeriodicTask
from streamtrain.ps.nodes.shards import Control
from streamtrain.ps.rpc import wire
from streamtrain.publish.head_check import HeadComparison, compare
from streamtrain.publish.lease import SECONDS, Lease
from streamtrain.quality.gate import Baseline, Figures, check_gate
from streamtrain.settings.groups import GateSettings
from streamtrain.store.publication import Publication
from streamtrain.store.redis.buckets import Buckets
from streamtrain.store.redis.dictionary import RedisDictionaries, ShardPart
from streamtrain.store.redis.layout import FullPublicationNeeded, Layout, TableSize
from streamtrain.store.redis.log import WriteToken

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ROOM = 2  # a full publication lays tables out for this multiple of their rows
_MIN_ROWS = 10_000
_MOST_CALLS = 256  # of shards at once
_COUNT_SECONDS = 10.0  # between two counts of the rows in Redis, at least


class Publications:
    """Publishes all shards. Used by one thread at a time.

    Args:
        controls: of all shards, in order.
        dictionaries: where they are published.
        dtype: of rows as they are published.
        gate: what a publication must meet.
        figures: gives those of the window, by label; publications bear them.
        lease: of the model's name; None: no other process can publish it.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        controls: Sequence[Control],
        dictionaries: RedisDictionaries,
        model: str,
        dtype: str = "float32",
        *,
        gate: GateSettings = GateSettings(),  # noqa: B008  # it is immutable
        figures: Callable[[], Figures] = dict,
        lease: Lease | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controls = controls
        self._pool = ThreadPoolExecutor(_MOST_CALLS, "publish")  # of which there are as many as are needed at once
        self._dictionaries = dictionaries
        self._model = model
        self._dtype = dtype
        self._gate = gate
        self._figures = figures
        self._lease = lease
        self._generation = 0  # of the lease
        self._now = now
        self._count_due = now() + _COUNT_SECONDS
        self._compare_due = now()
        self._reference: Baseline | None = None
        self._full = False
        self._last = 0  # number of the last publication that is known of
        self._bad: int | None = None  # shard that had something which is not finite when it was asked last

    def head(self) -> Publication | None:
        """The publication that was published last; raises the errors of `publish`."""
        return self._dictionaries.head()

    def publish(self, *, force: bool = False, removed: bool = False) -> Publication | None:
        """Publishes what was learned; None: there is nothing new, or the shards have not begun.

        Args:
            removed: rows may have been removed, so there is something new even if nothing was learned.
            force: whatever the gate says of its window, with which later ones are compared then.

        Raises:
            GateClosed: its window is not good enough, or a shard has rows or weights that are not finite.
            ShardError: a shard cannot be reached, or cannot write.
            OriginUnavailable: Redis does not answer. In any case the head stays, and it may be called again.
            TakenOver: another cluster publishes under this name.
            PublicationError: Redis refuses.
        """
        statuses = self._ask(lambda control: control.status())
        if not all(status.ready for status in statuses):
            return None
        self._acquire_lease(statuses)
        self._look(statuses[0].run)
        head = self._dictionaries.head()
        number = self._next(head, statuses)
        write = partial(self._write, statuses, number)
        if head is not None and head.run == statuses[0].run and not self._full:
            clock = _earliest([wire.decode_clock(status.clock) for status in statuses])
            if dict(head.clock) == clock and not removed:
                return None
            published = self._let_through(head, write, force=force)
            if published is not None:
                return published
        self._full = True  # until it succeeds
        published = self._let_through(head, partial(write, full=True), force=force)
        self._full = False
        return published

    def _ask(self, ask: Callable[[Control], T]) -> list[T]:
        """Calls all shards at the same time."""
        return list(self._pool.map(ask, self._controls))

    def _look(self, run: str) -> None:
        """Notices that Redis has lost rows; then everything is published anew.

        A node that has started again may have all that it had, or nothing, or what it had a while ago: only comparing
        tells. What a node loses while it keeps running, such as a deleted key, is found by counting now and then.
        """
        kept, lost, head = self._dictionaries.look(), self._dictionaries.lost(), self._dictionaries.head()
        if lost or (head is None and self._last):
            logger.warning("Redis has lost %s: publishing everything again", lost or "the head")
            self._full = True
        if self._full or head is None or head.run != run:
            return
        if (began := self._now()) < (self._count_due if kept else self._compare_due):
            return
        try:
            if kept and not self._miscounts(head):
                return
            why = "rows are missing" if kept else "a server has restarted, or a replica has taken its place"
            level = logging.WARNING if kept else logging.INFO  # restarts are usual, as whenever `up` starts
            logger.log(level, "%s in Redis: comparing publication %d with the shards", why, head.number)
            found = self._compare()
            if found is not None and found.agrees:
                self._dictionaries.vouch()
                # What stands behind a proxy may seem to start anew each time that it is asked.
                self._compare_due = self._now() + 20 * (self._now() - began)
            self._full = self._full or found is None
        except (OriginUnavailable, ShardUnavailable):
            raise
        except StreamtrainError as exc:  # it is so different that it cannot be compared
            logger.warning("%s; publishing everything again", exc)
            self._full = True

    def _miscounts(self, head: Publication) -> bool:
        began = self._now()
        wrong = self._dictionaries.counts() != dict(head.rows)
        took = self._now() - began
        self._count_due = self._now() + max(_COUNT_SECONDS, 100 * took)  # at most a hundredth of the time
        return wrong

    def _acquire_lease(self, statuses: Sequence[Any]) -> None:
        if self._lease is None:
            return
        had = max(status.generation for status in statuses)
        try:
            self._generation = self._lease.acquire(statuses[0].run, had)
        except TakenOver as exc:
            if exc.same_run:  # shards are to know it too, also those that have been started again since
                self._ask(lambda control: _tell(control, max(had, self._generation)))
            raise

    def renew_lease(self) -> None:
        """Gives a sign that this cluster still publishes; by any thread. Raises the errors of `publish`."""
        if self._lease is not None:
            self._lease.renew()

    def end_lease(self) -> None:
        """Lets another cluster publish at once; raises the errors of `publish`."""
        if self._lease is not None:
            self._lease.end()

    def verify(self) -> HeadComparison:
        """Compares the head's rows in Redis with those of the shards; nothing may be published meanwhile.

        Shards keep learning: rows that have changed since are left out. A shard that does not know what of it is
        published, as it has just begun or as the head has another part of it, has everything published anew before.
        If anything differs, the next publication is a full one.

        Raises:
            ShardError: a shard cannot be reached, or cannot tell.
            OriginUnavailable: Redis does not answer.
            PublicationError: there is no head of these shards, or it is damaged.
        """
        for _ in range(2):
            found = self._compare()
            if found is not None:
                return found
            self._full = True
            self.publish()
        raise PublicationError("shards keep restarting; retry later")

    def _compare(self) -> HeadComparison | None:
        """None: a shard needs everything published anew before."""
        runs = {status.run for status in self._ask(lambda control: control.status())}
        self._ask(lambda control: control.apply())
        publication, buckets = self._dictionaries.stored()
        if self._full or runs != {publication.run}:
            raise PublicationError(
                f"the head, publication {publication.number}, is not of the run that the shards have"
            )
        layout = buckets.layout.to_json()
        sums = self._ask(lambda control: control.sums(publication.number, layout))
        return None if any(one.full for one in sums) else self._compared(publication, buckets, sums)

    def _compared(self, publication: Publication, buckets: Buckets, sums: Sequence[Any]) -> HeadComparison:
        was, self._full = self._full, True  # also if it cannot even be read
        found = compare(publication, buckets, sums)
        self._full = was or not found.agrees
        if not found.agrees:
            logger.error(
                "publication %d in Redis differs from the shards: %s; publishing everything again",
                publication.number,
                found.faults,
            )
        return found

    def _next(self, head: Publication | None, statuses: list[Any]) -> int:
        """The number of the next publication: never one that there was, whatever Redis has forgotten.

        After a kill, or on a replica that has taken its place, Redis may be where it was some publications before.
        """
        found, tried = head.number if head else 0, max(status.published for status in statuses)
        if head is not None and (found < self._last or found + 1 < tried):
            logger.warning("the head is back at publication %d: Redis has lost later ones", found)
            self._full = True
        elif head is not None:
            tried = 0  # what was written after the head has not been committed
        self._last = max(self._last, found, tried)
        return self._last + 1

    def _let_through(
        self, head: Publication | None, write: Callable[[Figures], Publication | None], *, force: bool
    ) -> Publication | None:
        """Writes a publication, if its window is good enough."""
        if self._reference is None:
            self._reference = Baseline(self._gate.min_samples)
            self._reference.begin(head.metrics if head else {})
        figures = self._figures()
        if not force:
            check_gate(self._gate, f"publication {self._last + 1}", figures, self._reference.figures())
        published = write(figures)
        if published is not None:
            (self._reference.begin if force else self._reference.add)(figures)
        return published

    def head_token(self) -> str:
        """What shards know the head by that go on from it; "": there is none. Raises the errors of `publish`."""
        return self._dictionaries.token(0) or ""

    def _write(self, statuses: list[Any], number: int, figures: Figures, *, full: bool = False) -> Publication | None:
        """Writes all parts and commits them; None: a full publication is needed instead."""
        layout = self._begin(statuses) if full else None
        text = layout.to_json() if layout else ""
        # Alone and first: if it is still bad, what the others would write is useless. Shards may be fewer by now.
        if self._bad is not None and self._bad < len(self._controls):
            self._check_finite(number, [self._controls[self._bad].publish(number, text, self._generation)])
        answers = self._check_finite(number, self._ask(lambda control: control.publish(number, text, self._generation)))
        for answer in answers:
            if "full" in answer:
                if full:
                    raise PublicationError(f"the full publication failed: {answer['full']}")
                logger.info("a full publication is needed: %s", answer["full"])
                return None
        parts = [_part(answer["part"]) for answer in answers]
        publication = Publication(
            number=number,
            version=None,
            model=self._model,
            run=statuses[0].run,
            spec=statuses[0].spec,
            clock=_earliest([dict(map(tuple, answer["clock"])) for answer in answers]),
            watermark=float(max(answer["watermark"] for answer in answers)),
            published=time.time(),
            dtype=layout.dtype if layout else self._dtype,
            rows={table: sum(part.rows[table] for part in parts) for table in parts[0].rows},
            metrics=figures,
        )
        try:
            self._dictionaries.commit(publication, parts, layout, shards=len(statuses), generation=self._generation)
        except FullPublicationNeeded as exc:
            if full:
                raise
            logger.info("a full publication is needed: %s", exc)
            return None
        self._last = number
        self._ask(lambda control: control.apply())
        return publication

    def _check_finite(self, number: int, texts: list[str]) -> list[dict[str, Any]]:
        """Answers of shards."""
        answers = [json.loads(text) for text in texts]
        bad = [answer for answer in answers if "bad" in answer]
        self._bad = bad[0]["shard"] if bad else None
        if bad:
            raise GateClosed(f"publication {number} is held back: {'; '.join(answer['bad'] for answer in bad)}")
        return answers

    def _begin(self, statuses: list[Any]) -> Layout:
        dims = {one["name"]: one["dim"] for one in Spec.from_json(statuses[0].spec).tables}
        rows: dict[str, int] = dict.fromkeys(dims, 0)
        for status in statuses:
            for table in status.tables:
                rows[table.name] += table.rows
        sizes = {name: TableSize(dim, max(_ROOM * rows[name], _MIN_ROWS)) for name, dim in dims.items()}
        return self._dictionaries.begin(sizes, dtype=self._dtype, shards=len(statuses))


def _tell(control: Control, generation: int) -> None:
    """Has a shard find out that another cluster has the lease."""
    try:
        control.publish(0, "", generation)
    except StreamtrainError as exc:
        logger.info("%s: %s", control.target, exc)


def _part(given: list[Any]) -> ShardPart:
    number, dictionary, token, size, rows = given
    return ShardPart(number, dictionary, WriteToken(*token), size, rows)


def _earliest(clocks: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """What all shards have learned."""
    return {p: min(clock.get(p, 0) for clock in clocks) for p in sorted({p for clock in clocks for p in clock})}


_PATIENCE = 60.0


class PublicationSchedule:
    """Publishes at intervals, in a thread of its own; what fails or is held back is tried again at the next.

    Args:
        publications: what publishes; used here only.
        every: seconds from one to the next.
        count: called with "publications_published", "publications_held" or "publications_failed" for each.
        after: called after each publication.

    Attributes:
        published: how many there are.
        failed: how many could not be; why is logged.
        held: why the last one was held back, which is logged as it begins; "": it was not.
        last: the publication that was published last, here or before; None: it is not known.
    """

    def __init__(
        self,
        publications: Publications,
        every: float,
        count: Callable[[str], object] = lambda name: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self._publications = publications
        self._every = every
        self._count = count
        self._after = after
        self._lock = threading.Lock()  # who publishes
        backoff = Backoff(every, every)
        self._task = PeriodicTask("publications", self._run, every, backoff=backoff, observe=self._observe)
        self._has_begun = False
        self._lease_task = PeriodicTask("lease", self._renew_lease, SECONDS / 3, delay=SECONDS / 3)
        self._failures = FailureLog()
        self.published = 0
        self.failed = 0
        self.held = ""
        self.last: Publication | None = None

    def start(self) -> None:
        self._task.start()
        self._lease_task.start()

    def stop(self) -> None:
        """Ends, after the publication that is under way; another cluster may publish then."""
        self._task.close()
        self._lease_task.close()
        try:
            self._publications.end_lease()
        except StreamtrainError as exc:
            logger.warning("releasing the lease failed, it will expire: %s", exc)

    def now(self, *, force: bool = False, removed: bool = False, patience: float = _PATIENCE) -> Publication:
        """Publishes what is new, and returns the head. Thread-safe.

        Args:
            force: see `Publications.publish`.
            removed: the same.
            patience: seconds to wait for a publication that is under way.

        Raises:
            ShardUnavailable: nothing has been learned yet.
            ShardError: another publication takes too long; or the errors of `Publications.publish`.
        """
        with self.alone(patience):
            head = self._publish(force=force, removed=removed) or self._publications.head()
        if head is None:
            raise ShardUnavailable("nothing is published: nothing has been learned yet")
        return head

    def verify(self, patience: float = _PATIENCE) -> HeadComparison:
        """Publishes what is new, and compares what is published then with what shards have. Thread-safe.

        If the gate holds back what is new, what was published before is compared, as far as it stands. What differs
        is published in full, at once or with the next publication that succeeds.

        Args:
            patience: see `now`.

        Raises:
            ShardError: another publication takes too long; or the errors of `Publications.verify`.
        """
        with self.alone(patience):
            with suppress(GateClosed):
                self._publish()
            try:
                found = self._publications.verify()
            except PublicationCorrupt:
                self._heal()
                raise
            if not found.agrees:
                self._heal()
            return found

    def _heal(self) -> None:
        with suppress(StreamtrainError):  # which have been logged; it is tried again at the next
            self._publish()

    @contextmanager
    def alone(self, patience: float = _PATIENCE) -> Iterator[None]:
        """While nothing else is published.

        Args:
            patience: seconds to wait for a publication that is under way.

        Raises:
            ShardError: it takes longer.
        """
        if not self._lock.acquire(timeout=patience):
            raise ShardError(f"another publication has been under way for {patience:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def hand_over(self, patience: float = _PATIENCE) -> Iterator[str]:
        """Publishes what is new; then it is as in `alone`, while other shards take over.

        Returns:
            What the head is known by, from which they can go on; "": they cannot, as it is not new.

        Raises:
            ShardError: another publication takes longer than `patience` seconds.
        """
        with self.alone(patience):
            try:
                self._publish(removed=True)  # so that Redis has nothing any more that shards have removed by now
                head = self._publications.head_token()
            except StreamtrainError:  # which has been logged
                head = ""
            yield head

    def _run(self) -> float:
        began = time.monotonic()
        with self._lock, suppress(StreamtrainError):  # which have been counted and logged, or will be
            if self._has_begun:
                self._publish()
            else:  # the publication that was published before this process began
                self._has_begun = True
                self.last = self.last or self._publications.head()
        return max(began + self._every - time.monotonic(), 0)

    def _observe(self, error: Exception | None) -> None:
        if error is not None:
            self._fail()

    def _renew_lease(self) -> None:
        """Also while a publication takes long, or the next is far away."""
        with suppress(StreamtrainError):  # which the next publication meets, and logs
            self._publications.renew_lease()

    def _publish(self, *, force: bool = False, removed: bool = False) -> Publication | None:
        try:
            published = self._publications.publish(force=force, removed=removed)
        except GateClosed as exc:
            self._hold(str(exc))
            raise
        except StreamtrainError as exc:
            self._fail(str(exc))
            raise
        if self._failures.end():
            logger.info("publishing succeeds again")
        if self.held:
            logger.info("publications are no longer held back")
        self.held = ""
        if published is not None:
            self.published += 1
            self.last = published
            self._count("publications_published")
            self._after()
        return published

    def _hold(self, why: str) -> None:
        self._count("publications_held")
        if not self.held:
            logger.warning("%s; training continues, and publishing is retried", why)
        self.held = why

    def _fail(self, why: str = "") -> None:
        self.failed += 1
        self._count("publications_failed")
        if why and (line := self._failures.line(why, why.partition(":")[0])):
            logger.warning("not published: %s", line)
