"""The documentation says nothing that is not there: links, tests, commands, settings, metrics, files and routes."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from streamtrain.cli import app
from streamtrain.settings.groups import GROUPS, KEYS
from streamtrain.settings.load import load_settings
from tests.metrics_page import on_the_page

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name / "README.md" for name in ("examples", "schemas")),
    ]
)
METRICS = {one.name for one in on_the_page()}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page that are in one of some languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """What stands between backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


@cache
def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_python_imports_what_is_there(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "streamtrain":
                module = importlib.import_module(node.module)
                assert not [one.name for one in node.names if not hasattr(module, one.name)], (page.name, node.module)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target.resolve()), f"{page.name}: {link}"


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert re.search(rf"^ *(def|class) {name}\b|^{name} = ", (ROOT / file).read_text(), re.MULTILINE), (
            f"{page.name}: {file}::{name}"
        )


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    for name in spans(page):
        if re.fullmatch(r"(streamtrain|services|schemas|tests|benchmarks|examples|docs)/[\w./]+", name):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every `streamtrain …` of a page, without the first."""
    lines = [line for block in blocks(page, "sh", "bash") for line in block.splitlines()] + spans(page)
    for line in lines:
        for command in re.split(r"[|;&]+", line.partition(" #")[0]):
            words = command.split()
            if words and re.fullmatch(r"(.*/)?streamtrain", words[0]) and len(words) > 1:
                yield words[1:]


@each_page
def test_commands_and_their_options_exist(page: Path) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name, *words in commands(page):
        if name.startswith(("-", "…")):
            continue
        assert name in group.commands, f"{page.name}: streamtrain {name}"
        command = group.commands[name]
        if isinstance(command, TyperGroup) and words:
            assert words[0] in command.commands, f"{page.name}: streamtrain {name} {words[0]}"
            command = command.commands[words[0]]
        options = {option for one in command.params for option in one.opts} | {"--help"}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options, f"{page.name}: streamtrain {name} {given - options}"


@each_page
def test_targets_of_make_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE), ".venv/ready"}
    variables = {f"{name}=" for name in re.findall(r"^([A-Z_]+) \??:?=", makefile, re.MULTILINE)}
    lines = [line.partition("#")[0] for block in blocks(page, "sh", "bash") for line in block.splitlines()]
    for line in [*lines, *spans(page)]:
        if line.split()[:1] == ["make"]:
            given = {re.sub("(?<==).*", "", word) for word in shlex.split(line)[1:] if word != "&"}
            assert given <= targets | variables, f"{page.name}: {line}"


@each_page
def test_settings_that_are_named_exist(page: Path) -> None:
    for name in spans(page):
        if re.fullmatch(r"[a-z]+\.[a-z_]+", name) and name.partition(".")[0] in GROUPS:
            assert name in KEYS or name.endswith((".py", ".proto")), f"{page.name}: {name}"


@each_page
def test_settings_files_can_be_read(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "toml"):
        file = tmp_path / "streamtrain.toml"
        file.write_text(text)
        load_settings(file)


@each_page
def test_metrics_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"\bstreamtrain_(?:worker|shard|coordinator|serving|build)_\w+", page.read_text()):
        assert re.sub(r"_(bucket|count|sum)$", "", name) in METRICS or name in METRICS, f"{page.name}: {name}"


@each_page
def test_python_can_be_read(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


def test_routes_are_those_of_the_application() -> None:
    from streamtrain.serve.http.app import make_app
    from streamtrain.serve.registry import Registry
    from tests.serve.published import counted, origin_of  # which loads TensorFlow; the other tests here do without

    model = counted()
    served = make_app(Registry(model, origin_of(model))).openapi()["paths"]
    there = {(method.upper(), path) for path, methods in served.items() for method in methods}
    rows = re.findall(r"^\| `(GET|POST) (/[^`]*)` \|", (ROOT / "docs" / "http.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(there)
