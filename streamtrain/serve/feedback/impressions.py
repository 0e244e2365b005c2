"""The log of impressions: what was predicted is written to a topic, from which it can be joined with outcomes."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import orjson

from streamtrain._core import hash_bytes
from streamtrain.errors import ConfigError, WriteFailed
from streamtrain.logs import LogThrottle
from streamtrain.store.publication import Floats
from streamtrain.stream.kafka.appender import Appended, KafkaAppender

logger = logging.getLogger(__name__)

SERVING = "serving"
"""Field of an impression with what serving knows of it; all others belong to the instance."""
MAX_ID_BYTES = 256

_ROOM = 64 << 20
_OVERHEAD = 300  # bytes of an impression besides its instance
_PAUSE = 0.01  # seconds in which requests gather: few large steps take less time from requests than many small ones
_PIECE = 64  # requests after which others get their turn
_FLUSH_SECONDS = 5.0
_OPTIONS = {"queue.buffering.max.messages": 1_000_000, "queue.buffering.max.kbytes": 2 * _ROOM >> 10}


@dataclass(frozen=True)
class FieldNames:
    """Names of the fields that impressions and outcomes share.

    Attributes:
        id: which impression an outcome belongs to.
        time: event time.
        kind: of an outcome.
        value: of an outcome.
        weight: of a sample, where the join writes one; "": it does not.
    """

    id: str = "id"
    time: str = "time"
    kind: str = "kind"
    value: str = "value"
    weight: str = ""


class OwnFields(NamedTuple):
    """Names of the fields of a model's samples that say when they are of and how much they count; None: it has none."""

    time: str | None = None
    weight: str | None = None


class Answered(NamedTuple):
    """An answered request.

    Attributes:
        request: its id.
        time: when it arrived, in seconds since the epoch.
        model: name.
        labels: of the model, by column of predictions.
        own: fields of a sample that are not the caller's to set: its event time, and its weight.
        messages: the instances, as JSON.
        predictions: float32 [n, L].
        headers: of the response.
    """

    request: str
    time: float
    model: str
    labels: Sequence[str]
    own: OwnFields
    messages: Sequence[bytes]
    predictions: Floats
    headers: Mapping[str, str]


class ImpressionLog:
    """Writes impressions in a thread of its own. Requests never wait for it: what there is no room for is dropped.

    An impression is the instance as it was asked, with an id, its event time, and under `SERVING` the model, version,
    publication, arm, propensity and prediction. The id is that of the request, "-" and the index of the instance, and
    the event time when the request arrived: whoever may predict does not say what is learned of it, and how much.

    Args:
        appender: of the topic.
        fields: names of the id and of the event time.
        own_ids: whether the id of an instance that has one is that of its impression.
        sample: share of the impressions that is written, drawn by a hash of the id.
        room: bytes that may wait until Kafka has them.
    """

    def __init__(
        self,
        appender: KafkaAppender,
        fields: FieldNames,
        *,
        own_ids: bool = False,
        sample: float = 1.0,
        room: int = _ROOM,
    ) -> None:
        self._appender, self._fields, self._own_ids = appender, fields, own_ids
        self._sample, self._room = sample, room
        self._queue: deque[tuple[Answered, int]] = deque()
        self._lock = threading.Lock()
        self._waiting = 0  # bytes
        self._counts: Counter[str] = Counter(dict.fromkeys(("written", "skipped", "dropped", "failed"), 0))
        self._throttle = LogThrottle()
        self._wakeup, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="impressions", daemon=True)

    def start(self) -> None:
        """Begins to write."""
        self._appender.start()
        self._thread.start()

    @staticmethod
    def options() -> dict[str, int]:
        """Options of its appender, whose own queue is larger than the room."""
        return dict(_OPTIONS)

    def check_fields(self, model: str, fields: Collection[str]) -> None:
        """Raises ConfigError if the model reads a field that an impression has for something else.

        Args:
            model: its name.
            fields: that it reads of instances.
        """
        reserved = {self._fields.time: "join.time", SERVING: ""} | (
            {} if self._own_ids else {self._fields.id: "join.id"}
        )
        for name, setting in reserved.items():
            if name in fields:
                way_out = f"set {setting} to another name" if setting else "give the feature another field"
                raise ConfigError(
                    f"serve.log: impressions have a field {name!r} of their own, which model {model!r} reads as a "
                    f"feature: {way_out}"
                )

    @property
    def counts(self) -> dict[str, int]:
        """Impressions by what became of them: "written", "skipped" by the sample, "dropped" or "failed"."""
        with self._lock:
            return dict(self._counts)

    @property
    def waiting(self) -> int:
        """Bytes that are not written yet."""
        return self._waiting

    def take(self, answered: Answered) -> None:
        """Takes a request; returns at once."""
        if not answered.messages:
            return
        size = sum(map(len, answered.messages)) + _OVERHEAD * len(answered.messages)
        with self._lock:
            is_full = self._waiting + size > self._room
            if not is_full:
                self._waiting += size
        if is_full:
            self._lose("dropped", len(answered.messages), self._appender.trouble or "Kafka takes them too slowly")
            return
        self._queue.append((answered, size))
        if not self._wakeup.is_set():
            self._wakeup.set()

    def close(self) -> None:
        """Writes what waits, for a few seconds; what is left then is dropped."""
        if self._closing.is_set():
            return
        deadline = time.monotonic() + _FLUSH_SECONDS
        self._closing.set()
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._appender.is_reachable:
            self._drain()
            self._appender.flush(max(0.0, deadline - time.monotonic()))
        while self._queue:
            answered, _ = self._queue.popleft()
            self._lose("dropped", len(answered.messages), "the server stops")
        self._appender.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wakeup.wait()
            if self._closing.wait(_PAUSE):
                return
            if not self._appender.wait_open(_PAUSE):
                continue
            self._wakeup.clear()
            self._drain()

    def _drain(self) -> None:
        handled = 0
        while self._queue:
            answered, size = self._queue.popleft()
            self._write(answered)
            with self._lock:
                self._waiting -= size
            handled += 1
            if handled % _PIECE == 0:
                time.sleep(0)  # lets the thread of requests have the interpreter

    def _write(self, answered: Answered) -> None:
        for key, value in impressions(answered, self._fields, own_ids=self._own_ids):
            if self._sample < 1 and (hash_bytes(key) >> 11) / (1 << 53) >= self._sample:
                with self._lock:
                    self._counts["skipped"] += 1
                continue
            size = len(value)
            with self._lock:
                self._waiting += size
            try:
                self._appender.append(value, key, partial(self._written, size))
            except WriteFailed as exc:
                self._written(size, exc)

    def _written(self, size: int, result: Appended | WriteFailed) -> None:
        with self._lock:
            self._waiting -= size
            if isinstance(result, Appended):
                self._counts["written"] += 1
        if isinstance(result, WriteFailed):
            self._lose("failed", 1, str(result))

    def _lose(self, outcome: str, count: int, why: str) -> None:
        with self._lock:
            self._counts[outcome] += count
        if times := self._throttle.allow(outcome, count):
            logger.warning("%d impressions were not written: %s", times, why)


