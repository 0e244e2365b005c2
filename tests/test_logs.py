"""Logs: what a line has, as text and as JSON, of this process and of every command that runs long."""

import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from streamtrain import logs
from streamtrain.cli import app
from tests import commands
from tests.patience import PATIENCE

ROOT = Path(__file__).parent.parent
LONG_RUNNING = ("ps", "worker", "coordinator", "serve", "up", "demo", "produce")
EVERY_LINE = {"time", "level", "process", "pid", "logger", "message"}

Said = Callable[..., str]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """Says something by a logger of ours, and gives what is written."""
    stream = io.StringIO()

    def say(format_: logs.LogFormat, level: logs.Level, *what: object, process: str = "ps:1", **options: Any) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        logs.set_up_logs(format_, level, process)
        logging.getLogger("streamtrain.ps").log(*what, **options)  # type: ignore[arg-type]
        text = stream.getvalue()
        stream.seek(0)
        stream.truncate()
        return text

    return say


def test_text_is_for_people(said: Said) -> None:
    assert said("text", "info", logging.WARNING, "it is %s", "so") == "WARNING streamtrain.ps: it is so\n"
    assert said("text", "warning", logging.INFO, "nothing") == ""


def test_json_is_an_object_a_line(said: Said) -> None:
    line = json.loads(said("json", "debug", logging.DEBUG, "two\nlines of %s", "text", extra={"batch": "0:1-2"}))
    assert {*line} == EVERY_LINE | {"batch"}
    assert (line["level"], line["process"], line["logger"]) == ("debug", "ps:1", "streamtrain.ps")
    assert (line["message"], line["batch"]) == ("two\nlines of text", "0:1-2")
    assert line["time"].endswith("+00:00")


def test_a_traceback_is_in_its_line(said: Said) -> None:
    try:
        raise ValueError("of no use")
    except ValueError:
        text = said("json", "info", logging.ERROR, "failed", exc_info=True)
    assert len(text.splitlines()) == 1
    assert "ValueError: of no use" in json.loads(text)["exc_info"]


def test_the_request_of_the_context_is_named(said: Said) -> None:
    before = logs.REQUEST.set("abc-1")
    try:
        assert json.loads(said("json", "info", logging.INFO, "so"))["request_id"] == "abc-1"
        assert said("text", "info", logging.INFO, "so") == "INFO streamtrain.ps: so [request abc-1]\n"
    finally:
        logs.REQUEST.reset(before)


def test_what_others_say_becomes_a_line() -> None:
    line = json.loads(logs.json_line("kafka", 'started "it"'))
    assert (line["process"], line["level"], line["message"]) == ("kafka", "info", 'started "it"')
    assert {*line} == EVERY_LINE


def test_every_command_that_runs_long_takes_the_format() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name in LONG_RUNNING:
        assert "--log-format" in {option for one in group.commands[name].params for option in one.opts}, name


@pytest.mark.parametrize(
    ("command", "process"),
    [
        (["ps", "--index", "3", "--ps", "127.0.0.1:1"], "ps:3"),
        (["worker", "--model", "nowhere.py:model", "--ps", "127.0.0.1:1"], "worker"),
        (["coordinator", "--ps", "127.0.0.1:1"], "coordinator"),
        (["serve", "--model", "nowhere.py:model"], "serve"),
        (["produce", "nowhere.jsonl", "--topic", "t", "--rate", "-1"], "produce"),
        (["up", "--model", "nowhere.py:model"], "up"),
        (["demo", "--rate", "-1"], "demo"),
    ],
)
def test_last_words_are_a_line_as_well(command: list[str], process: str, tmp_path: Path) -> None:
    told = [*commands.COMMAND, *command, "--log-format", "json"]
    done = commands.run(told, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    line = json.loads(done.stderr.splitlines()[-1])
    assert (line["level"], line["process"], {*line}) == ("error", process, EVERY_LINE)
    assert done.stderr.count("\n") == len([json.loads(one) for one in done.stderr.splitlines()])


def test_a_format_that_is_none(tmp_path: Path) -> None:
    told = [*commands.COMMAND, "coordinator", "--log-format", "xml"]
    done = commands.run(told, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "streamtrain: log.format on the command line must be 'text' or 'json', not 'xml'\n"


def test_what_happens_all_the_time_is_due_now_and_then() -> None:
    now = 100.0
    seldom = logs.LogThrottle(60.0, lambda: now)
    assert [seldom.allow() for _ in range(5)] == [1, 0, 0, 0, 0]
    assert seldom.allow("another", 7) == 7
    now += 59.9
    assert seldom.allow(times=3) == 0
    now += 0.2
    assert seldom.allow(times=0) == 0  # it has not happened
    assert seldom.allow() == 8
    assert seldom.allow() == 0
