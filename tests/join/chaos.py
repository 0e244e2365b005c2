"""Chaos for the join: `streamtrain join` on a real Kafka while everything goes wrong.

    python -m tests.join.chaos --faults 40 --seed 7

Impressions and outcomes are written all the time, and one fault comes after another: joiners are killed, stopped for
longer than their session, joined by others and left by them; brokers are killed or hang; a log or a partition has no
messages for a while. In the end what is written has to be what the plain join of the finished logs gives, and every
message has to be counted once. Prints a table of the faults and of how soon the joiners went on.
"""

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from zlib import crc32

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.errors import SourceError
from streamtrain.join.engine import JoinLabel, Rules
from tests.join import oracle
from tests.join.topics import BEGIN, Topics, events, joiner
from tests.patience import PATIENCE, until

RULES = Rules(
    (
        JoinLabel("click", frozenset({"click"}), 20.0),
        JoinLabel("spent", frozenset({"buy"}), 40.0, value=True, attribution="sum", cancelled_by=frozenset({"refund"})),
    ),
    grace=6.0,
)
LABELS = """
wait = "20s"
grace = "6s"
idle = "1h"
memory_bytes = 500
[join.labels.click]
kinds = ["click"]
[join.labels.spent]
kinds = ["buy"]
wait = "40s"
value = true
attribution = "sum"
cancelled_by = ["refund"]
"""
_IDS = 60  # of a step
_SESSION = 2.0  # seconds, as Topics.settings has it
_PAUSE = threading.Event()


def position(topics: Topics) -> int:
    """Of the joiners, summed over all partitions."""
    committed = (stream.committed(topics.group) for stream in (topics.impressions, topics.outcomes))
    return sum(offset for of_topic in committed for offset in of_topic.values())


def total(topics: Topics) -> int:
    """Offsets after the last messages, summed over all partitions."""
    return sum(of.high for stream in (topics.impressions, topics.outcomes) for of in stream.bounds().values())


def check(topics: Topics) -> dict[str, int]:
    """Compares what is written with the plain join of the finished logs, and counts every message once."""
    samples, late, orphaned = Counter[str](), 0, 0
    read = [0, 0]
    for impressions, outcomes in topics.logs():
        wanted = oracle.join(RULES, impressions, outcomes)
        samples += wanted.samples
        late += wanted.late.total()
        orphaned += wanted.orphaned.total()
        read = [read[0] + len(impressions), read[1] + len(outcomes)]
    assert topics.joined() == samples
    assert len(topics.read(topics.outcomes.topic + ".late")) == late > 0
    assert len(topics.read(topics.outcomes.topic + ".orphaned")) == orphaned > 0
    return {
        "impressions": read[0],
        "samples": samples.total(),
        "outcomes": read[1],
        "late": late,
        "orphaned": orphaned,
    }


class Writing:
    """What is written for joiners, in steps.

    Args:
        topics: of the join.
        draw: what is chosen at random.
    """

    def __init__(self, topics: Topics, draw: random.Random) -> None:
        self._topics, self._draw = topics, draw
        self._step = 0
        self._withheld: list[dict[str, object]] = []

    def step(self) -> None:
        """The next impressions and outcomes; now and then those of a log come later, or a partition has none."""
        impressions, outcomes = events(self._draw, range(self._step * _IDS, (self._step + 1) * _IDS))
        self._step += 1
        only = self._draw.choice([None] * 4 + [*range(self._topics.partitions)])
        if only is not None:
            impressions, outcomes = (
                [one for one in log if self._partition(one) == only] for log in (impressions, outcomes)
            )
        before, self._withheld = self._withheld, []
        if self._draw.random() < 0.2:
            outcomes, self._withheld = [], outcomes
        self._topics.write(self._topics.impressions, impressions, self._partition)
        self._topics.write(self._topics.outcomes, before + outcomes, self._partition)

    def finish(self) -> None:
        """What was kept back, and then what brings all partitions to the end."""
        self._topics.write(self._topics.outcomes, self._withheld, self._partition)
        self._topics.end(BEGIN + self._step * _IDS + 10_000)

    def _partition(self, message: dict[str, object]) -> int:
        return crc32(str(message["id"]).encode()) % self._topics.partitions


