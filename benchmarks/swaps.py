"""Swaps of versions while clients ask as fast as they can: make bench-swaps.

    python benchmarks/swaps.py

One serving process, Valkey, and a model whose dense bias and rows both tell the publication they are of, so that an
answer that mixes two is known for one. The head moves on all the time. For some seconds nothing else happens; then
versions are promoted and rolled back over HTTP, at random, resident ones and ones that have to be loaded. Every answer
is checked. Then, without load, versions of many rows that are in Redis only are promoted, and rolled back from.
Prints tables of how long answers (medians of rounds) and swaps took, and a line of JSON; ends with 1 if an answer
failed or was mixed.
"""

import argparse
import asyncio
import http.client
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import cluster
import numpy as np
from asking import Connection, status_of
from head import Head, Moving
from processes import HERE, Processes, Usage, end_in_order
from versioned import USERS, prediction_of

from streamtrain.console import load_tensorflow
from streamtrain.embedded.valkey import Valkey

TOKEN = "token"
PATH = "/v1/models/model"
VERSIONS = (1, 2, 3, 4)
TELL_SECONDS = 0.25


async def load(port: int, connections: int, sizes: list[int]) -> None:
    """Asks as fast as it can until it is killed; prints what came, as lines of JSON."""
    told: dict[str, list[Any]] = {"answers": [], "wrong": []}

    async def one(client: int) -> None:
        connection, size = Connection(port), sizes[client % len(sizes)]
        body = json.dumps({"instances": [{"user": USERS[(client + i) % len(USERS)]} for i in range(size)]}).encode()
        while True:
            began = time.time()
            try:
                answer = await connection.post(f"{PATH}:predict", body)
            except (OSError, asyncio.IncompleteReadError) as exc:
                told["wrong"].append(["failed", repr(exc)])
                connection = Connection(port)
                continue
            told["answers"].append([began, time.time() - began, size])
            if answer.status != 200:
                told["wrong"].append(["failed", answer.body.decode(errors="replace")])
            elif answer.predictions != [[prediction_of(answer.publication)]] * size:
                told["wrong"].append(["mixed", answer.body.decode(errors="replace")])

    async def tell() -> None:
        while True:
            await asyncio.sleep(TELL_SECONDS)
            print(json.dumps(told), flush=True)
            for values in told.values():
                values.clear()

    await asyncio.gather(tell(), *(one(client) for client in range(connections)))


