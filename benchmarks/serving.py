"""How fast predictions are served, beside an empty FastAPI endpoint that parses the same body and answers a constant.

    python benchmarks/serving.py --workload w1 --rows 200000

Both servers are one process each, run by uvicorn with the same options, and are asked in turns by the same client (a
process of its own, raw sockets, keep-alive); the table gives the median of the rounds and the ratio to the empty one,
a line of JSON all rounds. Also prints how long the graph alone takes with and without XLA (--graph).
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from typing import Any

import numpy as np
from processes import pss_mb
from workloads import WORKLOADS, columns, model

FLOOR, OURS = "empty endpoint", "streamtrain"


def bodies(workload: str, instances: int, count: int = 64) -> list[bytes]:
    """Different bodies of so many instances each."""
    ids = WORKLOADS[workload]
    made = []
    for batch in ids.data(instances, count):
        named = {name: values.tolist() for name, values in columns(batch).items() if name != "label"}
        rows = [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]
        made.append(json.dumps({"instances": rows}).encode())
    return made


def floor(ready: Any) -> None:
    """The empty endpoint."""
    from fastapi import FastAPI, Request

    from streamtrain.serve.app import configure

    app = FastAPI()

    @app.post("/v1/models/{name}:predict")
    async def predict(name: str, request: Request) -> dict[str, Any]:
        body = json.loads(await request.body())
        return {"predictions": [[0.5]] * len(body["instances"])}

    _serve(configure(app, "127.0.0.1:0"), ready)


def ours(ready: Any, workload: str, rows: int) -> None:
    """The real one, with so many rows per table, and dense weights as they are at first."""
    import gc

    import tensorflow as tf
    from lookup import Made

    from streamtrain.serve.app import configure, make_app
    from streamtrain.serve.registry import HEAD, Registry

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    one = model(WORKLOADS[workload])
    registry = Registry(one, Made(one, rows))
    registry.promote(HEAD)
    gc.collect()
    gc.freeze()
    _serve(configure(make_app(registry), "127.0.0.1:0"), ready)


def _serve(config: Any, ready: Any) -> None:
    import uvicorn

    class Telling(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            ready.send(self.servers[0].sockets[0].getsockname()[1])

    Telling(config).run()


async def ask(port: int, requests: list[bytes], concurrency: int, seconds: float) -> list[float]:
    """Seconds that each answer took, by so many connections that each ask one after another."""
    took: list[float] = []
    until = time.perf_counter() + seconds

    async def one(first: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        at = first
        while (began := time.perf_counter()) < until:
            writer.write(requests[at % len(requests)])
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head + await reader.read(1000)
            size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(size)
            took.append(time.perf_counter() - began)
            at += 1
        writer.close()

    await asyncio.gather(*(one(i) for i in range(concurrency)))
    return took


def request_of(body: bytes) -> bytes:
    """A whole request."""
    head = f"POST /v1/models/model:predict HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


def compare(
    ports: dict[str, int], workload: str, instances: int, concurrency: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Asks both in turns, and prints a line for each."""
    requests = [request_of(body) for body in bodies(workload, instances)]
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ports}
    for turn in range(args.rounds + 1):
        for name, port in ports.items():
            took = asyncio.run(ask(port, requests, concurrency, args.seconds if turn else 1.0))
            if turn:  # the first one warms
                p50, p99 = np.percentile(took, [50, 99]) * 1e3
                rounds[name].append((len(took) / args.seconds, float(p50), float(p99)))
    pairs = list(zip(rounds[OURS], rounds[FLOOR], strict=True))
    ratios = {OURS: ([a[0] / b[0] for a, b in pairs], [a[2] / b[2] for a, b in pairs]), FLOOR: ([1.0], [1.0])}
    for name, of_name in rounds.items():
        rate, p50, p99 = (statistics.median(one) for one in zip(*of_name, strict=True))
        rates, slower = (statistics.median(one) for one in ratios[name])
        cells = [workload, instances, concurrency, name, f"{rate:,.0f}", f"{p50:.2f}", f"{p99:.2f}"]
        print(f"| {' | '.join(map(str, cells))} | {rates:.2f} | {slower:.2f} |", flush=True)
    return {
        "requests_per_s": [round(one[0]) for one in rounds[OURS]],
        "floor_requests_per_s": [round(one[0]) for one in rounds[FLOOR]],
        "p99_ms": [round(one[2], 3) for one in rounds[OURS]],
        "ratio": [round(one, 3) for one in ratios[OURS][0]],
        "p99_ratio": [round(one, 3) for one in ratios[OURS][1]],
    }


def graphs(workload: str) -> None:
    """How long a prediction's graph takes: called as it is, and compiled by XLA."""
    import tensorflow as tf

    from streamtrain.serve.graph import Graph
    from streamtrain.store.origin import Weights

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    made = model(WORKLOADS[workload])
    graph = Graph(made)
    dense = made.dense.flatten([weight.numpy() for weight in made.keras.trainable_variables])
    tensors = graph.tensors(Weights(dense, np.empty(0, np.float32)))
    compiled = tf.function(graph.function, jit_compile=True)
    for size in (1, 512):
        matrix = tf.random.normal([size, graph.columns])
        calls = {"plain": lambda m=matrix: graph.call(tensors, m), "xla": lambda m=matrix: compiled(tensors, m)}
        took = {}
        for name, call in calls.items():
            took[name] = min(_time(call) for _ in range(20))
        print(f"graph {workload}, {size} instances: " + ", ".join(f"{n} {s * 1e6:.0f} us" for n, s in took.items()))


def _time(call: Any, repeats: int = 50) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call().numpy()
    return (time.perf_counter() - began) / repeats


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--rows", type=int, default=200_000, help="of the table")
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 512], help="per request")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16], help="connections")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds within which servers are up")
    parser.add_argument("--graph", action="store_true", help="time the graph alone instead")
    args = parser.parse_args()
    if args.graph:
        graphs(args.workload)
        return
    context = multiprocessing.get_context("spawn")
    processes, ports = [], {}
    for name, target, given in ((FLOOR, floor, ()), (OURS, ours, (args.workload, args.rows))):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=target, args=(theirs, *given), daemon=True))
        processes[-1].start()
        if not mine.poll(args.patience):
            sys.exit(f"{name} does not start")
        ports[name] = mine.recv()
    print("| workload | instances | connections | server | requests/s | p50 ms | p99 ms | rate | p99 |")
    print("|---|---|---|---|---|---|---|---|---|")
    done = {
        f"{instances} by {concurrency}": compare(ports, args.workload, instances, concurrency, args)
        for instances in args.instances
        for concurrency in args.concurrency
    }
    mb = {name: pss_mb(process.pid or 0) for name, process in zip(ports, processes, strict=True)}
    for process in processes:
        process.terminate()
        process.join()
    print(json.dumps({"workload": args.workload, "rows": args.rows, "memory_mb": mb[OURS], "by_load": done}))


if __name__ == "__main__":
    main()
