"""`streamtrain produce` as a user runs it: real processes, real files, real services."""

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError, SourceUnavailable
from streamtrain.settings.groups import StreamSettings
from streamtrain.stream.opening import open_stream
from streamtrain.stream.source import Source, Stream
from tests import commands
from tests.patience import PATIENCE, until
from tests.stream.servers import kafka

__all__ = ["kafka"]

COMMAND = [*commands.COMMAND, "produce"]
DOCS = Path(__file__).parents[2] / "docs" / "produce.md"


on_both = pytest.mark.parametrize("url", ["redis", "kafka"], indirect=True)


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a service that all tests share: Redis, which starts at once, where they do not say otherwise."""
    if getattr(request, "param", "redis") == "kafka":
        yield f"kafka://{request.getfixturevalue('kafka').servers}"
    else:
        with Valkey() as server:
            yield server.url


@pytest.fixture
def stream(url: str) -> Stream:
    """A topic that is not there yet."""
    return open_stream(StreamSettings(url=url, topic=f"clicks-{uuid4().hex}"))


def produce(*args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return commands.run([*COMMAND, *args], capture_output=True, check=False, timeout=PATIENCE, **options)


Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def run(stream: Stream, url: str, tmp_path: Path) -> Run:
    """Runs the command on the topic, in a folder of its own."""

    def run(*args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        return produce(*args, "--url", url, "--topic", stream.topic, cwd=tmp_path, **options)

    return run


def lines(count: int) -> bytes:
    return b"".join(b'{"ts":%d,"user":"u%d","i":%d}\n' % (i, i % 7, i) for i in range(count))


class FromTheStart:
    """A listener that reads all."""

    def assigned(self, partitions: Sequence[int]) -> Mapping[int, int]:
        return dict.fromkeys(partitions, 0)

    def revoked(self, partitions: Sequence[int]) -> None:
        pass

    def lost(self, partitions: Sequence[int]) -> None:
        pass


def join(stream: Stream) -> Source:
    """The only member of a new group."""
    joined: list[Source] = []

    def has_joined() -> bool:
        with suppress(SourceUnavailable):  # a broker that has just started is still looking for who keeps its groups
            joined.append(stream.source(f"test-{uuid4().hex}", "test", FromTheStart()))
        return bool(joined)

    until(has_joined)
    return joined[0]


def read_all(stream: Stream) -> dict[int, list[bytes]]:
    """The messages of each partition."""
    highs = {partition: bounds.high for partition, bounds in stream.bounds().items()}
    values: dict[int, list[bytes]] = {partition: [] for partition in highs}
    with closing(join(stream)) as source:

        def read() -> None:
            for fetched in source.poll(10_000, 1.0):
                values[fetched.partition] += [value for value in fetched.values if value is not None]

        until(lambda: source.positions() == highs, doing=read)
    return values


def messages(stream: Stream) -> list[bytes]:
    return [value for found in read_all(stream).values() for value in found]


def figures(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    assert done.stdout.count(b"\n") == 1, done
    found: dict[str, Any] = json.loads(done.stdout)
    assert set(found) == {"messages", "bytes", "seconds", "messages_per_s"}
    return found


@on_both
def test_a_file_goes_to_a_new_topic(run: Run, stream: Stream, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(5000) + b"not json\n"))
    done = run("a.jsonl.gz", "--create", "3", "--key", "user")
    assert (done.returncode, done.stderr) == (0, b"")
    assert figures(done)["messages"] == 5001
    assert figures(done)["bytes"] == len(lines(5000)) - 5000 + 8
    home: dict[str, int] = {}
    for partition, found in read_all(stream).items():
        samples = [json.loads(value) for value in found if value != b"not json"]
        assert [one["i"] for one in samples] == sorted(one["i"] for one in samples)
        assert all(home.setdefault(one["user"], partition) == partition for one in samples)
    assert sorted(messages(stream)) == sorted([*lines(5000).splitlines(), b"not json"])


def test_csv_and_parquet(run: Run, stream: Stream, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"user,item,n,tags\n007,1e5,1e5,a;b\n")
    done = run("a.csv", "--create", "1", "--text", "user,item", "--lists", "tags=;")
    assert done.returncode == 0, done.stderr
    pq.write_table(pa.table({"user": ["u1"], "ids": [[1, 2]]}), tmp_path / "a.parquet")
    assert run("a.parquet").returncode == 0
    assert messages(stream) == [b'{"user":"007","item":"1e5","n":1e5,"tags":["a","b"]}', b'{"user":"u1","ids":[1,2]}']


def test_settings_come_from_the_file(url: str, stream: Stream, tmp_path: Path) -> None:
    settings = f'[stream]\nurl = "{url}"\ntopic = "{stream.topic}"\ncreate = 2\n'
    (tmp_path / "streamtrain.toml").write_text(settings)
    for options in ((), ("--config", str(tmp_path / "streamtrain.toml"), "--set", "stream.create=4")):
        done = commands.run([*COMMAND, "-", *options], input=lines(10), capture_output=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
    assert len(messages(stream)) == 20
    assert len(stream.bounds()) == 2


def test_limits_rounds_and_rates(run: Run, stream: Stream, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(40))
    done = run("a.jsonl", "--create", "1", "--repeat", "--limit", "100", "--rate", "200")
    assert done.returncode == 0, done.stderr
    assert figures(done)["messages"] == 100
    assert 0.49 < figures(done)["seconds"] < 30
    assert messages(stream) == (lines(40).splitlines() * 3)[:100]
    done = run("a.jsonl", "--speed", "100")
    assert 0.38 < figures(done)["seconds"] < 30
    assert figures(run("a.jsonl", "--speed", "1", "--max-gap", "10ms"))["seconds"] > 0.38


def test_history_is_written_as_if_it_happened_now(run: Run, stream: Stream, tmp_path: Path) -> None:
    times = [b'{"ts": "2001-01-01T00:00:00", "x": 1.50}', b'{"x":[1e3],"ts":978307201.5}']
    old = [*times, b"not json", b"[1]", b'{"x":1}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*old, b'{"ts":978307210}']))
    before = time.time()
    done = run("a.jsonl", "--create", "1", "--shift-times", "last", "--limit", "5")
    assert done.returncode == 0, done.stderr
    after, found = time.time(), messages(stream)
    assert figures(done)["bytes"] == sum(map(len, found))
    first, last = (json.loads(one)["ts"] for one in found[:2])
    assert before <= last <= after
    assert last - first == pytest.approx(1.5, abs=1e-5)
    assert re.fullmatch(rb'\{"ts":\d+\.\d{6},"x":1\.50\}', found[0])
    assert found[2:] == old[2:]

    before = time.time()
    assert run("-", "--shift-times", "each", "--rate", "10", input=b"\n".join(old)).returncode == 0
    after, found = time.time(), messages(stream)[5:]
    happened = [json.loads(found[i])["ts"] for i in (0, 1, 4)]  # one without a time has one now
    assert before <= happened[0] < happened[1] < happened[2] <= after
    assert happened[2] - happened[0] == pytest.approx(0.4, abs=0.3)
    assert found[2:4] == old[2:4]


@pytest.mark.parametrize(
    ("form", "old", "unit"),
    [
        ("ms", [978307200000, 978307201500], 1e3),
        ("%d/%m/%Y %H:%M:%S.%f", ["01/01/2001 00:00:00.0", "01/01/2001 00:00:01.5"], 1.0),
    ],
)
def test_history_whose_times_have_another_form(
    run: Run, stream: Stream, tmp_path: Path, *, form: str, old: list[Any], unit: float
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(json.dumps({"at": one}).encode() for one in old))
    before = time.time()
    given = ("a.jsonl", "--create", "1", "--time", "at", "--time-format", form, "--speed", "10")
    done = run(*given, "--shift-times", "last")
    assert done.returncode == 0, done.stderr
    assert figures(done)["seconds"] > 0.14
    first, last = (json.loads(one)["at"] for one in messages(stream))
    assert last - first == pytest.approx(1.5 * unit, abs=1e-5)
    assert before - 1 <= last / unit <= time.time()
    assert isinstance(last, int) == (unit != 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-", "--shift-times", "last"], "cannot read standard input twice: use --shift-times each"),
        (["a.jsonl", "--shift-times", "first"], "--shift-times must be last or each, not 'first'"),
        (["a.jsonl", "--shift-times", "last", "--time", "when"], "none of the first 2 samples has a field 'when'"),
        (["a.jsonl", "--shift-times", "last", "--time", "user"], "has an event time in 'user'; set --time"),
        (["a.jsonl", "--shift-times", "last", "--time-format", "hours"], "time_format 'hours': expected one of s, ms"),
    ],
)
def test_times_that_cannot_be_shifted(run: Run, tmp_path: Path, args: list[str], message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(2))
    done = run(*args, input=b"")
    assert (done.returncode, message in done.stderr.decode()) == (2, True), done


@on_both
def test_a_missing_topic_says_the_way_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(1))
    done = run("a.jsonl")
    assert done.returncode == 1
    assert b"; create it with --create PARTITIONS\n" in done.stderr
    assert done.stdout == b""


def test_a_damaged_file_says_how_far_it_got(run: Run, stream: Stream, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(100_000))[:-1000])
    done = run("a.jsonl.gz", "--create", "1")
    assert done.returncode == 2
    found = re.fullmatch(
        rb"streamtrain: cannot read a.jsonl.gz after sample ([\d,]+): .* the ([\d,]+) messages before it are written\n",
        done.stderr,
    )
    assert found, done.stderr
    assert found[1] == found[2]
    assert len(messages(stream)) == int(found[1].replace(b",", b"")) > 10_000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.csv", "--create", "1"], "cannot read nowhere.csv: No such file or directory"),
        (["-", "--rate", "1", "--speed", "1"], "give one of --rate and --speed"),
        (["a.csv", "--lists", "tags=ab"], "--lists: a separator is one character, and no letter"),
        (["-", "--repeat"], "standard input cannot be repeated"),
        (["-", "--create", "-1"], "stream.create on the command line"),
        (["-", "--max-gap", "soon"], "--max-gap must be a positive duration"),
        (["-", "--set", "stream.topics=a"], "did you mean stream.topic?"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, args: list[str], message: str) -> None:
    done = run(*args, input=b"")
    assert done.returncode == 2, done
    assert done.stdout == b""
    (line,) = done.stderr.decode().strip().splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "stream.topic is not set: set it, or use --topic"),
        ({"topic": "a", "url": "http://user:secret@host"}, "not 'http://***@host'"),
        ({"topic": "a", "url": "kafka"}, "stream.url must be kafka://"),
        ({"topic": "a", "url": "kafka://"}, 'stream.url must be "host:port"'),
        ({"topic": "a", "url": "kafka://a:9092/topic"}, 'stream.url must be "host:port"'),
        ({"topic": "a", "url": "kafka://me:secret@a:9092"}, "must not contain credentials"),
    ],
)
def test_streams_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        open_stream(StreamSettings(**settings))
    assert "secret" not in str(caught.value)


# --- ending early ---


def test_a_full_redis_says_how_much_it_took(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a":"%s"}\n' % (b"x" * 1000) * 20_000)
    with Valkey(maxmemory=8 << 20) as server:
        done = produce(str(tmp_path / "a.jsonl"), "--url", server.url, "--topic", "a", "--create", "1")
        found = re.search(rb"of the ([\d,]+) messages before it at least ([\d,]+) are written\n$", done.stderr)
        assert (done.returncode, done.stdout, bool(found)) == (1, b"", True), done.stderr
        assert found
        high = open_stream(StreamSettings(url=server.url, topic="a")).bounds()[0].high
        assert int(found[2].replace(b",", b"")) <= high < int(found[1].replace(b",", b""))


def test_a_message_too_large_for_kafka_says_where(kafka: Broker, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(3000) + b"x" * (2 << 20) + b"\n" + lines(10))
    url, topic = f"kafka://{kafka.servers}", f"clicks-{uuid4().hex}"
    done = produce(str(tmp_path / "a.jsonl"), "--url", url, "--topic", topic, "--create", "1")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"large; the 3,000 messages before it are written, except any that failed likewise\n" in done.stderr
    assert open_stream(StreamSettings(url=url, topic=topic)).bounds()[0].high == 3000


@on_both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_standard_input_goes_on_as_it_comes_until_a_signal(url: str, stream: Stream, number: signal.Signals) -> None:
    stream.create(1)
    command = [*COMMAND, "-", "--url", url, "--topic", stream.topic]
    with commands.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        rows = process.stdin

        def arrives(amount: int) -> bool:
            rows.write(b"1,2\n")
            rows.flush()
            return stream.bounds()[0].high >= amount

        try:
            until(lambda: arrives(1))
            until(lambda: arrives(3))
            process.send_signal(number)
            assert process.wait(PATIENCE) == 128 + number
            assert process.stderr.read() == b""
            assert json.loads(process.stdout.read())["messages"] == stream.bounds()[0].high
        finally:
            process.kill()


def test_a_bar_on_a_terminal(url: str, stream: Stream) -> None:
    stream.create(1)
    ours, theirs = os.openpty()
    command = [*COMMAND, "-", "--url", url, "--topic", stream.topic, "--rate", "200", "--limit", "100"]
    done = commands.run(command, input=lines(100), stdout=subprocess.PIPE, stderr=theirs, check=False, timeout=PATIENCE)
    os.close(theirs)
    shown = os.read(ours, 1 << 20)
    os.close(ours)
    assert (done.returncode, json.loads(done.stdout)["messages"]) == (0, 100)
    assert re.search(rb"\d+ messages \d+/s ", shown), shown


def test_tensorflow_is_not_loaded(url: str, stream: Stream) -> None:
    code = "import atexit, sys; atexit.register(lambda: print('tensorflow' in sys.modules)); "
    code += "from streamtrain.cli import main; main()"
    command = [sys.executable, "-c", code, "produce", "-", "--url", url, "--topic", stream.topic, "--create", "1"]
    done = commands.run(command, input=lines(1), capture_output=True, check=True, timeout=PATIENCE)
    assert done.stdout.splitlines()[-1] == b"False"


# --- what is documented ---


@on_both
def test_commands_of_the_documentation_work(url: str, tmp_path: Path) -> None:
    toml, given = re.findall(r"```(?:toml|sh)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "streamtrain.toml").write_text(toml)
    (tmp_path / "clicks.jsonl").write_bytes(lines(50))
    (tmp_path / "clicks.jsonl.gz").write_bytes(gzip.compress(lines(50)))
    (tmp_path / "clicks.csv").write_bytes(b"user,item\n007,77\n")
    pq.write_table(pa.table({"ts": range(10), "user": range(10)}), tmp_path / "clicks.parquet")
    (tmp_path / "clicks").mkdir()
    for part in range(5):
        (tmp_path / "clicks" / f"part-{part}.jsonl").write_bytes(lines(10))
    environment = os.environ | {"STREAMTRAIN_STREAM__URL": url}
    program = shlex.join(COMMAND)
    for line in given.strip().splitlines():
        command = line.replace("streamtrain produce", program)
        assert command != line
        done = commands.run(
            ["bash", "-c", command],
            capture_output=True,
            check=False,
            timeout=PATIENCE,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, (line, done.stderr)
        assert figures(done)["messages"] in (50, 1, 10)
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", DOCS.read_text()):
        assert (DOCS.parent / link).exists(), link
