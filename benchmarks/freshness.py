"""How long does it take from a sample that is produced to predictions that have learned it? make bench-freshness.

    python benchmarks/freshness.py --every 1s
    python benchmarks/freshness.py --every 100ms --stream redis

Real processes, under load: a broker (or Valkey with Redis Streams), parameter servers, workers that learn W1 with a
second output that counts, Valkey for publications, and one serving process; `streamtrain produce` writes samples at a
steady rate. A probe is a sample with an id never seen before. For half of them predictions are requested over HTTP,
again and again, until they differ from that of an unknown id ("asked again"); for the others once, with x-min-offset as
soon as their offset is known, and the response comes when they are learned. The time is that from handing the sample to
the stream's client to the response. Every prediction has to say that its probe was learned exactly once.

The mean time consists of: produced to written (acknowledged by the broker), to learned by all shards (polled every
20 ms), to published (written by all shards, just before the commit), to predicted (commit, follow, apply, request).
`written_p99_ms` is the time from the acknowledgement to the response: the product's own part.
Prints a table and a line of JSON; exits with 1 if a probe was lost or counted twice.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
import numpy as np
from confluent_kafka import KafkaError, Message, Producer
from harness.client import Connection, is_ready
from harness.figures import table
from harness.models import W1, location
from harness.processes import Processes, Usage, child_named, exit_on_sigterm, free_addresses, free_ports

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from streamtrain.ps.rpc import wire
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.stream.redis.stream import RedisStream

TOPIC = "samples"
MODEL = "model"
PATH = f"/v1/models/{MODEL}:predict"
POLL_SECONDS = 0.02
PROBE_TIMEOUT = 60.0  # seconds after which a probe is lost
MOST = 512  # probes of one request
PARTS = ("to_written", "to_learned", "to_published", "to_predicted")


@dataclass
class Probe:
    """One probe; times are seconds since the epoch.

    Attributes:
        name: its id.
        waits: whether its prediction is requested once, with x-min-offset.
        produced: when it was handed to the stream's client.
        written: when the stream had acknowledged it.
        place: its partition and offset, or those of a message soon after it; None: not known yet.
        seen: when a prediction had learned it.
        publication: number of that prediction's publication.
        value: what was predicted: how many times it had been learned.
    """

    name: str
    waits: bool
    produced: float = 0.0
    written: float = 0.0
    place: tuple[int, int] | None = None
    seen: float = 0.0
    publication: int = 0
    value: float = 0.0

    def see(self, value: float, publication: int) -> None:
        """It has been predicted now."""
        self.seen, self.publication, self.value = time.time(), publication, value


class Sender(Protocol):
    """Writes samples and returns where they are."""

    async def send(self, value: bytes, partition: int) -> tuple[int, int]:
        """Partition and offset of what was written."""

    def close(self) -> None:
        """Closes the connection."""


class KafkaSender:
    """Batches messages for as long as the product's own writer does (`linger.ms`)."""

    def __init__(self, servers: str, topic: str) -> None:
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, "enable.idempotence": True})
        self._polling = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        while True:
            self._producer.poll(0)
            await asyncio.sleep(0.002)

    async def send(self, value: bytes, partition: int) -> tuple[int, int]:
        """See `Sender.send`."""
        written: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

        def delivered(error: KafkaError | None, message: Message) -> None:
            if written.cancelled():  # the benchmark is ending
                return
            if error is not None:
                written.set_exception(SystemExit(f"writing a probe failed: {error.str()}"))
                return
            at = message.partition(), message.offset()
            assert at[0] is not None
            assert at[1] is not None
            written.set_result((at[0], at[1]))

        self._producer.produce(self._topic, value, partition=partition, on_delivery=delivered)
        return await written

    def close(self) -> None:
        """See `Sender.close`."""
        self._polling.cancel()
        self._producer.close()


