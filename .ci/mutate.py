"""Mutation testing of the modules that exactness, publishing and the doors rest on: what no test notices is listed.

Usage: python .ci/mutate.py [module …], such as ps/clock.py; without one, all of them. No file is changed: cosmic-ray
says how a module is changed, and each mutant is run in a process of its own, forked when all else is loaded.
"""

import ast
import contextlib
import difflib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
TESTS = {
    "ps/clock.py": ["tests/ps/test_clock.py"],
    "train/intake.py": ["tests/train/test_intake.py"],
    "stream/buffer.py": ["tests/stream/test_buffer.py"],
    "store/checkpoint/manifest.py": ["tests/store/checkpoint/test_manifest.py"],
    "quality/gate.py": ["tests/publish/test_gate.py"],
    "publish/shard_publisher.py": ["tests/publish/test_cluster_publisher.py", "tests/publish/test_shard_publisher.py"],
    "serve/watchdog.py": ["tests/serve/test_watchdog.py"],
    "serve/service/admission.py": ["tests/serve/http/test_overload.py"],
    "serve/service/tokens.py": ["tests/serve/http/test_doors.py"],
}
"""By module the tests nearest to it, so that a mutant costs seconds at most."""

# Loaded once, before the forks, with what of streamtrain and tests does not import the mutant.
HEAVY = ("confluent_kafka", "grpc", "hypothesis", "numpy", "prometheus_client", "pyarrow", "redis")
SERVERS = {"published", "redis_url", "server"}  # fixtures that start a process: tests with them run last
# Most of the former are types, `int | None`, which end the import; the latter need to be told of a variable.
SKIPPED = ("core/ReplaceBinaryOperator_BitOr_", "core/Variable")
LEAST_SECONDS = 20.0  # after which a mutant hangs, which counts as noticed; or four times what the tests take


class Mutant(MetaPathFinder, SourceFileLoader):
    """Imports a module from another source than its file's."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        super().__init__(name, str(path))
        self._source = source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """See MetaPathFinder."""
        return spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        """See SourceLoader; without the cache of bytecode."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


def mutants(source: str) -> Iterator[str]:
    """All changes of one place."""
    for name in operator_names():
        if name.startswith(SKIPPED):
            continue
        occurrence, operator = 0, get_operator(name)()
        while (changed := mutate_code(source, operator, occurrence)) is not None:
            yield changed
            occurrence += 1


class ServersLast:
    """Has the tests that start servers run last: most mutants end before these."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: not SERVERS.isdisjoint(getattr(item, "fixturenames", ())))


def load(tests: Sequence[str], name: str) -> None:
    """Imports all that tests need, but for a module and what imports it."""
    for path in tests:
        importlib.import_module(path.removesuffix(".py").replace("/", "."))
    ours = {one: module for one, module in sys.modules.items() if one.split(".")[0] in ("streamtrain", "tests")}
    imports = {one: imported(module) for one, module in ours.items()}
    changed, before = {name}, 0
    while len(changed) > before:
        before = len(changed)
        changed |= {one for one, others in imports.items() if not changed.isdisjoint(others)}
    for one in changed & ours.keys():
        del sys.modules[one]


def imported(module: ModuleType) -> set[str]:
    """Names of all that a module imports, wherever it does."""
    path, names = getattr(module, "__file__", None), set[str]()
    if path is None or not path.endswith(".py"):
        return names
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
    return names


def notices(tests: Sequence[str], mutant: Mutant, seconds: float) -> bool:
    """Whether a test fails, or hangs, with the mutant."""
    pid = os.fork()
    if pid == 0:
        os.setsid()  # what it starts ends with it
        code = 1
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            sys.meta_path.insert(0, mutant)
            try:
                code = int(
                    pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", *tests], [ServersLast()])
                )
            finally:
                os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (ended := os.waitpid(pid, os.WNOHANG)) != (0, 0):
            return os.waitstatus_to_exitcode(ended[1]) != 0
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def mutate(module: str) -> bool:
    """Tries all mutants of a module, prints those that live, and says whether 90 % do not."""
    path, tests = ROOT / "streamtrain" / module, TESTS[module]
    source, name = path.read_text(), "streamtrain." + module.removesuffix(".py").replace("/", ".")
    load(tests, name)
    began = time.monotonic()
    if notices(tests, Mutant(name, path, source), 600):
        raise SystemExit(f"{' '.join(tests)} fail as it is")
    seconds = max(LEAST_SECONDS, 4 * (time.monotonic() - began))
    tried = killed = 0
    for changed in mutants(source):
        tried += 1
        if notices(tests, Mutant(name, path, changed), seconds):
            killed += 1
        else:
            print("".join(difflib.unified_diff(*(s.splitlines(True) for s in (source, changed)), module, module, n=0)))
    print(f"{module}: {killed} of {tried} mutants are noticed, {killed / tried:.0%}", flush=True)
    return killed >= 0.9 * tried


def main() -> None:
    """Tries the modules that are named, or all; fails if the tests of one notice fewer than nine of ten mutants."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to load plugins takes longer than most of these tests
    for name in HEAVY:
        importlib.import_module(name)
    enough = [mutate(module) for module in sys.argv[1:] or TESTS]
    sys.exit(not all(enough))


if __name__ == "__main__":
    main()