class Admin:
    """Who swaps.

    Args:
        port: of the serving process.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.connect()
            began = time.perf_counter()
            data = None if body is None else json.dumps(body)
            connection.request(method, PATH + path, data, {"authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text), time.perf_counter() - began
        finally:
            connection.close()

    def swap(self, version: int | str | None) -> tuple[str, float]:
        """Promotes a version, or rolls back (None); what kind of swap it was, and its seconds.

        "nothing": there was nothing to roll back to.
        """
        if version is None:
            status, said, seconds = self._ask("POST", ":rollback")
            kind = "rollback" if status == 200 else "nothing"
        else:
            loaded = [one["version"] for one in self._ask("GET", "")[1]["model_version_status"]]
            kind = "promote, resident" if str({"head": 0}.get(str(version), version)) in loaded else "promote, loaded"
            status, said, seconds = self._ask("POST", ":promote", {"version": version})
        if status not in (200, 409):
            raise SystemExit(f"a swap was refused with {status}: {said}")
        return kind, seconds


def times(took: list[float]) -> dict[str, float]:
    """Count, and milliseconds."""
    values = [round(float(one) * 1e3, 2) for one in np.percentile(took, [50, 99, 100])] if took else [0.0] * 3
    return {"count": len(took), **dict(zip(("p50_ms", "p99_ms", "max_ms"), values, strict=True))}


def under_load(args: argparse.Namespace, processes: Processes, port: int, head: Head) -> dict[str, Any]:
    """Answers before and during the swaps, and the swaps."""
    rng, admin = random.Random(0), Admin(port)
    swaps: dict[str, list[float]] = {}
    rounds: list[tuple[float, float, float]] = []
    sizes = [str(size) for size in args.sizes]
    command = ["--role", "load", "--port", str(port), "--connections", str(args.connections), "--sizes", *sizes]
    processes.script("load", "swaps.py", *command)
    told = processes.readings["load"]
    with Moving(head, args.every):
        processes.until(lambda: any(one["answers"] for one in told), "no answers come")
        processes.sleep(args.warmup)
        memory = {"before": processes.memory()["serve"]}
        usage = Usage(processes)
        for _ in range(args.rounds):
            began = time.time()
            processes.sleep(args.seconds)
            middle = time.time()
            for _ in range(args.swaps // args.rounds):
                processes.sleep(args.gap)
                kind, seconds = admin.swap(rng.choice([*VERSIONS, "head", None, None]))
                swaps.setdefault(kind, []).append(seconds)
            rounds.append((began, middle, time.time()))
        cores = usage.cores()
    memory["during"] = processes.memory()["serve"]
    processes.sleep(4 * TELL_SECONDS)
    processes.stop("load")
    answers = [one for line in told for one in line["answers"]]
    wrong = [one for line in told for one in line["wrong"]]
    phases = {"before": [one[:2] for one in rounds], "during": [one[1:] for one in rounds]}
    of_rounds = {name: [_answers(answers, *span, args.sizes) for span in spans] for name, spans in phases.items()}
    p99 = [[one["all"]["p99_ms"] for one in of_rounds[name]] for name in phases]
    return {
        "answers": {name: _medians(one) for name, one in of_rounds.items()},
        "p99_ms_by_round": dict(zip(phases, p99, strict=True)),
        "ratio_p99": round(statistics.median(during / before for before, during in zip(*p99, strict=True)), 2),
        "failed": sum(kind == "failed" for kind, _ in wrong),
        "mixed": sum(kind == "mixed" for kind, _ in wrong),
        "wrong": wrong[:3],
        "checked": len(answers),
        "swaps": {kind: times(took) for kind, took in sorted(swaps.items())},
        "swap_seconds": round(sum(end - middle for _, middle, end in rounds), 1),
        "publications": head.number,
        "cores": cores,
        "serve_mb": memory,
    }


def _answers(answers: list[Any], first: float, last: float, sizes: list[int]) -> dict[str, Any]:
    """By size of the request, and of all; those that were asked within a time."""
    within = [(took, size) for began, took, size in answers if first <= began < last]
    found: dict[str, Any] = {"all": times([took for took, _ in within])}
    found |= {str(size): times([took for took, its in within if its == size]) for size in sorted(set(sizes))}
    return {name: one | {"per_s": round(one["count"] / (last - first))} for name, one in found.items()}


def _medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        size: {name: round(statistics.median(one[size][name] for one in rounds), 2) for name in figures}
        for size, figures in rounds[0].items()
    }


def large(args: argparse.Namespace, processes: Processes, url: str, port: int) -> dict[str, Any]:
    """Versions of many rows that are in Redis only, without load."""
    began, head = time.perf_counter(), Head(url, "large", args.large)
    head.publish()
    full = time.perf_counter() - began
    making = []
    for _ in range(args.large_versions):
        head.publish()
        began = time.perf_counter()
        head.keep()
        making.append(time.perf_counter() - began)
    head.close()
    began = time.perf_counter()
    serve(processes, "large", port)
    started = time.perf_counter() - began
    admin = Admin(port)
    loaded: list[float] = []
    back: list[float] = []
    again: list[float] = []
    for version in range(1, args.large_versions + 1):
        # Loaded, back to what was served before, and there again.
        for into, target in ((loaded, version), (back, None), (again, version)):
            into.append(admin.swap(target)[1])
    return {
        "rows": args.large,
        "full_publication_s": round(full, 2),
        "make_version_s": round(statistics.median(making), 2),
        "start_serving_s": round(started, 2),
        "promote_from_redis_s": round(statistics.median(loaded), 2),
        "rollback_resident_ms": round(1e3 * max(back), 2),
        "promote_resident_ms": round(1e3 * max(again), 2),
        "serve_mb": processes.memory()["large"],
    }


def serve(processes: Processes, name: str, port: int) -> None:
    """Starts a serving process of a model in Redis, and waits until it serves."""
    processes.start(name, "serve", "--listen", f"127.0.0.1:{port}", "--set", f"publish.model={name}")
    processes.until(lambda: status_of(port, "/healthz/ready") == 200, f"{name} is not ready")


def measure(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> dict[str, Any]:
    """All of it."""
    load_tensorflow(1)
    store = stack.enter_context(Valkey())
    processes.watch("valkey", store.pid)
    ports = cluster.free_ports(2)
    groups: dict[str, dict[str, Any]] = {"publish": {"url": store.url, "every": args.every}}
    processes.settings(groups | {"serve": {"admin_token": TOKEN}}, model=f"{HERE / 'versioned.py'}:model")
    head = Head(store.url, "serve", args.rows)
    stack.callback(head.close)
    for version in VERSIONS:
        head.publish()
        assert head.keep() == version
    serve(processes, "serve", ports[0])
    done = under_load(args, processes, ports[0], head)
    processes.stop("serve")
    return {
        **{name: getattr(args, name) for name in ("rows", "connections", "sizes", "every", "gap")},
        **done,
        "large": large(args, processes, store.url, ports[1]) if args.large else None,
    }


def tables(done: dict[str, Any]) -> str:
    """The figures, for people."""
    lines = ["| answers | instances | per s | p50 ms | p99 ms | max ms |", "|---|---|---|---|---|---|"]
    for phase, by_size in done["answers"].items():
        for size, one in by_size.items():
            lines.append(
                f"| {phase} | {size} | {one['per_s']:,.0f} | {one['p50_ms']} | {one['p99_ms']} | {one['max_ms']} |"
            )
    lines += ["", "| swaps | count | p50 ms | p99 ms | max ms |", "|---|---|---|---|---|"]
    for kind, one in done["swaps"].items():
        lines.append(f"| {kind} | {one['count']} | {one['p50_ms']} | {one['p99_ms']} | {one['max_ms']} |")
    lines += ["", f"{done['checked']:,} answers: {done['failed']} failed, {done['mixed']} mixed"]
    lines.append(f"p99 during / before: {done['ratio_p99']}")
    if done["large"]:
        lines.append("without load: " + ", ".join(f"{name} {value:,}" for name, value in done["large"].items()))
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4, help="of asking without swaps, then with a part of them")
    parser.add_argument("--gap", type=float, default=0.1, help="seconds between two swaps")
    parser.add_argument("--rows", type=int, default=100_000, help="of each version that is swapped under load")
    parser.add_argument("--connections", type=int, default=16, help="that each ask one after another")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 1, 1, 40], help="instances, of connections in turns"
    )
    parser.add_argument("--every", type=float, default=0.5, help="seconds between publications of the head")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=10.0, help="of asking before the swaps, in each round")
    parser.add_argument("--large", type=int, default=1_000_000, help="rows of versions promoted without load; 0: none")
    parser.add_argument("--large-versions", type=int, default=3)
    parser.add_argument("--role", choices=["load"], help="of a process that asks")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    if args.role:
        asyncio.run(load(args.port, args.connections, args.sizes))
        return
    end_in_order()
    with ExitStack() as stack:
        processes = stack.enter_context(Processes())
        done = measure(args, processes, stack)
        processes.close()  # before the server that they use
    print(tables(done))
    print(json.dumps(done))
    sys.exit(bool(done["failed"] or done["mixed"]))


if __name__ == "__main__":
    main()
