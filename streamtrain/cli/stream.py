"""`produce` and `deadletters`: what is written to a topic, and what of it could not be learned."""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from streamtrain.cli.options import (
    Command,
    Config,
    FileFormat,
    Json,
    ListColumns,
    LogFormat,
    SampleUrls,
    Setting,
    TextColumns,
    Url,
    read_client_settings,
    sample_file,
    set_up_process_log,
)
from streamtrain.cli.terminal import format_time, new_table, print_json
from streamtrain.cli.terminal import show as print_parts
from streamtrain.durations import parse_duration
from streamtrain.errors import ConfigError, StreamtrainError

if TYPE_CHECKING:
    from streamtrain.stream.dead_letters import StoredLetter
    from streamtrain.stream.source import Stream


def produce(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    files: SampleUrls,
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
    time_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="Of that field: ms, us, ns, or a pattern such as %d/%m/%Y; default: s, ISO 8601."
        ),
    ] = None,
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
    """Write the samples of files to a topic.

    Ends with a line of JSON: messages, bytes, seconds, messages_per_s. SIGINT and SIGTERM stop it gracefully.
    """
    from streamtrain.stream.event_times import EventTimes
    from streamtrain.stream.files import FileBlock, limited, repeated
    from streamtrain.stream.opening import open_writer
    from streamtrain.stream.producer import Stop, make_pace, progress_bar
    from streamtrain.stream.producer import produce as write
    from streamtrain.stream.producer import shift_times as make_shift

    overrides: dict[str, object] = {
        "stream.url": url,
        "stream.topic": topic,
        "stream.create": create,
        "log.format": log_format,
    }
    settings = read_client_settings(config, setting, overrides)
    set_up_process_log(settings, "produce")
    pace = make_pace(rate, speed, parse_duration(max_gap, "--max-gap"))
    times = EventTimes(time_format)
    reads_time = speed is not None or shift_times == "last"
    samples = sample_file(files, format_, text, lists, key=key, time=time if reads_time else None, times=times)

    def limit_blocks(blocks: Iterable[FileBlock]) -> Iterable[FileBlock]:
        return blocks if limit is None else limited(blocks, limit)

    shift = None if shift_times is None else make_shift(shift_times, time, samples, limit_blocks, times)
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


deadletters = typer.Typer(no_args_is_help=True, help="List, show and replay messages that could not be learned.")

Topic = Annotated[str | None, typer.Option(help="Original topic of the messages, without .dead.")]
Reason = Annotated[str | None, typer.Option(help="Only messages refused for this reason, such as not_json.")]

_SHOWN_BYTES = 4096
_PER_LINE = 16
_PRINTABLE = range(0x20, 0x7F)
_WIRE_BYTES = 5  # Confluent's header: a zero byte and a schema id


@deadletters.command("list", cls=Command)
def list_(
    topic: Topic = None, url: Url = None, json: Json = False, config: Config = None, setting: Setting = None
) -> None:
    """Count dead letters by reason, with the first and the last of each."""
    stream, dead = _streams(config, setting, url, topic)
    reasons: dict[str, dict[str, Any]] = {}
    for stored in _letters(stream, dead, None):
        place = {"partition": stored.letter.partition, "offset": stored.letter.offset, "time": stored.time}
        counts = reasons.setdefault(stored.letter.reason, {"letters": 0, "truncated": 0, "first": place, "last": place})
        counts["letters"] += 1
        counts["truncated"] += stored.truncated_from is not None
        counts["first"] = min(counts["first"], place, key=_order)
        counts["last"] = max(counts["last"], place, key=_order)
    if json:
        print_json({"topic": stream.topic, "reasons": reasons})
        return
    columns = ("reason", "letters", "truncated", "first", "written", "last", "written")
    table = new_table(f"dead letters of {stream.topic}", columns, right=("letters", "truncated"))
    for reason, counts in sorted(reasons.items(), key=lambda item: -item[1]["letters"]):
        first, last = counts["first"], counts["last"]
        ends = (_format_place(first), format_time(first["time"]), _format_place(last), format_time(last["time"]))
        table.add_row(_printable(reason), f"{counts['letters']:,}", f"{counts['truncated']:,}", *ends)
    print_parts(table if reasons else f"{dead.name} has no dead letters")


