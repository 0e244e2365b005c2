"""Dead letters: messages that cannot be learned go to a topic of their own, with what is wrong with them."""

import threading
from typing import NamedTuple

from streamtrain.errors import WriteFailed
from streamtrain.stream.source import Stream, Writer
from streamtrain.stream.waiting import available

SUFFIX = ".dead"
_FLUSH_SECONDS = 1.0


class DeadLetter(NamedTuple):
    """A message that is not learned.

    Attributes:
        partition: of the topic from which it came.
        offset: its own there.
        reason: why; docs/samples.md lists the reasons.
        field: at fault, or "" where the whole message is.
        value: its bytes.
    """

    partition: int
    offset: int
    reason: str
    field: str
    value: bytes


class DeadLetters:
    """Writes them to "{topic}.dead"; schemas/README.md describes the headers.

    A message that is read again after a crash is written again, with the same key: topic, partition and offset.

    Args:
        stream: the topic that the messages come from.
        stopped: once set, waiting for the service ends.
    """

    def __init__(self, stream: Stream, stopped: threading.Event) -> None:
        self._stream = stream
        self._stopped = stopped
        self._writer: Writer | None = None

    def write(self, letter: DeadLetter) -> None:
        """Begins to write one; errors as of `Stream.writer` and `Writer.write`."""
        if self._writer is None:  # the topic is made when there is something for it
            self._writer = available(lambda: self._stream.writer(self._stream.topic + SUFFIX), self._stopped)
        topic, partition, offset, reason, field, value = self._stream.topic, *letter
        headers = {"reason": reason, "field": field, "topic": topic, "partition": str(partition), "offset": str(offset)}
        self._writer.write(
            value,
            partition=partition,
            key=f"{topic}/{partition}/{offset}".encode(),
            headers={name: text.encode() for name, text in headers.items()},
        )

    def flush(self) -> None:
        """Waits until all are written.

        Raises:
            WriteFailed: one cannot be written, or not before `stopped`.
        """
        left = 1 if self._writer is not None else 0
        while self._writer is not None and left:
            left = self._writer.flush(_FLUSH_SECONDS)
            if left and self._stopped.is_set():
                raise WriteFailed(f"{left} dead letters of {self._stream.name} are not written; stopped before")

    def close(self) -> None:
        """Ends the writer."""
        if self._writer is not None:
            self._writer.close()
