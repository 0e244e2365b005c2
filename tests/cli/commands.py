"""The command line as a user runs it, against a published model."""

import json
import subprocess
from typing import Any

from tests import commands
from tests.store.published import Published


class Commands:
    """Commands about one model, each a process of its own.

    Args:
        url: of Redis.
        model: its name there.
    """

    def __init__(self, url: str, model: str) -> None:
        self._options = [f"publish.url={url}", f"publish.model={model}"]

    @classmethod
    def of(cls, published: Published) -> "Commands":
        return cls(published.url, published.model.keys.model)

    def run(self, *arguments: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        options = [part for one in (*self._options, *settings) for part in ("--set", one)]
        command = [*commands.COMMAND, *arguments, *options]
        return commands.run(command, capture_output=True, text=True, check=False, timeout=300)

    def told(self, *arguments: str, settings: tuple[str, ...] = ()) -> str:
        """What a command that succeeds prints."""
        done = self.run(*arguments, settings=settings)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *arguments: str, settings: tuple[str, ...] = ()) -> dict[str, Any]:
        """The same, as JSON."""
        (line,) = self.told(*arguments, "--json", settings=settings).splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    def refused(self, *arguments: str, settings: tuple[str, ...] = ()) -> str:
        """The one line that a command prints which fails."""
        done = self.run(*arguments, settings=settings)
        assert done.returncode in (1, 2)
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line.removeprefix("streamtrain: ")
