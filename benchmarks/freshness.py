"""How long it takes from a sample that is produced to predictions that have learned it: make bench-freshness.

    python benchmarks/freshness.py --every 1s
    python benchmarks/freshness.py --every 100ms --stream redis

Real processes, under load: a broker (or Valkey with Redis Streams), parameter servers, workers that learn W1 with an
output beside it that counts, Valkey for what is published, and one serving process; `streamtrain produce` writes
samples at a steady rate. A probe is a sample with an id never seen before. Half of them are asked for over HTTP, again
and again, until their prediction differs from that of an unknown id; the others once, with x-min-offset as soon as
their offset is known, and the answer comes when they are learned. The time is that from handing the sample to the
stream's client to the answer. Every prediction has to say that its probe was learned exactly once.

Means of the parts: produced to learned by all shards (looked at every 20 ms), learned to published (all shards
have written, just before the commit), published to predicted (commit, follow, apply, request).
Prints a table, and a line of JSON; ends with 1 if a probe was lost or counted twice.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import cluster
import grpc
import numpy as np
from asking import status_of
from probing import KafkaSender, Probe, Probing, RedisSender, Sender
from processes import HERE, Processes, Usage, child_named, end_in_order
from stream import messages

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from streamtrain.ps import wire
from streamtrain.ps.control import CHANNEL_OPTIONS, RemoteControl
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_origin import RedisOrigin
from streamtrain.store.redis_server import RedisServer

TOPIC = "samples"
MODEL = "model"
LOOK_SECONDS = 0.02


class Places(NamedTuple):
    """Where all is: addresses of shards, URLs of the stream and of what is published, the port that serves."""

    shards: list[str]
    stream: str
    store: str
    serving: int


class Looking:
    """A thread that notes when shards had learned what, and when what was published.

    Args:
        shards: addresses.
        url: where they publish.

    Attributes:
        published: by number of the publication when all shards had written it, seconds since the epoch.
        rows: rows by table, at the last look.
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

    def __enter__(self) -> "Looking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for channel in self._channels:
            channel.close()
        self._server.close()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            clocks = [wire.clock_of(control.status().clock) for control in self._controls]
            self._clocks.append((time.time(), {p: min(one.get(p, 0) for one in clocks) for p in clocks[0]}))
            head = self._origin.find(None)
            if head is not None:
                self.published[head.number] = head.published
                self.rows = dict(head.rows)

    def learned(self, place: tuple[int, int]) -> float | None:
        """When all shards were seen to have learned a message; None: they were not."""
        partition, offset = place
        at = bisect_left(self._clocks, True, key=lambda one: one[1].get(partition, 0) > offset)
        return self._clocks[at][0] if at < len(self._clocks) else None


def parts(probes: list[Probe], looking: Looking) -> dict[str, float]:
    """Mean milliseconds of what the time consists of, of the probes where all of it is known."""
    found = []
    for probe in probes:
        learned = looking.learned(probe.place) if probe.place else None
        published = looking.published.get(probe.publication)
        if learned is not None and published is not None:
            found.append((learned - probe.produced, published - learned, probe.seen - published))
    names = ("to_learned", "to_published", "to_predicted")
    means = np.mean(found, axis=0) * 1e3 if found else np.full(3, np.nan)
    return {name: round(float(mean), 1) for name, mean in zip(names, means, strict=True)}


def figures(probes: list[Probe], looking: Looking) -> dict[str, Any]:
    """Of the probes of one form."""
    seen = [probe for probe in probes if probe.seen]
    took = np.array([probe.seen - probe.produced for probe in seen]) * 1e3
    percentiles = np.percentile(took, [50, 90, 99, 100]) if seen else np.full(4, np.nan)
    return {
        "probes": len(probes),
        "lost": len(probes) - len(seen),
        "counted_wrongly": sum(probe.value != 1 for probe in seen),
        **{
            f"{name}_ms": round(float(one), 1)
            for name, one in zip(("p50", "p90", "p99", "max"), percentiles, strict=True)
        },
        "mean_parts_ms": parts(seen, looking),
    }


