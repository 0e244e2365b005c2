"""What a server reports about its predictions, and the outcomes that are reported to it."""

import asyncio
import time
from dataclasses import dataclass

from streamtrain.errors import ConfigError, OriginUnavailable
from streamtrain.metrics.serving import FeedbackState
from streamtrain.serve.errors import HTTPError
from streamtrain.serve.feedback.impressions import FieldNames, ImpressionLog
from streamtrain.serve.feedback.outcomes import OutcomeWriter
from streamtrain.serve.feedback.progress import AwaitedOffsets, Joined, JoinProgress
from streamtrain.settings.groups import Settings
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.stream.kafka.appender import KafkaAppender
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.opening import open_stream, topic_settings

_REDIS_SECONDS = 1.0


_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Feedback:
    """The feedback of a server.

    Attributes:
        impressions: what was predicted; None: it is not written.
        outcomes: what became of it; None: the server does not take it.
        progress: how far outcomes are joined; None: that is not known.
    """

    impressions: ImpressionLog | None = None
    outcomes: OutcomeWriter | None = None
    progress: JoinProgress | None = None

    async def wait_joined(self, wanted: AwaitedOffsets, deadline: float, timeout: float) -> dict[int, int]:
        """The offsets of samples to wait for, once the outcomes are joined.

        Args:
            wanted: offsets of samples and of outcomes.
            deadline: by the monotonic clock.
            timeout: seconds until then, for the message.

        Raises:
            HTTPError: 400, there is no join; 412, they are not joined by then.
            PublicationError: see `JoinProgress.read`.
        """
        if self.progress is None:
            raise HTTPError(400, "x-min-offset: outcomes cannot be waited for: set publish.url and join.outcomes")
        joined: dict[int, Joined] = {}
        trouble = ""
        while True:
            try:
                joined = await self.progress.read()
            except OriginUnavailable as exc:
                trouble = f" ({exc})"
            if all(p in joined and offset < joined[p].outcome for p, offset in wanted.outcomes.items()):
                return self._samples(wanted, joined)
            if time.monotonic() > deadline:
                at = ",".join(f"{p}:{one.outcome}" for p, one in sorted(joined.items())) or "none"
                raise HTTPError(
                    412,
                    f"x-min-offset: outcomes not joined within {timeout:g} s; the next offsets to be joined are {at}"
                    f"{trouble}",
                )
            await asyncio.sleep(_POLL_SECONDS)

    @staticmethod
    def _samples(wanted: AwaitedOffsets, joined: dict[int, Joined]) -> dict[int, int]:
        samples = dict(wanted.samples)
        for partition in wanted.outcomes:
            if (last := joined[partition].sample - 1) >= 0:
                samples[partition] = max(last, samples.get(partition, 0))
        return samples

    def state(self) -> FeedbackState:
        """For the metrics."""
        log, outcomes = self.impressions, self.outcomes
        return FeedbackState(
            impressions=log.counts if log else {},
            waiting=log.waiting if log else 0,
            outcomes=dict(outcomes.counts) if outcomes else {},
        )

    def start(self) -> None:
        """Begins to write, and to take outcomes."""
        if self.impressions is not None:
            self.impressions.start()
        if self.outcomes is not None:
            self.outcomes.start()

    def close(self) -> None:
        """Writes what waits, for a few seconds at most."""
        if self.impressions is not None:
            self.impressions.close()
        if self.outcomes is not None:
            self.outcomes.close()


def make_feedback(settings: Settings) -> Feedback:
    """The feedback of a serving process; nothing is connected before it is opened.

    Raises:
        ConfigError: a topic is wrong, or not one of Kafka.
    """
    chosen, join = settings.serve, settings.join
    fields = FieldNames(join.id, join.time, join.kind, join.value, join.keep.weight or "")
    impressions: ImpressionLog | None = None
    outcomes: OutcomeWriter | None = None
    progress: JoinProgress | None = None
    if chosen.log:
        appender = _appender(settings, chosen.log, "serve.log", ImpressionLog.options())
        impressions = ImpressionLog(appender, fields, own_ids=chosen.log_own_ids, sample=chosen.log_sample)
    if topic := chosen.outcomes or join.outcomes:
        key = "serve.outcomes" if chosen.outcomes else "join.outcomes"
        labels = join.labels.values() if topic == join.outcomes else ()
        outcomes = OutcomeWriter(
            _appender(settings, topic, key, OutcomeWriter.options()),
            fields,
            kinds={kind for label in labels for kind in (*label.kinds, *label.cancelled_by)},
            valued={kind for label in labels if label.value for kind in label.kinds},
            max_ahead=settings.stream.future_after,
        )
        if settings.publish.url:
            server = RedisServer(settings.publish.url, cluster=settings.publish.cluster, timeout=_REDIS_SECONDS)
            progress = JoinProgress(RedisModel(server, settings.publish.model))
    return Feedback(impressions, outcomes, progress)


def _appender(settings: Settings, address: str, key: str, options: dict[str, int]) -> KafkaAppender:
    topic = topic_settings(settings.stream, address, key)
    if topic.url.partition("://")[0] != "kafka":
        raise ConfigError(f'{key} = "{address}" needs Kafka, but stream.url is not: use "kafka://host:port/topic"')
    stream = open_stream(topic)
    assert isinstance(stream, KafkaStream)
    return KafkaAppender(stream, settings.stream.create, options)
