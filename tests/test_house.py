"""The house's own rules: imports run one way, folders and functions stay readable, TensorFlow is loaded late."""

import ast
import graphlib
import re
from collections.abc import Iterator, Sequence
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
    "incarnation",
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


def test_every_folder_has_a_layer() -> None:
    parts = {part_of(file) for file in SOURCES} - {"__init__", "__main__"} - COMMON
    assert parts == LAYERS.keys() - {"_native"}


def test_the_drawing_shows_every_folder() -> None:
    drawing = (ROOT / "docs" / "package.svg").read_text()
    shown = {name for names in re.findall(r'class="t">([^<]+)<', drawing) for name in names.split(", ")}
    assert shown == {folder for folder in LAYERS if (PACKAGE / folder).is_dir()}


@pytest.mark.parametrize(
    "file",
    [f for f in SOURCES if part_of(f) not in ("__init__", "__main__", "cli")],
    ids=lambda f: str(f.relative_to(ROOT)),
)
def test_imports_run_one_way(file: Path) -> None:
    part = part_of(file)
    for name, node in imports(ast.parse(file.read_text())):
        if name.split(".")[0] != "streamtrain" or file in MODEL_FILES:
            continue
        target = name.split(".")[1]
        may = COMMON | {part} | LAYERS.get(part, set())
        assert target in may, f"{file}:{node.lineno} imports {name}"


@pytest.mark.parametrize(
    "file",
    [f for f in SOURCES if part_of(f) not in ("__init__", "__main__", "cli") and f not in NAME_PROGRAMS],
    ids=lambda f: str(f.relative_to(ROOT)),
)
def test_no_string_names_a_module_above(file: Path) -> None:
    may = COMMON | {part_of(file)} | LAYERS.get(part_of(file), set())
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        found = re.fullmatch(r"streamtrain\.(\w+)(\.\w+)*", node.value)
        if found and ((PACKAGE / found[1]).is_dir() or (PACKAGE / f"{found[1]}.py").is_file()):
            assert found[1] in may, f"{file}:{node.lineno} names {node.value}"


@pytest.mark.parametrize("folder", FLOORS)
def test_floors_within_a_folder_are_in_order(folder: str) -> None:
    order = FLOORS[folder]

    def floor(words: Sequence[str]) -> int:
        return order.index(words[0] if words[0] in order or (PACKAGE / folder / words[0]).is_dir() else ITSELF)

    for file in (PACKAGE / folder).rglob("*.py"):
        mine = floor(file.relative_to(PACKAGE / folder).with_suffix("").parts)
        for name, node in imports(ast.parse(file.read_text())):
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
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
                arrows[module] |= names & modules.keys() - {"streamtrain"}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    "folder", sorted({file.parent for file in SOURCES}), ids=lambda folder: str(folder.relative_to(ROOT))
)
def test_a_folder_is_taken_in_at_a_glance(folder: Path) -> None:
    assert len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) <= MOST_MODULES


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_function_is_read_in_one_go(file: Path) -> None:
    functions = [
        n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in functions:
        inner = {line for one in ast.walk(node) if one in functions and one is not node for line in _lines(one)}
        lines = set(_lines(node)) - inner
        assert len(lines) <= MOST_LINES, f"{file}:{node.lineno} {node.name} has {len(lines)} lines of its own"


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    return range(function.body[0].lineno, (function.end_lineno or 0) + 1)


@pytest.mark.parametrize("file", [f for f in SOURCES if f not in MODEL_FILES], ids=lambda f: str(f.relative_to(ROOT)))
def test_tensorflow_is_loaded_inside_functions(file: Path) -> None:
    tree = ast.parse(file.read_text())
    for statement in tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for name, _ in imports(statement):
                assert name.split(".")[0] not in ("tensorflow", "keras"), f"{file}:{statement.lineno}"


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(ROOT)))
def test_only_the_command_line_reads_the_environment(file: Path) -> None:
    # What is forked gets the environment that the parent wants; TensorFlow and XLA are told by theirs.
    is_told = file.name in ("preload.py", "start_tensorflow.py")
    assert is_told or part_of(file) == "cli" or not re.search(r"\b(environb?|getenvb?)\b", file.read_text())


@pytest.mark.parametrize("file", NATIVE, ids=lambda f: f.name)
def test_the_core_knows_no_python(file: Path) -> None:
    binding = file.name.startswith("bind") or file.name == "module.cc"
    included = [line for line in file.read_text().splitlines() if line.startswith("#include")]
    assert binding or not any(word in line for line in included for word in ("nanobind", "Python.h", "bind.h"))


@pytest.mark.parametrize("file", [f for f in NATIVE if f.suffix == ".h"], ids=lambda f: f.name)
def test_headers_open_with_their_contract(file: Path) -> None:
    opening = file.read_text().partition("#pragma once")[0]
    assert opening.startswith("//")
    assert "hread safety" in opening or file.name in ("bind.h", "reason.h")


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "native").glob("*.py")), ids=lambda f: f.name)
def test_native_tests_do_not_load_tensorflow(file: Path) -> None:
    """They run under sanitizers, where TensorFlow would not."""
    for name, node in imports(ast.parse(file.read_text())):
        ours = name.startswith(("tests.oracles", "tests.native", "tests.patience"))
        allowed = ours or not name.startswith(("tensorflow", "keras", "tests"))
        assert allowed, f"{file}:{node.lineno} imports {name}"


def test_public_names_are_listed_and_there() -> None:
    assert all(hasattr(streamtrain, name) for name in streamtrain.__all__)
    public = {name for name, value in vars(streamtrain).items() if not name.startswith("_") and not _is_module(value)}
    assert public == set(streamtrain.__all__)


def _is_module(value: object) -> bool:
    return type(value).__name__ == "module"


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(ROOT)))
def test_nothing_executes_from_data(file: Path) -> None:
    """What could make code of bytes is not there; the operator's own model file alone is executed."""
    tree = ast.parse(file.read_text())
    for name, node in imports(tree):
        banned = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop")
        assert name.split(".")[0] not in banned, f"{file}:{node.lineno} imports {name}"
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}, file
    passed = {one.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for one in node.keywords}
    assert "allow_pickle" not in passed, file
    executed = "exec_module" in {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not executed or file.name == "loader.py", file