def start(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> Places:
    """Starts all but the load."""
    *ports, serving = cluster.free_ports(args.shards + 1)
    shards = [f"127.0.0.1:{port}" for port in ports]
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
        model=f"{HERE / 'probed.py'}:model",
    )
    for i in range(args.shards):
        processes.start(f"ps{i}", "ps", "--index", str(i))
    for i in range(args.workers):
        processes.start(f"worker{i}", "worker")
    processes.start("serve", "serve")
    return Places(shards, url, store.url, serving)


def produce(args: argparse.Namespace, processes: Processes, made: list[bytes]) -> None:
    """The load: the samples round and round, at a steady rate."""
    (processes.folder / "samples.jsonl").write_bytes(b"\n".join(made))
    command = ["produce", "samples.jsonl", "--rate", str(args.rate), "--repeat", "--create", str(args.partitions)]
    processes.start("produce", *command)


def measure(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> dict[str, Any]:
    """Starts all, probes, and gives the figures."""
    made = messages("w1")
    places = start(args, processes, stack)
    produce(args, processes, made)
    processes.until(lambda: status_of(places.serving, "/healthz/ready") == 200, "serving is not ready")
    samples = [json.loads(one) for one in made[:1000]]

    async def probing(count: int, prefix: str) -> list[Probe]:
        sender: Sender
        if args.stream == "kafka":
            sender = KafkaSender(places.stream.partition("://")[2], TOPIC)
        else:
            sender = RedisSender(places.stream, TOPIC)
        try:
            one = Probing(places.serving, sender, samples, args.partitions, args.pause)
            return await one.run(count, 2 * args.probe_rate, prefix, processes.check)
        finally:
            sender.close()

    with Looking(places.shards, places.store) as looking:
        asyncio.run(probing(max(2, round(2 * args.probe_rate * args.warmup)), "warm"))
        usage = Usage(processes)
        before = max(looking.published)
        began = time.monotonic()
        probes = asyncio.run(probing(2 * args.probes, "probe"))
        cores, seconds = usage.cores(), time.monotonic() - began
    return {
        **{name: getattr(args, name) for name in ("stream", "every", "rate", "shards", "workers", "dtype")},
        "asked_again": figures([probe for probe in probes if not probe.waits], looking),
        "x_min_offset": figures([probe for probe in probes if probe.waits], looking),
        "publications_per_s": round((max(looking.published) - before) / seconds, 2),
        "rows": sum(looking.rows.values()),
        "cores": cores,
        "memory_mb": processes.memory(),
    }


def table(done: dict[str, Any]) -> str:
    """The figures, for people."""
    lines = ["| form | probes | lost | p50 ms | p90 ms | p99 ms | max ms | to learned | to published | to predicted |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for form in ("asked_again", "x_min_offset"):
        one = done[form]
        names = ("probes", "lost", "p50_ms", "p90_ms", "p99_ms", "max_ms")
        cells = [form, *(one[name] for name in names), *one["mean_parts_ms"].values()]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", default="1s", help="from one publication to the next")
    parser.add_argument("--stream", choices=["kafka", "redis"], default="kafka")
    parser.add_argument("--rate", type=float, default=3_000, help="samples per second beside the probes")
    parser.add_argument("--probes", type=int, default=1_000, help="of each of the two forms")
    parser.add_argument("--probe-rate", type=float, default=20.0, help="probes per second of each form")
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds of probes that do not count")
    parser.add_argument("--pause", type=float, default=0.005, help="seconds between two requests of the first form")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batch-age", help="longest wait for a batch to fill; default: worker.batch_age's")
    parser.add_argument("--dtype", choices=["float32", "float16", "int8"], default="float32", help="as published")
    args = parser.parse_args()
    end_in_order()
    with ExitStack() as stack:
        processes = stack.enter_context(Processes())
        done = measure(args, processes, stack)
        processes.close()  # before the servers that they use
    print(table(done))
    print(json.dumps(done))
    forms = [done["asked_again"], done["x_min_offset"]]
    sys.exit(any(one["lost"] or one["counted_wrongly"] for one in forms))


if __name__ == "__main__":
    main()
