"""The error tree, sorted by what the caller does next.

StreamtrainError
├── ConfigError         a schema, model file or option is invalid: stop and fix it; the message names the key
├── SampleError         a sample cannot be used: dead-letter it; carries its index, reason and field
├── TooManyBadSamples   the stream itself is broken, not single samples: stop
├── SourceError         a stream cannot be read or written
│   ├── SourceUnavailable   its service does not respond: retry
│   ├── SourceRefused       credentials, topic or group are refused: stop and fix it
│   │   └── TopicMissing    the topic does not exist: create it, or wait for it
│   ├── OffsetGone          messages were deleted before they were learned: skip them, or stop
│   └── WriteFailed         a message cannot be written
├── CheckpointError     a checkpoint cannot be written or read
│   └── CheckpointCorrupt   a file of it is damaged or missing: use the previous epoch
├── PublicationError    a published model cannot be used
│   ├── OriginUnavailable   its store does not respond: retry
│   ├── PublicationCorrupt  it is damaged, incomplete or deleted: use another
│   ├── PublicationMissing  the version does not exist, or nothing has been published yet: name one, or wait
│   ├── PublicationMismatch it is of another model than the served one: fix the configuration
│   ├── Pinned              the served version is pinned by the configuration: unpin it
│   ├── GateClosed          it is worse than the quality gate allows: keep the served version
│   ├── TakenOver           another cluster publishes under this name: stop one of the two
│   ├── NothingBefore       no earlier version is left to roll back to: name a version
│   └── Superseded          another version is served by now than the one to be replaced: check again
└── ShardError          a shard cannot process a request
    ├── ShardUnavailable    it cannot be reached, or is not ready yet: retry
    ├── ShardRefused        the request does not fit the shard, its model or its limits: stop and fix it
    │   └── ModelMismatch   it is of another model, also a ConfigError: use the same model, or begin a new run
    └── ShardBroken         its rows can no longer be trusted: restart it from a checkpoint
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal


class StreamtrainError(Exception):
    """Base of every error that streamtrain raises on purpose."""


class ConfigError(StreamtrainError, ValueError):
    """A schema, model file or option is invalid."""


@dataclass(frozen=True)
class BadSample:
    """Why one sample was refused.

    Attributes:
        index: position of the sample in the call's samples.
        reason: one of `streamtrain.REASONS`, documented in docs/samples.md.
        field: the field at fault, or "" where the whole sample is.
        detail: what was found and what was expected, for people to read; "" of samples after the first 64 of a batch.
    """

    index: int
    reason: str
    field: str
    detail: str = dataclasses.field(default="", compare=False)

    def describe(self, others: int = 0) -> str:
        """The problem in words; `others` is the number of further samples that were refused with this one."""
        at = f" in field {self.field!r}" if self.field else ""
        more = f" (and {others} more)" if others else ""
        return f"{self.reason}{at}{more}" + (f": {self.detail}" if self.detail else "")

    def __str__(self) -> str:
        return f"sample {self.index}: {self.describe()}"


class SampleError(StreamtrainError, ValueError):
    """Samples were refused in a call that needs all of them.

    Attributes:
        bad: the refused samples with reasons, in order.
    """

    def __init__(self, bad: list[BadSample]) -> None:
        self.bad = bad
        super().__init__(f"sample {bad[0].index}: {bad[0].describe(len(bad) - 1)}")


class TooManyBadSamples(StreamtrainError):
    """So many samples were refused that the stream itself is at fault."""


class SourceError(StreamtrainError):
    """A stream cannot be read or written."""


class SourceUnavailable(SourceError):
    """The service of a stream does not respond."""


class SourceRefused(SourceError):
    """The service of a stream refuses the credentials, topic or group."""


class InstanceFenced(SourceRefused):
    """Another member of the group has joined as the same instance."""


class TopicMissing(SourceRefused):
    """The topic does not exist."""


class OffsetGone(SourceError):
    """An offset is outside of its partition: deleted, or never written.

    Attributes:
        partition: the partition.
        wanted: the offset.
        low: the first available offset.
        high: the offset after the last one.
    """

    def __init__(self, partition: int, wanted: int, low: int, high: int) -> None:
        super().__init__(
            f"partition {partition} did not have offset {wanted}, the next to be read, and has it now: "
            "its log was cut off, and has grown again"
            if low <= wanted <= high
            else f"partition {partition} has offsets {low} to {high - 1}, but {wanted} is the next to be read"
        )
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
    """The store of published models does not respond."""


class PublicationCorrupt(PublicationError):
    """A published model is damaged, incomplete or deleted."""


class PublicationMissing(PublicationError):
    """The version does not exist, or nothing has been published yet."""


class PublicationMismatch(PublicationError):
    """A publication is of another model than the served one."""


class Pinned(PublicationError):
    """The served version is pinned by the server's configuration."""


class GateClosed(PublicationError):
    """A publication is held back by the quality gate."""


class TakenOver(PublicationError):
    """Another cluster publishes under this name.

    Attributes:
        same_run: whether that cluster continues the same run; then this one must stop training, too.
    """

    def __init__(self, message: str, *, same_run: bool) -> None:
        super().__init__(message)
        self.same_run = same_run


class NothingBefore(PublicationError):
    """There is no earlier version to roll back to."""


class NothingToCompare(PublicationError):
    """Two models have no figures of the same samples."""


class LabelInUse(PublicationError):
    """Requests are divided by a label that is to be removed."""


class TrafficRefused(PublicationError):
    """Requests cannot be divided like that; nothing has changed."""


class ArmNotLoaded(TrafficRefused):
    """A server could not predict the requests for an arm; nothing has changed."""


class Superseded(PublicationError):
    """Another version is served by now than the one to be replaced."""


class ShardError(StreamtrainError):
    """A shard cannot process a request."""


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


class ModelMismatch(ShardRefused, ConfigError):
    """A model file does not fit what shards or a checkpoint have learned.

    Attributes:
        reason: "mismatch".
        learned: the spec of what they have learned, as JSON.
    """

    def __init__(self, message: str, learned: str) -> None:
        super().__init__(message, "mismatch")
        self.learned = learned


class ShardBroken(ShardError):
    """The rows of a shard can no longer be trusted."""
