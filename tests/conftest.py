"""What all tests share: which build of the native core they run on, and how hard hypothesis tries."""

import atexit
import gc
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

gc.disable()  # until all tests are collected, see there
atexit.register(gc.freeze)
# Models of tests import what is beside them; and what has the same environment is forked from the same process.
os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent))
# Before TensorFlow is imported, which reads them once. It greets with lines about instruction sets; and what XLA has
# compiled is shared by all processes of all tests.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# XLA compiles a graph in half of the time if it need not be fast; `XLA_FLAGS= make test` has it as users have it. It
# ends a process that names a flag it does not know, and they come and go with releases.
with suppress(PackageNotFoundError):  # tests of the core alone need no TensorFlow
    if version("tensorflow").startswith("2.21."):
        os.environ.setdefault(
            "XLA_FLAGS",
            "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
            "--xla_cpu_parallel_codegen_split_count=1",
        )
_compiled = None if "TF_XLA_FLAGS" in os.environ else tempfile.mkdtemp(prefix="streamtrain-tests-")
if _compiled is not None:
    os.environ["TF_XLA_FLAGS"] = f"--tf_xla_persistent_cache_directory={_compiled}"

SLOW_MACHINE = [HealthCheck.too_slow]  # machines are shared: how fast examples come says nothing about the code
settings.register_profile(
    "default", max_examples=50, deadline=None, suppress_health_check=SLOW_MACHINE, print_blob=True
)
settings.register_profile("sanitize", max_examples=8, deadline=None, suppress_health_check=SLOW_MACHINE)
settings.load_profile("default")

ALONE = {
    "tests/cluster/test_backups.py",
    "tests/processes/test_fork.py",
    "tests/processes/test_local.py",
    "tests/processes/test_secrets.py",
    "tests/processes/test_walkthroughs.py",
    "tests/test_demo.py",
    "tests/tuning/test_tune.py",
}
"""Files whose tests share nothing: processes take them one by one."""

LONGEST = (
    "tests/train/test_micro.py",
    "tests/stream/test_contract_groups.py",
    "tests/cli/test_verify.py",
    "tests/processes/test_walkthroughs.py::test_readme",
    "tests/chaos/test_chaos.py",
    "tests/join/test_standstill.py",
    "tests/processes/test_ray.py",
    "tests/processes/test_local.py::test_all_is_learned_exactly_whoever_is_killed_and_the_next_one_goes_on",
    "tests/stream/kafka/test_away.py",
    "tests/console/test_page.py",
    "tests/stream/test_two_copies.py",
    "tests/compose/test_processes.py",
    "tests/cli/test_produce.py",
    "tests/console/test_states.py",
    "tests/stream/test_contract.py",
    "tests/embedded/test_kafka.py",
    "tests/processes/test_walkthroughs.py::test_getting_started",
    "tests/stream/formats/test_hostile.py",
    "tests/chaos/test_killing.py",
    "tests/serve/test_traffic.py",
    "tests/processes/test_fork.py::test_parent_and_forks_count_exactly_whoever_is_killed",
    "tests/stream/test_topic_made_anew.py",
    "tests/processes/test_closed_loop.py",
    "tests/stream/kafka/test_rights.py",
    "tests/processes/test_preload.py",
    "tests/serve/http/test_slow.py",
    "tests/cli/test_cli.py",
    "tests/model/test_graphs.py",
    "tests/processes/test_comparison.py",
    "tests/stream/test_dead_letters.py",
    "tests/model/test_evolution.py",
    "tests/test_learner_interrupts.py",
    "tests/test_demo.py::test_ends_by_itself_with_its_figures",
    "tests/processes/test_worker.py",
    "tests/stream/redis/test_away.py",
    "tests/checkpoint/test_shard_state.py",
    "tests/train/test_loop.py",
    "tests/cluster/test_backups.py::test_a_primary_goes_on_without_its_backup_and_has_the_next_one_follow",
    "tests/console/test_traffic_and_compare.py",
    "tests/cli/test_deadletters.py",
    "tests/serve/test_damage.py",
    "tests/serve/http/test_app.py",
    "tests/chaos/test_rolling.py",
    "tests/fuzz/test_fuzz.py",
    "tests/processes/test_local.py::test_what_cannot_be_is_one_line",
    "tests/processes/test_ps.py",
    "tests/test_examples.py",
    "tests/serve/test_feedback.py",
    "tests/processes/test_secrets.py::test_no_role_says_a_secret",
    "tests/processes/test_fork.py::test_with_the_same_model_it_is_its_parent_bit_by_bit_and_what_is_taken_is_refused",
    "tests/stream/kafka/test_kafka.py",
    "tests/ps/rpc/test_remote_session.py",
    "tests/processes/test_serving.py",
    "tests/test_learner.py",
    "tests/stream/redis/test_groups.py",
    "tests/processes/test_walkthroughs.py::test_improve",
    "tests/publish/test_export_graph.py",
    "tests/stream/formats/test_registry.py",
    "tests/cluster/test_backups.py::test_a_primary_that_was_paused_acknowledges_nothing_and_ends",
    "tests/cluster/test_lag.py",
    "tests/tuning/test_sizing.py",
    "tests/cluster/test_scaling.py",
    "tests/cluster/test_scaled_backups.py",
    "tests/train/test_step.py",
    "tests/cluster/test_backups.py::test_backups_go_on_with_checkpoints_and_come_back_from_them",
    "tests/cli/test_learn.py",
    "tests/cluster/test_coordinator.py",
    "tests/stream/kafka/test_access.py",
    "tests/benchmarks/test_quality.py",
    "tests/publish/test_lost_rows.py",
    "tests/processes/test_walkthroughs.py::test_an_example_for_those_who_come_from_elsewhere",
    "tests/processes/test_walkthroughs.py::test_tune",
    "tests/model/test_blank_samples.py",
    "tests/processes/test_whole_path.py",
    "tests/stream/kafka/test_tls.py",
    "tests/metrics/test_metrics.py",
    "tests/test_demo.py::test_what_cannot_be_is_one_line",
    "tests/benchmarks/test_suite.py",
    "tests/test_demo.py::test_on_a_stream_that_is_given_what_it_prints_works_until_ctrl_c",
    "tests/join/test_joiner.py",
    "tests/serve/http/test_overload.py",
    "tests/ps/test_workers.py",
    "tests/processes/test_supervisor.py",
    "tests/serve/test_selection.py",
    "tests/model/test_defaults.py",
)
"""Files, and tests of those in `ALONE`, that take longest: they run first, and are not waited for at the end."""

