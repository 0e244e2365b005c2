"""The house's own rules: imports run one way, TensorFlow is loaded late, the core knows no Python, files stay small."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamtrain

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "streamtrain"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NATIVE = sorted([*PACKAGE.glob("_native/*.h"), *PACKAGE.glob("_native/*.cc")])

COMMON = {"_core", "errors", "clock", "address", "logs", "redis_client"}
MAY_IMPORT = {
    "errors": set(),
    "clock": {"errors"},
    "address": {"errors"},
    "logs": set(),
    "redis_client": {"errors"},
    "setting_types": COMMON,
    "settings": COMMON | {"setting_types", "settings_learning", "settings_serving"},
    "settings_learning": COMMON | {"setting_types"},
    "settings_serving": COMMON | {"setting_types"},
    "config": COMMON | {"settings", "setting_types"},
    "cluster": COMMON
    | {"learned", "metrics", "model", "ps", "serve", "setting_types", "settings", "store", "stream", "train"},
    "model": COMMON,
    "metrics": COMMON,
    "embedded": COMMON,
    "stream": COMMON | {"metrics", "model"},
    "ps": COMMON | {"model"},
    "store": COMMON,
    "train": COMMON | {"metrics", "model", "ps", "stream"},
    "serve": COMMON | {"metrics", "model", "store"},
    "learned": COMMON | {"model", "ps", "store"},
    "learner": COMMON | {"learned", "model", "ps", "store", "train"},
    "replay": COMMON | {"model", "learner"},
    # Its model is written as a user writes one: on the package itself.
    "demo": COMMON | {"cluster", "ps", "settings", "store", "stream"},
    "__main__": {"cli"},
    "console": COMMON,
    "commands": COMMON
    | {"console", "cluster", "config", "model", "learner", "replay", "demo", "embedded", "store", "stream", "train"},
    "cli": COMMON | {"commands"},
}
MODEL_FILES = {PACKAGE / "demo" / "flights.py"}

# Files over 300 lines, and why each is one piece.
LONG = {
    "index.h": "the probing, growing and deleting of one open-addressing index share its invariants",
}


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    "file", [f for f in SOURCES if part_of(f) != "__init__"], ids=lambda f: str(f.relative_to(ROOT))
)
def test_imports_run_one_way(file: Path) -> None:
    part = part_of(file)
    for name, node in imports(ast.parse(file.read_text())):
        if name.split(".")[0] != "streamtrain" or file in MODEL_FILES:
            continue
        target = name.split(".")[1]
        assert target == part or target in MAY_IMPORT[part], f"{file}:{node.lineno} imports {name}"


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
    assert part_of(file) in ("cli", "commands") or not re.search(r"\b(environb?|getenvb?)\b", file.read_text())


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


@pytest.mark.parametrize("file", [*SOURCES, *NATIVE], ids=lambda f: str(f.relative_to(ROOT)))
def test_a_long_file_has_a_reason(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 300 or file.name in LONG


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "native").glob("*.py")), ids=lambda f: f.name)
def test_native_tests_do_not_load_tensorflow(file: Path) -> None:
    """They run under sanitizers, where TensorFlow would not."""
    for name, node in imports(ast.parse(file.read_text())):
        allowed = not name.startswith(("tensorflow", "keras", "tests")) or name.startswith("tests.oracles")
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
    assert not executed or file.name == "load.py", file
