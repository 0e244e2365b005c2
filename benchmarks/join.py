"""Events per second of the join of one partition on one core, without Kafka: decode, join, splice.

python benchmarks/join.py [--impressions 1000000] [--outcomes 0.1] [--wait 300] [--memory-bytes …]
"""

import argparse
import json
import random
import resource
import time
from collections.abc import Iterator

from streamtrain.join.buffer import Buffer, Memory
from streamtrain.join.engine import JoinLabel, PartitionJoin, Rules
from streamtrain.join.messages import JoinReader
from streamtrain.settings.groups import JoinSettings
from streamtrain.stream.source import Fetched

BATCH = 5000


def messages(count: int, share: float, fields: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Batches of impressions, 1,000 in a second of event time, and of the outcomes of some, up to a minute later."""
    draw = random.Random(1)
    features = "".join(f', "feature{i}": {i * 1.5}' for i in range(fields))
    late: list[tuple[float, bytes]] = []
    for first in range(0, count, BATCH):
        impressions = []
        for number in range(first, first + BATCH):
            at = number / 1000
            impressions.append(b'{"id": "request-%d", "time": %.3f%s}' % (number, at, features.encode()))
            if draw.random() < share:
                when = at + draw.uniform(0, 60)
                late.append((when, b'{"id": "request-%d", "time": %.3f, "kind": "click"}' % (number, when)))
        late.sort()
        ready = sum(when <= (first + BATCH) / 1000 for when, _ in late)
        yield impressions, [value for _, value in late[:ready]]
        del late[:ready]


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impressions", type=int, default=1_000_000)
    parser.add_argument("--outcomes", type=float, default=0.1)
    parser.add_argument("--fields", type=int, default=20)
    parser.add_argument("--wait", type=float, default=300.0, help="seconds, of 1,000 impressions each")
    parser.add_argument("--memory-bytes", type=int, default=JoinSettings().memory_bytes)
    arguments = parser.parse_args()
    settings = JoinSettings(impressions="i", outcomes="o")
    reader = JoinReader(settings, 300.0)
    buffer = Buffer(Memory(arguments.memory_bytes))
    join = PartitionJoin(Rules((JoinLabel("click", frozenset({"click"}), arguments.wait),), grace=60.0), buffer=buffer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, events, most, files, offsets = 0.0, 0, 0, 0, [0, 0]
    for logs in messages(arguments.impressions, arguments.outcomes, arguments.fields):
        fetched = [
            Fetched(0, list(range(at, at + len(values))), values, [-1] * len(values))
            for at, values in zip(offsets, logs, strict=True)
        ]
        began = time.process_time()
        offsets = [at + len(values) for at, values in zip(offsets, logs, strict=True)]
        join.read_impressions(reader.impressions(fetched[0])[0], offsets[0])
        join.read_outcomes(reader.outcomes(fetched[1])[0], offsets[1])
        join.progress()
        join.output.clear()
        seconds += time.process_time() - began
        events += sum(map(len, logs))
        most, files = max(most, join.waiting), max(files, buffer.file_bytes)
    figures = {"events_per_second": events / seconds, "waiting": most, "file_megabytes": files / 1e6}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    figures |= {"megabytes": grown / 1024, "bytes_per_impression": grown * 1024 / max(most, 1)}
    print(json.dumps({name: round(of) for name, of in figures.items()}))


if __name__ == "__main__":
    main()
