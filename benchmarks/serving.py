"""How fast are predictions served over HTTP, compared with an empty FastAPI endpoint that parses the same body?

    python benchmarks/serving.py --workload w1 --rows 200000
    python benchmarks/serving.py --workload w1 --log

Both servers are one process each, run by uvicorn with the same options; the empty one responds with a constant. Both
are requested over gRPC, too, with the same instances as tensors. They are requested in turns by the same client
(a process of its own, raw sockets, keep-alive; over gRPC that of Python). With --graph it prints how long the graph
alone takes instead, with and without XLA. With --log, one more server writes every prediction to a broker on the same
machine (`serve.log`).

Prints a table with the medians of the rounds and their ratio to the empty endpoint, and a line of JSON with all rounds.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import uvicorn
from harness.client import Connection, post_request
from harness.figures import median_ratio, table_header, table_row
from harness.models import WORKLOADS, GeneratedRows, columns, first_weights
from harness.processes import pss_mb

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.service.start_tensorflow import load_tensorflow
from streamtrain.settings.load import load_settings

FLOOR, OURS, LOGGED = "empty endpoint", "streamtrain", "streamtrain, serve.log"
FLOOR_GRPC, GRPC = "empty method, gRPC", "streamtrain, gRPC"
PATH = "/v1/models/model:predict"
SERVICE = "tensorflow.serving.PredictionService"


def bodies(workload: str, instances: int, count: int = 64) -> list[bytes]:
    """Different bodies of requests."""
    made = []
    for batch in WORKLOADS[workload].data(instances, count):
        named = {name: values.tolist() for name, values in columns(batch).items() if name != "label"}
        rows = [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]
        made.append(json.dumps({"instances": rows}).encode())
    return made


def messages(workload: str, instances: int, count: int = 64) -> list[bytes]:
    """The same as PredictRequests, with ids as text."""
    import streamtrain.serve.grpc.tensorflow_serving_pb2 as pb

    made = []
    for batch in WORKLOADS[workload].data(instances, count):
        request = pb.PredictRequest(model_spec=pb.ModelSpec(name="model"))
        for name, values in columns(batch).items():
            if name == "label":
                continue
            tensor = request.inputs[name]
            tensor.tensor_shape.dim.add(size=len(values))
            if np.issubdtype(values.dtype, np.floating):
                tensor.dtype, tensor.tensor_content = pb.DT_FLOAT, values.astype("<f4").tobytes()
            else:
                tensor.dtype = pb.DT_STRING
                tensor.string_val.extend(str(one).encode() for one in values.tolist())
        made.append(request.SerializeToString())
    return made


def floor(ready: Any) -> None:
    """Runs the empty endpoint."""
    from fastapi import FastAPI, Request

    from streamtrain.processes.server import configure

    app = FastAPI()

    @app.post("/v1/models/{name}:predict")
    async def predict(name: str, request: Request) -> dict[str, Any]:
        body = json.loads(await request.body())
        return {"predictions": [[0.5]] * len(body["instances"])}

    class Reporting(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            self.grpc = grpc.aio.server()
            self.grpc.add_generic_rpc_handlers((_empty_service(),))
            port = self.grpc.add_insecure_port("127.0.0.1:0")
            await self.grpc.start()
            ready.send({FLOOR: self.servers[0].sockets[0].getsockname()[1], FLOOR_GRPC: port})

    Reporting(configure(app, "127.0.0.1:0")).run()


def _empty_service() -> grpc.GenericRpcHandler:
    import streamtrain.serve.grpc.tensorflow_serving_pb2 as pb

    async def predict(data: bytes, context: object) -> bytes:
        (dim,) = next(iter(pb.PredictRequest.FromString(data).inputs.values())).tensor_shape.dim
        answer = pb.TensorProto(dtype=pb.DT_FLOAT, float_val=[0.5] * dim.size)
        return bytes(pb.PredictResponse(outputs={"label": answer}).SerializeToString())

    return grpc.method_handlers_generic_handler(SERVICE, {"Predict": grpc.unary_unary_rpc_method_handler(predict)})


def ours(ready: Any, workload: str, rows: int, log: str | None = None) -> None:
    """Runs the real one, with `rows` rows and the initial dense weights; `log` is the topic of impressions."""
    from streamtrain.processes.server import PredictionServer, configure
    from streamtrain.serve.feedback.feedback import make_feedback
    from streamtrain.serve.http.app import make_app
    from streamtrain.serve.registry import HEAD, Registry
    from streamtrain.serve.service.service import ServingConfig

    load_tensorflow(1)
    model = WORKLOADS[workload].model()
    registry = Registry(model, GeneratedRows(model, rows))
    registry.promote(HEAD)
    settings = load_settings(
        None, {}, {"serve.log": log, "stream.url": log.rpartition("/")[0], "stream.create": 4} if log else {}
    )
    feedback = make_feedback(settings) if log else None
    gc.collect()
    gc.freeze()

    class Reporting(PredictionServer):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            port = self.servers[0].sockets[0].getsockname()[1]
            ready.send({LOGGED: port} if log else {OURS: port, GRPC: self.grpc_port})

    app = make_app(registry, config=ServingConfig(grpc_listen="127.0.0.1:0"), feedback=feedback)
    Reporting(configure(app, "127.0.0.1:0")).run()


async def load(port: int, requests: list[bytes], connections: int, seconds: float) -> list[float]:
    """Seconds that each response took; every connection has one request in flight."""
    took: list[float] = []
    until = time.perf_counter() + seconds

    async def client(first: int) -> None:
        connection, at = Connection(port), first
        while (began := time.perf_counter()) < until:
            response = await connection.send(requests[at % len(requests)])
            assert response.status == 200, response
            took.append(time.perf_counter() - began)
            at += 1
        connection.close()

    await asyncio.gather(*(client(i) for i in range(connections)))
    return took


async def load_grpc(port: int, requests: list[bytes], connections: int, seconds: float) -> list[float]:
    """As `load`, over gRPC."""
    took: list[float] = []
    until = time.perf_counter() + seconds

    async def client(first: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call, at = channel.unary_unary(f"/{SERVICE}/Predict"), first
            while (began := time.perf_counter()) < until:
                await call(requests[at % len(requests)])
                took.append(time.perf_counter() - began)
                at += 1

    await asyncio.gather(*(client(i) for i in range(connections)))
    return took


def compare(ports: dict[str, int], instances: int, connections: int, args: argparse.Namespace) -> dict[str, Any]:
    """Requests both in turns, and prints a row for each."""
    requests = [post_request(PATH, body) for body in bodies(args.workload, instances)]
    calls = messages(args.workload, instances)
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ports}
    for turn in range(args.rounds + 1):
        for name, port in ports.items():
            seconds = args.seconds if turn else 1.0
            if name in (GRPC, FLOOR_GRPC):
                took = asyncio.run(load_grpc(port, calls, connections, seconds))
            else:
                took = asyncio.run(load(port, requests, connections, seconds))
            if turn:  # the first one warms up
                p50, p99 = np.percentile(took, [50, 99]) * 1e3
                rounds[name].append((len(took) / args.seconds, float(p50), float(p99)))
    floor_rates, _, floor_p99 = (list(one) for one in zip(*rounds[FLOOR], strict=True))
    for name, runs in rounds.items():
        rates, p50s, p99s = (list(one) for one in zip(*runs, strict=True))
        medians = (
            f"{statistics.median(rates):,.0f}",
            f"{statistics.median(p50s):.2f}",
            f"{statistics.median(p99s):.2f}",
        )
        ratios = (f"{median_ratio(rates, floor_rates):.2f}", f"{median_ratio(p99s, floor_p99):.2f}")
        print(table_row((args.workload, instances, connections, name, *medians, *ratios)), flush=True)
    rates, _, p99s = (list(one) for one in zip(*rounds[OURS], strict=True))
    return {
        "requests_per_s": [round(one) for one in rates],
        "floor_requests_per_s": [round(one) for one in floor_rates],
        "p99_ms": [round(one, 3) for one in p99s],
        "ratio": [round(a / b, 3) for a, b in zip(rates, floor_rates, strict=True)],
        "p99_ratio": [round(a / b, 3) for a, b in zip(p99s, floor_p99, strict=True)],
        **({} if LOGGED not in rounds else _against(rounds[LOGGED], rounds[OURS])),
        "grpc_to_http": [round(a[0] / b[0], 3) for a, b in zip(rounds[GRPC], rounds[OURS], strict=True)],
        "floor_grpc_to_http": [round(a[0] / b[0], 3) for a, b in zip(rounds[FLOOR_GRPC], rounds[FLOOR], strict=True)],
    }


def _against(logged: list[tuple[float, float, float]], plain: list[tuple[float, float, float]]) -> dict[str, Any]:
    return {
        "log_ratio": [round(a[0] / b[0], 3) for a, b in zip(logged, plain, strict=True)],
        "log_p99_ratio": [round(a[2] / b[2], 3) for a, b in zip(logged, plain, strict=True)],
    }


def graphs(workload: str) -> None:
    """Prints how long a prediction's graph takes: called as it is, and compiled by XLA."""
    load_tensorflow(1)
    import tensorflow as tf

    from streamtrain.serve.graph import Graph

    model = WORKLOADS[workload].model()
    graph = Graph(model)
    tensors = graph.tensors(first_weights(model))
    compiled = tf.function(graph.function, jit_compile=True)
    for size in (1, 512):
        matrix = tf.random.normal([size, graph.columns])
        calls = {"plain": lambda m=matrix: graph.call(tensors, m), "xla": lambda m=matrix: compiled(tensors, m)}
        took = {name: min(_mean_seconds(call) for _ in range(20)) for name, call in calls.items()}
        print(f"graph {workload}, {size} instances: " + ", ".join(f"{n} {s * 1e6:.0f} µs" for n, s in took.items()))


