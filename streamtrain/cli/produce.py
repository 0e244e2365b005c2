"""`produce`: write samples to a topic."""

import os
import sys
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console

from streamtrain.cli.options import (
    Config,
    FileFormat,
    ListColumns,
    LogFormat,
    Setting,
    TextColumns,
    Url,
    read_client_settings,
    sample_file,
    set_up_process_log,
)
from streamtrain.cli.terminal import print_json
from streamtrain.durations import parse_duration


def produce(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    file: Annotated[str, typer.Argument(help="Path or URL of the samples; - is standard input, as JSON lines.")],
    config: Config = None,
    setting: Setting = None,
    url: Url = None,
    topic: Annotated[str | None, typer.Option(help="Topic to write to; default: setting stream.topic.")] = None,
    create: Annotated[
        int | None,
        typer.Option(metavar="PARTITIONS", help="Create the topic with this many partitions if it does not exist."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Messages per second; default: as fast as possible.")] = None,
    speed: Annotated[float | None, typer.Option(help="Replay at this multiple of the events' own pace.")] = None,
    shift_times: Annotated[
        str | None,
        typer.Option(
            metavar="last|each", help="Move event times so that the last event, or each as it is written, is now."
        ),
    ] = None,
    time: Annotated[
        str, typer.Option(metavar="FIELD", help="Field of the event time, for --speed and --shift-times.")
    ] = "ts",
    max_gap: Annotated[
        str, typer.Option(metavar="DURATION", help="Longest wait between two messages, for --speed.")
    ] = "60s",
    key: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Field of the message key: equal values go to the same partition."),
    ] = None,
    format_: FileFormat = None,
    text: TextColumns = "",
    lists: ListColumns = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many messages.")] = None,
    repeat: Annotated[bool, typer.Option("--repeat", help="Start over at the end of the file, forever.")] = False,
    log_format: LogFormat = None,
) -> None:
    """Write the samples of a file to a topic.

    Ends with a line of JSON: messages, bytes, seconds, messages_per_s. SIGINT and SIGTERM stop it gracefully.
    """
    from streamtrain.stream.event_times import shift_times as make_shift
    from streamtrain.stream.files import Block, limited, repeated
    from streamtrain.stream.opening import open_writer
    from streamtrain.stream.producer import Stop, make_pace, progress_bar
    from streamtrain.stream.producer import produce as write

    overrides: dict[str, object] = {
        "stream.url": url,
        "stream.topic": topic,
        "stream.create": create,
        "log.format": log_format,
    }
    settings = read_client_settings(config, setting, overrides)
    set_up_process_log(settings, "produce")
    pace = make_pace(rate, speed, parse_duration(max_gap, "--max-gap"))
    reads_time = speed is not None or shift_times == "last"
    samples = sample_file(file, format_, text, lists, key=key, time=time if reads_time else None)

    def limit_blocks(blocks: Iterable[Block]) -> Iterable[Block]:
        return blocks if limit is None else limited(blocks, limit)

    shift = None if shift_times is None else make_shift(shift_times, time, samples, limit_blocks)
    blocks = limit_blocks(repeated(samples) if repeat else samples.blocks())
    stop = Stop()
    bar = progress_bar(Console(stderr=True), limit)
    with open_writer(settings.stream) as writer, bar as on_progress:
        stop.listen()
        done = write(blocks, writer, pace=pace, stop=stop, shift=shift, on_progress=on_progress)
    print_json(done.as_dict())
    if stop.signal is not None:
        sys.stderr.flush()
        os._exit(128 + stop.signal)  # a reader thread of Arrow would abort an interpreter that shuts down
