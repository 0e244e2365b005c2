"""Dead letters: messages that cannot be learned go to a topic of their own, with the reason.

There they can be read, and replayed once they can be learned. What was replayed is noted in the topic of dead letters.
A replayed message also names its dead letter in a header, so that a replay is found that was killed before it noted it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from typing import NamedTuple

from streamtrain.errors import SourceRefused, SourceUnavailable, TopicMissing, WriteFailed
from streamtrain.periodic import retry
from streamtrain.stream.source import Bounds, Record, Stream, Writer

SUFFIX = ".dead"
TRUNCATED = "truncated_from"
"""Header of a dead letter that was cut to the topic's limit: the size of the message in bytes."""
REPLAYED = "dead_letter"
"""Header of a replayed message: the key of its dead letter."""
NOTED = "replayed"
"""Header of a note among the dead letters, without a value: the key of the letter that was replayed."""
IDENTITY = "topic_id"
"""Header of a dead letter: the identity of its topic, as one that is created again has the same offsets."""

_FLUSH_SECONDS = 1.0
_FLUSHED = 1000  # messages that are replayed between two flushes
_SKEW_SECONDS = 3600.0  # by which the clocks of those who write to a topic may differ


class DeadLetter(NamedTuple):
    """A message that cannot be learned.

    Attributes:
        partition: partition of the topic it came from.
        offset: offset in that partition.
        reason: one of those that docs/samples.md lists.
        field: at fault; "" where the whole message is.
        value: its bytes.
        detail: what was found and what was expected, for people to read; "" if it was not noted.
    """

    partition: int
    offset: int
    reason: str
    field: str
    value: bytes
    detail: str = ""

    def identify(self, topic: str, identity: str = "") -> tuple[bytes, dict[str, bytes]]:
        """Key and headers of the letter of a message of this topic, with its identity if that is known."""
        partition, offset, reason, field, _, detail = self
        texts = {"reason": reason, "field": field, "topic": topic, "partition": str(partition), "offset": str(offset)}
        texts |= ({"detail": detail} if detail else {}) | ({IDENTITY: identity} if identity else {})
        headers = {name: text.encode(errors="replace") for name, text in texts.items()}
        return f"{topic}/{partition}/{offset}".encode(), headers

    def message(
        self, topic: str, identity: str, max_value_bytes: Callable[[bytes, Mapping[str, bytes]], int]
    ) -> tuple[bytes, bytes, dict[str, bytes]]:
        """Key, value and headers of the letter of a message of this topic; the value is cut to what fits.

        Args:
            topic: the topic.
            identity: of the topic; "": unknown.
            max_value_bytes: the most bytes of a value with a key and headers.
        """
        key, headers = self.identify(topic, identity)
        value = self.value
        if len(value) > max_value_bytes(key, headers):
            headers[TRUNCATED] = str(len(value)).encode()
            value = value[: max_value_bytes(key, headers)]
        return key, value, headers


class DeadLetters:
    """Writes them to "{topic}.dead"; schemas/README.md describes the headers.

    A message that is read again after a crash is written again, with the same key: topic, partition and offset.
    Any message can be written: where the topic of dead letters has fewer partitions, the partition modulo their number
    is used, and values above the topic's limit are cut; the headers keep the original partition and size.

    Args:
        stream: the topic that the messages come from.
        stopped: once set, waiting for the service ends.
    """

    def __init__(self, stream: Stream, stopped: threading.Event) -> None:
        self._stream = stream
        self._stopped = stopped
        self._writer: Writer | None = None
        self._identity = ""

    def write(self, letter: DeadLetter) -> None:
        """Queues a dead letter; errors as `Stream.writer` and `Writer.write`."""
        if self._writer is None:  # the topic is created with the first dead letter
            self._identity = retry(self._stream.identity, SourceUnavailable, self._stopped)
            self._writer = retry(
                lambda: self._stream.writer(self._stream.topic + SUFFIX), SourceUnavailable, self._stopped
            )
        key, value, headers = letter.message(self._stream.topic, self._identity, self._writer.max_value_bytes)
        self._writer.write(value, partition=letter.partition % self._writer.partitions, key=key, headers=headers)

    def flush(self) -> None:
        """Waits until all are written.

        Raises:
            WriteFailed: one cannot be written, or was not before `stopped`.
        """
        left = 1 if self._writer is not None else 0
        while self._writer is not None and left:
            left = self._writer.flush(_FLUSH_SECONDS)
            if left and self._stopped.is_set():
                raise WriteFailed(
                    f"{left} dead letters of {self._stream.name} were not written before the worker stopped"
                )

    def close(self) -> None:
        """Closes the writer."""
        if self._writer is not None:
            self._writer.close()


class StoredLetter(NamedTuple):
    """A dead letter as it is in its topic.

    Attributes:
        letter: the message and its reason.
        key: topic, partition and offset of the message, and the identity of the topic, if it is known.
        time: when the letter was written, in seconds since the epoch; 0: unknown.
        truncated_from: size of the message in bytes, if it was cut.
    """

    letter: DeadLetter
    key: str
    time: float
    truncated_from: int | None