@deadletters.command(cls=Command)
def show(
    message: Annotated[
        str, typer.Argument(metavar="PARTITION:OFFSET", help="Place of the message in its original topic.")
    ],
    topic: Topic = None,
    url: Url = None,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Show a dead letter: the reason, and the message as JSON, as text or as bytes."""
    given = re.fullmatch(r"(\d{1,10}):(\d{1,19})", message, re.ASCII)
    if given is None:
        raise ConfigError(f"the message must be PARTITION:OFFSET, such as 0:1234, not {message!r}")
    place = (int(given[1]), int(given[2]))
    stream, dead = _streams(config, setting, url, topic)
    found = [one for one in _letters(stream, dead, None) if (one.letter.partition, one.letter.offset) == place]
    if not found:
        raise StreamtrainError(f"{dead.name} has no dead letter for offset {place[1]} of partition {place[0]}")
    typer.echo("\n".join(_lines(found[-1])))  # of the latest topic of the name, where there were several


@deadletters.command(cls=Command)
def replay(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    topic: Topic = None,
    url: Url = None,
    reason: Reason = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay at most this many.")] = None,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Write messages back to their topic, once the cause of their refusal is fixed.

    Each message is replayed once: if the command is interrupted, run it again. Ends with a line of JSON: replayed,
    before (replayed by an earlier run), truncated (stored incompletely, and therefore not replayed).
    """
    from streamtrain.stream.dead_letters import replay_dead_letters

    stream, dead = _streams(config, setting, url, topic)
    console = Console(stderr=True, markup=False, highlight=False)
    done = replay_dead_letters(
        stream,
        dead,
        lambda: islice(_letters(stream, dead, reason), limit),
        lambda count: console.print(f"{count:,} replayed"),
    )
    for key in done.truncated:
        console.print(f"{_printable(key)} was stored incompletely and stays a dead letter")
    print_json(done._asdict() | {"truncated": len(done.truncated)})


def _streams(config: Any, setting: list[str] | None, url: str | None, topic: str | None) -> tuple["Stream", "Stream"]:
    """The topic, and the topic of its dead letters."""
    from streamtrain.stream.dead_letters import SUFFIX
    from streamtrain.stream.opening import open_stream

    settings = read_client_settings(config, setting, {"stream.url": url, "stream.topic": topic}).stream
    stream = open_stream(settings)
    return stream, open_stream(settings.model_copy(update={"topic": f"{stream.topic}{SUFFIX}"}))


def _letters(stream: "Stream", dead: "Stream", reason: str | None) -> Iterator["StoredLetter"]:
    from streamtrain.stream.dead_letters import read_dead_letters

    stream.bounds()  # raises if the topic does not exist
    return (stored for stored in read_dead_letters(stream, dead) if reason in (None, stored.letter.reason))


def _order(place: dict[str, Any]) -> tuple[float, int, int]:
    return place["time"], place["partition"], place["offset"]


def _format_place(place: dict[str, Any]) -> str:
    return f"{place['partition']}:{place['offset']}"


def _lines(stored: "StoredLetter") -> Iterator[str]:
    letter, value = stored.letter, stored.letter.value
    yield f"partition  {letter.partition}"
    yield f"offset     {letter.offset}"
    yield f"reason     {_printable(letter.reason)}"
    if letter.field:
        yield f"field      {_printable(letter.field)}"
    if letter.detail:
        yield f"detail     {_printable(letter.detail)}"
    yield f"written    {format_time(stored.time)}"
    cut = "" if stored.truncated_from is None else f" of {stored.truncated_from:,}; the rest was not stored"
    yield f"bytes      {len(value):,}{cut}"
    if len(value) >= _WIRE_BYTES and value[0] == 0:
        yield f"schema     {int.from_bytes(value[1:_WIRE_BYTES])}, if it is in the wire format of a schema registry"
    yield ""
    yield from _shown(value)


def _shown(value: bytes) -> Iterator[str]:
    """A message as JSON, as text or as bytes; only the beginning of a long one."""
    shown = value[:_SHOWN_BYTES]
    with suppress(ValueError, RecursionError):
        yield _printable(json.dumps(json.loads(value), indent=2, ensure_ascii=False)[:_SHOWN_BYTES])
        return
    try:
        text = shown.decode()
    except UnicodeDecodeError:
        for at in range(0, len(shown), _PER_LINE):
            line = shown[at : at + _PER_LINE]
            text = "".join(chr(byte) if byte in _PRINTABLE else "." for byte in line)
            yield f"{at:06x}  {line.hex(' '):{3 * _PER_LINE}} {text}"
    else:
        yield _printable(text)
    if len(value) > _SHOWN_BYTES:
        yield f"… {len(value) - _SHOWN_BYTES:,} more bytes"


def _printable(text: str) -> str:
    """Text from outside, without control characters."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
