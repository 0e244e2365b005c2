"""The builds of the core for x86-64-v2 and x86-64-v3: the processor's is loaded, and both compute the same bits."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from streamtrain import _core

FILE = Path(_core.__file__ or "")
both = pytest.mark.skipif(
    not (FILE.parent / "x86-64-v3" / FILE.name).exists(), reason=f"{FILE} is the only build of the core"
)
OPTIMIZERS: "tuple[_core.OptimizerName, ...]" = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
DENSE_OPTIMIZERS: tuple[Literal["sgd", "adagrad", "adam"], ...] = ("sgd", "adagrad", "adam")
DTYPES: "tuple[_core.Dtype, ...]" = ("float32", "bfloat16", "float16")
HALVES: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")

# Where the file is given: that of tests may be another than the installed one.
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("streamtrain._core", sys.argv[1])
core = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = core
spec.loader.exec_module(core)
from tests.native.test_arch import digest
print(core.ARCH, digest())
"""


def results() -> Iterator[bytes]:
    """What the core computes in vectors, and what it scans in wide loads."""
    rng = np.random.default_rng(5)
    keys = rng.integers(0, 2**64, 300, dtype=np.uint64)
    ones = np.ones(len(keys), np.uint32)
    for dim in (1, 7, 16, 67):
        gradients = rng.standard_normal((3, len(keys), dim)).astype(np.float32)
        for optimizer in OPTIMIZERS:
            for dtype in DTYPES:
                table = _core.Table(dim, optimizer=optimizer, rate=0.05, decay=0.9, dtype=dtype, seed=3)
                for gradient in gradients:
                    table.push(keys, gradient, ones, ones)
                yield table.pull_state(keys)[0].tobytes()
        yield _core.birth(keys, dim, seed=9, dtype="float16").tobytes()
        parts = [keys[:200], keys[100:]]
        merged = _core.merge_rows(
            parts, [gradients[0, :200], gradients[1, :200]], [ones[:200]] * 2, [ones[:200]] * 2, [0.3, 0.7]
        )
        yield from (one.tobytes() for one in merged)
    values = np.concatenate([rng.standard_normal(1000), rng.standard_normal(1000) * 1e-6]).astype(np.float32)
    for dtype in HALVES:
        bits = _core.narrow(values, dtype)
        yield bits.tobytes() + _core.widen(bits, dtype).tobytes()
    for optimizer in DENSE_OPTIMIZERS:
        vector = _core.DenseVector(values, optimizer=optimizer, rate=0.1)
        vector.apply(values[::-1].copy())
        yield vector.pull().tobytes() + vector.slots.tobytes()
    decoder = _core.Decoder(
        labels=[_core.LabelSpec("label")],
        categoricals=[_core.CategoricalSpec("id")],
        crosses=[],
        numerics=[_core.NumericSpec("x", transform="log1p")],
        time="ts",
        weight=None,
    )
    ids = ["a", "b" * 31, "c" * 32, "d" * 70, 'quote \\"', "ü" * 20, "\\u0041", "e" * 30 + "\\n"]
    messages = [f'{{"ts": {i}, "label": 1, "id": "{one}", "x": {i / 7}}}'.encode() for i, one in enumerate(ids)]
    columns = decoder.decode([*messages, b'{"ts": 1, "label": 1, "id": "a\tb", "x": 1}'])
    yield columns.keys.tobytes() + columns.numeric.tobytes() + repr(columns.errors).encode()


def digest() -> str:
    """Of all results."""
    return hashlib.sha256(b"".join(results())).hexdigest()


def run(arch: str | None) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "STREAMTRAIN_ARCH"}
    environment |= {"STREAMTRAIN_ARCH": arch} if arch else {}
    command = [sys.executable, "-c", PROGRAM, str(FILE)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@both
def test_both_builds_compute_the_same_bits() -> None:
    baseline = run("x86-64-v2")
    assert baseline.stdout.split()[0] == "x86-64-v2", baseline.stderr
    own = run(None)
    flags = Path("/proc/cpuinfo").read_text()
    assert own.stdout.split()[0] == ("x86-64-v3" if " avx2 " in flags else "x86-64-v2"), own.stderr
    assert own.stdout.split()[1] == baseline.stdout.split()[1] == digest()


@both
def test_an_unknown_build_is_refused() -> None:
    assert "STREAMTRAIN_ARCH is x86-64-v9, but must be x86-64-v2 or x86-64-v3" in run("x86-64-v9").stderr
