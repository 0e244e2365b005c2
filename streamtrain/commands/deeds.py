"""Deeds: what commands that change versions share: by whom and why it is done, and how it is told."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import typer

from streamtrain.commands.options import Config, Json, Setting, Who, Why, read_settings, who_of
from streamtrain.console import print_json

if TYPE_CHECKING:
    from streamtrain.config import Settings


@dataclass(frozen=True)
class Deed:
    """What a command is asked to do to versions.

    Attributes:
        settings: of the cluster.
        who: does it.
        why: for the history.
        json: whether it is told as a line of JSON.
    """

    settings: "Settings"
    who: str
    why: str
    json: bool

    def tell(self, found: dict[str, object], text: str) -> None:
        """Says what has been done: as JSON, or as a sentence."""
        if self.json:
            print_json(found)
        else:
            typer.echo(text)


def deed(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command of a function that is given a Deed, then its own parameters: it takes the deed's options, too."""

    @wraps(command, assigned=("__module__", "__name__", "__qualname__", "__doc__"))  # annotations are its own
    def run(
        *,
        why: Why = "",
        who: Who = None,
        json: Json = False,
        config: Config = None,
        setting: Setting = None,
        **given: Any,
    ) -> None:
        command(Deed(read_settings(config, setting, {}), who_of(who), why, json), **given)

    _, *own = inspect.signature(command).parameters.values()
    shared = [one for one in inspect.signature(run, follow_wrapped=False).parameters.values() if one.name != "given"]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *shared)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run