def read_dead_letters(stream: Stream, dead: Stream) -> Iterator[StoredLetter]:
    """The dead letters of a topic, each once, in the order in which they lie in the partitions of their own topic.

    Args:
        stream: the topic.
        dead: that of its dead letters, which may be missing. Other messages are skipped.

    Raises:
        SourceRefused, SourceUnavailable: as `Stream.bounds`.
    """
    try:
        bounds = dead.bounds()
    except TopicMissing:
        return
    seen: set[str] = set()
    for record in dead.records(bounds):
        stored = _parse(record)
        if stored is not None and record.headers.get("topic") == stream.topic.encode() and stored.key not in seen:
            seen.add(stored.key)
            yield stored


def _parse(record: Record) -> StoredLetter | None:
    texts = {name: value.decode(errors="replace") for name, value in record.headers.items()}
    try:
        partition, offset = int(texts["partition"]), int(texts["offset"])
        field, detail = texts.get("field", ""), texts.get("detail", "")
        letter = DeadLetter(partition, offset, texts["reason"], field, record.value, detail)
        truncated_from = int(texts[TRUNCATED]) if TRUNCATED in texts else None
        key = " ".join([f"{texts['topic']}/{partition}/{offset}", *filter(None, [texts.get(IDENTITY)])])
        return StoredLetter(letter, key, record.time, truncated_from)
    except (KeyError, ValueError):
        return None


def read_notes(dead: Stream) -> set[str]:
    """Keys of the letters that are noted as replayed; errors as `read_dead_letters`."""
    try:
        bounds = dead.bounds()
    except TopicMissing:
        return set()
    noted = (record.headers.get(NOTED) for record in dead.records(bounds))
    return {key.decode(errors="replace") for key in noted if key is not None}


class Replayed(NamedTuple):
    """The result of a replay.

    Attributes:
        replayed: number of messages replayed.
        before: number of messages that had been replayed before.
        truncated: topic, partition and offset of those that cannot be replayed, as they were cut.
    """

    replayed: int
    before: int
    truncated: list[str]


def replay_dead_letters(
    stream: Stream,
    dead: Stream,
    read: Callable[[], Iterable[StoredLetter]],
    on_progress: Callable[[int], None] = lambda replayed: None,
) -> Replayed:
    """Writes messages back to their topic, each once, however often this is called or was killed.

    Two replays at the same time do not know of each other.

    Args:
        stream: the topic. It is read from the time of the first letter on, for what a replay that was killed has
            written without a note, also of transactions that are open meanwhile.
        dead: that of its dead letters.
        read: reads the dead letters; called twice, so that they are not kept in memory.
        on_progress: called with the number of messages written.

    Raises:
        WriteFailed: one cannot be written. Call it again: what was written is not written again.
        SourceRefused, SourceUnavailable: as `Stream.bounds`.
    """
    truncated: list[str] = []
    times: dict[str, float] = {}
    for stored in read():
        if stored.truncated_from is None:
            times[stored.key] = stored.time
        else:
            truncated.append(f"{stream.topic}/{stored.letter.partition}/{stored.letter.offset}")
    noted = read_notes(dead)
    missing = times.keys() - noted
    if missing:
        missing -= _replayed_since(stream, min(times[key] for key in missing))
    if missing:
        _write(stream, dead, (stored for stored in read() if stored.key in missing), on_progress)
    return Replayed(len(missing), len(times) - len(missing), truncated)


def _write(stream: Stream, dead: Stream, letters: Iterable[StoredLetter], on_progress: Callable[[int], None]) -> None:
    count, left = 0, iter(letters)
    with closing(stream.writer()) as writer, closing(dead.writer()) as notes:
        while some := list(islice(left, _FLUSHED)):
            for stored in some:
                partition = stored.letter.partition if stored.letter.partition < writer.partitions else None
                writer.write(stored.letter.value, partition=partition, headers={REPLAYED: stored.key.encode()})
            _flush(writer)
            for stored in some:
                notes.write(b"", key=stored.key.encode(), headers={NOTED: stored.key.encode()})
            _flush(notes)
            count += len(some)
            on_progress(count)


def _flush(writer: Writer) -> None:
    while writer.flush(_FLUSH_SECONDS):
        continue


def _replayed_since(stream: Stream, time: float) -> set[str]:
    """Keys of the letters whose messages were replayed since a time."""
    bounds: Mapping[int, Bounds] = stream.bounds()
    try:
        first = stream.at(max(0.0, time - _SKEW_SECONDS))
    except SourceRefused:  # its messages have no times
        first = {}
    wanted = {p: Bounds(max(low, first.get(p, low)), high) for p, (low, high) in bounds.items()}
    return {
        record.headers[REPLAYED].decode(errors="replace")
        for record in stream.records(wanted, committed=False)
        if REPLAYED in record.headers
    }
