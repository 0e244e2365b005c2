"""What all tests share: which build of the native core they run on, and how hard hypothesis tries."""

import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before TensorFlow is imported, which reads them once. It greets with lines about instruction sets, and what XLA has
# compiled is shared by all processes of all tests, as each would take some seconds for the same graphs.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
_compiled = None if "TF_XLA_FLAGS" in os.environ else tempfile.mkdtemp(prefix="streamtrain-tests-")
if _compiled is not None:
    os.environ["TF_XLA_FLAGS"] = f"--tf_xla_persistent_cache_directory={_compiled}"

SLOW_MACHINE = [HealthCheck.too_slow]  # machines are shared: how fast examples come says nothing about the code
settings.register_profile(
    "default", max_examples=50, deadline=None, suppress_health_check=SLOW_MACHINE, print_blob=True
)
settings.register_profile("sanitize", max_examples=8, deadline=None, suppress_health_check=SLOW_MACHINE)
settings.load_profile("default")

LONGEST = (
    "tests/processes/test_walkthroughs.py",
    "tests/chaos/test_chaos.py",
    "tests/train/test_micro.py",
    "tests/processes/test_local.py",
    "tests/processes/test_fork.py",
    "tests/stream/test_contract_groups.py",
    "tests/fuzz/test_fuzz.py",
    "tests/processes/test_secrets.py",
    "tests/processes/test_comparison.py",
    "tests/cluster/test_backups.py",
    "tests/tuning/test_tune.py",
    "tests/cli/test_verify.py",
    "tests/chaos/test_killing.py",
    "tests/processes/test_closed_loop.py",
    "tests/test_demo.py",
    "tests/cli/test_produce.py",
    "tests/compose/test_processes.py",
    "tests/test_malice.py",
    "tests/serve/test_traffic.py",
    "tests/cli/test_cli.py",
    "tests/checkpoint/test_shard_state.py",
    "tests/stream/formats/test_hostile.py",
    "tests/processes/test_whole_path.py",
    "tests/processes/test_worker.py",
    "tests/stream/kafka/test_away.py",
    "tests/test_learner.py",
    "tests/native/test_table.py",
    "tests/stream/formats/test_registry.py",
)
"""Files that take longest: they run first, so that no process is left alone with one of them in the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns = {path: turn for turn, path in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.location[0], len(turns)))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """What a test sets of logging ends with it: the log of a test must not depend on which ran before it."""
    before = {logger.name: (logger.level, logger.disabled, logger.propagate) for logger in _loggers()}
    everywhere = logging.root.manager.disable
    yield
    if logging.root.manager.disable != everywhere:
        logging.disable(everywhere)
    for logger in _loggers():
        level, logger.disabled, logger.propagate = before.get(logger.name, (logging.NOTSET, False, True))
        if logger.level != level:
            logger.setLevel(level)
    if (logs := sys.modules.get("streamtrain.logs")) is not None:
        for handler in logs._handlers:
            logging.root.removeHandler(handler)
        logs._handlers.clear()


def _loggers() -> list[logging.Logger]:
    """The root's and ours."""
    ours = [one for name, one in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "streamtrain"]
    return [logging.root, *(one for one in ours if isinstance(one, logging.Logger))]


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory that is not there yet, on a disk and elsewhere."""
    return f"{'memory://' if request.param == 'memory' else ''}{tmp_path}/place"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", metavar="PATH", help="another build of the native core to test, such as one with ASan")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--core")
    if path is not None:
        use_core(Path(path))


def pytest_unconfigure() -> None:
    if _compiled is not None:  # in the first process: those of xdist have its environment
        shutil.rmtree(_compiled, ignore_errors=True)


def use_core(path: Path) -> None:
    """Make `path` the module streamtrain._core. Nothing may have imported streamtrain before."""
    if "streamtrain" in sys.modules:
        raise pytest.UsageError("--core comes too late: streamtrain is imported already")
    spec = importlib.util.spec_from_file_location("streamtrain._core", path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise pytest.UsageError(f"--core: {path} is no extension module")
    core = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = core
    spec.loader.exec_module(core)

    import streamtrain

    streamtrain._core = core


def pytest_report_header(config: pytest.Config) -> str:
    core = sys.modules.get("streamtrain._core")
    return f"core: {config.getoption('--core') or 'as installed'}" + (f" ({core.__file__})" if core else "")
