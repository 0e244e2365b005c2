"""The table of docs/configuration.md, made of the descriptions below the settings; as a program, writes it there."""

import ast
import inspect
import json
from pathlib import Path
from typing import Any

from streamtrain.settings import groups
from streamtrain.settings.groups import GROUPS, Settings
from streamtrain.settings.types import SettingsGroup

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = "| key | default | meaning |\n|---|---|---|\n"
UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}


def table() -> str:
    """Rows of all settings, in the order of the code."""
    rows = []
    for name in Settings.model_fields:
        prefix, of = (f"{name}.", getattr(Settings(), name)) if name in GROUPS else ("", Settings())
        described = descriptions(type(of))
        for field in type(of).model_fields if prefix else [name]:
            default = as_toml(getattr(of, field), type(of).__annotations__[field])
            cells = f"`{prefix}{field}`", default and f"`{default}`", described[field].replace("|", "\\|")
            rows.append(f"| {' | '.join(cells)} |\n".replace("|  |", "| |"))
    return "".join(rows)


def descriptions(group: type[SettingsGroup]) -> dict[str, str]:
    """Text below each field of a group."""
    (of,) = (one for one in ast.parse(inspect.getsource(groups)).body if getattr(one, "name", "") == group.__name__)
    assert isinstance(of, ast.ClassDef)
    found = {}
    for field, text in zip(of.body, of.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                found[name] = " ".join(said.split())
    return found


def as_toml(value: Any, annotation: Any) -> str:
    """A default as it would be written; "": none."""
    if value is None:
        return ""
    if "_seconds" in repr(annotation) and value:
        unit, seconds = next((unit, seconds) for unit, seconds in UNITS.items() if value >= seconds)
        return f'"{value / seconds:g}{unit}"'
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:_}"
    return json.dumps({} if isinstance(value, SettingsGroup) else value)


def written() -> str:
    """The page with this table."""
    before, _, rest = PAGE.read_text().partition(HEAD)
    return before + HEAD + table() + "\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(written())
