"""Joining: two joiners beside the services, on the same Kafka, and what is written for them."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import KafkaException

from streamtrain.errors import SourceError
from streamtrain.service.programs import Program
from streamtrain.service.supervisor import Supervisor
from tests.chaos import rights
from tests.chaos.looking import Looking
from tests.chaos.service import ROOT, until
from tests.chaos.watch import Standstill
from tests.join.chaos import LABELS, Writing, check, position, total
from tests.join.topics import Topics
from tests.stream.servers import allow

JOINERS = 2
_EVERY = 1.0  # seconds between two steps of what is written
_OPTIONS = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}


class Positions(Looking):
    """A thread that looks how far each partition of both inputs is joined."""

    def __init__(self, topics: Topics) -> None:
        super().__init__("positions of the join", 0.25)
        self._topics = topics
        self.standstill = Standstill()

    def look(self) -> None:
        """At what is committed."""
        found: dict[str, tuple[int, int]] = {}
        for stream in (self._topics.impressions, self._topics.outcomes):
            try:
                ends, committed = stream.bounds(), stream.committed(self._topics.group)
            except SourceError:  # the broker is away
                return
            kind = stream.topic.partition("-")[0]
            found |= {f"partition {p} of {kind}": (committed.get(p, 0), of.high) for p, of in ends.items()}
        self.standstill.see(found)


class Joining:
    """Joiners that are started again when they end, with exactly the rights that they need.

    Args:
        folder: for settings and logs.
        servers: of Kafka, for the test.
        secured: the same, where users are asked for.
        draw: what is written.

    Attributes:
        wrong: what was not exact.
        samples: number of them in the end.
    """

    def __init__(self, folder: Path, servers: str, secured: str, draw: random.Random) -> None:
        folder.mkdir()
        self._folder, self._topics = folder, Topics(servers, partitions=3)
        topics = self._topics
        names = (topics.impressions.topic, topics.outcomes.topic, topics.samples.topic)
        allow(servers, "joiner", rights.of_joiner(*names, topics.group))
        self._settings = topics.settings(folder, LABELS, secured=secured, options={**_OPTIONS, **rights.sasl("joiner")})
        self._writing, self._ended = Writing(topics, draw), threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="load of the join", daemon=True)
        self._failure: BaseException | None = None
        self._logs = {name: (folder / f"{name}.log").open("a") for name in self.names}
        self._supervisor = Supervisor([self._program(name) for name in self.names], self._write)
        self.positions = Positions(topics)
        self.wrong: list[str] = []
        self.samples = 0

    @property
    def names(self) -> list[str]:
        """Of the processes."""
        return [f"join{i}" for i in range(JOINERS)]

    def _program(self, name: str) -> Program:
        command = [sys.executable, "-m", "streamtrain", "join", "--config", str(self._settings), "--instance", name]
        return Program(
            name, command, os.environ | {"PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}, drain=60.0, preload=True
        )

    def _write(self, name: str, line: str) -> None:
        self._logs[name].write(f"{time.strftime('%H:%M:%S')} {line}\n")
        self._logs[name].flush()

    def start(self) -> None:
        """Starts joiners, and begins to write."""
        self._supervisor.start()
        self._thread.start()
        self.positions.start()

    def _write_all(self) -> None:
        try:
            while not self._ended.wait(_EVERY):
                self._writing.step()
        except BaseException as exc:  # for whoever stops it
            self._failure = exc

    def pid(self, name: str) -> int | None:
        """Of a joiner."""
        return self._supervisor.pid(name)

    @contextmanager
    def gone(self, name: str, number: int) -> Iterator[None]:
        """A joiner gets a signal; it is started again."""
        until(lambda: self.pid(name) is not None, 60)
        pid = self.pid(name)
        if pid is None:
            raise SystemExit(f"{name} does not start again:\n{self.said()}")
        os.kill(pid, number)
        try:
            yield
        finally:
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)

    def until_well(self, seconds: float) -> None:
        """Waits until all that is written by now is joined.

        Raises:
            SystemExit: it takes too long.
        """
        end: list[int] = []

        def is_well() -> bool:
            try:
                end[:] = end or [total(self._topics)]
                return position(self._topics) >= end[0]
            except (SourceError, KafkaException):
                return False

        if not until(is_well, seconds):
            raise SystemExit(f"what is written is not joined within {seconds:g} s:\n{self.said()}")

    def come_to_rest(self, seconds: float) -> None:
        """Ends what is written, waits until all is joined, and compares it with the plain join of the finished logs."""
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self._writing.finish()
        self.until_well(seconds)
        self.positions.stop()
        if "stands still" in self.said(1 << 30):
            self.wrong.append("a partition of the join stood still: see the logs of joiners")
        try:
            self.samples = check(self._topics)["samples"]
        except AssertionError as exc:
            self.wrong.append(f"what is joined is not the plain join of the logs: {exc}")

    def stop(self) -> None:
        """Ends all."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.positions.stop()
        self._supervisor.stop()
        for log in self._logs.values():
            log.close()

    def said(self, most: int = 1500) -> str:
        """The ends of all logs."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: …{log.read_text(errors='replace')[-most:]}" for log in logs)

    def as_json(self) -> dict[str, object]:
        """For the report."""
        seconds, place = self.positions.standstill.worst()
        starts = sum(self._supervisor.starts(name) for name in self.names)
        return {
            "samples": self.samples,
            "standstill": round(seconds, 1),
            "standstill_of": place,
            "starts": starts,
            "wrong": self.wrong,
        }
