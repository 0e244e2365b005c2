"""Do swaps of versions disturb clients that request predictions as fast as they can? make bench-swaps.

    python benchmarks/swaps.py

One serving process, Valkey, and a model whose dense bias and rows both tell the publication they are of, so that a
prediction that mixes two is detected. The head advances all the time. Every round first measures some seconds without
swaps; then versions are promoted and rolled back over HTTP, at random, loaded ones and ones that have to be loaded.
Every response is checked. Then, without load, versions of many rows that are in Redis only are promoted and rolled
back.

Prints tables of how long responses (medians of the rounds) and swaps took, and a line of JSON; exits with 1 if a
request failed or a prediction was mixed.
"""

import argparse
import asyncio
import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from harness.client import Connection, is_ready
from harness.figures import median_ratio, percentiles, table
from harness.models import KEYS, USERS, WIDTH, location, versioned, versioned_prediction, versioned_weights
from harness.processes import Processes, Usage, exit_on_sigterm, free_ports

from streamtrain._core import hash_integers
from streamtrain.embedded.valkey import Valkey
from streamtrain.model.spec import Spec
from streamtrain.service.start_tensorflow import load_tensorflow
from streamtrain.store.publication import Publication, RowChange
from streamtrain.store.redis.dictionary import RedisDictionaries
from streamtrain.store.redis.layout import TableSize
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.versions import RedisVersions

TOKEN = "token"
PATH = "/v1/models/model"
VERSIONS = (1, 2, 3, 4)
REPORT_SECONDS = 0.25
PART = 1 << 15


class Head:
    """The head of `versioned` in Redis. All that publication n predicts tells n.

    Args:
        url: of the server.
        name: of the model in Redis.
        rows: of its table, in addition to those that are requested.
    """

    def __init__(self, url: str, name: str, rows: int) -> None:
        self._server = RedisServer(url, timeout=60)
        place = RedisModel(self._server, name)
        self._dictionaries, self._versions = RedisDictionaries(place), RedisVersions(place)
        self._rows, self._name = rows, name
        self.number = 0

    def publish(self) -> None:
        """Makes the next publication; the first is a full one."""
        self.number += 1
        layout, changes = None, iter([self._requested()])
        if self.number == 1:
            sizes = {"user": TableSize(WIDTH, 2 * (self._rows + len(KEYS)))}
            layout, changes = self._dictionaries.begin(sizes, shards=1), self._all()
        rows = {"user": self._rows + len(KEYS)}
        weights = versioned_weights(self.number)
        part = self._dictionaries.write(self.number, 0, changes, weights, rows=rows, layout=layout)
        about: dict[str, Any] = {"clock": {0: self.number}, "watermark": time.time(), "published": time.time()}
        about |= {"dtype": "float32", "rows": rows, "spec": Spec.of(versioned).to_json()}
        self._dictionaries.commit(Publication(self.number, None, self._name, "run", **about), [part], layout)
        self._dictionaries.apply(0)

    def _requested(self) -> RowChange:
        return RowChange("user", KEYS, np.full((len(KEYS), WIDTH), self.number, np.float32), KEYS[:0])

    def _all(self) -> Iterator[RowChange]:
        yield self._requested()
        for start in range(0, self._rows, PART):
            keys = hash_integers(np.arange(start, min(start + PART, self._rows), dtype=np.int64))
            yield RowChange("user", keys, np.random.default_rng(start).random((len(keys), WIDTH), np.float32), keys[:0])

    def make_version(self) -> int:
        """Makes a version of the head, and returns its number."""
        version = self._versions.make("benchmark").version
        assert version
        return version

    def close(self) -> None:
        """Closes the connection."""
        self._server.close()


class Advancing:
    """A thread that publishes every `every` seconds."""

    def __init__(self, head: Head, every: float) -> None:
        self._head, self._every = head, every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: Exception | None = None

    def __enter__(self) -> "Advancing":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._every):
                self._head.publish()
        except Exception as exc:  # raised by __exit__
            self._error = exc