class RedisSender:
    """Its offsets are the end of the partition just after the write: that of the sample, or of one soon after it."""

    def __init__(self, url: str, topic: str) -> None:
        self._stream = RedisStream(url, topic)
        self._writer = self._stream.writer()

    def _send(self, value: bytes, partition: int) -> tuple[int, int]:
        self._writer.write(value, partition=partition)
        self._writer.flush(PROBE_TIMEOUT)
        return partition, self._stream.bounds()[partition].high - 1

    async def send(self, value: bytes, partition: int) -> tuple[int, int]:
        """See `Sender.send`."""
        return await asyncio.to_thread(self._send, value, partition)

    def close(self) -> None:
        """See `Sender.close`."""
        self._writer.close()


@dataclass
class Prober:
    """Sends probes at a steady rate and requests predictions for all that are under way.

    Args:
        port: of the serving process.
        sender: writes them.
        samples: provide the other fields of probes, in turns.
        partitions: of the topic.
        pause: seconds between two requests for probes that are asked for again and again.
    """

    port: int
    sender: Sender
    samples: list[dict[str, Any]]
    partitions: int
    pause: float
    _sent: int = field(default=0, init=False)
    _under_way: dict[str, Probe] = field(default_factory=dict, init=False)
    _free: deque[Connection] = field(default_factory=deque, init=False)

    async def run(self, count: int, rate: float, prefix: str, check: Callable[[], object]) -> list[Probe]:
        """Sends `count` probes, every second one with x-min-offset; waits until they are seen or lost."""
        probes = [Probe(f"{prefix}{i}", waits=bool(i % 2)) for i in range(count)]
        polling = asyncio.create_task(self._poll())
        began, tasks = time.monotonic(), []
        for i, probe in enumerate(probes):
            await asyncio.sleep(began + i / rate - time.monotonic())
            tasks.append(asyncio.create_task(self._send(probe)))
            if polling.done():
                await polling
            check()
        await asyncio.gather(*tasks)
        deadline = time.monotonic() + PROBE_TIMEOUT
        while self._under_way and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            check()
        self._under_way.clear()
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        while self._free:
            self._free.pop().close()
        return probes

    async def _send(self, probe: Probe) -> None:
        self._sent += 1
        sample = self.samples[self._sent % len(self.samples)]
        probe.produced = time.time()
        value = json.dumps(sample | {"ts": probe.produced, "probe": probe.name, "seen": 0}).encode()
        if not probe.waits:
            self._under_way[probe.name] = probe
        probe.place = await self.sender.send(value, self._sent % self.partitions)
        probe.written = time.time()
        if probe.waits:
            await self._wait(probe, probe.place)

    async def _wait(self, probe: Probe, place: tuple[int, int]) -> None:
        """Requests the prediction with x-min-offset, again if the server gave up waiting (412)."""
        connection = self._free.popleft() if self._free else Connection(self.port)
        while time.time() < probe.produced + PROBE_TIMEOUT:
            response = await connection.post(PATH, _body([probe.name]), x_min_offset=f"{place[0]}:{place[1]}")
            if response.status == 200:
                probe.see(response.predictions[0]["seen"][0], response.publication)
                break
            if response.status != 412:
                raise SystemExit(f"the prediction of a probe failed with {response.status}: {response.body.decode()}")
        self._free.append(connection)

    async def _poll(self) -> None:
        """Requests predictions for all that have not been seen, in one request, again and again."""
        connection = Connection(self.port)
        try:
            while True:
                asked = [*self._under_way.values()][:MOST]
                if asked:
                    response = await connection.post(PATH, _body([probe.name for probe in asked]))
                    if response.status != 200:
                        raise SystemExit(f"predictions failed with {response.status}: {response.body.decode()}")
                    for probe, predicted in zip(asked, response.predictions, strict=True):
                        if predicted["seen"][0]:
                            probe.see(predicted["seen"][0], response.publication)
                            del self._under_way[probe.name]
                await asyncio.sleep(self.pause)
        finally:
            connection.close()


def _body(names: list[str]) -> bytes:
    return json.dumps({"instances": [{"probe": name} for name in names]}).encode()


