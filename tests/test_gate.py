"""What `.ci/pytest` makes of tests that fail once, and of processes of tests that crash."""

import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
FINE = "def test_fine(): pass"


def first(then: str) -> str:
    """A test that does this the first time that it runs."""
    return f"""
        import os
        from pathlib import Path
        def test_first():
            seen = Path("seen")
            if not seen.exists():
                seen.touch()
                {then}
    """


@pytest.mark.parametrize(
    ("files", "code", "told"),
    [
        ({"test_fine": FINE}, 0, []),
        ({"test_fine": FINE, "test_first": first("assert False")}, 0, ["flaky: failed among all tests, passed by"]),
        (
            {"test_aborts": first("os.abort()"), "test_fine": FINE, "test_more": FINE},
            0,
            ["flaky: a process crashed or hung", "3 passed"],
        ),
        ({"test_aborts": "import os\ndef test_aborts(): os.abort()", "test_fine": FINE}, 1, ["crashed or hung again"]),
        ({"test_fails": "def test_fails(): assert False", "test_fine": FINE}, 1, ["tried once more by themselves"]),
        (
            {f"test_{number}": "def test_fails(): assert False" for number in range(6)},
            1,
            ["6 tests failed, and at most 5 are tried once more"],
        ),
    ],
    ids=["all pass", "one fails once", "one crashes once", "one crashes", "one fails", "many fail"],
)
def test_what_runs_again(tmp_path: Path, files: dict[str, str], code: int, told: list[str]) -> None:
    for name in (".ci/pytest", "tests/conftest.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, content in files.items():
        (tmp_path / f"tests/{name}.py").write_text(dedent(content))
    command = [str(tmp_path / ".ci/pytest"), str(Path(sys.executable).parent), "--numprocesses=1", "--dist=loadfile"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    for line in told:
        assert line in done.stdout, done.stdout
