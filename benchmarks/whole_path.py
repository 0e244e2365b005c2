"""The whole path on MovieLens: are predictions over HTTP as good as those of the trainer itself?

    python benchmarks/whole_path.py --stream movielens-100k.jsonl.gz
    python benchmarks/whole_path.py --stream movielens-100k.jsonl.gz --order events --speed 150000 --seconds 130

Real processes by the command line: Kafka, two parameter servers, one worker, Valkey (or --redis-server) for what is
published every second, one serving process. Every rating is asked for over HTTP just before it is produced, those that
are due together in one request, as on a site that shows a prediction and then learns what came of it. The worker's own
AUC is of the same ratings, as its metrics tell: a worker that is started after the first ones has seen no others.

A replay is faster than what it replays, and publishing is not: at a speed of 600, a publication a second is one every
ten minutes of event time. Two orders:

* "users": each user rates in their own rhythm, but they come together, as on a site with more visitors. So a speed of
  1 has a load, too: what happens to a user within a second of theirs is a second of publishing.
* "events": as it was. All of it takes minutes at speeds beyond 100,000 only, when a second of publishing is a day.

Pauses (of a user, or of all) are cut to a minute of event time, or two seconds of the replay if that is longer, and it
ends after --seconds. The ratings of those who came first are produced at once, and not asked for. Prints a table and a
line of JSON; ends with 1 if at the first speed serving is more than 0.01 of AUC from the worker.
"""

import argparse
import asyncio
import json
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

import cluster
import numpy as np
from asking import Connection, status_of
from numpy.typing import NDArray
from processes import Processes, Usage, end_in_order
from prometheus_client.parser import text_string_to_metric_families
from quality import EXAMPLES, read

import streamtrain as st
from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from streamtrain.stream.kafka import KafkaStream

NAME = "movielens"
PATH = f"/v1/models/{NAME}:predict"
FIELDS = ("user", "item", "genres", "year", "zip")
MOST = 512  # ratings of one request
TICK = 0.01  # seconds between two looks for what is due
SLOWEST = 120.0  # seconds that the worker may be behind
WITHIN = 0.01  # of AUC


class Timeline(NamedTuple):
    """Ratings in the order in which they are replayed.

    Attributes:
        before: those that are produced at once.
        samples: the others.
        due: float64 [n], when each is due, seconds of event time from the first on.
    """

    before: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    due: NDArray[np.float64]


def shortened(samples: list[dict[str, Any]], pause: float) -> NDArray[np.float64]:
    """When ratings are due, seconds from the first on."""
    times = np.array([one["ts"] for one in samples], np.float64)
    return np.cumsum(np.minimum(np.diff(times, prepend=times[:1]), pause))


def as_they_were(ratings: list[dict[str, Any]], before: int, pause: float, until: float) -> Timeline:
    """In their order."""
    due = shortened(ratings[before:], pause)
    return Timeline(ratings[:before], ratings[before:][: int((due < until).sum())], due[due < until])


def side_by_side(ratings: list[dict[str, Any]], before: int, pause: float, until: float) -> Timeline:
    """User by user, one coming after another."""
    by_user: dict[str, list[dict[str, Any]]] = {}
    for one in ratings:
        by_user.setdefault(one["user"], []).append(one)
    earlier: list[dict[str, Any]] = []
    while len(earlier) < before:
        earlier += by_user.pop(next(iter(by_user)))
    samples = [one for of_user in by_user.values() for one in of_user]
    come = np.arange(len(by_user)) * (until / len(by_user))
    due = np.concatenate([at + shortened(one, pause) for at, one in zip(come, by_user.values(), strict=True)])
    order = [int(i) for i in np.argsort(due, kind="stable") if due[i] < until]
    return Timeline(sorted(earlier, key=lambda one: one["ts"]), [samples[i] for i in order], due[order])


ORDERS = {"users": side_by_side, "events": as_they_were}


