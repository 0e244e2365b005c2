"""`learn` as a user runs it: any file, a curve and advice while and after it learns, and mistakes said plainly."""

import csv
import gzip
import io
import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import streamtrain as st
from streamtrain.cli.learn import ModelOptions, replay
from streamtrain.errors import TooManyBadSamples
from streamtrain.model.features import Feature
from streamtrain.stream.files import SampleFile
from tests import commands
from tests.models import make

MODEL = """
import keras
import streamtrain as st

schema = st.Schema(label="label", time="ts", features=[st.Categorical("user", dim=4), st.Numeric("price")])

def graph(inputs):
    x = keras.layers.Concatenate()(list(inputs.values()))
    return keras.layers.Dense(1, activation="sigmoid")(x)

def broken(inputs):
    return top(keras.layers.Concatenate()(list(inputs.values())))

def top(x):
    return keras.layers.Dens(1)(x)

def loss(labels, predictions):
    return keras.ops.squar(labels - predictions)

model = st.Model(schema, graph, micro_batch_size=None)
wrong = st.Model(schema, broken)
lossy = st.Model(schema, graph, loss=loss)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "m.py"
    file.write_text(MODEL)
    return str(file)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"ts": i, "label": i % 7 % 2, "user": f"u{i % 7}", "price": i % 10 / 10} for i in range(count)]


def jsonl(samples: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in samples)


def run(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [*commands.COMMAND, *args]
    return commands.run(command, input=stdin, capture_output=True, check=False, timeout=300)


def written(folder: Path, kind: str) -> Path:
    """2,000 samples in a file of a kind."""
    table, text = pa.Table.from_pylist(rows(2000)), io.StringIO()
    if kind == "parquet":
        pq.write_table(table, folder / "samples.parquet")
        return folder / "samples.parquet"
    writer = csv.DictWriter(text, table.column_names)
    writer.writeheader()
    writer.writerows(rows(2000))
    content, packing = (text.getvalue().encode(), kind) if kind.startswith("csv") else (jsonl(rows(2000)), kind)
    if packing.endswith(".gz"):
        content = gzip.compress(content)
    if packing.endswith(".zst"):
        content = pa.compress(content, "zstd", asbytes=True)
    (folder / f"samples.{kind}").write_bytes(content)
    return folder / f"samples.{kind}"


def learned(file: Path) -> tuple[st.Learner, str]:
    """What a learner makes of a file, and what is said meanwhile."""
    features: list[Feature] = [st.Categorical("user", dim=4), st.Numeric("price")]
    learner = st.Learner(make(features), batch_size=256)
    samples, said = SampleFile(str(file)), io.StringIO()
    replay(learner, samples.opened(), Console(file=said, width=200), title="samples", place=samples.place)
    return learner, said.getvalue()


@pytest.mark.parametrize("kind", ["csv", "csv.zst", "jsonl.zst", "parquet"])
def test_every_kind_of_file_is_learned_alike(tmp_path: Path, kind: str) -> None:
    expected, _ = learned(written(tmp_path, "jsonl.gz"))
    assert expected.samples == 2000
    learner, said = learned(written(tmp_path, kind))
    assert learner.metrics()["label"].as_dict() == expected.metrics()["label"].as_dict()
    assert learner.rows == {"user": 7}
    assert "1,024 samples   auc 0." in said
    assert said.index("1,024 samples") < said.index("2,000 samples   auc 0.")


def test_the_first_refused_sample_of_each_kind_is_described_with_its_line(tmp_path: Path) -> None:
    samples = rows(500)
    samples[3]["label"], samples[8]["label"] = 5, 6
    del samples[6]["user"]
    file = tmp_path / "samples.jsonl"
    file.write_bytes(b"\n\n" + jsonl(samples[:5]) + b"\n" + jsonl(samples[5:]))
    _, said = learned(file)
    assert "refused 2, the first in line 6: bad_label in field 'label': it is 5; loss 'binary_crossentropy'" in said
    assert "refused 1, the first in line 10: missing_field in field 'user': the sample has" in said
    file.write_bytes(jsonl(samples[:7]))
    with pytest.raises(TooManyBadSamples, match="such as line 4: bad_label in field 'label': it is 5"):
        learned(file)


def clicks(folder: Path, count: int = 3000) -> Path:
    """A CSV as one has it, of whose clicks hour, genre and the price tell."""
    random = np.random.default_rng(0)
    lines = ["row,at,user_id,hour,genres,price,device,clicked"]
    for i in range(count):
        hour, price, genre = int(random.integers(24)), float(random.lognormal(3)), int(random.integers(4))
        clicked = "yes" if random.random() < (0.8 if hour > 12 and price < 20 else 0.1) else "no"
        at = f"{i // 240 % 28 + 1:02}/{i // 6720 + 1:02}/2024 {i // 10 % 24:02}:{i % 60:02}"
        names = "|".join(["Drama", "War", "Comedy", "News"][: genre + 1])
        lines.append(f"{i},{at},{i * 7919 % 500},{hour},{names},{price:.2f},phone,{clicked}")
    (folder / "clicks.csv").write_text("\n".join(lines))
    return folder / "clicks.csv"


def test_a_csv_alone(tmp_path: Path) -> None:
    """No model file: what the fields are is decided, said and written; the written file learns the same, and serves."""
    file, model, saved = clicks(tmp_path), tmp_path / "made.py", tmp_path / "learned"
    given = ("learn", str(file), "--label", "clicked")
    done = run(*given, "--write-model", str(model), "--save", str(saved))
    said = done.stderr.decode()
    assert done.returncode == 0, said
    figures = json.loads(done.stdout)
    assert figures["samples"] == 3000
    assert figures["metrics"]["clicked"]["auc"] > 0.75
    rows = [[cell.strip() for cell in line.split("│")] for line in said.splitlines() if line.count("│") == 5]
    roles = {name: role for _, name, role, *_ in rows if name}
    assert roles == {
        **{"row": "left out", "at": "time", "user_id": "id", "hour": "id", "genres": "list", "price": "number"},
        **{"device": "left out", "clicked": "label"},
    }
    assert f"to serve it: streamtrain serve --model {model}:model --set checkpoint.url={saved}" in said
    assert 'time_format="%d/%m/%Y %H:%M"' in model.read_text()
    assert "Files like this are read with --lists genres, be it by learn" in model.read_text()
    header, *lines = file.read_text().splitlines(keepends=True)
    files = [tmp_path / name for name in ("first.csv", "second.csv")]
    for part, of_part in zip(files, (lines[:1700], lines[1700:]), strict=True):
        part.write_text("".join([header, *of_part]))
    same = run("learn", *map(str, files), "--model", str(model), "--lists", "genres")
    assert json.loads(same.stdout)["metrics"] == figures["metrics"]
    assert run(*given, "--write-model", str(model)).stderr.decode() == (
        f"streamtrain: --write-model: there is a file {model} already; replace it with --overwrite\n"
    )
    learner = st.Learner.load(saved, st.load_model(str(model)))
    assert 0 < learner.predict([{"at": "05/01/2024 10:00", "user_id": 7, "hour": 3, "price": "NA"}])[0, 0] < 1


def test_later_ids_that_look_like_something_else(tmp_path: Path) -> None:
    lines = [f"{i % 1000},{i % 100 / 7},{i % 2}\n" for i in range(10_000)]
    (tmp_path / "clicks.csv").write_text("".join(["user_id,price,clicked\n", *lines, "12e5,1e2,0\n", "true,7,1\n"]))
    file = SampleFile(str(tmp_path / "clicks.csv"))
    _, _, messages = ModelOptions(None, "clicked", None, None).infer(file, file.opened(), Console(file=io.StringIO()))
    *_, first, second = messages
    assert json.loads(first) == {"user_id": "12e5", "price": 100, "clicked": 0}
    assert json.loads(second) == {"user_id": "true", "price": 7, "clicked": 1}


def test_words_of_json_lines(tmp_path: Path) -> None:
    titles = [f"the {'good' if i % 3 else 'bad'} film of {i * 7 % 2003}" for i in range(4000)]
    samples: list[dict[str, Any]] = [
        {"title": title, "user_id": float(i % 90), "seen": i % 3 > 0} for i, title in enumerate(titles)
    ]
    file, model = tmp_path / "films.jsonl", tmp_path / "made.py"
    file.write_bytes(jsonl(samples))
    inferring, read = ModelOptions(None, "seen", None, None), SampleFile(str(file))
    inferred, _, messages = inferring.infer(read, read.opened(), Console(file=io.StringIO()))
    assert {one.name: one.role for one in inferred.fields} == {"title": "words", "user_id": "id", "seen": "label"}
    found = [json.loads(one) for one in messages]
    assert found == [
        {"title": one["title"].split(), "user_id": str(i % 90), "seen": one["seen"]} for i, one in enumerate(samples)
    ]
    told = SampleFile(str(file), text=["title"])
    inferred, _, messages = inferring.infer(told, told.opened(), Console(file=io.StringIO()))
    assert {one.name: one.role for one in inferred.fields} == {"title": "id", "user_id": "id", "seen": "label"}
    assert json.loads(next(messages))["title"] == titles[0]
    done = run("learn", "-", "--label", "seen", "--write-model", str(model), stdin=jsonl(samples))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["samples"], figures["bad"]) == (4000, {})
    assert figures["metrics"]["seen"]["auc"] > 0.9
    assert "read with --text user_id --lists 'title= ', be it" in model.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "say what to predict: --label FIELD, and the model is made by what the file holds; or give a model file"),
        (("--label", "click"), "--label: the samples have no field 'click'; they have 'ts', 'label', 'user', 'price'"),
        (("--label", "user"), "field 'user' has 7 different values, u0 (15%), "),
        (("--label", "label", "--time", "at"), "--time: the samples have no field 'at'"),
        (("--label", "label", "--model", "m.py"), "--label is for learning without --model"),
        (("--label", "label", "--write-model", "/nowhere/m.py"), "--write-model: cannot write /nowhere/m.py: No such"),
    ],
)
def test_what_is_wrong_without_a_model(options: tuple[str, ...], message: str) -> None:
    done = run("learn", "-", *options, stdin=jsonl(rows(100)))
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_text_that_looks_like_a_list(tmp_path: Path) -> None:
    genres = ["Drama", "Comedy|Romance", "Action|Comedy|War", ""]
    model, file = tmp_path / "m.py", tmp_path / "samples.csv"
    names = "genres", "tags", "agent"
    features = ", ".join(f'st.Categorical("{name}", dim=4, default="")' for name in names)
    model.write_text(MODEL.replace('st.Categorical("user", dim=4), st.Numeric("price")', features))
    lines = [f"{i},{i % 2},{genres[i % 4]},{'a|b' if i % 3 else 'c'},X11; {'Linux;' * (i % 3)}" for i in range(300)]
    file.write_text("\n".join(["ts,label,genres,tags,agent", *lines]))

    def advice(*options: str) -> list[str]:
        done = run("learn", str(file), "--model", str(model), *options)
        assert done.returncode == 0, done.stderr
        given: list[str] = json.loads(done.stdout)["advice"]
        return given

    one, other = advice()
    assert one == (
        "field 'genres' holds text such as 'Comedy|Romance', each of which is one id. If it is a list of ids, split "
        "it: with --lists genres."
    )
    assert "--lists tags." in other
    assert advice("--lists", "genres", "--text", "tags") == []


def test_it_learns_saves_and_does_not_overwrite_unasked(tmp_path: Path, model: str) -> None:
    file, checkpoint = str(written(tmp_path, "csv")), str(tmp_path / "checkpoint")
    given = ("learn", file, "--model", model, "--save", checkpoint)
    done = run(*given)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["samples"], figures["advice"]) == (2000, [])

    again = run(*given)
    assert again.returncode == 2
    assert again.stderr == (
        f"streamtrain: --save: there is a checkpoint at {checkpoint} already; replace it with --overwrite\n".encode()
    )
    (tmp_path / "notes").mkdir()
    other = run("learn", file, "--model", model, "--save", str(tmp_path / "notes"), "--overwrite")
    assert (other.returncode, b"exists and is not a checkpoint" in other.stderr) == (2, True)

    assert run(*given, "--overwrite").returncode == 0
    assert run(*given, "--load", checkpoint).returncode == 0  # what is replaced is continued
    st.Learner.load(checkpoint, st.load_model(model))


def test_on_a_terminal_it_draws_the_curve_and_asks_before_it_overwrites(tmp_path: Path, model: str) -> None:
    file, checkpoint = str(written(tmp_path, "csv")), tmp_path / "checkpoint"
    st.Learner(st.load_model(model)).save(checkpoint)
    before = (checkpoint / "manifest.json").read_bytes()

    def typed(answer: bytes) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        command = [*commands.COMMAND, "learn", file, "--model", model, "--save", str(checkpoint)]
        environment = {**os.environ, "COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"}
        with commands.start(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            os.write(ours, answer)
            said = b""
            while True:
                try:
                    said += os.read(ours, 65536)
                except OSError:  # the other side is closed
                    break
            os.close(ours)
        return process.returncode, said.decode()

    code, said = typed(b"n\n")
    assert code == 2
    assert "already. Replace it? [y/N]" in said
    assert (checkpoint / "manifest.json").read_bytes() == before
    code, said = typed(b"y\n")
    assert code == 0
    assert "log loss of label, by samples" in said
    assert "auc of label, by samples" in said
    assert any(0x2800 < ord(c) < 0x2900 for c in said)
    assert (checkpoint / "manifest.json").read_bytes() != before


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_summary_is_not_lost_where_it_cannot_be_written(model: str, unbuffered: str) -> None:
    command = [*commands.COMMAND, "learn", "-", "--model", model]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = commands.run(
            command, input=jsonl(rows(10)), stdout=full, stderr=subprocess.PIPE, env=environment, timeout=300
        )
    *_, summary, said = done.stderr.decode().splitlines()
    assert json.loads(summary)["samples"] == 10
    assert (done.returncode, said) == (1, "streamtrain: standard output cannot be written: No space left on device")


@pytest.mark.parametrize(
    ("name", "fails", "lines"),
    [
        ("wrong", "graph fails with AttributeError", ["broken", "return top(", "in top", "keras.layers.Dens(1)(x)"]),
        ("lossy", "loss of 'label' fails with AttributeError", ["in loss", "keras.ops.squar(labels - predictions)"]),
    ],
)
def test_a_bug_in_the_model_file_shows_its_own_lines(model: str, name: str, fails: str, lines: list[str]) -> None:
    done = run("learn", "-", "--model", f"{model}:{name}", stdin=jsonl(rows(10)))
    assert (done.returncode, done.stdout) == (2, b"")
    said = done.stderr.decode()
    assert said.startswith(f"streamtrain: {fails}")
    assert all(line in said for line in lines)
    assert {line.split(chr(34))[1] for line in said.splitlines() if line.startswith("  File")} == {model}
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("trian", "there is no command 'trian'; did you mean learn FILE or worker?"),
        ("lern", "there is no command 'lern'; did you mean learn?"),
        ("xyzzy", "there is no command 'xyzzy'; `streamtrain --help` lists all commands"),
    ],
)
def test_unknown_commands(typed: str, message: str) -> None:
    done = run(typed)
    assert done.returncode == 2
    assert message in done.stderr.decode()


def test_a_stream_that_does_not_answer_names_the_setting() -> None:
    done = run("produce", "-", "--url", "redis://127.0.0.1:1", "--topic", "clicks", stdin=b"{}")
    assert done.returncode == 1
    assert b"Connection refused; check stream.url (or --url), and that its server is running" in done.stderr