class Places(NamedTuple):
    """Addresses of shards, URLs of the stream and of publications, and the port of the serving process."""

    shards: list[str]
    stream: str
    store: str
    serving: int


class Watch:
    """A thread that notes when shards have learned what, and when it was published.

    Args:
        shards: addresses.
        url: where they publish.

    Attributes:
        published: when all shards had written a publication, seconds since the epoch, by its number.
        rows: rows by table of the head.
    """

    def __init__(self, shards: list[str], url: str) -> None:
        self._channels = [grpc.insecure_channel(address, options=CHANNEL_OPTIONS) for address in shards]
        self._controls = [RemoteControl(*one) for one in zip(self._channels, shards, strict=True)]
        self._server = RedisServer(url)
        self._origin = RedisOrigin(RedisModel(self._server, MODEL))
        self._clocks: list[tuple[float, dict[int, int]]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.published: dict[int, float] = {}
        self.rows: dict[str, int] = {}

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for channel in self._channels:
            channel.close()
        self._server.close()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            clocks = [wire.decode_clock(control.status().clock) for control in self._controls]
            self._clocks.append((time.time(), {p: min(one.get(p, 0) for one in clocks) for p in clocks[0]}))
            head = self._origin.find(None)
            if head is not None:
                self.published[head.number] = head.published
                self.rows = dict(head.rows)

    def learned(self, place: tuple[int, int]) -> float | None:
        """When all shards had learned a message; None if that was not seen."""
        partition, offset = place
        at = bisect_left(self._clocks, True, key=lambda one: one[1].get(partition, 0) > offset)
        return self._clocks[at][0] if at < len(self._clocks) else None


def mean_parts(probes: list[Probe], watch: Watch) -> dict[str, float]:
    """Mean milliseconds of each part of the time, over the probes of which all moments are known."""
    found = []
    for probe in probes:
        learned = watch.learned(probe.place) if probe.place else None
        published = watch.published.get(probe.publication)
        if learned is not None and published is not None:
            found.append(np.diff((probe.produced, probe.written, learned, published, probe.seen)))
    means = np.mean(found, axis=0) * 1e3 if found else np.full(4, np.nan)
    return {name: round(float(mean), 1) for name, mean in zip(PARTS, means, strict=True)}


def figures(probes: list[Probe], watch: Watch) -> dict[str, Any]:
    """The figures of the probes of one form."""
    seen = [probe for probe in probes if probe.seen]
    took = np.array([probe.seen - probe.produced for probe in seen]) * 1e3
    found = np.percentile(took, [50, 90, 99, 100]) if seen else np.full(4, np.nan)
    written = round(float(np.percentile([one.seen - one.written for one in seen], 99)) * 1e3, 1) if seen else None
    names = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    return {
        "probes": len(probes),
        "lost": len(probes) - len(seen),
        "counted_wrongly": sum(probe.value != 1 for probe in seen),
        **{name: round(float(one), 1) for name, one in zip(names, found, strict=True)},
        "written_p99_ms": written,
        "mean_parts_ms": mean_parts(seen, watch),
    }


def start(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> Places:
    """Starts everything but the load."""
    shards, (serving,) = free_addresses(args.shards), free_ports(1)
    store = stack.enter_context(Valkey())
    processes.watch("valkey", store.pid)
    if args.stream == "kafka":
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(Broker(resolve(), data=data))
        processes.watch("kafka", child_named("kafka.Kafka"))
        url = f"kafka://{broker.servers}"
    else:
        server = stack.enter_context(Valkey())
        processes.watch("stream", server.pid)
        url = server.url
    age = {"batch_age": args.batch_age} if args.batch_age else {}
    processes.settings(
        {
            "stream": {"url": url, "topic": TOPIC, "create": args.partitions},
            "worker": {"batch_size": args.batch, **age},
            "ps": {"addresses": shards},
            "publish": {"url": store.url, "every": args.every, "model": MODEL, "dtype": args.dtype},
            "serve": {"listen": f"127.0.0.1:{serving}"},
        },
        model=location("probed"),
    )
    processes.start_shards(args.shards)
    for i in range(args.workers):
        processes.start(f"worker{i}", "worker")
    processes.start("serve", "serve")
    return Places(shards, url, store.url, serving)


def measure(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> dict[str, Any]:
    """Starts everything, and probes it."""
    messages = W1.messages()
    places = start(args, processes, stack)
    (processes.folder / "samples.jsonl").write_bytes(b"\n".join(messages))
    load = ["produce", "samples.jsonl", "--rate", str(args.rate), "--repeat", "--create", str(args.partitions)]
    processes.start("produce", *load)
    processes.wait_until(lambda: is_ready(places.serving), "serving was not ready")
    samples = [json.loads(one) for one in messages[:1000]]

    async def probe(count: int, prefix: str) -> list[Probe]:
        sender: Sender
        if args.stream == "kafka":
            sender = KafkaSender(places.stream.partition("://")[2], TOPIC)
        else:
            sender = RedisSender(places.stream, TOPIC)
        try:
            await sender.send(messages[0], 0)  # connects, which the first probes would wait for
            prober = Prober(places.serving, sender, samples, args.partitions, args.pause)
            return await prober.run(count, 2 * args.probe_rate, prefix, processes.check)
        finally:
            sender.close()

    with Watch(places.shards, places.store) as watch:
        asyncio.run(probe(max(2, round(2 * args.probe_rate * args.warmup)), "warm"))
        usage = Usage(processes)
        before = max(watch.published)
        began = time.monotonic()
        probes = asyncio.run(probe(2 * args.probes, "probe"))
        cores, seconds = usage.cores(), time.monotonic() - began
    return {
        **{name: getattr(args, name) for name in ("stream", "every", "rate", "shards", "workers", "dtype")},
        "asked_again": figures([one for one in probes if not one.waits], watch),
        "x_min_offset": figures([one for one in probes if one.waits], watch),
        "publications_per_s": round((max(watch.published) - before) / seconds, 2),
        "rows": sum(watch.rows.values()),
        "cores": cores,
        "memory_mb": processes.memory(),
    }


def as_table(done: dict[str, Any]) -> str:
    """The figures, a row for each form."""
    head = ("form", "probes", "lost", "p50 ms", "p90 ms", "p99 ms", "max ms", "p99 ms once written")
    keys = ("probes", "lost", "p50_ms", "p90_ms", "p99_ms", "max_ms", "written_p99_ms")
    rows = []
    for form in ("asked_again", "x_min_offset"):
        one = done[form]
        rows.append([form, *(one[key] for key in keys), *one["mean_parts_ms"].values()])
    return table((*head, *(part.replace("_", " ") for part in PARTS)), rows)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", default="1s", help="interval of publications")
    parser.add_argument("--stream", choices=["kafka", "redis"], default="kafka")
    parser.add_argument("--rate", type=float, default=3_000, help="samples per second in addition to the probes")
    parser.add_argument("--probes", type=int, default=1_000, help="of each of the two forms")
    parser.add_argument("--probe-rate", type=float, default=20.0, help="probes per second of each form")
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds of probes that do not count")
    parser.add_argument("--pause", type=float, default=0.005, help="seconds between two requests of the first form")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batch-age", help="setting worker.batch_age; default: its default")
    parser.add_argument("--dtype", choices=["float32", "float16", "int8"], default="float32", help="of published rows")
    args = parser.parse_args()
    exit_on_sigterm()
    with ExitStack() as stack:
        processes = stack.enter_context(Processes())
        done = measure(args, processes, stack)
        processes.close()  # before the servers that they use
    print(as_table(done))
    print(json.dumps(done))
    forms = [done["asked_again"], done["x_min_offset"]]
    sys.exit(any(one["lost"] or one["counted_wrongly"] for one in forms))


if __name__ == "__main__":
    main()