SERVICES = {
    "tests/chaos/test_chaos.py",
    "tests/chaos/test_killing.py",
    "tests/chaos/test_rolling.py",
    "tests/compose/test_processes.py",
    "tests/processes/test_closed_loop.py",
    "tests/processes/test_comparison.py",
    "tests/processes/test_fork.py::test_parent_and_forks_count_exactly_whoever_is_killed",
    "tests/processes/test_fork.py::test_with_the_same_model_it_is_its_parent_bit_by_bit_and_what_is_taken_is_refused",
    "tests/processes/test_local.py::test_all_is_learned_exactly_whoever_is_killed_and_the_next_one_goes_on",
    "tests/processes/test_ray.py",
    "tests/processes/test_walkthroughs.py::test_getting_started",
    "tests/processes/test_walkthroughs.py::test_improve",
    "tests/processes/test_walkthroughs.py::test_readme",
    "tests/serve/test_traffic.py",
    "tests/stream/test_two_copies.py",
    "tests/test_demo.py::test_ends_by_itself_with_its_figures",
}
"""Of these, those that run a whole service: were all of them run at once, each would have a tenth of a processor."""


def _unit(nodeid: str) -> str:
    """What one process runs as a whole: a file, or a test of it."""
    path, _, name = nodeid.partition("::")
    return f"{path}::{name.partition('[')[0]}" if path in ALONE else path


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (passed := _passed(config)) and passed.is_file():
        before = set(passed.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
        items[:] = [item for item in items if item.nodeid not in before]
    turns = {unit: turn for turn, unit in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(_unit(item.nodeid), len(turns)))


def pytest_collection_finish() -> None:
    """What is imported, and all tests, stay: were they searched for cycles meanwhile, it would take twice as long."""
    from streamtrain.memory import kept_for_good  # not earlier: see `use_core`

    with kept_for_good():
        gc.set_threshold(5_000, 20, 100)  # graphs are many objects that live for one test
    gc.enable()


def _passed(config: pytest.Config) -> Path | None:
    path = config.getoption("--passed")
    return Path(path) if path else None


class _Passed:
    """Writes down which tests have passed, or were skipped, as soon as they have: a process may crash in the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")


class _Units(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Gives the processes one unit after another, in their order; half of them take `SERVICES` first, others last."""

    def _split_scope(self, nodeid: str) -> str:
        return _unit(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        runs_services = node in self.nodes[: len(self.nodes) // 2]
        for unit in self.workqueue:
            if (unit in SERVICES) == runs_services:
                self.workqueue.move_to_end(unit, last=False)
                break
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Units(config, log)


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
    parser.addoption("--passed", metavar="FILE", help="tests that passed; they are added to it, and are not run again")


def pytest_configure(config: pytest.Config) -> None:
    if (passed := _passed(config)) and not hasattr(config, "workerinput"):  # the first process hears of all
        config.pluginmanager.register(_Passed(passed))
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
