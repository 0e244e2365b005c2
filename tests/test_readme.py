"""README's notebook block runs as it stands, and the commands that pages name are there."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from streamtrain.cli import app

README = Path(__file__).parent.parent / "README.md"
PAGES = [README, *sorted(README.parent.glob("docs/*.md")), *sorted(README.parent.glob("schemas/*.md"))]


def test_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block, str(README), "exec"), names)
    assert names["learner"].metrics()["label"].auc > 0.9
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()
    assert "[[" in capsys.readouterr().out


def test_files_that_it_names_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / link).exists(), link


def command_lines() -> list[str]:
    """Lines of code blocks, and code within text, that begin with the command."""
    lines = []
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            lines += re.findall(r"^\$? ?(streamtrain .*)$", block, re.MULTILINE)
        lines += re.findall(r"`(streamtrain [a-z][^`\n]*)`", text)
    return sorted(set(lines))


@pytest.mark.parametrize("line", command_lines())
def test_commands_that_pages_name_are_there(line: str) -> None:
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    words = shlex.split(line.replace("…", "x"), comments=True)
    assert words[1] in commands
    options = {name for one in commands[words[1]].params for name in one.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options
