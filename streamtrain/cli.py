"""The command line: `streamtrain …`. It and services/ alone read the environment."""

import logging
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from streamtrain.clock import parse_duration
from streamtrain.console import load_tensorflow, opened, print_json, stopped_by_signals
from streamtrain.errors import ConfigError, StreamtrainError

if TYPE_CHECKING:
    from streamtrain.config import Settings
    from streamtrain.model.model import Model

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

EXIT_CONFIG = 2
EXIT_FAILED = 1

# Options of several commands.
Config = Annotated[Path | None, typer.Option(help="Settings; default: streamtrain.toml, if there is one.")]
Setting = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as worker.batch_size=512.")
]
Addresses = Annotated[
    str | None, typer.Option("--ps", help="Addresses of all shards, in order of their index: host:port,…")
]
Workers = Annotated[int | None, typer.Option(help="Workers that bulk consistency waits for in the beginning.")]


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
    load_tensorflow()
    from streamtrain.demo.flights import model
    from streamtrain.demo.stream import flights
    from streamtrain.learner import Learner
    from streamtrain.replay import replay

    console = Console(stderr=True)
    console.print("Flights out of New York in 2013: will it arrive more than 15 minutes late?")
    learner = Learner(model, batch_size=batch_size)
    done = replay(learner, flights(), console, title="predicted before each is learned from", seconds=for_)
    print_json(
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
    with opened(file) as stream:
        load_tensorflow()
        made = load_model(model)
        learner = Learner.load(load, made, batch_size=batch_size) if load else Learner(made, batch_size=batch_size)
        lines = (line for line in stream if not line.isspace())
        console = Console(stderr=True)
        done = replay(learner, [lines], console, title=file, max_bad_ratio=max_bad_ratio, seconds=for_)
    if save:
        learner.save(save)
    print_json(
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
    addresses: Addresses = None,
    listen: Annotated[str | None, typer.Option(help="Address to listen at, if it is not the shard's own.")] = None,
    workers: Workers = None,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Run a parameter server: one shard of the embedding tables and dense parameters.

    It takes its model from the first worker, or from its newest checkpoint. Shard 0 has all shards take checkpoints.
    """
    from streamtrain.cluster.membership import Cluster
    from streamtrain.cluster.process import PsProcess

    settings = _settings(config, setting, {"ps.addresses": addresses, "ps.listen": listen})
    cluster = Cluster.of(settings.ps.addresses, os.environ.get("TF_CONFIG"))
    if index is None:
        if cluster.task is None or cluster.task.type != "ps":
            raise ConfigError("--index is not given, and TF_CONFIG does not make this process a ps")
        index = cluster.task.index
    logging.getLogger("streamtrain").setLevel(logging.INFO)
    process = PsProcess(index, cluster.ps, settings, workers or cluster.workers or 1)
    process.run(stopped_by_signals())


@app.command()
def worker(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    model: Annotated[str | None, typer.Option(help="The model: path/to/file.py:name; default: setting model.")] = None,
    addresses: Addresses = None,
    topic: Annotated[str | None, typer.Option(help="What is learned; default: setting stream.topic.")] = None,
    shard: Annotated[int | None, typer.Option(help="Also serve this shard, in the same process.")] = None,
    workers: Workers = None,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Run a worker: learn a topic, together with the other workers of its group.

    SIGTERM and SIGINT end it once what is under way is learned. Nothing is lost if it is killed.
    """
    from streamtrain.cluster.membership import Cluster

    settings = _settings(config, setting, {"model": model, "ps.addresses": addresses, "stream.topic": topic})
    cluster = Cluster.of(settings.ps.addresses, os.environ.get("TF_CONFIG"))
    logging.getLogger("streamtrain").setLevel(logging.INFO)
    stopped = stopped_by_signals()
    made = _load_model(settings)
    from streamtrain.cluster.worker import WorkerProcess
    from streamtrain.model.spec import Spec
    from streamtrain.train.step import Step

    count = workers or cluster.workers or 1
    process = WorkerProcess(made, Step(made), Spec.of(made), cluster.ps, settings, shard=shard, workers=count)
    process.run(stopped)


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="The model: path/to/file.py:name; default: setting model.")] = None,
    listen: Annotated[str | None, typer.Option(help="Address of the HTTP endpoint; default 127.0.0.1:8501.")] = None,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Serve predictions over HTTP: TensorFlow Serving's REST API, and the Open Inference Protocol.

    From where parameter servers publish (publish.url), following what they learn; or from a checkpoint.
    """
    settings = _settings(config, setting, {"model": model, "serve.listen": listen})
    logging.getLogger("streamtrain").setLevel(logging.INFO)
    made = _load_model(settings)
    from streamtrain.cluster.serving import serve_model

    serve_model(made, settings)


def _load_model(settings: "Settings") -> "Model":
    from streamtrain.model.load import load_model, locate_model

    if settings.model is None:
        raise ConfigError("no model is named: give --model path/to/file.py:name, or set model")
    locate_model(settings.model)
    load_tensorflow(settings.worker.threads)
    return load_model(settings.model)


@app.command()
def produce(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    file: Annotated[str, typer.Argument(help="Samples: a path or URL; - is standard input.")],
    config: Config = None,
    setting: Setting = None,
    url: Annotated[str | None, typer.Option(help="Of the stream: kafka://host:port,… or redis://…")] = None,
    topic: Annotated[str | None, typer.Option(help="Where they go.")] = None,
    create: Annotated[
        int | None,
        typer.Option(metavar="PARTITIONS", help="Make the topic, with so many partitions, if it is missing."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Messages per second; default: as fast as possible.")] = None,
    speed: Annotated[
        float | None, typer.Option(help="As far apart as the events were, so many times as fast as they happened.")
    ] = None,
    time: Annotated[str, typer.Option(metavar="FIELD", help="The event time, for --speed.")] = "ts",
    max_gap: Annotated[
        str, typer.Option(metavar="DURATION", help="The longest wait between two messages, for --speed.")
    ] = "60s",
    key: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Samples with the same value go to the same partition.")
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="jsonl, csv or parquet; default: as the name says.")
    ] = None,
    text: Annotated[
        str, typer.Option(metavar="FIELDS", help="Columns that are text even where they look like numbers: user,item")
    ] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    repeat: Annotated[bool, typer.Option("--repeat", help="Begin again at the end, for ever.")] = False,
) -> None:
    """Write samples of a file to the stream's topic.

    Ends with a line of JSON: messages, bytes, seconds, messages_per_s. SIGINT and SIGTERM end it early but in order.
    """
    from streamtrain.cluster.streams import open_writer
    from streamtrain.stream.files import SampleFile, limited, repeated
    from streamtrain.stream.pace import pace_of
    from streamtrain.stream.producer import Stop, progress_bar
    from streamtrain.stream.producer import produce as write

    settings = _settings(config, setting, {"stream.url": url, "stream.topic": topic, "stream.create": create})
    pace = pace_of(rate, speed, parse_duration(max_gap, "--max-gap"))
    columns = [name.strip() for name in text.split(",") if name.strip()]
    samples = SampleFile(file, format_, key=key, time=None if speed is None else time, text=columns)
    blocks = repeated(samples) if repeat else samples.blocks()
    if limit is not None:
        blocks = limited(blocks, limit)
    stop = Stop()
    bar = progress_bar(Console(stderr=True), limit)
    with closing(samples), open_writer(settings.stream) as writer, bar as on_progress:
        stop.listen()
        done = write(blocks, writer, pace=pace, stop=stop, on_progress=on_progress)
    print_json(done.as_dict())
    if stop.signal is not None:
        raise typer.Exit(128 + stop.signal)


def _settings(config: Path | None, setting: list[str] | None, overrides: dict[str, object]) -> "Settings":
    from streamtrain.config import load_settings

    given = {key: value for key, value in overrides.items() if value is not None}
    return load_settings(config, os.environ, dict(_key_value(one) for one in setting or []) | given)


def _key_value(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set takes KEY=VALUE, not {text!r}")
    return key, value


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def main() -> None:
    """Entry point. Errors of streamtrain are one line and exit code 2 (configuration) or 1 (anything else)."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except StreamtrainError as exc:
        sys.stderr.write(f"streamtrain: {exc}\n")
        sys.exit(EXIT_CONFIG if isinstance(exc, ConfigError) else EXIT_FAILED)
