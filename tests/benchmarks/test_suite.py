"""The suite of benchmarks: the figures of commands, turns, what it continues with, what it compares."""

import json
import platform
import re
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import pages, results  # noqa: E402
from harness.results import OtherMachine, Results  # noqa: E402
from harness.runner import Contestant, Failed, Others, Part, Turns, figure_of, only, run  # noqa: E402
from harness.suite import Peers  # noqa: E402
from quick import compare  # noqa: E402


def saying(name: str, code: str, missing: str = "") -> Contestant:
    return Contestant(name, (sys.executable, "-c", code), {"samples/s": ("rate",)}, timeout=60, missing=missing)


def told(path: Path, name: str, rate: float) -> str:
    """Code that leaves its name in a file, and prints a rate."""
    return f"open({str(path)!r}, 'a').write('{name} '); print('note'); print('{{\"rate\": {rate}}}')"


def test_figures_are_found_by_their_place() -> None:
    printed = {"a": [{"b": 2}, {"b": [3, 4.5]}]}
    assert figure_of(printed, ("a", 0, "b")) == [2.0]
    assert figure_of(printed, ("a", 1, "b")) == [3.0, 4.5]
    with pytest.raises(Failed, match="a / 2 / b"):
        figure_of(printed, ("a", 2, "b"))


def test_contestants_take_turns_there_and_back(tmp_path: Path) -> None:
    log = tmp_path / "log"
    part = Part("p", "P", [saying("a", told(log, "a", 1)), saying("b", told(log, "b", 2))])
    found = Results(tmp_path / "r.json", ())
    Turns(found, 3, lambda line: None).part(part)
    assert log.read_text().split() == ["a", "b", "b", "a", "a", "b"]
    assert found.found["medians"]["p"] == {"a": {"samples/s": 1.0}, "b": {"samples/s": 2.0}}


