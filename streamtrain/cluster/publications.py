"""Publications of a whole cluster: all shards write what they have learned, then the head moves."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from streamtrain.cluster.reference import Reference
from streamtrain.cluster.verify_head import HeadFound, compare
from streamtrain.errors import PublicationError
from streamtrain.model.spec import Spec
from streamtrain.ps import wire
from streamtrain.ps.shards import Control
from streamtrain.store.gate import Figures, Gate, GateClosed
from streamtrain.store.origin import Publication
from streamtrain.store.redis_dictionaries import Part, RedisDictionaries
from streamtrain.store.redis_layout import FullPublicationNeeded, Layout, TableSize
from streamtrain.store.redis_log import Token

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ROOM = 2  # a full publication lays tables out for so many times their rows
_MIN_ROWS = 10_000


class Publications:
    """Publishes all shards. Used by one thread at a time.

    Args:
        controls: of all shards, in order.
        dictionaries: where they are published.
        model: name of the model.
        dtype: of rows as they are published.
        gate: what a publication must fulfil.
        figures: gives those of the window, by label; publications bear them.
    """

    def __init__(
        self,
        controls: Sequence[Control],
        dictionaries: RedisDictionaries,
        model: str,
        dtype: str = "float32",
        *,
        gate: Gate = Gate(),  # noqa: B008  # it is immutable
        figures: Callable[[], Figures] = dict,
    ) -> None:
        self._controls = controls
        self._dictionaries = dictionaries
        self._model = model
        self._dtype = dtype
        self._gate = gate
        self._figures = figures
        self._reference: Reference | None = None
        self._full = False
        self._last = 0  # number of the last publication that is known of
        self._bad: int | None = None  # shard that had something which is not finite when it was asked last

    def head(self) -> Publication | None:
        """The publication that was published last; errors as of `publish`."""
        return self._dictionaries.head()

    def publish(self, *, force: bool = False) -> Publication | None:
        """Publishes what was learned; None: there is nothing new, or the shards have not begun.

        Args:
            force: whatever the gate says of its window, with which later ones are compared then.

        Raises:
            GateClosed: its window is not good enough, or a shard has rows or weights that are not finite.
            ShardError: a shard cannot be reached, or cannot write.
            OriginUnavailable: Redis does not answer. In any case the head stays, and it may be called again.
            PublicationError: another process publishes this model.
        """
        with ThreadPoolExecutor(len(self._controls)) as pool:

            def of_all(ask: Callable[[Control], T]) -> list[T]:
                return list(pool.map(ask, self._controls))

            statuses = of_all(lambda control: control.status())
            if not all(status.ready for status in statuses):
                return None
            head = self._dictionaries.head()
            number = self._next(head, statuses)
            if head is not None and head.run == statuses[0].run and not self._full:
                if dict(head.clock) == _earliest([wire.clock_of(status.clock) for status in statuses]):
                    return None
                write = partial(self._write, of_all, statuses, number)
                published = self._let_through(head, write, force=force)
                if published is not None:
                    return published
            self._full = True  # until it succeeds
            write = partial(self._write, of_all, statuses, number, full=True)
            published = self._let_through(head, write, force=force)
            self._full = False
            return published

    def verify(self) -> HeadFound:
        """Compares the head's rows in Redis with those of the shards; nothing may be published meanwhile.

        Shards go on learning: rows that have changed since are left out. A shard that does not know what of it is
        published, as it has just begun, has everything published anew before.

        Raises:
            ShardError: a shard cannot be reached, or cannot tell.
            OriginUnavailable: Redis does not answer.
            PublicationError: there is no head of these shards, or it is damaged.
        """
        with ThreadPoolExecutor(len(self._controls)) as pool:
            for _ in range(2):
                runs = {status.run for status in pool.map(lambda control: control.status(), self._controls)}
                [*pool.map(lambda control: control.apply(), self._controls)]
                publication, buckets = self._dictionaries.stored()
                if self._full or runs != {publication.run}:
                    raise PublicationError(f"publication {publication.number}, the head, is not of what shards have")
                asked = partial(_sums_of, number=publication.number, layout=buckets.layout.as_json())
                sums = [*pool.map(asked, self._controls)]
                if not any(one.full for one in sums):
                    return compare(publication, buckets, sums)
                self._full = True
                self.publish()
        raise PublicationError("shards begin anew again and again: try later")

    def _next(self, head: Publication | None, statuses: list[Any]) -> int:
        """The number of the next publication: never one that there was, whatever Redis has forgotten.

        After a kill, or on a replica that has taken its place, Redis may be where it was some publications before.
        """
        found, tried = head.number if head else 0, max(status.published for status in statuses)
        if head is not None and (found < self._last or found + 1 < tried):
            logger.warning("the head is publication %d again: Redis has forgotten what came after it", found)
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
            self._reference = Reference(self._gate.min_samples)
            self._reference.begin(head.metrics if head else {})
        figures = self._figures()
        if not force:
            self._gate.check(f"publication {self._last + 1}", figures, self._reference.figures())
        published = write(figures)
        if published is not None:
            (self._reference.begin if force else self._reference.add)(figures)
        return published

    def _write(
        self,
        of_all: Callable[[Callable[[Control], Any]], list[Any]],
        statuses: list[Any],
        number: int,
        figures: Figures,
        *,
        full: bool = False,
    ) -> Publication | None:
        """Writes all parts and commits them; None: a full publication is needed instead."""
        layout = self._begin(statuses) if full else None
        text = layout.as_json() if layout else ""
        if self._bad is not None:  # alone and first: what the others would write is in vain if it is still bad
            self._check_finite(number, [self._controls[self._bad].publish(number, text)])
        answers = self._check_finite(number, of_all(lambda control: control.publish(number, text)))
        for answer in answers:
            if "full" in answer:
                if full:
                    raise PublicationError(f"the full publication was in vain: {answer['full']}")
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
            self._dictionaries.commit(publication, parts, layout)
        except FullPublicationNeeded:
            if full:
                raise
            return None
        self._last = number
        of_all(lambda control: control.apply())
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


def _sums_of(control: Control, number: int, layout: str) -> Any:
    return control.sums(number, layout)


def _part(given: list[Any]) -> Part:
    number, dictionary, token, size, rows = given
    return Part(number, dictionary, Token(*token), size, rows)


def _earliest(clocks: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """What all shards have learned."""
    return {p: min(clock.get(p, 0) for clock in clocks) for p in sorted({p for clock in clocks for p in clock})}
