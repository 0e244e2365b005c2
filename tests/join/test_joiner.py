"""`streamtrain join` on a real Kafka: exactly once, whatever is killed, stopped or started."""

import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from streamtrain.embedded.kafka import Broker
from streamtrain.errors import ConfigError
from streamtrain.join.joiner import create_topics, open_topics
from streamtrain.settings.groups import Settings
from streamtrain.settings.load import load_settings
from tests.join.chaos import LABELS, Chaos, check
from tests.join.topics import BEGIN, Topics, joiner
from tests.patience import until
from tests.ports import free_ports
from tests.probes import is_ready


@pytest.fixture
def topics(kafka: Broker) -> Topics:
    return Topics(kafka.servers)


def test_killed_stopped_and_rebalanced_it_joins_everything_once(topics: Topics, tmp_path: Path) -> None:
    """More of it, with brokers that die as well: python -m tests.join.chaos."""
    with ExitStack() as stack:
        chaos = Chaos(topics, topics.settings(tmp_path, LABELS), random.Random(7), stack)
        for kind in ("kill joiner", "second joiner", "zombie", "kill joiner", "joiner leaves", "kill joiner"):
            chaos.inject(kind)
        chaos.finish()
    check(topics)


def test_idle_topics_settle_by_the_clock_and_bad_messages_are_letters(topics: Topics, tmp_path: Path) -> None:
    settings = topics.settings(
        tmp_path,
        f'wait = "2s"\ngrace = "1s"\nidle = "500ms"\nmetrics = "127.0.0.1:{(port := free_ports(1)[0])}"\n'
        '[join.labels.click]\nkinds = ["click"]\n',
    )
    topics.write(topics.impressions, [{"id": name, "time": BEGIN, "of": name} for name in ("a", "b")])
    topics.write(topics.outcomes, [{"id": "a", "time": BEGIN + 1, "kind": "click"}])
    for value in (b"no json", b'{"id": 1.5, "time": 1}', b'{"id": "c"}', b'{"id": "c", "time": "soon"}'):
        topics.write_raw(topics.impressions, value)
    topics.write_raw(topics.impressions, b'{"id": "\xff", "time": 1}')
    topics.write_raw(topics.impressions, b'{"id": "d", "time": 1, "of": ' + b"[" * 1500 + b"]" * 1500 + b"}")
    topics.write_raw(topics.impressions, None)
    topics.write_raw(topics.impressions, b'{"id": "c", "time": 4e9}')
    topics.samples.create(topics.partitions)
    topics.write_raw(topics.outcomes, b'{"id": "c", "time": %d}' % BEGIN)
    topics.write_raw(topics.outcomes, None)
    with joiner(settings):
        until(lambda: len(topics.read(topics.samples.topic)) == 2, 90)
        assert is_ready(port)
    found = {one.key: one.value for one in topics.read(topics.samples.topic)}
    assert found[b"a"] == b'{"id": "a", "time": %.1f, "of": "a","click":1}' % BEGIN
    assert found[b"b"] == b'{"id": "b", "time": %.1f, "of": "b","click":0}' % BEGIN
    letters = [one.headers["reason"] for one in topics.read(topics.impressions.topic + ".dead")]
    assert letters == [b"not_json", b"wrong_type", b"missing_field", b"bad_time", b"not_utf8", b"too_deep", b"future"]
    (letter,) = topics.read(topics.outcomes.topic + ".dead")
    assert (letter.headers["reason"], letter.headers["field"]) == (b"missing_field", b"kind")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "join.labels is not set: a sample needs a label"),
        ('emit = "fast"', "join.emit in .* must be 'first' or 'settled', not 'fast'"),
        ('[join.labels.click]\nkinds = ["click"]\nwait = 0', "join.labels in .* must be valid: click.wait must be a"),
        ('[join.labels.click]\nkind = ["click"]\nkinds = ["x"]', "click.kind is not a setting"),
    ],
)
def test_what_cannot_be_joined_is_refused_in_words(more: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "join.toml"
    file.write_text(f'[join]\nimpressions = "i"\noutcomes = "o"\n{more}')
    with pytest.raises(ConfigError, match=message):
        load_settings(file)


def test_topics_that_do_not_fit_are_refused(topics: Topics, tmp_path: Path) -> None:
    labels = '[join.labels.click]\nkinds = ["click"]\n'
    made = load_settings(topics.settings(tmp_path, labels))

    def changed(**join: object) -> Settings:
        return made.model_copy(update={"join": made.join.model_copy(update=join)})

    with pytest.raises(ConfigError, match="must be different topics"):
        open_topics(changed(outcomes=topics.samples.topic))
    with pytest.raises(ConfigError, match="needs all topics of a join at the same brokers"):
        open_topics(changed(outcomes="kafka://elsewhere:9092/outcomes"))
    with pytest.raises(ConfigError, match=r'join\.outcomes must be "kafka://host:port/topic" or the name of a topic'):
        open_topics(changed(outcomes="redis://localhost/outcomes"))
    topics.samples.create(3)
    with pytest.raises(ConfigError, match=r"has 3 partitions, but topic impressions-\w+ has 2"):
        create_topics(open_topics(made), 0, dead_letters=True)