def test_what_is_done_is_not_run_again_unless_it_is_forgotten(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "r.json"
    part = Part("p", "P", [saying("a", told(log, "a", 1))])
    for rounds, runs in ((1, 1), (1, 1), (3, 3)):
        Turns(Results(path, ()), rounds, lambda line: None).part(part)
        assert len(log.read_text().split()) == runs
    again = Results(path, ())
    again.forget("p", ["a"])
    assert again.found["parts"] == {}
    Turns(again, 1, lambda line: None).part(part)
    assert len(log.read_text().split()) == 4


def test_one_contestant_alone_is_measured_anew(tmp_path: Path) -> None:
    log, found = tmp_path / "log", Results(tmp_path / "r.json", ())
    part = Part("p", "P", [saying("red", told(log, "red", 1)), saying("blue", told(log, "blue", 1))])
    Turns(found, 1, lambda line: None).part(part)
    found.forget("p", [one.name for one in only(part, ["blu"]).contestants])
    Turns(found, 1, lambda line: None).part(only(part, []))
    assert log.read_text().split() == ["red", "blue", "blue"]


def test_one_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    bad = saying("bad", "import sys; sys.exit('no disk')")
    part = Part("p", "P", [bad, saying("good", "print('{\"rate\": 1}')"), saying("away", "", missing="not installed")])
    lines: list[str] = []
    found = Results(tmp_path / "r.json", ())
    Turns(found, 2, lines.append).part(part)
    assert "no disk" in found.part("p")["failed"]["bad"]
    assert len(found.part("p")["runs"]["good"]) == 2
    assert [line for line in lines if "bad FAILED" in line and "no disk" in line]
    assert "away" in "".join(pages.left_out(found.found))
    Turns(found, 2, lines.append).part(Part("p", "P", [saying("bad", "print('{\"rate\": 1}')")]))
    assert found.part("p")["failed"] == {}


def test_a_broker_is_there_only_while_it_is_needed(tmp_path: Path) -> None:
    asked: list[str] = []

    def broker() -> AbstractContextManager[str]:
        asked.append("w1")
        return nullcontext("here:1")

    code = "import sys, json; print(json.dumps({'rate': len(sys.argv[1])}))"
    reads = Contestant("k", (sys.executable, "-c", code, "{input}"), {"samples/s": ("rate",)})
    found = Results(tmp_path / "r.json", ())
    for _ in range(2):
        Turns(found, 1, lambda line: None).part(Part("p", "P", [reads], input=broker))
    assert asked == ["w1"]
    assert found.found["medians"]["p"]["k"] == {"samples/s": len("here:1")}


def test_without_a_broker_those_go_on_that_need_none(tmp_path: Path) -> None:
    def none() -> AbstractContextManager[str]:
        raise OSError("no Java")

    reads = Contestant("k", (sys.executable, "{input}"), {"samples/s": ("rate",)})
    found = Results(tmp_path / "r.json", ())
    turns = Turns(found, 1, lambda line: None)
    turns.part(Part("p", "P", [reads, saying("a", "print('{\"rate\": 1}')")], input=none))
    assert "no Java" in found.part("p")["failed"]["k"]
    assert "a" in found.found["medians"]["p"]


@pytest.mark.parametrize(("code", "said"), [("print('hello')", "no JSON"), ("import time; time.sleep(600)", "1 s")])
def test_a_command_that_says_nothing_or_hangs_has_failed(code: str, said: str) -> None:
    with pytest.raises(Failed, match=said):
        run((sys.executable, "-c", code), timeout=60 if "print" in code else 1)


def test_what_commands_use_is_not_counted_as_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s that the machine was busy, of 20, a command had one, and somewhat for its start."""
    told = iter([(5.0, 100.0), (15.0, 120.0)])
    monkeypatch.setattr("harness.runner.machine_seconds", lambda: next(told))
    others = Others()
    run((sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass\nprint('{}')"), timeout=300)
    assert 0.3 < others.share() <= 0.45


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """Neither what a command started, nor its temporary files; and what was there before stays."""
    inner = "import subprocess, sys, os; p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
    inner += 'print(\'{"pid": %d, "tmp": "%s"}\' % (p.pid, os.environ[\'TMPDIR\'])); sys.stdout.flush()'
    outer = (
        f"import sys, json, subprocess; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "from harness.runner import adopt_orphans, run\n"
        "adopt_orphans(); before = subprocess.Popen(['sleep', '600'])\n"
        f"done = run((sys.executable, '-c', {inner!r}), 60)\n"
        "done['before'] = before.poll() is None; before.kill(); before.wait(); print(json.dumps(done))"
    )
    done = json.loads(subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, check=True).stdout)
    assert done["before"]
    assert not Path(f"/proc/{done['pid']}").exists()
    assert not Path(done["tmp"]).exists()


def test_another_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Results(path, ()).save()
    found = json.loads(path.read_text())
    found["machine"]["cores"] += 1
    path.write_text(json.dumps(found))
    with pytest.raises(OtherMachine, match="another machine"):
        Results(path, ())


def test_peers_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    assert "folder" in Peers().contestant("x", "tf", "x.py").missing
    assert "tf" in Peers(tmp_path).contestant("x", "tf", "x.py").missing
    (tmp_path / "x.py").touch()
    python = tmp_path / "envs" / "tf" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    there = Peers(tmp_path, tmp_path / "envs").contestant("x", "tf", "x.py", "--batch", 64)
    assert not there.missing
    assert there.command == (str(python), str(tmp_path / "x.py"), "--batch", "64")


def test_a_loss_of_more_than_a_fifth_is_one() -> None:
    verdicts = {
        one.name: one for one in compare({"a": 0.81, "b": 0.79, "c": 2.0, "d": None}, {"a": 1.0, "b": 1.0, "e": 1.0})
    }
    assert {name for name, one in verdicts.items() if one.lost} == {"b", "e"}
    assert "LOST" in str(verdicts["b"])
    assert "-21%" in str(verdicts["b"])
    assert "nothing accepted" in str(verdicts["c"])
    assert "not measured" in str(verdicts["d"])


def test_the_guard_ends_with_one_after_a_loss(tmp_path: Path) -> None:
    """The real command, of its quickest part."""
    command = [sys.executable, str(ROOT / "benchmarks" / "quick.py"), "--parts", "decode", "--accepted"]
    file, other = tmp_path / "quick.json", {"pull / numpy.take": 0.5}
    file.write_text(json.dumps(other))
    subprocess.run([*command, str(file), "--accept"], check=True, capture_output=True)
    (name,) = set(json.loads(file.read_text())) - {*other}
    file.write_text(json.dumps({name: 1e6}))
    lost = subprocess.run([*command, str(file), "--tries", "1"], check=False, capture_output=True, text=True)
    assert lost.returncode == 1
    assert f"LOST {name}" in lost.stdout
    file.write_text(json.dumps({name: 1e-6}))
    subprocess.run([*command, str(file)], check=True, capture_output=True)


def test_the_machine_is_told() -> None:
    found = results.machine()
    assert found["cores"] >= 1
    assert found["memory_gb"] > 0
    assert found["cpu"]
    assert found["simd"] in ("avx512f", "avx2", "avx", platform.machine())
    assert results.versions()["numpy"] != "none"
    assert re.fullmatch(r"([0-9a-f]{10}\+?)?", results.commit())
