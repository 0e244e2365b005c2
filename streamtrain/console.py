"""What the commands share: files, signals, figures, and TensorFlow without its greeting."""

import gzip
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from streamtrain.errors import ConfigError

_GREETING = re.compile(
    r"absl::InitializeLog|oneDNN custom operations|cudart_stub|cuda_platform|cpu_feature_guard|rebuild TensorFlow"
)


@contextmanager
def opened(file: str) -> Iterator[IO[bytes]]:
    """A file of lines, unpacked if its name ends in .gz; "-" is standard input."""
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as stream:
            yield stream  # type: ignore[misc]  # both are binary streams of lines
    except (OSError, EOFError) as exc:
        raise ConfigError(f"cannot read {file}: {exc}") from exc


def load_tensorflow(threads: int = 0) -> None:
    """Imports TensorFlow without its greeting, which it writes past every log level; what else it says is passed on.

    Args:
        threads: that it uses for one operation, and for operations side by side; 0: as many as there are cores.
    """
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
            tf.config.list_physical_devices()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            said = captured.read().decode(errors="replace").splitlines(keepends=True)
            sys.stderr.writelines(line for line in said if not _GREETING.search(line))


def stopped_by_signals() -> threading.Event:
    """Set by SIGTERM and SIGINT."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    return stopped


def print_json(figures: dict[str, object]) -> None:
    """A line of figures, for scripts."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()