async def load(port: int, connections: int, sizes: list[int]) -> None:
    """Requests predictions as fast as it can until it is killed; prints responses as lines of JSON."""
    found: dict[str, list[Any]] = {"answers": [], "wrong": []}

    async def client(i: int) -> None:
        connection, size = Connection(port), sizes[i % len(sizes)]
        body = json.dumps({"instances": [{"user": USERS[(i + j) % len(USERS)]} for j in range(size)]}).encode()
        while True:
            began = time.time()
            try:
                response = await connection.post(f"{PATH}:predict", body)
            except (OSError, asyncio.IncompleteReadError) as exc:
                found["wrong"].append(["failed", repr(exc)])
                connection = Connection(port)
                continue
            found["answers"].append([began, time.time() - began, size])
            if response.status != 200:
                found["wrong"].append(["failed", response.body.decode(errors="replace")])
            elif response.predictions != [[versioned_prediction(response.publication)]] * size:
                found["wrong"].append(["mixed", response.body.decode(errors="replace")])

    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            print(json.dumps(found), flush=True)
            for values in found.values():
                values.clear()

    await asyncio.gather(report(), *(client(i) for i in range(connections)))


class Admin:
    """Promotes and rolls back over HTTP."""

    def __init__(self, port: int) -> None:
        self._port = port

    def _request(self, method: str, path: str, body: Any = None) -> tuple[int, Any, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.connect()
            began = time.perf_counter()
            data = None if body is None else json.dumps(body)
            connection.request(method, PATH + path, data, {"authorization": f"Bearer {TOKEN}"})
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text), time.perf_counter() - began
        finally:
            connection.close()

    def swap(self, version: int | str | None) -> tuple[str, float]:
        """Promotes a version, or rolls back (None); the kind of the swap and its seconds.

        The kind is "nothing" if there was nothing to roll back to.
        """
        if version is None:
            status, said, seconds = self._request("POST", ":rollback")
            kind = "rollback" if status == 200 else "nothing"
        else:
            loaded = [one["version"] for one in self._request("GET", "")[1]["model_version_status"]]
            kind = "promote, resident" if str({"head": 0}.get(str(version), version)) in loaded else "promote, loaded"
            status, said, seconds = self._request("POST", ":promote", {"version": version})
        if status not in (200, 409):
            raise SystemExit(f"a swap failed with {status}: {said}")
        return kind, seconds


def times(took: Sequence[float]) -> dict[str, float]:
    """Count, and milliseconds."""
    return {"count": len(took), **{f"{name}_ms": one for name, one in percentiles(took, 1e3).items()}}


def under_load(args: argparse.Namespace, processes: Processes, port: int, head: Head) -> dict[str, Any]:
    """Responses before and during the swaps, and the swaps."""
    rng, admin = random.Random(0), Admin(port)
    swaps: dict[str, list[float]] = {}
    rounds: list[tuple[float, float, float]] = []
    options = ("--role", "load", "--port", port, "--connections", args.connections, "--sizes", *args.sizes)
    processes.script("load", "swaps", *options)
    printed = processes.readings["load"]
    with Advancing(head, args.every):
        processes.wait_until(lambda: any(one["answers"] for one in printed), "no predictions came")
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
    processes.sleep(4 * REPORT_SECONDS)
    processes.stop("load")
    answers = [one for line in printed for one in line["answers"]]
    wrong = [one for line in printed for one in line["wrong"]]
    phases = {"before": [one[:2] for one in rounds], "during": [one[1:] for one in rounds]}
    of_rounds = {name: [_answers(answers, *span, args.sizes) for span in spans] for name, spans in phases.items()}
    p99 = {name: [one["all"]["p99_ms"] for one in of_rounds[name]] for name in phases}
    return {
        "answers": {name: _medians(one) for name, one in of_rounds.items()},
        "p99_ms_by_round": p99,
        "ratio_p99": round(median_ratio(p99["during"], p99["before"]), 2),
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
    """Of requests that were sent between two moments: all of them, and by number of instances."""
    within = [(took, size) for began, took, size in answers if first <= began < last]
    found: dict[str, Any] = {"all": times([took for took, _ in within])}
    found |= {str(size): times([took for took, its in within if its == size]) for size in sorted(set(sizes))}
    return {name: one | {"per_s": round(one["count"] / (last - first))} for name, one in found.items()}


def _medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        size: {name: round(statistics.median(one[size][name] for one in rounds), 2) for name in figures}
        for size, figures in rounds[0].items()
    }


