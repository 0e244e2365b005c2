"""The command line: `streamtrain …`. Only it and services/ read the environment."""

import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from streamtrain import __version__
from streamtrain.cli.bench import bench, size
from streamtrain.cli.checkpoint import checkpoint, evolve, fork, plan, restore
from streamtrain.cli.compare import compare
from streamtrain.cli.learn import graph, learn
from streamtrain.cli.options import Command
from streamtrain.cli.publish import export, publish
from streamtrain.cli.ray import ray
from streamtrain.cli.run import coordinator, join, ps, serve, worker
from streamtrain.cli.status import forget, set_, status
from streamtrain.cli.stream import deadletters, produce
from streamtrain.cli.terminal import output_failed
from streamtrain.cli.tune import tune
from streamtrain.cli.up import demo, drain, scale, up
from streamtrain.cli.verify import verify
from streamtrain.cli.versions import drop, label, promote, rollback, traffic, versions
from streamtrain.errors import ConfigError, OriginUnavailable, SourceUnavailable, StreamtrainError
from streamtrain.logs import fail, set_up_logs
from streamtrain.memory import exit_at_once

# What people call a command that has another name here.
_SYNONYMS = {"train": "learn FILE or worker", "fit": "learn FILE", "predict": "serve", "consume": "worker", "run": "up"}
_ENDINGS: dict[type[StreamtrainError], str] = {
    SourceUnavailable: "; check stream.url (or --url), and that its server is running",
    OriginUnavailable: "; check publish.url, and that its Redis is running",
}


class _Commands(TyperGroup):
    """Commands, of which the nearest is named where one does not exist."""

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        command = super().get_command(ctx, cmd_name)
        if command is None and not ctx.resilient_parsing:
            near = get_close_matches(cmd_name, [*self.list_commands(ctx), *_SYNONYMS], 1)
            meant = f"; did you mean {_SYNONYMS.get(near[0], near[0])}?" if near else ";"
            raise ConfigError(f"there is no command {cmd_name!r}{meant} `streamtrain --help` lists all commands")
        return command


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

EXIT_CONFIG = 2
EXIT_FAILED = 1

_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "In one process": (learn, tune, bench, size, graph),
    "The whole service": (demo, up, scale, drain),
    "Cluster": (ps, worker, coordinator, join, serve, produce, status, forget),
    "Checkpoints": (checkpoint, restore, plan, evolve, fork),
    "Versions": (publish, versions, promote, rollback, label, traffic, compare, export, verify, drop),
}


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"streamtrain {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Real-time learning for recommenders, ads and search."""


for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=panel)(command)
app.command("set", cls=Command, rich_help_panel="Cluster")(set_)
app.add_typer(ray, name="ray", rich_help_panel="The whole service")
app.add_typer(deadletters, name="deadletters", rich_help_panel="Cluster")


def main() -> None:
    """Entry point. Errors of streamtrain are printed as one line; the exit code is 2 (configuration) or 1 (others)."""
    exit_at_once()
    set_up_logs(level="warning")
    try:
        app()
    except StreamtrainError as exc:
        ending = next((text for kind, text in _ENDINGS.items() if isinstance(exc, kind)), "")
        fail(f"{exc}".rstrip(".") + ending if ending else str(exc))
        sys.exit(EXIT_CONFIG if isinstance(exc, ConfigError) else EXIT_FAILED)
    except OSError as exc:
        if not output_failed():
            raise
        fail(f"standard output cannot be written: {exc.strerror}")
        sys.exit(EXIT_FAILED)
