"""Messages of impressions and outcomes: what the join reads of them, and why one is refused."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from streamtrain._core import CategoricalSpec, Decoder
from streamtrain.join.engine import Impression, Outcome
from streamtrain.settings.groups import JoinSettings
from streamtrain.stream.dead_letters import DeadLetter
from streamtrain.stream.event_times import EARLIEST, LATEST, parse_time
from streamtrain.stream.source import Fetched

_MOST_ID_BYTES = 256  # as for samples
_MOST_DEPTH = 256  # of nested objects and lists: more than any schema allows a sample


class _RefusedMessage(Exception):
    """A message is well-formed, but cannot be used; has its reason and its field."""


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _RefusedMessage)


class JoinReader:
    """Reads the fields that a join goes by; the others stay as they are. For one thread.

    Args:
        settings: names of fields, and labels.
        max_ahead: seconds that an event time may be ahead of the log's time of its message; beyond that the message is
            refused, as its watermark would settle all other messages.
    """

    def __init__(self, settings: JoinSettings, max_ahead: float) -> None:
        common: list[tuple[str, Any]] = [("id", str | int), ("time", float | str)]
        names = {"id": settings.id, "time": settings.time, "kind": settings.kind, "value": settings.value}
        self._names = names
        self._max_ahead = max_ahead
        self._valued = {kind for one in settings.labels.values() if one.value for kind in one.kinds}
        self._decode_impression = _decoder("Impression", common, names)
        self._decode_outcome = _decoder(
            "Outcome", [*common, ("kind", str | int), ("value", float | bool | None, None)], names
        )
        self._explain = Decoder(
            labels=[],
            categoricals=[CategoricalSpec(settings.id)],
            crosses=[],
            numerics=[],
            time=settings.time,
            weight=None,
            max_message_bytes=1 << 30,
            max_depth=_MOST_DEPTH,
        )

    @property
    def time(self) -> str:
        """Field of the event time."""
        return self._names["time"]

    def impressions(self, fetched: Fetched) -> tuple[list[Impression], list[DeadLetter]]:
        """The impressions that can be used, and those that cannot."""
        decode, ahead = self._decode_impression, self._max_ahead
        found: list[Impression] = []
        letters: list[DeadLetter] = []
        for offset, value, stamp in zip(fetched.offsets, fetched.values, fetched.times, strict=True):
            if value is None:
                continue
            try:
                self._check_depth(value)
                one = decode(value)
                id_, time = one.id, one.time
                is_plain = id_.__class__ is str and time.__class__ is float and len(id_) <= 64
                if not is_plain or not EARLIEST <= time < LATEST:
                    id_, time = self._convert(id_, time)
                if stamp >= 0 and time > stamp / 1000 + ahead:
                    raise _RefusedMessage("future", self._names["time"])
            except _UNREADABLE as exc:
                letters.append(self._refuse(fetched.partition, offset, value, exc))
            else:
                found.append(Impression(offset, id_, time, value))
        return found, letters

    def outcomes(self, fetched: Fetched) -> tuple[list[Outcome], list[DeadLetter]]:
        """The outcomes that can be used, and those that cannot."""
        decode, ahead = self._decode_outcome, self._max_ahead
        found: list[Outcome] = []
        letters: list[DeadLetter] = []
        for offset, value, stamp in zip(fetched.offsets, fetched.values, fetched.times, strict=True):
            if value is None:
                continue
            try:
                self._check_depth(value)
                one = decode(value)
                id_, time = self._convert(one.id, one.time)
                if stamp >= 0 and time > stamp / 1000 + ahead:
                    raise _RefusedMessage("future", self._names["time"])
                kind, number = str(one.kind), one.value
                if number is None and kind in self._valued:
                    raise _RefusedMessage("missing_field", self._names["value"])
            except _UNREADABLE as exc:
                letters.append(self._refuse(fetched.partition, offset, value, exc))
            else:
                found.append(Outcome(offset, id_, time, kind, 1.0 if number is None else float(number), value))
        return found, letters

    def _check_depth(self, value: bytes) -> None:
        """Refuses what is nested so deep that it depends on the depth of the stack whether msgspec can read it."""
        if value.count(b"[") + value.count(b"{") <= _MOST_DEPTH:
            return
        for _, reason, field, _ in self._explain.decode([value], False).errors:
            if reason in ("too_deep", "not_utf8"):
                raise _RefusedMessage(reason, field)

    def _convert(self, id_: str | int, time: float | str) -> tuple[str, float]:
        """The id as text, and the time in seconds."""
        text = id_ if isinstance(id_, str) else str(id_)
        if len(text.encode(errors="surrogatepass")) > _MOST_ID_BYTES:
            raise _RefusedMessage("id_too_long", self._names["id"])
        seconds = parse_time(time)
        if seconds is None or (isinstance(time, str) and _is_number(time)):
            raise _RefusedMessage("bad_time", self._names["time"])
        return text, seconds

    def _refuse(self, partition: int, offset: int, value: bytes, error: Exception) -> DeadLetter:
        if isinstance(error, _RefusedMessage):
            reason, field = error.args
            return DeadLetter(partition, offset, reason, field, value)
        for _, reason, field, _ in self._explain.decode([value], False).errors:
            return DeadLetter(partition, offset, reason, field, value, str(error))
        text = str(error)
        reason = "missing_field" if "missing required field" in text else "wrong_type"
        field = next((name for name in self._names.values() if f"`{name}`" in text or f"$.{name}`" in text), "")
        return DeadLetter(partition, offset, reason, field, value, text)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _decoder(name: str, fields: Sequence[Any], names: dict[str, str]) -> Callable[[bytes], Any]:
    kind = msgspec.defstruct(name, fields, rename=names, gc=False)
    return msgspec.json.Decoder(kind).decode
