"""The feedback of a serving process, from its settings."""

from streamtrain.errors import ConfigError
from streamtrain.serve.feedback.feedback import Feedback
from streamtrain.serve.feedback.impressions import Fields, ImpressionLog
from streamtrain.serve.feedback.outcomes import OutcomeWriter
from streamtrain.serve.feedback.progress import JoinProgress
from streamtrain.settings.groups import Settings
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.stream.kafka.appender import KafkaAppender
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.opening import open_stream, topic_settings

_REDIS_SECONDS = 1.0


def make_feedback(settings: Settings) -> Feedback:
    """The feedback of a serving process; nothing is connected before it is opened.

    Raises:
        ConfigError: a topic is wrong, or not one of Kafka.
    """
    chosen, join = settings.serve, settings.join
    fields = Fields(join.id, join.time, join.kind, join.value, join.keep.weight or "")
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