class Chaos:
    """Joiners, what is written for them, and what happens to them.

    Args:
        topics: of the join.
        settings: file.
        draw: what is chosen at random.
        stack: ends the joiners.
        broker: that may be killed; None: brokers are left alone.
    """

    def __init__(
        self, topics: Topics, settings: Path, draw: random.Random, stack: ExitStack, broker: Broker | None = None
    ) -> None:
        self._topics, self._settings, self._draw, self._stack, self._broker = topics, settings, draw, stack, broker
        self._first = self._start("--instance", "a")
        self._second: subprocess.Popen[bytes] | None = None
        self._writing = Writing(topics, draw)
        self.recovered: dict[str, list[float]] = defaultdict(list)

    @property
    def faults(self) -> dict[str, Callable[[], None]]:
        """By name. They end before they return, but for what others have to get well from."""
        found = {
            "kill joiner": self._kill,
            "stop joiner": self._stop,
            "second joiner": self._join,
            "kill second joiner": self._kill_second,
            "joiner leaves": self._leave,
            "zombie": self._zombie,
        }
        return found | ({"kill Kafka": self._kill_broker, "Kafka hangs": self._stop_broker} if self._broker else {})

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(joiner(self._settings, *options))

    def _members(self, count: int) -> None:
        self._until(lambda: self._topics.impressions.members(self._topics.group) == count)

    def _kill(self) -> None:
        self._first.kill()
        self._first.wait()
        self._first = self._start("--instance", "a")

    def _stop(self) -> None:
        self._first.send_signal(signal.SIGSTOP)
        _PAUSE.wait(self._draw.uniform(0.5, 2.0) * _SESSION)
        self._first.send_signal(signal.SIGCONT)

    def _join(self) -> None:
        if self._second is None:
            self._second = self._start()
            self._members(2)

    def _kill_second(self) -> None:
        self._join()
        assert self._second is not None
        self._second.kill()
        self._second.wait()
        self._second = None

    def _leave(self) -> None:
        self._join()
        assert self._second is not None
        self._second.terminate()
        assert self._second.wait(PATIENCE) == 0
        self._second = None

    def _zombie(self) -> None:
        """One wakes up when its partitions are long somebody else's."""
        self._join()
        assert self._second is not None
        self._second.send_signal(signal.SIGSTOP)
        self._members(1)
        self._writing.step()
        _PAUSE.wait(self._draw.uniform(0.0, 1.0))
        self._second.send_signal(signal.SIGCONT)

    def _kill_broker(self) -> None:
        assert self._broker is not None
        self._broker.kill()
        _PAUSE.wait(self._draw.uniform(0.0, 2.0))
        self._broker.start()

    def _stop_broker(self) -> None:
        assert self._broker is not None
        self._broker.pause()
        _PAUSE.wait(self._draw.uniform(1.0, 12.0))
        self._broker.resume()

    def _until(self, condition: Callable[[], object]) -> None:
        def is_so() -> bool:
            with suppress(SourceError):  # the broker is not back yet
                return bool(condition())
            return False

        until(is_so, told=lambda: f"{condition} within {PATIENCE:g} s")

    def inject(self, kind: str) -> None:
        """Has something go wrong while messages are written, and waits until more of them are joined."""
        self._writing.step()
        _PAUSE.wait(self._draw.uniform(0.0, 0.6))
        self.faults[kind]()
        over, is_written = time.monotonic(), self._draw.random() < 0.5
        if is_written:
            self._writing.step()
        self._until(lambda: position(self._topics) >= 0)  # as soon as brokers answer
        at = position(self._topics)
        if not is_written:
            self._writing.step()
        self._until(lambda: position(self._topics) > at or position(self._topics) >= total(self._topics))
        self.recovered[kind].append(time.monotonic() - over)

    def finish(self) -> None:
        """Waits until everything is joined, and ends the joiners."""
        self._writing.finish()
        self._until(lambda: position(self._topics) >= total(self._topics))
        for process in filter(None, (self._first, self._second)):
            process.terminate()
            assert process.wait(PATIENCE) == 0


def run(seed: int, faults: int, folder: Path) -> dict[str, int]:
    """One run; prints the table, and returns the counts."""
    draw = random.Random(seed)
    with Broker(resolve(), data=folder / "kafka") as broker, ExitStack() as stack:
        topics = Topics(broker.servers, partitions=3)
        chaos = Chaos(topics, topics.settings(folder, LABELS), draw, stack, broker)
        deck: list[str] = []
        for _ in range(faults):
            if not deck:
                deck = draw.sample([*chaos.faults], len(chaos.faults))
            kind = deck.pop()
            chaos.inject(kind)
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {kind}: went on after {chaos.recovered[kind][-1]:.1f} s\n")
        chaos.finish()
        counts = check(topics)
        print("| fault | times | median recovery time, s | worst |\n|---|---|---|---|")
        for kind, seconds in chaos.recovered.items():
            print(f"| {kind} | {len(seconds)} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |")
        print("\n" + ", ".join(f"{count:,} {name}" for name, count in counts.items()) + ": all is exact")
        return counts


def main(given: Sequence[str] | None = None) -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(prog="python -m tests.join.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="of what is chosen at random; it is printed")
    args = parser.parse_args(given)
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    sys.stderr.write(f"seed {seed}\n")
    with tempfile.TemporaryDirectory() as folder:
        run(seed, args.faults, Path(folder))


if __name__ == "__main__":
    main()
