"""README's notebook block runs as it stands; test_docs.py sees to the rest of it."""

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block, str(README), "exec"), names)
    assert names["learner"].metrics()["label"].auc > 0.9
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()
    assert "[[" in capsys.readouterr().out
