"""The command line in the test's own process, which is quicker than one of its own for every command."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from streamtrain.cli import main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["streamtrain", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def told(*arguments: str) -> dict[str, Any]:
    """What a command that succeeds prints as JSON."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def refused(*arguments: str, code: int = 1) -> str:
    """The line that a command ends with which fails."""
    done = run(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    # Servers and workers of the same process, which a test may have, log there too.
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith(("INFO ", "WARNING "))]
    return line.removeprefix("streamtrain: ")
