"""The command line: `streamtrain …`. It, its commands and services/ alone read the environment."""

import sys
from collections.abc import Callable

import typer

from streamtrain.commands.benching import bench
from streamtrain.commands.demonstrating import demo
from streamtrain.commands.exporting import export
from streamtrain.commands.learning import learn
from streamtrain.commands.processes import coordinator, ps, serve, worker
from streamtrain.commands.producing import produce
from streamtrain.commands.publishing import publish
from streamtrain.commands.saving import checkpoint, restore
from streamtrain.commands.verifying import verify
from streamtrain.commands.versions import label, promote, rollback, versions
from streamtrain.commands.watching import status
from streamtrain.commands.whole import up
from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.logs import fail, set_up_logs

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

EXIT_CONFIG = 2
EXIT_FAILED = 1

_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "In one process": (learn, bench),
    "The whole service": (demo, up),
    "Of a cluster": (ps, worker, coordinator, serve, produce, status),
    "Checkpoints": (checkpoint, restore),
    "Versions": (publish, versions, promote, rollback, label, export, verify),
}


@app.callback()
def root() -> None:
    """Real-time learning for recommenders, ads and search."""


for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


def main() -> None:
    """Entry point. Errors of streamtrain are one line and exit code 2 (configuration) or 1 (anything else)."""
    set_up_logs(level="warning")
    try:
        app()
    except StreamtrainError as exc:
        fail(str(exc))
        sys.exit(EXIT_CONFIG if isinstance(exc, ConfigError) else EXIT_FAILED)
