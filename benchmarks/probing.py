"""Probes of the freshness benchmark: samples with ids never seen before, written, and asked for until learned."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from asking import Connection
from confluent_kafka import KafkaError, Message, Producer

from streamtrain.stream.redis_streams import RedisStream

PATH = "/v1/models/model:predict"
GIVE_UP = 60.0  # seconds after which a probe is lost
MOST = 512  # probes of one request


@dataclass
class Probe:
    """One probe; times are seconds since the epoch.

    Attributes:
        name: its id.
        waits: whether it is asked for once, with x-min-offset, instead of again and again.
        produced: when it was handed to the stream's client.
        place: its partition and offset, or those of a message soon after it; None: not known yet.
        seen: when a prediction had learned it.
        publication: of that prediction.
        value: what was predicted then: how many times it had been learned.
    """

    name: str
    waits: bool
    produced: float = 0.0
    place: tuple[int, int] | None = None
    seen: float = 0.0
    publication: int = 0
    value: float = 0.0

    def take(self, value: float, publication: int) -> None:
        """It has been seen now."""
        self.seen, self.publication, self.value = time.time(), publication, value


class Sender(Protocol):
    """Writes samples, and tells where they are."""

    async def send(self, value: bytes, partition: int) -> tuple[int, int]:
        """Partition and offset of what was written."""

    def close(self) -> None:
        """Ends it."""


class KafkaSender:
    """Waits as long for company as the product's own writer does.

    Args:
        servers: addresses of brokers.
        topic: that is written to.
    """

    def __init__(self, servers: str, topic: str) -> None:
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, "enable.idempotence": True})
        self._polling = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        while True:
            self._producer.poll(0)
            await asyncio.sleep(0.002)

    async def send(self, value: bytes, partition: int) -> tuple[int, int]:
        """See Sender."""
        written: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

        def delivered(error: KafkaError | None, message: Message) -> None:
            if written.cancelled():  # the benchmark is ending
                return
            if error is not None:
                written.set_exception(SystemExit(f"a probe cannot be written: {error.str()}"))
                return
            at = message.partition(), message.offset()
            assert at[0] is not None
            assert at[1] is not None
            written.set_result((at[0], at[1]))

        self._producer.produce(self._topic, value, partition=partition, on_delivery=delivered)
        return await written

    def close(self) -> None:
        """See Sender."""
        self._polling.cancel()
        self._producer.close()


class RedisSender:
    """Its offsets are of the end of the partition just after the write: that of the sample, or of one soon after it.

    Args:
        url: of the server.
        topic: that is written to.
    """

    def __init__(self, url: str, topic: str) -> None:
        self._stream = RedisStream(url, topic)
        self._writer = self._stream.writer()

    def _send(self, value: bytes, partition: int) -> tuple[int, int]:
        self._writer.write(value, partition=partition)
        self._writer.flush(GIVE_UP)
        return partition, self._stream.bounds()[partition].high - 1

    async def send(self, value: bytes, partition: int) -> tuple[int, int]:
        """See Sender."""
        return await asyncio.to_thread(self._send, value, partition)

    def close(self) -> None:
        """See Sender."""
        self._writer.close()


@dataclass
class Probing:
    """Sends probes at a steady rate, and asks for all that are under way.

    Args:
        port: of the serving process.
        sender: that writes them.
        samples: whose fields probes have beside their id, taken in turns.
        partitions: of the topic.
        pause: seconds between two requests for probes that are asked for again and again.

    Attributes:
        asked: requests so far.
    """

    port: int
    sender: Sender
    samples: list[dict[str, Any]]
    partitions: int
    pause: float
    asked: int = 0
    _sent: int = field(default=0, init=False)
    _under_way: dict[str, Probe] = field(default_factory=dict, init=False)
    _free: deque[Connection] = field(default_factory=deque, init=False)

    async def run(self, count: int, rate: float, prefix: str, check: Callable[[], object]) -> list[Probe]:
        """So many probes, each second one with x-min-offset, and so many a second; all have been seen, or given up."""
        probes = [Probe(f"{prefix}{i}", waits=bool(i % 2)) for i in range(count)]
        asking = asyncio.create_task(self._ask())
        began, tasks = time.monotonic(), []
        for i, probe in enumerate(probes):
            await asyncio.sleep(began + i / rate - time.monotonic())
            tasks.append(asyncio.create_task(self._one(probe)))
            if asking.done():
                await asking
            check()
        await asyncio.gather(*tasks)
        deadline = time.monotonic() + GIVE_UP
        while self._under_way and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            check()
        self._under_way.clear()
        await _cancelled(asking)
        while self._free:
            self._free.pop().close()
        return probes

    async def _one(self, probe: Probe) -> None:
        self._sent += 1
        sample = self.samples[self._sent % len(self.samples)]
        probe.produced = time.time()
        value = json.dumps(sample | {"ts": probe.produced, "probe": probe.name, "seen": 0}).encode()
        if not probe.waits:
            self._under_way[probe.name] = probe
        probe.place = await self.sender.send(value, self._sent % self.partitions)
        if probe.waits:
            await self._wait_for(probe, probe.place)

    async def _wait_for(self, probe: Probe, place: tuple[int, int]) -> None:
        connection = self._free.popleft() if self._free else Connection(self.port)
        while time.time() < probe.produced + GIVE_UP:
            self.asked += 1
            answer = await connection.post(PATH, _body([probe.name]), x_min_offset=f"{place[0]}:{place[1]}")
            if answer.status == 200:
                probe.take(answer.predictions[0]["seen"][0], answer.publication)
                break
            if answer.status != 412:
                raise SystemExit(f"a probe is refused with {answer.status}: {answer.body.decode()}")
        self._free.append(connection)

    async def _ask(self) -> None:
        """Asks for all that have not been seen, in one request, and again."""
        connection = Connection(self.port)
        try:
            while True:
                asked = [*self._under_way.values()][:MOST]
                if asked:
                    self.asked += 1
                    answer = await connection.post(PATH, _body([probe.name for probe in asked]))
                    if answer.status != 200:
                        raise SystemExit(f"a probe is refused with {answer.status}: {answer.body.decode()}")
                    for probe, predicted in zip(asked, answer.predictions, strict=True):
                        if predicted["seen"][0]:
                            probe.take(predicted["seen"][0], answer.publication)
                            del self._under_way[probe.name]
                await asyncio.sleep(self.pause)
        finally:
            connection.close()


def _body(names: list[str]) -> bytes:
    return json.dumps({"instances": [{"probe": name} for name in names]}).encode()


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
