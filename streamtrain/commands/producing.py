"""The command that writes samples to a stream: `produce`."""

import os
import sys
from contextlib import closing
from typing import Annotated

import typer
from rich.console import Console

from streamtrain.clock import parse_duration
from streamtrain.commands.options import Config, LogFormat, Setting, read_settings, set_up_log
from streamtrain.console import print_json


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
    log_format: LogFormat = None,
) -> None:
    """Write samples of a file to the stream's topic.

    Ends with a line of JSON: messages, bytes, seconds, messages_per_s. SIGINT and SIGTERM end it early but in order.
    """
    from streamtrain.cluster.streams import open_writer
    from streamtrain.stream.files import SampleFile, limited, repeated
    from streamtrain.stream.pace import pace_of
    from streamtrain.stream.producer import Stop, progress_bar
    from streamtrain.stream.producer import produce as write

    overrides: dict[str, object] = {
        "stream.url": url,
        "stream.topic": topic,
        "stream.create": create,
        "log.format": log_format,
    }
    settings = read_settings(config, setting, overrides)
    set_up_log(settings, "produce")
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
        sys.stderr.flush()
        os._exit(128 + stop.signal)  # a thread of Arrow may still read, and aborts an interpreter that ends under it
