"""Loads TensorFlow, without what it would say and what Keras would add."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from streamtrain.memory import kept_for_good

_GREETING = re.compile(
    r"absl::InitializeLog|oneDNN custom operations|cudart_stub|cuda_platform|cpu_feature_guard|rebuild TensorFlow"
)


@contextmanager
def _absent(*names: str) -> Iterator[None]:
    """Has imports of these modules fail, as if they were not installed, unless they are imported already."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is what stops an import
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def load_tensorflow(threads: int = 0) -> None:
    """Imports TensorFlow, and sets how many threads it has.

    Args:
        threads: threads within an operation, and of concurrent operations; 0: one per core.
    """
    if threads == 1:  # else XLA hands kernels to a second thread, which costs more than it gains
        os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false {os.environ.get('XLA_FLAGS', '')}".rstrip()
    import_tensorflow()
    with _without_greeting():
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        tf.config.list_physical_devices()


def import_tensorflow() -> None:
    """Imports TensorFlow, and runs nothing of it.

    Keras imports scikit-learn and pandas where they are installed, for estimators and data frames that no process here
    uses: a third of the import's time and 120 MB. They are hidden from it; a model file may import them nevertheless.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # warnings and errors, but not that XLA was initialized
    with _without_greeting(), _absent("sklearn", "pandas"), kept_for_good():
        import tensorflow  # noqa: F401


@contextmanager
def _without_greeting() -> Iterator[None]:
    """In this context, TensorFlow does not greet, whatever its log level is; its other output is passed on."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            lines = captured.read().decode(errors="replace").splitlines(keepends=True)
            sys.stderr.writelines(line for line in lines if not _GREETING.search(line))
