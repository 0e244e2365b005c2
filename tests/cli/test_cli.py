"""The command line as a user runs it: real processes, real files."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from streamtrain.cli import app
from tests import commands
from tests.patience import PATIENCE

MODEL = """
import keras
import streamtrain as st

schema = st.Schema(label="label", time="ts", features=[st.Categorical("user", dim=4), st.Numeric("price")])

def graph(inputs):
    return keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(list(inputs.values())))

model = st.Model(schema, graph)
broken = st.Model(schema, lambda inputs: inputs["user"])
"""


def run(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return commands.run([*commands.COMMAND, *args], input=stdin, capture_output=True, check=False, timeout=300)


def samples(count: int, start: int = 0) -> bytes:
    rows = [{"ts": i, "label": i % 2, "user": f"u{i % 7}", "price": i / 10} for i in range(start, start + count)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "m.py"
    file.write_text(MODEL)
    return str(file)


def test_learn_saves_and_goes_on(tmp_path: Path, model: str) -> None:
    stream = tmp_path / "samples.jsonl.gz"
    stream.write_bytes(gzip.compress(samples(500) + b"\n\n" + b"not json\n"))
    done = run("learn", str(stream), "--model", f"{model}:model", "--save", str(tmp_path / "checkpoint"))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["samples"] == 500
    assert figures["bad"] == {"not_json": 1}
    assert figures["rows"] == {"user": 7}
    assert 0 <= figures["metrics"]["label"]["auc"] <= 1

    more = run("learn", "-", "--model", model, "--load", str(tmp_path / "checkpoint"), stdin=samples(100, 500))
    assert more.returncode == 0, more.stderr
    assert json.loads(more.stdout.splitlines()[-1])["samples"] == 100


def test_bench_tells_what_a_sample_costs(tmp_path: Path, model: str) -> None:
    stream = tmp_path / "samples.jsonl"
    stream.write_bytes(samples(200) + b"not json\n")
    options = ("--model", model, "--batch-size", "64", "--rounds", "2")
    done = run("bench", str(stream), *options, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["samples"], figures["bad"], figures["rows"]) == (201, 1, {"user": 7})
    assert set(figures["us_per_sample"]) == {"decode", "predict", "learn"}
    assert all(value > 0 for value in figures["us_per_sample"].values())
    assert b"refused" in run("bench", str(stream), *options).stdout
    assert b"has no samples" in run("bench", "-", *options).stderr


def test_graph_prints_a_model_file(tmp_path: Path, model: str) -> None:
    without = tmp_path / "without.py"
    without.write_text(MODEL + 'model = st.Model(schema, name="taste")\n')
    done = run("graph", "--model", str(without))
    assert done.returncode == 0, done.stderr
    (tmp_path / "printed.py").write_bytes(done.stdout)
    assert run("graph", "--model", f"{tmp_path}/printed.py:model").stderr == (
        b"streamtrain: the model has a graph of its own, which stands in its file\n"
    )
    learned = run("learn", "-", "--model", f"{tmp_path}/printed.py", stdin=samples(20))
    assert json.loads(learned.stdout.splitlines()[-1])["samples"] == 20


def test_too_many_bad_samples_stop_it(model: str) -> None:
    done = run("learn", "-", "--model", model, stdin=samples(80) + b"{}\n" * 20)
    assert done.returncode == 1
    why = b"20 of 100 samples were refused (missing_field 20), such as line 81: missing_field in field 'ts'"
    assert why in done.stderr
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.jsonl", "--model", "{model}"], "cannot read nowhere.jsonl"),
        (["-", "--model", "nowhere.py"], "model file 'nowhere.py' does not exist"),
        (["-", "--model", "{model}:other"], "has no Model named 'other'; it has ['model', 'broken']"),
        (["-", "--model", "{model}:broken"], "graph: the output for 'label' must be a Keras tensor [batch, 1]"),
        (["-", "--model", "{model}", "--batch-size", "0"], "batch_size must be an integer from 1"),
        (["-", "--model", "{model}", "--load", "nowhere"], "no checkpoint at nowhere"),
    ],
)
def test_what_is_wrong_is_one_line(model: str, args: list[str], message: str) -> None:
    done = run("learn", *(arg.replace("{model}", model) for arg in args), stdin=samples(10))
    assert done.returncode in (1, 2)
    assert done.stdout == b""
    lines = done.stderr.decode().strip().splitlines()
    assert len(lines) == 1, lines
    assert message in lines[0]


def test_tensorflow_is_loaded_without_what_keras_would_add_and_model_files_may_import_that() -> None:
    code = (
        "import sys; from streamtrain.service.start_tensorflow import load_tensorflow; load_tensorflow(1);"
        "import keras;"
        "assert not {'sklearn', 'pandas'} & set(sys.modules), 'loaded';"
        "import pandas, sklearn.metrics; print(keras.layers.Dense(1)(keras.ops.ones([2, 3])).shape)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "(2, 1)"


def test_help_does_not_load_tensorflow() -> None:
    code = """
import sys
from typer.main import get_command
from streamtrain.cli import app, main
names = [*get_command(app).commands]
assert {"demo", "learn", "serve", "publish", "export"} <= set(names)
for arguments in [[], *([name] for name in names)]:
    sys.argv = ["streamtrain", *arguments, "--help"]
    try:
        main()
    except SystemExit as exc:
        assert exc.code == 0, arguments
assert not {"tensorflow", "keras"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"Usage: ") > 10


def test_help_breaks_lines_only_between_paragraphs() -> None:
    top = get_command(app).commands  # type: ignore[attr-defined]
    helps = {name: command.help for name, command in {**top, **top["deadletters"].commands}.items()}
    assert "\n\n" in helps["learn"]
    assert not [name for name, text in helps.items() if "\n" in text.replace("\n\n", "")]


def test_a_signal_stops_whatever_the_main_thread_holds() -> None:
    """A handler runs between any two instructions of the main thread, also while that holds the event's lock."""
    code = (
        "import os, signal\n"
        "from streamtrain.shutdown import stop_on_signals\n"
        "stopped = stop_on_signals()\n"
        "with stopped._cond:\n"
        "    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):\n"
        "        os.kill(os.getpid(), number)\n"
        "    assert not stopped._flag\n"
        "print(stopped.wait(60))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "True\n"
