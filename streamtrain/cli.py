"""The command line: `streamtrain …`. It and services/ alone read the environment."""

import gzip
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.console import Console

from streamtrain.errors import ConfigError, StreamtrainError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

EXIT_CONFIG = 2
EXIT_FAILED = 1

_GREETING = re.compile(
    r"absl::InitializeLog|oneDNN custom operations|cudart_stub|cuda_platform|cpu_feature_guard|rebuild TensorFlow"
)


@app.callback()
def root() -> None:
    """Real-time learning for recommenders, ads and search."""


@app.command()
def demo(
    for_: Annotated[float | None, typer.Option("--for", metavar="SECONDS", help="End by itself after so long.")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per step.")] = 64,
) -> None:
    """Learn from a year of real flights in the order in which they left, with live metrics.

    Ends with a line of JSON: samples, samples_per_s, auc, freshness_ms_p99 (from the arrival of a sample to a model
    that has learned from it), version (null: nothing is published in one process).
    """
    _load_tensorflow()
    from streamtrain.demo.flights import model
    from streamtrain.demo.stream import flights
    from streamtrain.learner import Learner
    from streamtrain.replay import replay

    console = Console(stderr=True)
    console.print("Flights out of New York in 2013: will it arrive more than 15 minutes late?")
    learner = Learner(model, batch_size=batch_size)
    done = replay(learner, flights(), console, title="predicted before each is learned from", seconds=for_)
    _print_json(
        {
            "samples": done.samples,
            "samples_per_s": round(done.samples_per_s),
            "auc": _rounded(learner.metrics()[model.labels[0].name].as_dict()["auc"]),
            "freshness_ms_p99": round(done.update_ms_p99, 2),
            "version": None,
        }
    )


@app.command()
def learn(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    file: Annotated[str, typer.Argument(help="Samples, a JSON object a line; .gz is unpacked; - is standard input.")],
    model: Annotated[str, typer.Option(help="The model: path/to/file.py:name.")],
    batch_size: Annotated[int, typer.Option(help="Samples per step.")] = 1024,
    load: Annotated[str | None, typer.Option(help="Checkpoint to go on from: a path or URL.")] = None,
    save: Annotated[str | None, typer.Option(help="Where to write a checkpoint at the end: a path or URL.")] = None,
    max_bad_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Share of refused samples, over 10,000, above which it stops.")
    ] = 0.1,
    for_: Annotated[float | None, typer.Option("--for", metavar="SECONDS", help="End by itself after so long.")] = None,
) -> None:
    """Learn from a file of samples, with live metrics.

    Ends with a line of JSON: samples, samples_per_s, bad (refused samples by reason), rows, and metrics by label.
    """
    from streamtrain.learner import Learner
    from streamtrain.model.load import load_model, locate_model
    from streamtrain.replay import replay

    locate_model(model)
    with _open(file) as stream:
        _load_tensorflow()
        made = load_model(model)
        learner = Learner.load(load, made, batch_size=batch_size) if load else Learner(made, batch_size=batch_size)
        lines = (line for line in stream if not line.isspace())
        console = Console(stderr=True)
        done = replay(learner, [lines], console, title=file, max_bad_ratio=max_bad_ratio, seconds=for_)
    if save:
        learner.save(save)
    _print_json(
        {
            "samples": done.samples,
            "samples_per_s": round(done.samples_per_s),
            "bad": done.bad,
            "rows": learner.rows,
            "metrics": {
                label: {name: _rounded(value) for name, value in metrics.as_dict().items()}
                for label, metrics in learner.metrics().items()
            },
        }
    )


@app.command()
def ps(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    index: Annotated[int | None, typer.Option(help="Which shard this is, from 0; default: as TF_CONFIG says.")] = None,
    addresses: Annotated[
        str | None, typer.Option("--ps", help="Addresses of all shards, in order of their index: host:port,…")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="Address to listen at, if it is not the shard's own.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Workers that bulk consistency waits for in the beginning.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default: streamtrain.toml, if there is one.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as checkpoint.url=/data.")
    ] = None,
) -> None:
    """Run a parameter server: one shard of the embedding tables and dense parameters.

    It takes its model from the first worker, or from its newest checkpoint. Shard 0 has all shards take checkpoints.
    """
    from streamtrain.cluster.membership import Cluster
    from streamtrain.cluster.process import PsProcess
    from streamtrain.config import load_settings

    overrides: dict[str, object] = dict(_key_value(one) for one in setting or [])
    overrides |= {"ps.addresses": addresses, "ps.listen": listen}
    settings = load_settings(config, os.environ, overrides)
    cluster = Cluster.of(settings.ps.addresses, os.environ.get("TF_CONFIG"))
    if index is None:
        if cluster.task is None or cluster.task.type != "ps":
            raise ConfigError("--index is not given, and TF_CONFIG does not make this process a ps")
        index = cluster.task.index
    logging.getLogger("streamtrain").setLevel(logging.INFO)
    process = PsProcess(index, cluster.ps, settings, workers or cluster.workers or 1)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    process.run(stopped)


def _key_value(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set takes KEY=VALUE, not {text!r}")
    return key, value


@contextmanager
def _open(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as stream:
            yield stream  # type: ignore[misc]  # both are binary streams of lines
    except (OSError, EOFError) as exc:
        raise ConfigError(f"cannot read {file}: {exc}") from exc


def _load_tensorflow() -> None:
    """Imports TensorFlow without its greeting, which it writes past every log level; what else it says is passed on."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            said = captured.read().decode(errors="replace").splitlines(keepends=True)
            sys.stderr.writelines(line for line in said if not _GREETING.search(line))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _print_json(figures: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point. Errors of streamtrain are one line and exit code 2 (configuration) or 1 (anything else)."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except StreamtrainError as exc:
        sys.stderr.write(f"streamtrain: {exc}\n")
        sys.exit(EXIT_CONFIG if isinstance(exc, ConfigError) else EXIT_FAILED)
