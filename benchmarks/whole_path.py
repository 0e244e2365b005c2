"""Are predictions over HTTP as good as those of the trainer itself? The whole path, on MovieLens. make bench-path.

    python benchmarks/whole_path.py --stream movielens-100k.jsonl.gz
    python benchmarks/whole_path.py --stream movielens-100k.jsonl.gz --order events --speed 150000 --seconds 130

Real processes: Kafka, two parameter servers, one worker, Valkey (or --redis-server) for publications every second, and
one serving process. Every rating is predicted over HTTP just before it is produced, those that are due together in one
request, as by a site that shows a prediction and then learns from the outcome. The worker's own AUC is of the same
ratings, taken from its metrics: a worker that is started after the first ratings has seen no others.

A replay is faster than real time, and publishing is not: at a speed of 600, a publication per second is one every ten
minutes of event time. There are two orders:

* "users": each user rates at their own pace, but all of them come at once, as on a site with more visitors. So there is
  load at a speed of 1, too, at which a second of a user is a second of publishing.
* "events": the original order. It takes minutes only at speeds beyond 100,000, when a second of publishing is a day.

Pauses (of a user, or of all) are cut to a minute of event time, or two seconds of the replay if that is longer, and the
replay ends after --seconds. The ratings of the first users are produced at once, without predictions. Prints a table
and a line of JSON; exits with 1 if the AUC of serving differs from the worker's by more than 0.01 at the first speed.
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from harness.client import Connection, get_status, is_ready, scrape
from harness.figures import table_header, table_row
from harness.models import EXAMPLES, metrics_of, samples_of
from harness.processes import Processes, Usage, exit_on_sigterm, free_addresses, free_ports
from numpy.typing import NDArray

import streamtrain as st
from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from streamtrain.stream.kafka.stream import KafkaStream

NAME = "movielens"
MODEL = f"{EXAMPLES / 'movielens.py'}:model"
PATH = f"/v1/models/{NAME}:predict"
FIELDS = ("user", "item", "genres", "year", "zip")
MOST = 512  # ratings of one request
TICK = 0.01  # seconds between two checks for what is due
SLOWEST = 120.0  # seconds that the worker may lag
TOLERANCE = 0.01  # of AUC


class Timeline(NamedTuple):
    """Ratings in the order in which they are replayed.

    Attributes:
        before: those that are produced at once.
        samples: the others.
        due: float64 [n], when each is due, seconds of event time after the first.
    """

    before: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    due: NDArray[np.float64]


def shortened(samples: list[dict[str, Any]], pause: float) -> NDArray[np.float64]:
    """When ratings are due, seconds after the first, with pauses cut."""
    times = np.array([one["ts"] for one in samples], np.float64)
    return np.cumsum(np.minimum(np.diff(times, prepend=times[:1]), pause))


def as_they_were(ratings: list[dict[str, Any]], before: int, pause: float, until: float) -> Timeline:
    """The order "events"."""
    due = shortened(ratings[before:], pause)
    return Timeline(ratings[:before], ratings[before:][: int((due < until).sum())], due[due < until])


def side_by_side(ratings: list[dict[str, Any]], before: int, pause: float, until: float) -> Timeline:
    """The order "users": they start one after another."""
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
    """The site: requests predictions and produces ratings.

    Args:
        servers: addresses of Kafka.
        topic: that it creates.
        serving: port of the serving process.

    Attributes:
        predictions: of ratings, in order.
        behind: seconds of event time by which the model lagged behind the ratings, for each request.
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
        """Closes the connection to Kafka."""
        self._writer.close()

    def produce(self, samples: list[dict[str, Any]], at: NDArray[np.float64]) -> None:
        """Writes ratings with these event times, seconds since the epoch."""
        for one, when in zip(samples, at, strict=True):
            self._writer.write(json.dumps(one | {"ts": float(when)}).encode(), partition=0)
        self._produced += len(samples)

    async def learned(self, check: Callable[[], object]) -> None:
        """Waits until serving has learned everything that was produced."""
        while self._writer.flush(10.0):
            continue
        connection, deadline = Connection(self._serving), time.monotonic() + SLOWEST
        body = json.dumps({"instances": []}).encode()
        while True:
            response = await connection.post(PATH, body, x_min_offset=f"0:{self._produced - 1}")
            if response.status == 200:
                break
            if response.status not in (412, 503) or time.monotonic() > deadline:
                raise SystemExit(f"ratings were not learned: {response.status} {response.body.decode()}")
            await asyncio.sleep(0.2)
            check()
        connection.close()

    async def replay(self, timeline: Timeline, speed: float, check: Callable[[], object]) -> float:
        """Predicts every rating and then produces it; the seconds it took."""
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
            response = await connection.post(PATH, _body(asked))
            if response.status != 200:
                raise SystemExit(f"a prediction failed with {response.status}: {response.body.decode()}")
            self.predictions += [one[0] for one in response.predictions]
            self.publications.add(response.publication)
            trained = datetime.fromisoformat(response.headers["x-trained-through"]).timestamp()
            self.behind.append(max(0.0, at[0] - trained))
            self.produce(asked, at)
            done = end
        connection.close()
        return time.monotonic() - began