def without_load(args: argparse.Namespace, processes: Processes, url: str, port: int) -> dict[str, Any]:
    """Versions of many rows that are only in Redis."""
    began, head = time.perf_counter(), Head(url, "large", args.large)
    head.publish()
    full = time.perf_counter() - began
    making = []
    for _ in range(args.large_versions):
        head.publish()
        began = time.perf_counter()
        head.make_version()
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
        # Promoted, rolled back to what was served before, and promoted again.
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
    """Starts a serving process of a model in Redis, and waits until it is ready."""
    processes.start(name, "serve", "--listen", f"127.0.0.1:{port}", "--set", f"publish.model={name}")
    processes.wait_until(lambda: is_ready(port), f"{name} was not ready")


def measure(args: argparse.Namespace, processes: Processes, stack: ExitStack) -> dict[str, Any]:
    """Everything."""
    load_tensorflow(1)
    store = stack.enter_context(Valkey())
    processes.watch("valkey", store.pid)
    ports = free_ports(2)
    groups: dict[str, dict[str, Any]] = {"publish": {"url": store.url, "every": args.every}}
    processes.settings(groups | {"serve": {"admin_token": TOKEN}}, model=location("versioned"))
    head = Head(store.url, "serve", args.rows)
    stack.callback(head.close)
    for version in VERSIONS:
        head.publish()
        assert head.make_version() == version
    serve(processes, "serve", ports[0])
    done = under_load(args, processes, ports[0], head)
    processes.stop("serve")
    return {
        **{name: getattr(args, name) for name in ("rows", "connections", "sizes", "every", "gap")},
        **done,
        "large": without_load(args, processes, store.url, ports[1]) if args.large else None,
    }


def tables(done: dict[str, Any]) -> str:
    """The figures as Markdown."""
    names = ("p50_ms", "p99_ms", "max_ms")
    answers = [
        (phase, size, f"{one['per_s']:,.0f}", *(one[name] for name in names))
        for phase, by_size in done["answers"].items()
        for size, one in by_size.items()
    ]
    swaps = [(kind, one["count"], *(one[name] for name in names)) for kind, one in done["swaps"].items()]
    lines = [table(("responses", "instances", "per s", "p50 ms", "p99 ms", "max ms"), answers), ""]
    lines += [table(("swaps", "count", "p50 ms", "p99 ms", "max ms"), swaps), ""]
    lines.append(f"{done['checked']:,} responses: {done['failed']} failed, {done['mixed']} mixed")
    lines.append(f"p99 during / before: {done['ratio_p99']}")
    if done["large"]:
        lines.append("without load: " + ", ".join(f"{name} {value:,}" for name, value in done["large"].items()))
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4, help="that the swaps are divided among")
    parser.add_argument("--gap", type=float, default=0.1, help="seconds between two swaps")
    parser.add_argument("--rows", type=int, default=100_000, help="of each version that is swapped under load")
    parser.add_argument("--connections", type=int, default=16, help="each with one request in flight")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 1, 1, 40], help="instances per request, of connections in turns"
    )
    parser.add_argument("--every", type=float, default=0.5, help="seconds between publications of the head")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=10.0, help="without swaps, in each round")
    parser.add_argument("--large", type=int, default=1_000_000, help="rows of versions swapped without load; 0: none")
    parser.add_argument("--large-versions", type=int, default=3)
    parser.add_argument("--role", choices=["load"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        asyncio.run(load(args.port, args.connections, args.sizes))
        return
    exit_on_sigterm()
    with ExitStack() as stack:
        processes = stack.enter_context(Processes())
        done = measure(args, processes, stack)
        processes.close()  # before the server that they use
    print(tables(done))
    print(json.dumps(done))
    sys.exit(bool(done["failed"] or done["mixed"]))


if __name__ == "__main__":
    main()
