"""The house's own rules: imports run one way, folders and functions stay readable, TensorFlow is loaded late."""

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import streamtrain

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "streamtrain"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NATIVE = sorted([*PACKAGE.glob("_native/*.h"), *PACKAGE.glob("_native/*.cc")])

COMMON = {
    "_core",
    "errors",
    "shutdown",
    "address",
    "durations",
    "logs",
    "periodic",
    "child_process",
    "redis_client",
    "memory",
    "disk",
    "incarnation",
    "python_source",
}
# What executes programs names them, and what they import, by strings.
NAME_PROGRAMS = {PACKAGE / "service" / "preload.py", PACKAGE / "service" / "programs.py"}
ITSELF = "…"  # in an order of floors: the modules of the folder itself
MOST_MODULES = 15  # of a folder that one still takes in at a glance
MOST_LINES = 60  # of a function
MODEL_FILES = {PACKAGE / "demo" / "flights.py"}


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tables() -> list[list[str]]:
    """The rows of the tables of layers and of floors in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("## Layers of the package")[2].partition("## ")[0]
    return [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]


def names(text: str) -> list[str]:
    return re.findall(rf"`(\w+|{ITSELF})`", text)


LAYERS = {name: set(names(row[2])) for row in tables() if len(row) == 3 for name in names(row[0])}
FLOORS = {name: names(row[1]) for row in tables() if len(row) == 2 for name in names(row[0])}
LAYERED = [file for file in SOURCES if part_of(file) not in ("__init__", "__main__", "cli")]


def may(file: Path) -> set[str]:
    """What a module may import."""
    return COMMON | {part_of(file)} | LAYERS.get(part_of(file), set())


def test_every_folder_has_a_layer() -> None:
    parts = {part_of(file) for file in SOURCES} - {"__init__", "__main__"} - COMMON
    assert parts == LAYERS.keys() - {"_native"}


def test_the_drawing_shows_every_folder() -> None:
    drawing = (ROOT / "docs" / "package.svg").read_text()
    shown = {name for names in re.findall(r'class="t">([^<]+)<', drawing) for name in names.split(", ")}
    assert shown == {folder for folder in LAYERS if (PACKAGE / folder).is_dir()}


def test_imports_run_one_way() -> None:
    assert not [
        f"{file}:{node.lineno} imports {name}"
        for file in LAYERED
        for name, node in imports(tree_of(file))
        if name.split(".")[0] == "streamtrain" and file not in MODEL_FILES and name.split(".")[1] not in may(file)
    ]


def test_no_string_names_a_module_above() -> None:
    for file in LAYERED:
        for node in ast.walk(tree_of(file)) if file not in NAME_PROGRAMS else ():
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            found = re.fullmatch(r"streamtrain\.(\w+)(\.\w+)*", node.value)
            if found and ((PACKAGE / found[1]).is_dir() or (PACKAGE / f"{found[1]}.py").is_file()):
                assert found[1] in may(file), f"{file}:{node.lineno} names {node.value}"


@pytest.mark.parametrize("folder", FLOORS)
def test_floors_within_a_folder_are_in_order(folder: str) -> None:
    order = FLOORS[folder]

    def floor(words: Sequence[str]) -> int:
        return order.index(words[0] if words[0] in order or (PACKAGE / folder / words[0]).is_dir() else ITSELF)

    for file in (PACKAGE / folder).rglob("*.py"):
        mine = floor(file.relative_to(PACKAGE / folder).with_suffix("").parts)
        for name, node in imports(tree_of(file)):
            words = name.split(".")
            if words[:2] == ["streamtrain", folder] and len(words) > 2:
                assert floor(words[2:]) <= mine, f"{file}:{node.lineno} imports {name}"


def test_folders_with_folders_have_an_order() -> None:
    with_folders = {f.parent.parent for f in SOURCES if len(f.relative_to(PACKAGE).parts) > 2} - {PACKAGE}
    assert {folder.name for folder in with_folders} == FLOORS.keys()


def test_modules_do_not_import_each_other_in_circles() -> None:
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in SOURCES}
    arrows: dict[str, set[str]] = {}
    for module, file in modules.items():
        arrows[module] = set()
        for node in tree_of(file).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
                arrows[module] |= names & modules.keys() - {"streamtrain"}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_folder_is_taken_in_at_a_glance() -> None:
    modules = Counter(file.parent for file in SOURCES if file.name != "__init__.py")
    assert not {folder: count for folder, count in modules.items() if count > MOST_MODULES}


def test_a_function_is_read_in_one_go() -> None:
    for file in SOURCES:
        functions = [n for n in ast.walk(tree_of(file)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in functions:
            inner = {line for one in ast.walk(node) if one in functions and one is not node for line in _lines(one)}
            lines = set(_lines(node)) - inner
            assert len(lines) <= MOST_LINES, f"{file}:{node.lineno} {node.name} has {len(lines)} lines of its own"


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    return range(function.body[0].lineno, (function.end_lineno or 0) + 1)


def test_tensorflow_is_loaded_inside_functions() -> None:
    for file in SOURCES:
        for statement in tree_of(file).body if file not in MODEL_FILES else ():
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for name, _ in imports(statement):
                    assert name.split(".")[0] not in ("tensorflow", "keras"), f"{file}:{statement.lineno}"


def test_only_the_command_line_reads_the_environment() -> None:
    # What is forked gets the environment that the parent wants; TensorFlow and XLA are told by theirs.
    told = ("preload.py", "start_tensorflow.py")
    reading = [file for file in SOURCES if re.search(r"\b(environb?|getenvb?)\b", file.read_text())]
    assert not [file for file in reading if part_of(file) != "cli" and file.name not in told]


def test_the_core_knows_no_python() -> None:
    for file in NATIVE:
        if not file.name.startswith("bind") and file.name != "module.cc":
            included = [line for line in file.read_text().splitlines() if line.startswith("#include")]
            assert not any(word in line for line in included for word in ("nanobind", "Python.h", "bind.h")), file


def test_headers_open_with_their_contract() -> None:
    for file in NATIVE:
        opening = file.read_text().partition("#pragma once")[0]
        said = opening.startswith("//") and ("hread safety" in opening or file.name in ("bind.h", "reason.h"))
        assert said or file.suffix != ".h", file


def test_native_tests_do_not_load_tensorflow() -> None:
    """They run under sanitizers, where TensorFlow would not."""
    for file in (ROOT / "tests" / "native").glob("*.py"):
        for name, node in imports(tree_of(file)):
            ours = name.startswith(("tests.oracles", "tests.native", "tests.patience"))
            allowed = ours or not name.startswith(("tensorflow", "keras", "tests"))
            assert allowed, f"{file}:{node.lineno} imports {name}"


def test_public_names_are_listed_and_there() -> None:
    assert all(hasattr(streamtrain, name) for name in streamtrain.__all__)
    public = {name for name, value in vars(streamtrain).items() if not name.startswith("_") and not _is_module(value)}
    assert public == set(streamtrain.__all__)


def _is_module(value: object) -> bool:
    return type(value).__name__ == "module"


def test_nothing_executes_from_data() -> None:
    """What could make code of bytes is not there; the operator's own model file alone is executed."""
    banned = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop")
    for file in SOURCES:
        tree = tree_of(file)
        for name, node in imports(tree):
            assert name.split(".")[0] not in banned, f"{file}:{node.lineno} imports {name}"
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
        assert not called & {"eval", "exec", "compile", "__import__"}, file
        assert "allow_pickle" not in {one.arg for node in calls for one in node.keywords}, file
        executed = "exec_module" in {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not executed or file.name == "loader.py", file
