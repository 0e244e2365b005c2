"""Outcomes of impressions: what clients tell is checked, and written to a topic."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import orjson
from msgspec import UNSET, Struct, UnsetType

from streamtrain.errors import OriginUnavailable, WriteFailed
from streamtrain.serve.feedback.impressions import MAX_ID_BYTES, FieldNames
from streamtrain.stream.kafka.appender import Appended, KafkaAppender

WRITE_SECONDS = 5.0
"""Time within which Kafka must have taken an outcome."""

_MAX_KIND_BYTES = 64
_PATIENCE = 1.0  # seconds beyond WRITE_SECONDS in which the client library tells that it has given up


class Outcome(Struct, forbid_unknown_fields=True):
    """What became of an impression."""

    id: str | int
    kind: str
    value: float | UnsetType = UNSET
    time: float | UnsetType = UNSET


class BadOutcome(Exception):
    """Why an outcome cannot be used, with its field."""


class Written(NamedTuple):
    """What became of outcomes.

    Attributes:
        places: of each; None: it is not known to be written.
        failure: why one is not.
    """

    places: list[Appended | None]
    failure: str


class OutcomeWriter:
    """Writes outcomes, keyed by id, once all replicas in sync have them.

    Args:
        appender: of the topic.
        fields: names of the fields in messages.
        kinds: that are known; empty: any.
        valued: kinds of outcomes that need a value.
        max_ahead: seconds that the time of an outcome may be ahead of the clock; None: any.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        appender: KafkaAppender,
        fields: FieldNames,
        *,
        kinds: Collection[str] = (),
        valued: Collection[str] = (),
        max_ahead: float | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._appender, self._fields, self._kinds = appender, fields, frozenset(kinds)
        self._valued, self._max_ahead, self._now = frozenset(valued), max_ahead, now
        self.counts: Counter[str] = Counter(dict.fromkeys(("written", "refused", "failed"), 0))

    def start(self) -> None:
        """Begins to open the topic."""
        self._appender.start()

    @staticmethod
    def options() -> dict[str, int]:
        """Options of its appender: clients wait for it."""
        return {"linger.ms": 0, "message.timeout.ms": int(1000 * WRITE_SECONDS)}

    def encode(self, outcomes: Sequence[Outcome]) -> list[tuple[bytes, bytes]]:
        """The key and the value of the message of each.

        Raises:
            BadOutcome: one of them cannot be used; the message names it, its field and the reason.
        """
        now, encoded = self._now(), []
        for index, one in enumerate(outcomes):
            try:
                encoded.append(self._encode(one, now))
            except BadOutcome as exc:
                where = f"outcomes[{index}]: " if len(outcomes) > 1 else ""
                raise BadOutcome(f"{where}{exc}") from exc
        return encoded

    def _encode(self, outcome: Outcome, now: float) -> tuple[bytes, bytes]:
        key = str(outcome.id).encode(errors="surrogatepass")
        if not 0 < len(key) <= MAX_ID_BYTES:
            raise BadOutcome(f"id must have from 1 to {MAX_ID_BYTES} bytes, not {len(key)}")
        kind = outcome.kind.encode(errors="surrogatepass")
        if not 0 < len(kind) <= _MAX_KIND_BYTES:
            raise BadOutcome(f"kind must have from 1 to {_MAX_KIND_BYTES} bytes, not {len(kind)}")
        if self._kinds and outcome.kind not in self._kinds:
            raise BadOutcome(f"kind {outcome.kind!r} makes no label; the kinds are {', '.join(sorted(self._kinds))}")
        at = now if outcome.time is UNSET else outcome.time
        if not 0 < at < math.inf:
            raise BadOutcome(f"time must be in seconds since the epoch, not {at:g}")
        if self._max_ahead is not None and at > now + self._max_ahead:
            raise BadOutcome(f"time {at:.3f} is more than {self._max_ahead:g} s ahead of the server's clock")
        message = {self._fields.id: str(outcome.id), self._fields.time: at, self._fields.kind: outcome.kind}
        if outcome.value is UNSET and outcome.kind in self._valued:
            raise BadOutcome(f"an outcome of kind {outcome.kind!r} needs a value, which becomes a label")
        if outcome.value is not UNSET:
            if not math.isfinite(outcome.value):
                raise BadOutcome("value must be a finite number")
            message[self._fields.value] = outcome.value
        try:
            return key, orjson.dumps(message)
        except orjson.JSONEncodeError as exc:  # lone surrogates
            raise BadOutcome(f"id and kind must be valid Unicode: {exc}") from exc

    async def write(self, messages: Sequence[tuple[bytes, bytes]]) -> Written:
        """Writes messages; may be called in one event loop only.

        Raises:
            OriginUnavailable: Kafka is away; nothing is written.
        """
        if trouble := self._appender.trouble:
            self.counts["failed"] += len(messages)
            raise OriginUnavailable(f"no outcome was written: {trouble}")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        places: list[Appended | None] = [None] * len(messages)
        left, failures = len(messages), [] if messages else [""]

        def settle(index: int, result: Appended | WriteFailed) -> None:
            nonlocal left
            left -= 1
            if isinstance(result, Appended):
                places[index] = result
            else:
                failures.append(str(result))
            if not left and not done.done():
                done.set_result(None)

        def report(index: int, result: Appended | WriteFailed) -> None:  # in a thread of the appender
            loop.call_soon_threadsafe(settle, index, result)

        for index, (key, value) in enumerate(messages):
            try:
                self._appender.append(value, key, partial(report, index))
            except WriteFailed as exc:
                settle(index, exc)
        try:
            await asyncio.wait_for(done, WRITE_SECONDS + _PATIENCE)
        except TimeoutError:
            failures.append(f"{self._appender.name} does not answer within {WRITE_SECONDS:g} s")
        written = sum(place is not None for place in places)
        self.counts["written"] += written
        self.counts["failed"] += len(places) - written
        return Written(list(places), failures[0] if failures else "")

    def close(self) -> None:
        """Gives up on what is not written."""
        self._appender.close()


class OutcomeBatch(Struct, forbid_unknown_fields=True):
    """Several outcomes."""

    outcomes: list[Outcome]


_read = msgspec.json.Decoder(Outcome).decode
_read_batch = msgspec.json.Decoder(OutcomeBatch).decode


def parse_outcomes(body: bytes) -> list[Outcome]:
    """One outcome, or those of a batch.

    Raises:
        BadOutcome: the body is neither.
    """
    try:
        head = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return _read_batch(body).outcomes if "outcomes" in head else [_read(body)]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise BadOutcome(f"the body is neither an outcome nor a list of outcomes: {exc}") from exc