class Site:
    """What shows predictions and produces ratings.

    Args:
        servers: of Kafka.
        topic: that it makes.
        serving: port.

    Attributes:
        predictions: of ratings, in order.
        behind: by request seconds of event time that its ratings were after the last one that the model had learned.
        publications: numbers of those that predicted.
    """

    def __init__(self, servers: str, topic: str, serving: int) -> None:
        stream = KafkaStream(servers, topic, {})
        stream.create(1)
        self._writer = stream.writer()
        self._serving = serving
        self._produced = 0
        self.predictions: list[float] = []
        self.behind: list[float] = []
        self.publications: set[int] = set()

    def close(self) -> None:
        """Ends it."""
        self._writer.close()

    def produce(self, samples: list[dict[str, Any]], at: NDArray[np.float64]) -> None:
        """Writes ratings with these event times, seconds since the epoch."""
        for one, when in zip(samples, at, strict=True):
            self._writer.write(json.dumps(one | {"ts": float(when)}).encode(), partition=0)
        self._produced += len(samples)

    async def learned(self, check: Callable[[], object]) -> None:
        """Waits until serving has learned all that was produced."""
        while self._writer.flush(10.0):
            continue
        connection, deadline = Connection(self._serving), time.monotonic() + SLOWEST
        body = json.dumps({"instances": []}).encode()
        while True:
            answer = await connection.post(PATH, body, x_min_offset=f"0:{self._produced - 1}")
            if answer.status == 200:
                break
            if answer.status not in (412, 503) or time.monotonic() > deadline:
                raise SystemExit(f"not learned: {answer.status} {answer.body.decode()}")
            await asyncio.sleep(0.2)
            check()
        connection.close()

    async def replay(self, timeline: Timeline, speed: float, check: Callable[[], object]) -> float:
        """Asks for every rating and then produces it; gives the seconds that it took."""
        connection, done = Connection(self._serving), 0
        began, epoch = time.monotonic(), time.time()
        while done < len(timeline.samples):
            now = (time.monotonic() - began) * speed
            end = min(int(np.searchsorted(timeline.due, now, "right")), done + MOST)
            if end == done:
                await asyncio.sleep(TICK)
                check()
                continue
            asked, at = timeline.samples[done:end], timeline.due[done:end] + epoch
            answer = await connection.post(PATH, _body(asked))
            if answer.status != 200:
                raise SystemExit(f"a prediction is refused with {answer.status}: {answer.body.decode()}")
            self.predictions += [one[0] for one in answer.predictions]
            self.publications.add(answer.publication)
            trained = datetime.fromisoformat(answer.headers["x-trained-through"]).timestamp()
            self.behind.append(max(0.0, at[0] - trained))
            self.produce(asked, at)
            done = end
        connection.close()
        return time.monotonic() - began


def _body(samples: list[dict[str, Any]]) -> bytes:
    """Without what is not known yet."""
    return json.dumps({"instances": [{name: one[name] for name in FIELDS} for one in samples]}).encode()


def told(port: int) -> dict[str, float]:
    """The figures of a worker's window, by the names of its metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    prefix = "streamtrain_worker_window_"
    return {
        one.name.removeprefix(prefix): one.samples[0].value
        for one in families
        if one.name.startswith(prefix) and one.samples
    }


def start(args: argparse.Namespace, processes: Processes, servers: str, store: str, topic: str) -> tuple[int, int]:
    """Starts all but the worker; gives the ports of serving and of the worker's metrics."""
    *ports, serving, metrics = cluster.free_ports(4)
    processes.settings(
        {
            "stream": {"url": f"kafka://{servers}", "topic": topic},
            "worker": {
                **{"batch_size": args.batch, "batch_age": "20ms", "metrics": f"127.0.0.1:{metrics}"},
                "window": 8 * args.most,  # so that it holds all
            },
            "ps": {"addresses": [f"127.0.0.1:{port}" for port in ports]},
            "publish": {"url": store, "every": args.every, "model": NAME},
            "serve": {"listen": f"127.0.0.1:{serving}"},
        },
        model=f"{EXAMPLES / 'movielens.py'}:model",
    )
    for i in range(len(ports)):
        processes.start(f"ps{i}", "ps", "--index", str(i))
    processes.start("serve", "serve")
    return serving, metrics


