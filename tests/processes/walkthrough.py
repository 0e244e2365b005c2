"""Walks through a page of the documentation in a temporary folder: its files, programs and commands, in their order.

Whatever a page has in a block of `sh` is run, so that a new command is tested as soon as it is written. What cannot be
run as it stands is in SKIPPED, with the reason.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests import commands
from tests.patience import PATIENCE, until

ROOT = Path(__file__).parents[2]
SKIPPED = {
    "make ": "builds an environment, or needs the network",
    ". .venv/bin/activate": "the test's environment is active",
    ". venv/bin/activate": "the test's environment is active",
    "python3 -m venv": "the test's environment is active",
    "python -m venv": "the test's environment is active",
    "pip install": "needs the network",
    "uv pip install": "needs the network",
    "apt install": "needs the network, and root",
    "streamtrain demo": "runs until Ctrl-C; tests/test_demo.py runs it",
}
_STEP = re.compile(
    r"(?:`(?P<name>[\w.-]+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$"
    r"|it\s+says\s+`(?P<says>[^`]+)`|(?P<stop>Press Ctrl-C to stop the service)",
    re.DOTALL | re.MULTILINE,
)


_SHELL = re.compile(r"[|&;<>()$`*?~#\\]")


def _words(command: str) -> list[str] | None:
    """Of a command of streamtrain that needs no shell; None: it does."""
    if not command.startswith("streamtrain ") or _SHELL.search(command):
        return None
    return [*commands.COMMAND, *shlex.split(command)[1:]]


class Step(NamedTuple):
    """Something that a page has its reader do.

    Attributes:
        kind: "file": write it; "python": run it; "sh": run the command; "start": run it in another terminal;
            "wait": until what runs there says `text`; "stop": Ctrl-C there.
        text: of the file, program, command or output.
        name: of the file.
    """

    kind: str
    text: str
    name: str = ""


def steps(page: Path) -> Iterator[Step]:
    """The steps of a page, in their order."""
    for found in _STEP.finditer(page.read_text()):
        name, language, text, says, stop = found.group("name", "language", "text", "says", "stop")
        if says or stop:
            yield Step("wait", says) if says else Step("stop", "")
        elif name and "." in name:
            yield Step("file", text, name)
        elif language == "python":
            yield Step("python", text)
        elif language in ("sh", "bash", "console"):
            for line in text.splitlines():
                command, _, comment = line.partition("  #")
                kind = "start" if "keeps running" in comment or command.rstrip().endswith("&") else "sh"
                if command.strip() and not command.startswith(tuple(SKIPPED)):
                    yield Step(kind, command.strip().removesuffix("&").strip())


class Terminal:
    """Does the steps of pages in a folder, with settings of the environment in place of a page's addresses.

    Attributes:
        environment: of all commands.
        replaced: texts of commands and what stands in their place.
        instead: by command what is done instead.
        said: commands and programs with what they said, in their order.
    """

    def __init__(self, folder: Path, environment: dict[str, str], stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.environment = os.environ | environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.environment.pop("XLA_FLAGS", None)  # of tests: a reader's graphs are compiled with optimization
        self.replaced: dict[str, str] = {}
        self.instead: dict[str, Callable[[], object]] = {}
        self.said: list[tuple[str, str]] = []
        self._background: list[subprocess.Popen[bytes]] = []
        self._started = 0

    def walk(self, page: Path) -> None:
        """Does all steps of a page; everything must succeed."""
        for step in steps(page):
            text = step.text
            for old, new in self.replaced.items():
                text = text.replace(old, new) if step.kind != "file" else text
            if step.kind == "file":
                (self.folder / step.name).write_text(text)
            elif step.text in self.instead:
                self.instead[step.text]()
            elif step.kind == "python":
                (self.folder / "program.py").write_text(text)
                self.said.append(("program.py", self.run("python program.py")))
            elif step.kind == "start":
                self._start(text)
            elif step.kind == "wait":
                self._wait(text)
            elif step.kind == "stop":
                assert self.stop(signal.SIGINT) == [0], self.logs()
            else:
                self.said.append((step.text, self._answer(text) if text.startswith("curl") else self.run(text)))

    def _wait(self, text: str) -> None:
        until(lambda: text in self.logs(), PATIENCE)

    def of(self, start: str) -> list[str]:
        """What the commands that begin like this said."""
        return [said for command, said in self.said if command.startswith(start)]

    def run(self, command: str) -> str:
        done = commands.run(
            _words(command) or ["bash", "-o", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}\n{self.logs()}"
        return str(done.stdout)

    def _answer(self, command: str) -> str:
        """What a curl says once it is no refusal: on a slow machine, 5 seconds for an offset may be too few."""
        said = ""

        def is_one() -> bool:
            nonlocal said
            said = self.run(command)
            return '{"error"' not in said

        until(is_one, PATIENCE)
        return said

    def _start(self, command: str) -> None:
        self._started += 1
        with (self.folder / f"{self._started}.log").open("wb") as log:
            process = commands.start(
                # `up` is executed, as its reader does it: it starts all others.
                (_words(command) if "streamtrain up" not in command else None) or ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._background.append(process)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> list[int]:
        """Ends what runs in other terminals, as Ctrl-C or the page's `kill` does; the exit codes."""
        for one in self._background:
            one.send_signal(number)
        codes = [one.wait(PATIENCE) for one in self._background]
        self._background.clear()
        return codes

    def logs(self) -> str:
        return "\n".join(log.read_text()[-6000:] for log in sorted(self.folder.glob("*.log")))