def impressions(answered: Answered, fields: FieldNames, *, own_ids: bool = False) -> Iterator[tuple[bytes, bytes]]:
    """The key and the value of each impression of a request; arguments as of `ImpressionLog`."""
    headers = answered.headers
    about: dict[str, Any] = {"model": answered.model, "version": headers["x-model-version"]}
    about["publication"] = int(headers["x-publication"])
    if "x-arm" in headers:
        about |= {"arm": headers["x-arm"], "propensity": float(headers["x-propensity"])}
    head = orjson.dumps(about)[:-1]
    columns = [_texts(answered.predictions[:, j]) for j in range(len(answered.labels))]
    labels = [orjson.dumps(label) for label in answered.labels]
    rows = [b",".join(map(b"%s:%s".__mod__, zip(labels, row, strict=True))) for row in zip(*columns, strict=True)]
    times = list(dict.fromkeys(filter(None, (fields.time, answered.own.time))))
    reserved = {fields.id, SERVING, *times, *answered.labels, *filter(None, (fields.weight, answered.own.weight))}
    marks = [orjson.dumps(name) for name in reserved]
    moment = orjson.dumps(round(answered.time, 6))
    id_name, moments = orjson.dumps(fields.id), b",".join(b"%s:%s" % (orjson.dumps(name), moment) for name in times)
    for index, (message, row) in enumerate(zip(answered.messages, rows, strict=True)):
        text, body = f"{answered.request}-{index}", message.strip()
        if b"\\" in body or any(mark in body for mark in marks):
            own, body = _apart(body, fields.id, reserved)
            text = own if own_ids and own else text
        rest = body[1:-1].strip()
        parts = (id_name, orjson.dumps(text), moments, head, row, b"," * bool(rest), rest)
        yield text.encode(), b'{%s:%s,%s,"serving":%s,"prediction":{%s}}%s%s}' % parts


def _texts(column: Floats) -> list[bytes]:
    return orjson.dumps(column.copy(), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")


def _apart(body: bytes, id_field: str, reserved: Collection[str]) -> tuple[str, bytes]:
    """The id of an instance that may have fields with reserved names, or "", and its other fields as they are."""
    try:
        instance = _FIELDS.decode(body)
    except msgspec.DecodeError:  # though the model's decoder has read it: rather nothing than what is not the caller's
        return "", b"{}"
    try:
        own = msgspec.json.decode(instance.get(id_field, b"null"), type=str | int | None)
    except msgspec.DecodeError:
        own = None
    is_id = own is not None and len(str(own).encode()) <= MAX_ID_BYTES
    others = {name: value for name, value in instance.items() if name not in reserved}
    return str(own) if is_id else "", msgspec.json.encode(others)


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
