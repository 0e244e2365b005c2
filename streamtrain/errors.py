"""The error tree, sorted by what the caller does next.

StreamtrainError
├── ConfigError         a schema, model file or option is wrong: stop and mend it; the message names the key
├── SampleError         a sample cannot be used: dead-letter it; carries its index, reason and field
├── TooManyBadSamples   the stream is broken rather than a sample: stop
├── SourceError         a stream cannot be read or written
│   ├── SourceUnavailable   its service does not answer: try again
│   ├── SourceRefused       credentials, topic or group are refused: stop and mend it
│   │   └── TopicMissing    there is no such topic: create it, or wait for it
│   ├── OffsetGone          messages are deleted that have not been learned: skip them, or stop
│   └── WriteFailed         a message cannot be written
├── CheckpointError     a checkpoint cannot be written or read
│   └── CheckpointCorrupt   a file of it is damaged or missing: use the epoch before
├── PublicationError    a published model cannot be used
│   ├── OriginUnavailable   what keeps it does not answer: try again
│   ├── PublicationCorrupt  it is damaged, incomplete or gone: use another
│   ├── NothingBefore       nothing that was served before is there: name what to serve
│   └── Superseded          what is served is not what was to be replaced, any more: look again
└── ShardError          a shard cannot do what it is asked
    ├── ShardUnavailable    it cannot be reached, or is not ready yet: try again
    ├── ShardRefused        the request does not fit the shard, its model or its limits: stop and mend it
    └── ShardBroken         its rows can no longer be trusted: restart it from a checkpoint
"""

from dataclasses import dataclass
from typing import Literal


class StreamtrainError(Exception):
    """Base of every error that streamtrain raises on purpose."""


class ConfigError(StreamtrainError, ValueError):
    """A schema, model file or option is wrong."""


@dataclass(frozen=True)
class BadSample:
    """Why one sample was refused.

    Attributes:
        index: position of the sample in the call's samples.
        reason: one of `streamtrain.REASONS`, documented in docs/samples.md.
        field: the field at fault, or "" where the whole sample is.
    """

    index: int
    reason: str
    field: str

    def __str__(self) -> str:
        at = f" in field {self.field!r}" if self.field else ""
        return f"sample {self.index}: {self.reason}{at}"


class SampleError(StreamtrainError, ValueError):
    """Samples were refused where every one is needed.

    Attributes:
        bad: what was refused and why, in order of the samples.
    """

    def __init__(self, bad: list[BadSample]) -> None:
        self.bad = bad
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        super().__init__(f"{bad[0]}{more}")


class TooManyBadSamples(StreamtrainError):
    """So many samples were refused that the stream itself is at fault."""


class SourceError(StreamtrainError):
    """A stream cannot be read or written."""


class SourceUnavailable(SourceError):
    """The service of a stream does not answer."""


class SourceRefused(SourceError):
    """The service of a stream refuses: credentials, topic or group are wrong."""


class TopicMissing(SourceRefused):
    """There is no such topic."""


class OffsetGone(SourceError):
    """Messages at a position are deleted, or have never been.

    Attributes:
        partition: whose they are.
        wanted: offset of the position.
        low: the first offset that there is.
        high: the offset after the last.
    """

    def __init__(self, partition: int, wanted: int, low: int, high: int) -> None:
        super().__init__(f"partition {partition} has offsets {low} to {high - 1}, but {wanted} is the next to be read")
        self.partition, self.wanted, self.low, self.high = partition, wanted, low, high


class WriteFailed(SourceError):
    """A message cannot be written."""


class CheckpointError(StreamtrainError):
    """A checkpoint cannot be written or read."""


class CheckpointCorrupt(CheckpointError):
    """A file of a checkpoint is damaged or missing."""


class PublicationError(StreamtrainError):
    """A published model cannot be used."""


class OriginUnavailable(PublicationError):
    """What keeps published models does not answer."""


class PublicationCorrupt(PublicationError):
    """A published model is damaged, incomplete or gone."""


class NothingBefore(PublicationError):
    """Nothing that was served before is there to go back to."""


class Superseded(PublicationError):
    """What is served is not what was to be replaced, any more."""


class ShardError(StreamtrainError):
    """A shard cannot do what it is asked."""


class ShardUnavailable(ShardError):
    """A shard cannot be reached, or is not ready yet."""


class ShardRefused(ShardError):
    """A request does not fit the shard, its model or its limits.

    Attributes:
        reason: "malformed", "mismatch" (of model, run or shard), "limit", or "unauthenticated".
    """

    def __init__(
        self, message: str, reason: Literal["malformed", "mismatch", "limit", "unauthenticated"] = "malformed"
    ):
        super().__init__(message)
        self.reason = reason


class ShardBroken(ShardError):
    """The rows of a shard can no longer be trusted."""