def measure(args: argparse.Namespace, servers: str, ratings: list[dict[str, Any]], speed: float) -> dict[str, Any]:
    """Everything from new, at a speed."""
    timeline = ORDERS[args.order](ratings, args.before, max(60.0, 2 * speed), args.seconds * speed)
    topic, asked = f"ratings-{uuid.uuid4().hex}", len(timeline.samples)
    with Valkey(binary=args.redis_server) as store, Processes() as processes:
        serving, metrics = start(args, processes, servers, store.url, topic)
        site = Site(servers, topic, serving)
        site.produce(timeline.before, np.full(len(timeline.before), time.time()))
        processes.start("first worker", "worker")
        processes.until(lambda: status_of(serving, "/healthz/ready") == 200, "serving is not ready")
        asyncio.run(site.learned(processes.check))
        processes.stop("first worker")
        processes.start("worker", "worker")
        processes.until(lambda: status_of(metrics, "/metrics") == 200, "the worker has no metrics")
        usage = Usage(processes)
        took = asyncio.run(site.replay(timeline, speed, processes.check))
        cores = usage.cores()
        asyncio.run(site.learned(processes.check))
        # Its figures may lack the last batch until the next one comes.
        least = asked - args.batch
        processes.until(lambda: told(metrics).get("samples", 0) >= least, f"the worker has not learned {asked} ratings")
        worker = told(metrics)
        site.close()
        processes.close()  # before the server that they use
    mine = metrics_of(site.predictions, timeline.samples)
    return {
        **{"order": args.order, "speed": speed, "every": args.every, "batch": args.batch, "seconds": round(took, 1)},
        **{"ratings": asked, "ratings_per_s": round(asked / took, 1), "publications": len(site.publications)},
        "behind_s": round(float(np.median(site.behind)), 1),
        "auc": {"serving": round(mine.auc, 4), "worker": round(worker["auc_ratio"], 4)},
        "log_loss": {"serving": round(mine.log_loss, 4), "worker": round(worker["log_loss_nats"], 4)},
        "cores": cores,
    }


def metrics_of(predictions: list[float], samples: list[dict[str, Any]]) -> st.Metrics:
    """How good predictions were."""
    validation = st.ProgressiveValidation([st.Label("label", kind="binary")])
    labels = np.array([[one["label"]] for one in samples], np.float32)
    validation.update(np.array(predictions, np.float32)[:, None], labels, np.ones(len(labels), np.float32))
    return validation.total()["label"]


def row(done: dict[str, Any]) -> str:
    """Its figures, for people."""
    auc = done["auc"]
    cells = [done["order"], f"{done['speed']:g}", f"{done['ratings']:,}", f"{done['ratings_per_s']:,.0f}"]
    cells += [done["publications"], f"{done['behind_s']:,.1f}"]
    cells += [f"{auc['serving']:.4f}", f"{auc['worker']:.4f}", f"{auc['serving'] - auc['worker']:+.4f}"]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stream", required=True, help="JSON lines; see benchmarks/quality.py")
    parser.add_argument("--order", choices=ORDERS, default="users")
    parser.add_argument("--speed", type=float, nargs="+", default=[1.0], help="seconds of event time in a second")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the replay, at each speed")
    parser.add_argument("--before", type=int, default=20_000, help="ratings that are not asked for, at least")
    parser.add_argument("--every", default="1s", help="from one publication to the next")
    parser.add_argument("--batch", type=int, default=4, help="of the worker")
    parser.add_argument("--redis-server", help="path of another server than the package's")
    args = parser.parse_args()
    end_in_order()
    ratings = [json.loads(one) for one in read(args.stream)]
    args.most = len(ratings)
    results = []
    print(
        "| order | speed | ratings | ratings/s | publications | behind, event s | AUC, serving | worker | difference |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with Broker(resolve()) as broker:
        for speed in args.speed:
            results.append(measure(args, broker.servers, ratings, speed))
            print(row(results[-1]), flush=True)
    print(json.dumps(results))
    first = results[0]["auc"]
    sys.exit(abs(first["serving"] - first["worker"]) > WITHIN)


if __name__ == "__main__":
    main()
