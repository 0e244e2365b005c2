"""`streamtrain demo` as a user runs it: real processes, real flights."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from streamtrain.embedded.valkey import Valkey
from tests import commands
from tests.patience import PATIENCE
from tests.ports import free_ports

FIGURES = {"samples", "samples_per_s", "auc", "freshness_ms_p99", "version"}
DEMO = [*commands.COMMAND, "demo", "--rate", "500"]


def environment(folder: Path) -> dict[str, str]:
    """Of a process whose temporary files are in a folder; what it says elsewhere of settings does not count."""
    return os.environ | {"TMPDIR": str(folder), "STREAMTRAIN_STREAM__URL": "none://", "PYTHONUNBUFFERED": "1"}


def test_ends_by_itself_with_its_figures(tmp_path: Path) -> None:
    (tmp_path / "streamtrain.toml").write_text('stream.url = "none://"\n')
    done = commands.run(
        [*DEMO, "--for", "3", "--log-format", "json"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == FIGURES
    assert figures["samples"] > 0
    assert figures["version"] == 1
    shown = [json.loads(line) for line in done.stderr.splitlines()]
    assert {one["process"] for one in shown} == {"demo"}
    for said in ("promoted version 1", "rolled back", "first prediction"):
        assert any(said in one["message"] for one in shown)
    (log,) = tmp_path.glob("*.log")
    processes = {json.loads(line)["process"] for line in log.read_text().splitlines()}
    assert {"coordinator", "ps0", "worker0", "worker1"} <= processes
    assert {one.suffix for one in tmp_path.iterdir()} == {".toml", ".log"}, "its data is left"


@pytest.mark.skipif(shutil.which("curl") is None, reason="it prints a curl line")
def test_on_a_stream_that_is_given_what_it_prints_works_until_ctrl_c(tmp_path: Path) -> None:
    with Valkey() as server:
        command = [*DEMO, "--set", f"stream.url={server.url}", "--set", "up.workers=1"]
        with commands.start(
            command, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as demo:
            try:
                assert demo.stderr is not None
                curl = next(line for line in demo.stderr if line.startswith("curl "))
                said = commands.run(["bash", "-c", curl], capture_output=True, text=True, timeout=PATIENCE, check=True)
                assert 0 < json.loads(said.stdout)["predictions"][0][0] < 1
                demo.send_signal(signal.SIGINT)
                figures, _ = demo.communicate(timeout=PATIENCE)
            finally:
                demo.kill()
    assert demo.returncode == 0
    assert json.loads(figures.splitlines()[-1]).keys() == FIGURES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "--rate must be above 0 flights per second, not 0"),
        (["--set", "model=mine.py"], "the demo does not take model: run your own models with streamtrain up"),
        (["--set", "worker.batch=3"], "worker.batch"),
        (["--set", "stream.url=kafka://127.0.0.1:1"], "stream.url: "),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    listen = f"serve.listen=127.0.0.1:{free_ports(1)[0]}"  # others may have the default port now
    done = commands.run(
        [*DEMO, "--set", listen, *options],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert not [*tmp_path.iterdir()]
