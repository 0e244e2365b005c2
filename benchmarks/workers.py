"""What do several workers cost in accuracy? make bench-workers.

    python benchmarks/workers.py
    python benchmarks/workers.py --streams ratings --workers 1 8

README's model at the defaults on streams of streams.py, in `async` mode from two shards behind gRPC. It is a replay, in
which a worker lacks what others learn between its pull and its push: workers take samples in the order of the stream,
and as fast as they can, in full batches. Ratings and movies are partitioned by user and flights by tail number, the
others in turn.

Prints a table: AUC by number of workers, where each prediction was made before its sample was learned. "meanwhile" is
that of their predictions; "divided" the same with workers that share a batch of the default size; "afterwards" that of
one worker alone, which continues from what they have learned with the last fifth of the stream.
"""

import argparse
import json
import os
import zlib
from itertools import islice

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from harness.figures import table_header, table_row
from harness.learners import SHAPES
from harness.together import learn_together
from streams import CATEGORICAL, NUMERIC, STREAMS, Sample

import streamtrain as st

KEYS = {"flights": "tail", "ratings": "user", "movies": "user"}
KINDS = ("meanwhile", "divided", "afterwards")


def model_of(stream: str) -> st.Model:
    """README's model of a stream."""
    features, graph = SHAPES["one layer"](CATEGORICAL[stream])
    numbers = [st.Numeric(name) for name in NUMERIC[stream]]
    return st.Model(st.Schema(label="label", time="ts", features=[*features, *numbers]), graph)


def partition_of(stream: str, index: int, sample: Sample, workers: int) -> int:
    """The partition of a sample."""
    key = KEYS.get(stream)
    return index % workers if key is None else zlib.crc32(str(sample[key]).encode()) % workers


def auc(kind: str, stream: str, samples: list[Sample], workers: int, batch: int) -> float:
    """The AUC of one pass."""
    messages = [json.dumps(sample).encode() for sample in samples]
    order = [partition_of(stream, i, sample, workers) for i, sample in enumerate(samples)]
    judged = None
    if kind == "afterwards":
        last = len(order) // 5
        order[-last:] = [workers] * last
        judged = {workers}
    size = batch // workers if kind == "divided" else batch
    return learn_together(model_of(stream), messages, order, batch_size=size, ahead=1, judged=judged).auc


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=["ratings", "movies", "flights", "stops"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, default=100_000, help="only the first ones")
    parser.add_argument("--batch", type=int, default=1024)
    args = parser.parse_args()
    print(table_header(("stream", "workers", *args.workers)))
    for stream in args.streams:
        samples = list(islice(STREAMS[stream](), args.samples))
        for kind in args.kinds:
            found = [auc(kind, stream, samples, workers, args.batch) for workers in args.workers]
            print(table_row((stream, kind, *(f"{one:.4f}" for one in found))), flush=True)


if __name__ == "__main__":
    main()