def _body(samples: list[dict[str, Any]]) -> bytes:
    """A request without what is not known yet."""
    return json.dumps({"instances": [{name: one[name] for name in FIELDS} for one in samples]}).encode()


def window(port: int) -> dict[str, float]:
    """The figures of a worker's window, by the names of their metrics."""
    prefix = "streamtrain_worker_window_"
    found = {one.name: one.samples[0].value for one in scrape(port) if one.samples}
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def start(args: argparse.Namespace, processes: Processes, servers: str, store: str, topic: str) -> tuple[int, int]:
    """Starts everything but the worker; the ports of serving and of the worker's metrics."""
    addresses, (serving, metrics) = free_addresses(2), free_ports(2)
    processes.settings(
        {
            "stream": {"url": f"kafka://{servers}", "topic": topic},
            "worker": {
                **{"batch_size": args.batch, "batch_age": "20ms", "metrics": f"127.0.0.1:{metrics}"},
                "window": 8 * args.most,  # so that it holds all
            },
            "ps": {"addresses": addresses},
            "publish": {"url": store, "every": args.every, "model": NAME},
            "serve": {"listen": f"127.0.0.1:{serving}"},
        },
        model=MODEL,
    )
    processes.start_shards(len(addresses))
    processes.start("serve", "serve")
    return serving, metrics


def measure(args: argparse.Namespace, servers: str, ratings: list[dict[str, Any]], speed: float) -> dict[str, Any]:
    """A replay at a speed, with new processes."""
    timeline = ORDERS[args.order](ratings, args.before, max(60.0, 2 * speed), args.seconds * speed)
    topic, asked = f"ratings-{uuid.uuid4().hex}", len(timeline.samples)
    with Valkey(binary=args.redis_server) as store, Processes() as processes:
        serving, metrics = start(args, processes, servers, store.url, topic)
        site = Site(servers, topic, serving)
        site.produce(timeline.before, np.full(len(timeline.before), time.time()))
        processes.start("first worker", "worker")
        processes.wait_until(lambda: is_ready(serving), "serving was not ready")
        asyncio.run(site.learned(processes.check))
        processes.stop("first worker")
        processes.start("worker", "worker")
        processes.wait_until(lambda: get_status(metrics, "/metrics") == 200, "the worker had no metrics")
        usage = Usage(processes)
        took = asyncio.run(site.replay(timeline, speed, processes.check))
        cores = usage.cores()
        asyncio.run(site.learned(processes.check))
        # Its figures may lack the last batch until the next one comes.
        least = asked - args.batch
        processes.wait_until(
            lambda: window(metrics).get("samples", 0) >= least, f"the worker did not learn {asked} ratings"
        )
        worker = window(metrics)
        site.close()
        processes.close()  # before the server that they use
    predictions = np.array(site.predictions, np.float32)[:, None]
    labels = np.array([[one["label"]] for one in timeline.samples], np.float32)
    mine = metrics_of(st.load_model(MODEL), predictions, labels)
    return {
        **{"order": args.order, "speed": speed, "every": args.every, "batch": args.batch, "seconds": round(took, 1)},
        **{"ratings": asked, "ratings_per_s": round(asked / took, 1), "publications": len(site.publications)},
        "behind_s": round(float(np.median(site.behind)), 1),
        "auc": {"serving": round(mine.auc, 4), "worker": round(worker["auc_ratio"], 4)},
        "log_loss": {"serving": round(mine.log_loss, 4), "worker": round(worker["log_loss_nats"], 4)},
        "cores": cores,
    }


def as_row(done: dict[str, Any]) -> str:
    """The figures of a replay."""
    auc = done["auc"]
    cells = [done["order"], f"{done['speed']:g}", f"{done['ratings']:,}", f"{done['ratings_per_s']:,.0f}"]
    cells += [done["publications"], f"{done['behind_s']:,.1f}"]
    cells += [f"{auc['serving']:.4f}", f"{auc['worker']:.4f}", f"{auc['serving'] - auc['worker']:+.4f}"]
    return table_row(cells)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stream", required=True, help="JSON lines; see example_models.py")
    parser.add_argument("--order", choices=ORDERS, default="users")
    parser.add_argument("--speed", type=float, nargs="+", default=[1.0], help="seconds of event time in a second")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the replay, at each speed")
    parser.add_argument("--before", type=int, default=20_000, help="ratings that are not predicted, at least")
    parser.add_argument("--every", default="1s", help="interval of publications")
    parser.add_argument("--batch", type=int, default=4, help="batch size of the worker")
    parser.add_argument("--redis-server", help="path of a Redis server; default: Valkey")
    args = parser.parse_args()
    exit_on_sigterm()
    ratings = [json.loads(one) for one in samples_of(args.stream)]
    args.most = len(ratings)
    results = []
    figures = ("ratings", "ratings/s", "publications", "lag, event s", "AUC, serving", "worker", "difference")
    print(table_header(("order", "speed", *figures)))
    with Broker(resolve()) as broker:
        for speed in args.speed:
            results.append(measure(args, broker.servers, ratings, speed))
            print(as_row(results[-1]), flush=True)
    print(json.dumps(results))
    first = results[0]["auc"]
    sys.exit(abs(first["serving"] - first["worker"]) > TOLERANCE)


if __name__ == "__main__":
    main()