def _mean_seconds(call: Any, repeats: int = 50) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call().numpy()
    return (time.perf_counter() - began) / repeats


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--rows", type=int, default=200_000, help="of the table")
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 512], help="of a request")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16], help="connections")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds within which servers must start")
    parser.add_argument("--log", action="store_true", help="also with a log of impressions in Kafka")
    parser.add_argument("--graph", action="store_true", help="time the graph alone instead")
    args = parser.parse_args()
    if args.graph:
        graphs(args.workload)
        return
    with ExitStack() as stack:
        run(args, stack)


def run(args: argparse.Namespace, stack: ExitStack) -> None:
    """Starts the servers, and compares them."""
    context = multiprocessing.get_context("spawn")
    servers: list[tuple[str, Any, tuple[Any, ...]]] = [(FLOOR, floor, ()), (OURS, ours, (args.workload, args.rows))]
    if args.log:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(Broker(resolve(), data=data))
        servers.append((LOGGED, ours, (args.workload, args.rows, f"kafka://{broker.servers}/impressions")))
    processes: dict[str, Any] = {}
    ports: dict[str, int] = {}
    for name, target, given in servers:
        mine, theirs = context.Pipe()
        processes[name] = context.Process(target=target, args=(theirs, *given), daemon=True)
        processes[name].start()
        if not mine.poll(args.patience):
            sys.exit(f"{name}: not started within {args.patience:g} s")
        ports |= mine.recv()
    names = ("server", "requests/s", "p50 ms", "p99 ms", "rate / empty", "p99 / empty")
    print(table_header(("workload", "instances", "connections", *names)))
    done = {
        f"{instances} by {concurrency}": compare(ports, instances, concurrency, args)
        for instances in args.instances
        for concurrency in args.concurrency
    }
    mb = {name: pss_mb(process.pid or 0) for name, process in processes.items()}
    for process in processes.values():
        process.terminate()
        process.join()
    print(json.dumps({"workload": args.workload, "rows": args.rows, "memory_mb": mb[OURS], "by_load": done}))


if __name__ == "__main__":
    main()
