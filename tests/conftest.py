"""What all tests share: which build of the native core they run on, and how hard hypothesis tries."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before TensorFlow is imported, which reads it once. TensorFlow greets with lines about instruction sets.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

SLOW_MACHINE = [HealthCheck.too_slow]  # machines are shared: how fast examples come says nothing about the code
settings.register_profile("default", max_examples=50, deadline=None, suppress_health_check=SLOW_MACHINE)
settings.register_profile("ci", max_examples=200, deadline=None, suppress_health_check=SLOW_MACHINE, print_blob=True)
settings.register_profile("sanitize", max_examples=15, deadline=None, suppress_health_check=SLOW_MACHINE)
settings.load_profile("ci" if os.environ.get("CI") else "default")


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
