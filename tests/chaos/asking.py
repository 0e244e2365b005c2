"""Clients that ask for predictions all the time, and look at every answer."""

import http.client
import json
import threading
import time
from collections import Counter, OrderedDict
from datetime import datetime
from typing import Any

from tests.chaos.load import Load
from tests.chaos.samples import Samples, Which

_TIMEOUT = 2.0  # seconds for an answer; then the client asks again, and may reach another process
_LONG = 8.0  # for one that waits for what is learned
_KEPT = 2000  # publications whose answers are compared


class Seen:
    """What clients of one model saw. Thread-safe.

    Attributes:
        outcomes: how many requests were answered (200), refused (by status) or broken (by error).
        refusals: what the first refusal of each status said.
        wrong: answers that cannot be, the first hundred.
        ms: milliseconds of the answers that were not waited for, with when they came.
        freshness: seconds from the latest sample that an answer has learned from to the answer, with when it came.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[str, ...], tuple[float, list[float]]] = OrderedDict()  # with when it came
        self._last = time.monotonic()
        self.longest = 0.0
        self.outcomes: Counter[str] = Counter()
        self.refusals: dict[str, str] = {}
        self.wrong: list[str] = []
        self.ms: list[tuple[float, float]] = []
        self.freshness: list[tuple[float, float]] = []

    def gap(self) -> float:
        """Longest time between two answers, in seconds; also if it has not ended yet."""
        with self._lock:
            return max(self.longest, time.monotonic() - self._last)

    def begin(self) -> None:
        """What was before does not count."""
        with self._lock:
            self._last, self.longest = time.monotonic(), 0.0
            self.outcomes.clear()
            self.freshness.clear()
            self.ms.clear()

    def broken(self, why: str, said: bytes = b"") -> None:
        """A request got no prediction, and perhaps an answer."""
        with self._lock:
            self.outcomes[why] += 1
            if said:
                self.refusals.setdefault(why, said.decode(errors="replace")[:500])

    def answered(self, values: list[float], headers: Any, ms: float | None, low: Which, high: Which) -> None:
        """A request got one; see `Samples.told`."""
        now, wrong = time.monotonic(), self._samples.told(values, low, high)
        of = (headers["x-model-version"], headers["x-publication"], headers.get("x-trained-through", ""))
        with self._lock:
            self.longest, self._last = max(self.longest, now - self._last), now
            self.outcomes["answered"] += 1
            if ms is not None:
                self.ms.append((now, ms))
            if of[2]:
                self.freshness.append((now, time.time() - datetime.fromisoformat(of[2]).timestamp()))
            at, before = self._answers.setdefault(of, (now, values))
            if before != values:
                wrong.append(f"of {of} there were {before}, and {now - at:.1f} s later {values}")
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
            self.wrong += [f"{of}: {one}" for one in wrong][: 100 - len(self.wrong)]


class Asker:
    """Asks, over a connection for each request, so that any of the serving processes may answer. For one thread.

    Args:
        listen: "host:port" of the endpoint.
        samples: of the model.
        load: what is written.
        seen: is told.
    """

    def __init__(self, listen: str, samples: Samples, load: Load, seen: Seen) -> None:
        self._host, _, port = listen.rpartition(":")
        self._port, self._samples, self._load, self._seen = int(port), samples, load, seen
        self._body = json.dumps({"instances": samples.instances()})

    def ask(self, ends: list[int] | None = None) -> bool:
        """Asks once; whether there was a prediction.

        Args:
            ends: for each partition, what is before has to be learned first.
        """
        last = ",".join(f"{p}:{n - 1}" for p, n in enumerate(ends or []) if n)
        wanted, seconds = ({"x-min-offset": last}, _LONG) if last else ({}, _TIMEOUT)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        began = time.perf_counter()
        try:
            connection.request("POST", f"/v1/models/{self._samples.model}:predict", self._body, wanted)
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            self._seen.broken(type(exc).__name__)
            return False
        finally:
            connection.close()
        if answer.status != 200:
            self._seen.broken(str(answer.status), said)
            return False
        ms = None if ends else 1000 * (time.perf_counter() - began)
        least, most = ends or [0] * len(self._load.written), [*self._load.written]
        values = [float(value) for (value,) in json.loads(said)["predictions"]]
        self._seen.answered(values, answer.headers, ms, lambda: self._load.good(least), lambda: self._load.good(most))
        return True


class Clients:
    """Threads that ask.

    Args:
        asker: makes one for a thread.
        load: what is written.
        every: seconds between two requests of a client.
    """

    def __init__(self, asker: Asker, load: Load, every: float) -> None:
        self._asker, self._load = asker, load
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(every, False), name="client", daemon=True),
            threading.Thread(target=self._run, args=(20 * every, True), name="client that waits", daemon=True),
        ]

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends."""
        self._ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self, every: float, waits: bool) -> None:
        while not self._ended.wait(every):
            self._asker.ask([*self._load.written] if waits else None)
