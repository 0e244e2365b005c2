"""Topics of a join for tests: written as a producer would, and read as a worker reads them."""

import json
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from streamtrain.errors import TopicMissing
from streamtrain.join.engine import Impression, Outcome
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.source import Record
from tests import commands
from tests.patience import until

BEGIN = float(int(time.time()) - 20_000)  # so late that retention keeps them
KINDS = ("click", "click", "click", "buy", "refund", "hover")


class Topics:
    """Impressions, outcomes and samples of a test of its own."""

    def __init__(self, servers: str, partitions: int = 2) -> None:
        name = uuid.uuid4().hex[:8]
        self.servers, self.partitions, self.group = servers, partitions, f"{name}.join"
        self.impressions, self.outcomes, self.samples = (
            KafkaStream(servers, f"{kind}-{name}", {}) for kind in ("impressions", "outcomes", "samples")
        )
        self.impressions.create(partitions)
        self.outcomes.create(partitions)
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "linger.ms": 5,
                "enable.idempotence": True,
                "message.max.bytes": 4_000_000,
                "topic.metadata.refresh.interval.ms": 500,
            }
        )

    def settings(
        self,
        folder: Path,
        text: str = "",
        *,
        secured: str | None = None,
        options: Mapping[str, object] = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 300},
    ) -> Path:
        """A file of settings, with this text at its end; `secured` is where brokers ask for the user of `options`."""
        file, servers = folder / "join.toml", secured or self.servers
        kafka = "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in options.items())
        file.write_text(
            f'[stream]\nurl = "kafka://{servers}"\ntopic = "{self.samples.topic}"\n'
            f'group = "{self.group.removesuffix(".join")}"\n'
            f'[stream.kafka]\n{kafka}"topic.metadata.refresh.interval.ms" = 1000\n'
            f'[join]\nimpressions = "kafka://{servers}/{self.impressions.topic}"\n'
            f'outcomes = "{self.outcomes.topic}"\n{text}'
        )
        return file

    def grow(self, stream: KafkaStream, partitions: int) -> None:
        """Adds partitions to a topic."""
        admin = AdminClient({"bootstrap.servers": self.servers})
        admin.create_partitions([NewPartitions(stream.topic, partitions)])[stream.topic].result(60)
        until(lambda: len(self._producer.list_topics(stream.topic).topics[stream.topic].partitions) == partitions)

    def write(
        self,
        stream: KafkaStream,
        messages: Sequence[dict[str, object]],
        partition: Callable[[dict[str, object]], int] = lambda message: -1,
    ) -> None:
        """Writes messages with their ids as keys; partition -1: that of the key."""
        for one in messages:
            value = json.dumps(one).encode()
            stamp = int(float(str(one["time"])) * 1000)
            self._producer.produce(stream.topic, value, str(one["id"]).encode(), partition(one), timestamp=stamp)
        assert self._producer.flush(60) == 0

    def write_raw(self, stream: KafkaStream, value: bytes | None, partition: int = 0) -> None:
        """Writes bytes; None: a tombstone."""
        self._producer.produce(stream.topic, value, b"key", partition)
        assert self._producer.flush(60) == 0

    @contextmanager
    def transaction(self, stream: KafkaStream, messages: Sequence[dict[str, object]]) -> Iterator[None]:
        """Messages for partition 0 in a transaction, which is open meanwhile."""
        producer = Producer({"bootstrap.servers": self.servers, "transactional.id": uuid.uuid4().hex})
        producer.init_transactions(60)
        producer.begin_transaction()
        for one in messages:
            stamp = int(float(str(one["time"])) * 1000)
            producer.produce(stream.topic, json.dumps(one).encode(), str(one["id"]).encode(), 0, timestamp=stamp)
        assert producer.flush(60) == 0
        yield
        producer.commit_transaction(60)

    def end(self, time: float) -> None:
        """Brings the watermarks of all partitions to a time, with ids that have no counterpart."""
        for stream, more in ((self.impressions, {}), (self.outcomes, {"kind": "end"})):
            for partition in range(self.partitions):
                value = json.dumps({"id": f"end-{partition}", "time": time, **more}).encode()
                self._producer.produce(stream.topic, value, None, partition, timestamp=int(time * 1000))
        assert self._producer.flush(60) == 0

    def read(self, topic: str) -> list[Record]:
        """What is committed of a topic, which may not be there yet."""
        stream = self.samples.of(topic)
        with suppress(TopicMissing):
            return list(stream.records(stream.bounds()))
        return []

    def logs(self) -> Iterator[tuple[list[Impression], list[Outcome]]]:
        """Both logs of each partition."""
        first, last = self.read(self.impressions.topic), self.read(self.outcomes.topic)
        for partition in range(self.partitions):
            impressions, outcomes = [], []
            for one in first:
                if one.partition == partition:
                    of = json.loads(one.value)
                    impressions.append(Impression(one.offset, str(of["id"]), float(of["time"]), one.value))
            for one in last:
                if one.partition == partition:
                    of = json.loads(one.value)
                    id_, number = str(of["id"]), float(of.get("value", 1.0))
                    outcomes.append(Outcome(one.offset, id_, float(of["time"]), of["kind"], number, one.value))
            yield impressions, outcomes

    def joined(self) -> Counter[str]:
        """The samples that are committed."""
        return Counter(json.dumps(json.loads(one.value, parse_int=float)) for one in self.read(self.samples.topic))


def events(
    draw: random.Random, ids: range, seconds: float = 0.5
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Impressions in their order, and their outcomes: some late, some without impression, some taken back."""
    impressions: list[dict[str, object]] = []
    outcomes: list[dict[str, object]] = []
    for number in ids:
        time = BEGIN + number * seconds + draw.uniform(-3, 3)
        impressions.append({"id": f"i{number}", "time": time, "user": number % 7})
        for _ in range(draw.choice((0, 0, 1, 1, 3))):
            kind = draw.choice(KINDS)
            happened = time + draw.choice((draw.uniform(-1, 20), draw.uniform(0, 60)))
            outcomes.append({"id": f"i{number}", "time": happened, "kind": kind, "value": draw.randint(1, 5)})
        if draw.random() < 0.05:
            outcomes.append({"id": f"x{number}", "time": time, "kind": "click", "value": 1})
    outcomes.sort(key=lambda one: float(str(one["time"])) + draw.uniform(0, 8))
    return impressions, outcomes


@contextmanager
def joiner(settings: Path, *options: str, stderr: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `streamtrain join`, which is killed at the end if it still runs."""
    command = [*commands.COMMAND, "join", "--config", str(settings), *options]
    process = commands.start(command, stderr=stderr)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()
