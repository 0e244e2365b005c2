"""Publications of a whole cluster: all shards write what they have learned, then the head moves."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from streamtrain.errors import PublicationError, StreamtrainError
from streamtrain.model.spec import Spec
from streamtrain.ps import wire
from streamtrain.ps.shards import Control
from streamtrain.store.origin import Publication
from streamtrain.store.redis_dictionaries import Part, RedisDictionaries
from streamtrain.store.redis_layout import FullPublicationNeeded, Layout, TableSize
from streamtrain.store.redis_log import Token

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ROOM = 2  # a full publication lays tables out for so many times their rows
_MIN_ROWS = 10_000


class Publications:
    """Publishes all shards. Used by one thread.

    Args:
        controls: of all shards, in order.
        dictionaries: where they are published.
        model: name of the model.
        dtype: of rows as they are published.
    """

    def __init__(
        self, controls: Sequence[Control], dictionaries: RedisDictionaries, model: str, dtype: str = "float32"
    ) -> None:
        self._controls = controls
        self._dictionaries = dictionaries
        self._model = model
        self._dtype = dtype
        self._full = False

    def publish(self) -> Publication | None:
        """Publishes what was learned; None: there is nothing new, or the shards have not begun.

        Raises:
            ShardError: a shard cannot be reached, or cannot write.
            OriginUnavailable: Redis does not answer. In either case the head stays, and it may be called again.
            PublicationError: another process publishes this model.
        """
        with ThreadPoolExecutor(len(self._controls)) as pool:

            def of_all(ask: Callable[[Control], T]) -> list[T]:
                return list(pool.map(ask, self._controls))

            statuses = of_all(lambda control: control.status())
            if not all(status.ready for status in statuses):
                return None
            head = self._dictionaries.head()
            if head is not None and head.run == statuses[0].run and not self._full:
                if dict(head.clock) == _earliest([wire.clock_of(status.clock) for status in statuses]):
                    return None
                published = self._write(of_all, statuses, head.number + 1, full=False)
                if published is not None:
                    return published
            self._full = True  # until it succeeds
            published = self._write(of_all, statuses, (head.number if head else 0) + 1, full=True)
            self._full = False
            return published

    def _write(
        self, of_all: Callable[[Callable[[Control], Any]], list[Any]], statuses: list[Any], number: int, *, full: bool
    ) -> Publication | None:
        """Writes all parts and commits them; None: a full publication is needed instead."""
        layout = self._begin(statuses) if full else None
        text = layout.as_json() if layout else ""
        answers = [json.loads(answer) for answer in of_all(lambda control: control.publish(number, text))]
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
        )
        try:
            self._dictionaries.commit(publication, parts, layout)
        except FullPublicationNeeded:
            if full:
                raise
            return None
        of_all(lambda control: control.apply())
        return publication

    def _begin(self, statuses: list[Any]) -> Layout:
        dims = {one["name"]: one["dim"] for one in Spec.from_json(statuses[0].spec).tables}
        rows: dict[str, int] = dict.fromkeys(dims, 0)
        for status in statuses:
            for table in status.tables:
                rows[table.name] += table.rows
        sizes = {name: TableSize(dim, max(_ROOM * rows[name], _MIN_ROWS)) for name, dim in dims.items()}
        return self._dictionaries.begin(sizes, dtype=self._dtype, shards=len(statuses))


class PublicationSchedule:
    """Publishes at intervals, in a thread of its own; whatever fails is tried again at the next.

    Args:
        publications: what publishes.
        every: seconds from one to the next.

    Attributes:
        published: how many there are.
        failed: how many could not be; why is logged, once in a row.
    """

    def __init__(self, publications: Publications, every: float) -> None:
        self._publications = publications
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publications", daemon=True)
        self._failing = ""
        self.published = 0
        self.failed = 0

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, after the publication that is under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._every
        while not self._stop.wait(max(due - time.monotonic(), 0)):
            due = time.monotonic() + self._every
            try:
                published = self._publications.publish()
            except StreamtrainError as exc:
                self._fail(str(exc))
            except Exception:  # whatever it is: to go on training without ever publishing again would be worse
                self.failed += 1
                logger.exception("not published")
            else:
                if self._failing:
                    logger.info("publishes again")
                self._failing = ""
                self.published += published is not None

    def _fail(self, why: str) -> None:
        self.failed += 1
        kind = why.partition(":")[0]
        if kind != self._failing:
            logger.warning("not published: %s", why)
        self._failing = kind


def _part(given: list[Any]) -> Part:
    number, dictionary, token, size, rows = given
    return Part(number, dictionary, Token(*token), size, rows)


def _earliest(clocks: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """What all shards have learned."""
    return {p: min(clock.get(p, 0) for clock in clocks) for p in sorted({p for clock in clocks for p in clock})}
