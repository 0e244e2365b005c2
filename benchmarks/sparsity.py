"""What L1 costs and what it leaves: examples/lr_ftrl.py on the flights, one pass for each l1.

    python benchmarks/sparsity.py --l1 0 1 3 5

Prints AUC, rows, and the share of them that is exactly zero; see benchmarks/quality.py for other batch sizes.
"""

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pyarrow.dataset
from quality import EXAMPLES

import streamtrain as st
from streamtrain.demo.stream import flights


def learned(l1: float, batch_size: int) -> st.Learner:
    """The example with another l1, after one pass."""
    model = st.load_model(str(EXAMPLES / "lr_ftrl.py"))
    assert isinstance(model.embedding_optimizer, st.FTRL)
    optimizer = replace(model.embedding_optimizer, l1=l1)
    changed = st.Model(model.schema, model.graph, embedding_optimizer=optimizer, reduction=model.reduction)
    learner = st.Learner(changed, batch_size=batch_size)
    for piece in flights():
        learner.learn(piece)
    return learner


def zeros_of(learner: st.Learner) -> float:
    """Share of all values of rows that is exactly zero."""
    with tempfile.TemporaryDirectory() as folder:
        learner.save(f"{folder}/saved")
        tables = [pyarrow.dataset.dataset(one).to_table() for one in Path(folder, "saved", "tables").iterdir()]
        values = np.array([value for table in tables for row in table["embedding"].to_pylist() for value in row])
    return float((values == 0).mean())


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--l1", type=float, nargs="+", default=[0.0, 1.0, 3.0, 5.0])
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    print("| l1 | AUC | log loss | rows | zeros |\n|---|---|---|---|---|")
    for l1 in args.l1:
        learner = learned(l1, args.batch_size)
        figures = learner.metrics()["label"]
        rows = sum(learner.rows.values())
        print(
            f"| {l1:g} | {figures.auc:.4f} | {figures.log_loss:.4f} | {rows:,} | {zeros_of(learner):.1%} |", flush=True
        )


if __name__ == "__main__":
    main()
