"""Rolling restarts under a backlog: three workers, then three joiners, one after another, ten times: all is taken.

    python -m tests.chaos.rolling --messages 1000000 --restarts 10

Workers are those of tests.chaos.killing, which count. Joiners are `streamtrain join`, on as many impressions and
outcomes together. Each process is stopped in good order and replaced by a new one while the topic is full. Prints, as
JSON, how long a restart of all three took, and the longest time in which nothing of a partition was taken; the exit
code is 0 only if all was taken and counted once.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.errors import ShardUnavailable, SourceError
from streamtrain.stream.kafka.stream import KafkaStream
from tests.chaos import killing
from tests.chaos.looking import Looking
from tests.chaos.watch import Standstill
from tests.cluster.counted import differences
from tests.join.topics import BEGIN, Topics
from tests.patience import until

MEMBERS = 3
_SECONDS = 600.0
_LABELS = 'wait = "20s"\ngrace = "6s"\ncommit_every = "1s"\n[join.labels.click]\nkinds = ["click"]\n'


class Positions(Looking):
    """A thread that looks how far each partition is."""

    def __init__(self, positions: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        super().__init__("positions", 0.25)
        self._positions = positions
        self._standstill = Standstill()

    def look(self) -> None:
        """At where each is, and where it ends."""
        self._standstill.see(self._positions())

    def as_json(self) -> dict[str, Any]:
        seconds, place = self._standstill.worst()
        return {"longest_standstill_s": round(seconds, 1), "of": place}


def restarts(times: int, one: Callable[[], None]) -> dict[str, float]:
    """Replaces each member, so many times; seconds for all three."""
    took = []
    for _ in range(times):
        began = time.monotonic()
        for _ in range(MEMBERS):
            one()
        took.append(time.monotonic() - began)
        sys.stderr.write(f"restart of {MEMBERS}: {took[-1]:.1f} s\n")
    return {"median_s": round(statistics.median(took), 1), "worst_s": round(max(took), 1)}


def workers(messages: int, times: int, folder: Path) -> dict[str, Any]:
    """Three workers and two shards, which count."""
    samples = messages // killing.PARTITIONS
    chaos = killing.Chaos(killing.parse(["--samples", str(samples)]), folder)
    try:
        killing.fill(chaos.stream, samples, 1e9, threading.Event())
        chaos.join()
        shards = chaos.shards()

        def positions() -> dict[str, tuple[int, int]]:
            try:
                clocks = shards.clocks()
            except ShardUnavailable:
                return {}
            return {
                f"partition {p}": (min(clock.get(p, 0) for clock in clocks), samples) for p in range(killing.PARTITIONS)
            }

        assert isinstance(chaos.stream, KafkaStream)
        stream, group = chaos.stream, chaos.settings.stream.group

        def have_partitions() -> bool:
            chaos.check_alive()
            members = stream.group_members(group)
            return len(members) == MEMBERS and all(one.assignment.topic_partitions for one in members)

        def replace() -> None:
            chaos.leave()
            chaos.join()
            until(have_partitions, _SECONDS)

        until(have_partitions, _SECONDS)
        watch = Positions(positions)
        watch.start()
        began = time.monotonic()
        took = restarts(times, replace)
        learned = sum(at for at, _ in positions().values())
        chaos.wait_for_the_end(shards, _SECONDS)
        seconds = time.monotonic() - began
        watch.stop()
        if wrong := differences(shards, killing.PARTITIONS, samples):
            raise SystemExit(f"{len(wrong)} counts are wrong: {wrong[:10]}")
    finally:
        chaos.stop()
    return {
        "messages": messages,
        "learned_after_restarts": learned,
        "seconds": round(seconds, 1),
        "counts": "exact",
    } | {
        **took,
        **watch.as_json(),
    }


class Joiners:
    """Three joiners of some topics."""

    def __init__(self, topics: Topics, folder: Path) -> None:
        self._settings, self._folder = topics.settings(folder, _LABELS), folder
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._count = 0
        for _ in range(MEMBERS):
            self.start()

    def start(self) -> None:
        log = self._folder / f"joiner{self._count}.log"
        self._count += 1
        command = [sys.executable, "-m", "streamtrain", "join", "--config", str(self._settings)]
        with log.open("wb") as output:
            self._running.append((subprocess.Popen(command, stdout=output, stderr=output), log))

    def replace(self) -> None:
        """The one that has been there longest goes, in good order, and another comes."""
        leaving, log = self._running.pop(0)
        leaving.send_signal(signal.SIGTERM)
        if leaving.wait(_SECONDS) != 0:
            raise SystemExit(f"a joiner left with {leaving.returncode}:\n{log.read_text()[-3000:]}")
        self.start()
        until(self.are_all_there, _SECONDS)

    def are_all_there(self) -> bool:
        for running, log in self._running:
            if running.poll() is not None:
                raise SystemExit(f"a joiner ended by itself with {running.returncode}:\n{log.read_text()[-3000:]}")
        return all("are joined here" in log.read_text() for _, log in self._running)

    def stop(self) -> None:
        for running, _ in self._running:
            running.kill()
            running.wait()


def joiners(messages: int, times: int, folder: Path) -> dict[str, Any]:
    """Three joiners, of half as many impressions and outcomes each."""
    with Broker(resolve(), data=folder / "kafka", properties={"group.min.session.timeout.ms": "1000"}) as broker:
        topics = Topics(broker.servers, 2 * MEMBERS)
        count = messages // 2

        def write(first: int, last: int) -> None:
            shown = [{"id": f"i{n}", "time": BEGIN + n / 100} for n in range(first, last)]
            topics.write(topics.impressions, shown)
            clicks = [{"id": f"i{n}", "time": BEGIN + n / 100 + 1, "kind": "click"} for n in range(first, last)]
            topics.write(topics.outcomes, clicks)

        for first in range(0, count, 10_000):
            write(first, min(first + 10_000, count))
        topics.end(BEGIN + count / 100 + 60)
        ends = {topic.topic: topic.bounds() for topic in (topics.impressions, topics.outcomes)}

        def positions() -> dict[str, tuple[int, int]]:
            found = {}
            for topic in (topics.impressions, topics.outcomes):
                try:
                    committed = topic.committed(topics.group)
                except SourceError:
                    continue
                for p, bounds in ends[topic.topic].items():
                    found[f"partition {p} of {topic.topic}"] = (committed.get(p, 0), bounds.high)
            return found

        group = Joiners(topics, folder)
        try:
            until(group.are_all_there, _SECONDS)
            watch = Positions(positions)
            watch.start()
            began = time.monotonic()
            took = restarts(times, group.replace)
            read = sum(at for at, _ in positions().values())
            until(lambda: all(at >= end for at, end in positions().values()), _SECONDS)
            seconds = time.monotonic() - began
            watch.stop()
        finally:
            group.stop()
        joined = [json.loads(one.value) for one in topics.read(topics.samples.topic)]
        positives = {one["id"] for one in joined if one["click"] == 1}
        mine = [one["id"] for one in joined if one["id"].startswith("i")]
        if len(mine) != count or len(positives) != count:
            raise SystemExit(f"{len(mine)} samples of {len(positives)} positives, instead of {count} of each")
    figures = {"messages": messages, "read_after_restarts": read, "seconds": round(seconds, 1), "samples": "exact"}
    return figures | took | watch.as_json()


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.rolling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="that wait when restarts begin")
    parser.add_argument("--restarts", type=int, default=10, help="of all three members")
    parser.add_argument("--of", nargs="+", choices=["workers", "joiners"], default=["workers", "joiners"])
    return parser.parse_args(given)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One run; raises SystemExit if anything is not exact."""
    kinds: dict[str, Callable[[int, int, Path], dict[str, Any]]] = {"workers": workers, "joiners": joiners}
    found = {}
    for kind in args.of:
        with tempfile.TemporaryDirectory(prefix="streamtrain-rolling-") as folder:
            found[kind] = kinds[kind](args.messages, args.restarts, Path(folder))
    return found


if __name__ == "__main__":
    print(json.dumps(run(parse()), indent=1))
