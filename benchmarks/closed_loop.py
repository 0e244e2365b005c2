"""How long does it take from an outcome that is posted to predictions that have learned it?

    python benchmarks/closed_loop.py --every 1s
    python benchmarks/closed_loop.py --every 100ms

Real processes, under load: a broker, parameter servers, a worker that learns W1 with a second output that counts, a
joiner, Valkey for publications, and one serving process that writes impressions; `streamtrain produce` writes other
samples at a steady rate. A probe is a prediction for an id never seen before, the outcome of that prediction, posted a
moment later, and one more prediction with x-min-offset. The time is that from sending the outcome to the response of
the last one, which has to say that the probe was learned exactly once. Prints a line of JSON; exits with 1 if one was
not.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from harness.client import Connection, is_ready
from harness.figures import percentiles
from harness.models import W1, location
from harness.processes import Processes, Usage, child_named, exit_on_sigterm, free_addresses, free_ports

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey

MODEL = "model"
PATH = f"/v1/models/{MODEL}"
PATIENCE = 60.0  # seconds after which a probe is lost


class Probed(NamedTuple):
    """A probe: seconds from sending its outcome until it was written and predicted, and how often it was learned."""

    written: float
    seen: float
    learned: float


async def probe(name: str, port: int, pause: float) -> Probed:
    """Predicts, says what happened after a pause, and predicts again."""
    connection = Connection(port)
    instances = json.dumps({"instances": [{"probe": name}]}).encode()
    shown = await connection.post(f"{PATH}:predict", instances, x_request_id=name)
    assert shown.status == 200, shown
    await asyncio.sleep(pause)
    began = time.monotonic()
    told = await connection.post(f"{PATH}/outcomes", json.dumps({"id": f"{name}-0", "kind": "click"}).encode())
    assert told.status == 200, told
    written = time.monotonic() - began
    (offset,) = json.loads(told.body)["offsets"]
    count = 0.0
    while time.monotonic() < began + PATIENCE:
        seen = await connection.post(f"{PATH}:predict", instances, x_min_offset=offset)
        if seen.status == 200:
            count = seen.predictions[0]["seen"][0]
            break
        assert seen.status == 412, seen
    connection.close()
    return Probed(written, time.monotonic() - began, count)


async def run(count: int, rate: float, prefix: str, port: int) -> list[Probed]:
    """Starts probes at a steady rate."""
    draw, began, tasks = random.Random(1), time.monotonic(), []
    for i in range(count):
        await asyncio.sleep(began + i / rate - time.monotonic())
        tasks.append(asyncio.create_task(probe(f"{prefix}{i}", port, draw.uniform(0.1, 1.0))))
    return await asyncio.gather(*tasks)


def start(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> int:
    """Starts everything; returns the port of the serving process."""
    shards, (serving,) = free_addresses(args.shards), free_ports(1)
    store = stack.enter_context(Valkey())
    processes.watch("valkey", store.pid)
    data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    broker = stack.enter_context(Broker(resolve(), data=data))
    processes.watch("kafka", child_named("kafka.Kafka"))
    processes.settings(
        {
            "stream": {"url": f"kafka://{broker.servers}", "topic": "samples", "create": 4},
            "ps": {"addresses": shards},
            "publish": {"url": store.url, "every": args.every, "model": MODEL},
            "serve": {"listen": f"127.0.0.1:{serving}", "log": "impressions"},
            "join": {"impressions": "impressions", "outcomes": "outcomes", "time": "ts", "wait": "1h"},
            "join.labels.label": {"kinds": ["click"]},
            "join.labels.seen": {"kinds": ["click"]},
        },
        model=location("probed"),
    )
    processes.start_shards(args.shards)
    for role in ("join", "worker", "serve"):
        processes.start(role, role)
    (processes.folder / "samples.jsonl").write_bytes(b"\n".join(W1.messages()))
    processes.start("produce", "produce", "samples.jsonl", "--rate", str(args.rate), "--repeat", "--create", "4")
    processes.wait_until(lambda: is_ready(serving), "serving was not ready")
    return serving


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", default="1s", help="interval of publications")
    parser.add_argument("--rate", type=float, default=3_000, help="samples per second in addition to the probes")
    parser.add_argument("--probes", type=int, default=500)
    parser.add_argument("--probe-rate", type=float, default=20.0, help="probes per second")
    parser.add_argument("--warmup", type=int, default=200, help="probes that do not count")
    parser.add_argument("--shards", type=int, default=2)
    args = parser.parse_args()
    exit_on_sigterm()
    with ExitStack() as stack:
        processes = stack.enter_context(Processes())
        port = start(args, processes, stack)
        asyncio.run(run(args.warmup, args.probe_rate, "warm", port))
        usage = Usage(processes)
        probes = asyncio.run(run(args.probes, args.probe_rate, "probe", port))
        processes.check()
        done: dict[str, Any] = {"every": args.every, "rate": args.rate, "probes": len(probes)}
        done |= {"counted_wrongly": sum(one.learned != 1 for one in probes), "cores": usage.cores()}
        done |= {"written_ms": percentiles([one.written for one in probes], 1e3, 1)}
        done |= {"predicted_ms": percentiles([one.seen for one in probes], 1e3, 1)}
        processes.close()  # before the servers that they use
    print(json.dumps(done))
    sys.exit(bool(done["counted_wrongly"]))


if __name__ == "__main__":
    main()
