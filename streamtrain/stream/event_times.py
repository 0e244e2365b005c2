"""Event times: history that is written again as if it happened now, so that freshness and expiry mean something."""

import time
from collections.abc import Callable, Iterable

import msgspec

from streamtrain.errors import ConfigError
from streamtrain.stream.files import STDIN, Block, SampleFile, parse_time

Shift = Callable[[bytes], bytes]
"""Gives a message with its new event time."""

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def shift_times(to: str, field: str, samples: SampleFile, limit: Callable[[Iterable[Block]], Iterable[Block]]) -> Shift:
    """What gives messages other event times. All other fields stay as they are, byte for byte.

    Args:
        to: "last": all are moved by as much as it takes for the last event of the file to happen now. "each": an event
            happens when it is written.
        field: of the event time.
        samples: the file, with event times. For "last" it is read once before.
        limit: gives those of its blocks that are going to be written.

    Raises:
        ConfigError: `to` is neither, standard input cannot be read twice, or no sample has an event time.
    """
    if to not in ("last", "each"):
        raise ConfigError(f"--shift-times must be last or each, not {to!r}")
    if to == "each":
        return lambda message: with_time(message, field, lambda _: time.time())
    if samples.url == STDIN:
        raise ConfigError("--shift-times last cannot read standard input twice: use --shift-times each")
    times = (at for block in limit(samples.blocks()) for _, at, _ in block.samples if at is not None)
    last = max(times, default=None)
    if last is None:
        raise ConfigError(f"--shift-times: no sample of {samples.name} has an event time in {field!r}; set --time")
    by = time.time() - last
    return lambda message: with_time(message, field, lambda at: None if at is None else at + by)


def with_time(message: bytes, field: str, new: Callable[[float | None], float | None]) -> bytes:
    """A JSON message with another event time, in seconds; unchanged if it is not an object, or has no event time.

    Args:
        message: the message.
        field: of its event time.
        new: gives the new one by the old one, which is None where there is none; None: it stays.

    >>> with_time(b'{"ts": "1970-01-01T00:01", "id": 1.50}', "ts", lambda at: at + 1)
    b'{"ts":61.000000,"id":1.50}'
    """
    try:
        fields = _decode(message)
        before = parse_time(msgspec.json.decode(fields[field])) if field in fields else None
    except msgspec.DecodeError:  # workers say what is wrong with it
        return message
    at = new(before)
    if at is None:
        return message
    return msgspec.json.encode(fields | {field: msgspec.Raw(b"%.6f" % at)})
