"""`streamtrain up` as a user runs it: real processes on the embedded stream, killed one after another."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from streamtrain.cluster.client import CoordinatorClient
from streamtrain.errors import ConfigError, ShardRefused, SourceUnavailable
from streamtrain.ps.rpc.control import RemoteControl
from streamtrain.ps.rpc.security import Security, connect, metadata
from streamtrain.serve.client import Endpoint, EndpointError
from streamtrain.service.local import fill_local_defaults, kept_secrets
from streamtrain.service.service_file import ServiceFile, find_service
from streamtrain.settings.load import Settings, load_settings
from streamtrain.stream.redis.stream import RedisStream
from tests import commands
from tests.children import children
from tests.patience import PATIENCE, until
from tests.ports import free_ports

TOPIC = "clicks"
MODEL = """
import keras
import streamtrain as st

schema = st.Schema(time="ts", features=[st.Categorical("user", dim=1, combiner="sum", init=st.Constant(0.0))])

def graph(inputs):
    return keras.layers.Activation("linear")(inputs["user"])

# Gradient -1 per occurrence, rate 1, rows born zero: what is predicted is how many times the id was learned.
model = st.Model(
    schema, graph, loss=lambda labels, predictions: -predictions, reduction="sum", embedding_optimizer=st.SGD(1.0)
)
"""
QUICK = ("publish.every=200ms", "checkpoint.every=2s", "consistency.lease=3s", "serve.processes=2")
KILLED = (  # the second server long after the first, which takes its time to load what it serves
    ["serve", "--index", "0"],
    ["ps"],
    ["worker"],
    ["coordinator"],
    ["serve", "--index", "1"],
    ["streamtrain.embedded.valkey"],
)


@cache
def old_java() -> "tempfile.TemporaryDirectory[str]":
    """A folder with a Java that is too old for Kafka."""
    folder = tempfile.TemporaryDirectory()
    java = Path(folder.name, "java")
    java.write_text("#!/bin/sh\necho 'openjdk version \"8\"' >&2\n")
    java.chmod(0o755)
    return folder


def environment() -> dict[str, str]:
    """Kafka cannot be run, so the stream is the embedded Redis stream."""
    return os.environ | {"PATH": f"{old_java().name}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}


def command(folder: Path, *options: str, settings: tuple[str, ...] = ()) -> list[str]:
    file = folder / "model.py"
    file.write_text(MODEL)
    chosen = ("up.workers=1", "up.ps=1", f"up.data={folder / 'data'}", *settings)
    given = [part for one in chosen for part in ("--set", one)]
    return [*commands.COMMAND, "up", "--model", f"{file}:model", *given, *options]


def left(folder: Path) -> list[str]:
    """Commands of processes that were started for a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        said = " ".join(_command(process.name))
        if str(folder) in said:
            found.append(said)
    return found


def _command(pid: str) -> list[str]:
    """Words of a process's command; none if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


INSTANCE = b'{"user": "all"}'


class Service:
    """A running `up`.

    Args:
        folder: where it runs.
        words: of its command without --listen; by default those for the model that counts.
    """

    def __init__(self, folder: Path, words: Sequence[str] | None = None) -> None:
        self.listen = f"127.0.0.1:{free_ports(1)[0]}"
        words = command(folder, "--topic", TOPIC, settings=QUICK) if words is None else words
        self._process = commands.start(
            [*words, "--listen", self.listen],
            env=environment(),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._endpoint = Endpoint(f"http://{self.listen}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self.lines.extend(lines)

    def until_ready(self) -> None:
        until(self._endpoint.is_ready, PATIENCE)

    @property
    def stream(self) -> RedisStream:
        return RedisStream(self.settings.stream.url, TOPIC)

    @property
    def settings(self) -> Settings:
        """As commands find them that are to reach it."""
        until(lambda: any("run them with --config" in line for line in self.lines), PATIENCE)
        self.file = Path(re.findall(r"--config (\S+);", "".join(self.lines))[0])
        return load_settings(self.file)

    def counted(self) -> float:
        """What is predicted once all that is in the stream is learned."""
        ends = {partition: bounds.high - 1 for partition, bounds in self.stream.bounds().items() if bounds.high}
        wanted = ",".join(f"{partition}:{offset}" for partition, offset in ends.items())
        found: list[float] = []

        def is_learned() -> bool:
            try:
                predictions, _ = self._endpoint.predict("model", [INSTANCE], x_min_offset=wanted)
            except EndpointError:
                return False
            found.append(predictions[0][0])
            return True

        until(is_learned, PATIENCE)
        return found[0]

    def pids(self, *words: str) -> list[int]:
        """Processes of `up` that have these words in their command, the eldest first."""
        found = children(self._process.pid)
        return [pid for pid, command in found.items() if all(word in command for word in words)]

    def pid(self, *words: str) -> int | None:
        """The eldest of these."""
        return next(iter(self.pids(*words)), None)

    def kill(self, *words: str) -> None:
        """Kills a process, and waits until `up` has noticed."""
        pid, noticed = self.pid(*words), self._noticed()
        assert pid is not None, words
        os.kill(pid, signal.SIGKILL)
        until(lambda: self._noticed() > noticed, PATIENCE)

    def _noticed(self) -> int:
        return sum("was killed by SIGKILL" in line for line in self.lines)

    @contextmanager
    def asked(self) -> Iterator[list[int]]:
        """Asks for predictions all the time, by a new connection each; yields how often, and how often in vain."""
        asked, ended = [0, 0], threading.Event()

        def ask() -> None:
            while not ended.wait(0.05):  # without a pause it would take half a processor from what it asks
                asked[0] += 1
                with Endpoint(f"http://{self.listen}") as endpoint:
                    try:
                        endpoint.predict("model", [INSTANCE])
                    except EndpointError:
                        asked[1] += 1

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield asked
        finally:
            ended.set()
            thread.join()

    def stop(self) -> int:
        """Ctrl-C; the exit code. All lines are there afterwards."""
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(PATIENCE)
        self._reader.join()
        return code

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._endpoint.close()


@contextmanager
def running(folder: Path, words: Sequence[str] | None = None) -> Iterator[Service]:
    service = Service(folder, words)
    try:
        yield service
    except BaseException:
        sys.stderr.write("".join(service.lines))
        raise
    finally:
        service.close()


def samples(start: int, count: int) -> list[bytes]:
    return [json.dumps({"ts": start + i, "label": 0, "user": "all"}).encode() for i in range(count)]


def write(stream: RedisStream, start: int, count: int) -> int:
    """Writes samples once the stream answers; the end of them."""

    def is_there() -> bool:
        try:
            return bool(stream.bounds())
        except SourceUnavailable:
            return False

    until(is_there, PATIENCE)
    writer = stream.writer()
    try:
        for one in samples(start, count):
            writer.write(one)
        until(lambda: not writer.flush(1.0), PATIENCE)
    finally:
        writer.close()
    return start + count


def nobody_else_gets_in(service: Service, folder: Path) -> None:
    """Neither another user of the machine, who reaches its ports, sees commands and finds files; but its own does."""
    settings = service.settings
    url, token = urlsplit(settings.stream.url), settings.security.token
    assert url.password
    assert token
    server = f"redis://{url.hostname}:{url.port}/0"
    for given in (server, server.replace("//", "//:guess@")):
        with redis.Redis.from_url(given) as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
    assert settings.coordinator.address
    for address in (*settings.ps.addresses, settings.coordinator.address):
        for guess in (Security(), Security(token="guess")):
            with CoordinatorClient([address], guess) as client, connect(address, guess) as channel:
                with pytest.raises(ShardRefused, match="token"):
                    client.status()
                if address in settings.ps.addresses:
                    with pytest.raises(ShardRefused, match="token"):
                        RemoteControl(channel, address, metadata(guess)).freeze()
    own = [*commands.COMMAND, "status", "--once", "--config", str(service.file)]
    commands.run(own, check=True, timeout=PATIENCE, env=environment(), stdout=subprocess.DEVNULL)
    commands_find_it(folder)
    said = "".join([*left(folder), *service.lines])
    for secret in (url.password, token.get_secret_value()):
        assert secret not in said
    data = service.file.parent
    for private in (data, data / "valkey", service.file, data / "valkey" / "password"):
        assert private.stat().st_mode & 0o077 == 0, private


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command as a user gives it, in the folder where `up` runs."""
    return commands.run(
        [*commands.COMMAND, *words],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def commands_find_it(folder: Path) -> None:
    """Without any setting but the folder of the service; one that names another cluster is obeyed."""
    (folder / "streamtrain.toml").write_text('[up]\ndata = "data"\n')

    def learned() -> int:
        done = run(folder, "status", "--json")
        assert (done.returncode, done.stderr) == (0, ""), done
        return int(json.loads(done.stdout)["samples"])

    until(lambda: learned() == 500)  # the coordinator asks shards once a second
    done = run(folder, "publish", "--version", "--why", "all of it", "--json")
    assert (json.loads(done.stdout)["version"], done.stderr) == (1, ""), done
    for words in (
        ("versions",), ("promote", "1"), ("rollback",), ("label", "canary", "1"), ("checkpoint",),
        ("export", "1", "exported"), ("verify",), ("deadletters", "list"), ("restore", "--list"),
    ):  # fmt: skip
        done = run(folder, *words)
        assert (done.returncode, done.stderr) == (0, ""), done
    done = run(folder, "status", "--once", "--ps", "127.0.0.1:1")
    assert done.returncode == 1
    assert "ignoring the service that runs in data (process " in done.stderr
    assert "ps.addresses is set to another one" in done.stderr
    assert "127.0.0.1:1" in done.stderr.splitlines()[-1]
    done = run(folder, "up", "--model", "model.py:model", "--topic", TOPIC)
    assert done.returncode == 2
    assert re.match(r"streamtrain: `streamtrain up` already runs in data \(process \d+\): stop it first", done.stderr)
    (folder / "streamtrain.toml").unlink()


def shards_change_in_number(service: Service, folder: Path, total: int) -> int:
    """While it runs, also if one is killed then; the end of what was written."""
    (folder / "streamtrain.toml").write_text('[up]\ndata = "data"\n')
    worker = service.pid("worker")
    for shards in (3, 1, 2):
        done = run(folder, "scale", "--ps", str(shards), "--json")
        assert (done.returncode, done.stderr) == (0, ""), done
        assert len(json.loads(done.stdout)["shards"]) == shards
        assert load_settings(service.file).ps.addresses == tuple(json.loads(done.stdout)["shards"])
        total = write(service.stream, total, 100)
        assert service.counted() == total
        assert len(service.pids("ps")) == shards
        service.kill("ps", *(["--spare"] if shards > 1 else []))
        total = write(service.stream, total, 100)
        assert service.counted() == total
    assert service.pid("worker") == worker
    for count in (2, 1):
        done = run(folder, "scale", "--workers", str(count))
        assert (done.returncode, done.stderr) == (0, ""), done
        until(lambda count=count: len(service.pids("worker", "worker1")) == count - 1)  # type: ignore[misc]
        total = write(service.stream, total, 100)
        assert service.counted() == total
    assert service.pid("worker") == worker
    done = run(folder, "scale", "--workers", "0")
    assert (done.returncode, done.stderr) == (2, "streamtrain: --workers must be 1 to 256, not 0\n")
    done = run(folder, "scale", "--ps", "0")
    assert (done.returncode, done.stderr) == (2, "streamtrain: --ps must be 1 to 1024 shards, not 0\n")
    (folder / "streamtrain.toml").unlink()
    return total


ONE_MORE = ("features=[", 'features=[st.Categorical("more", dim=3, field="user"), ')
WRONG_NOW = "worker0   ended with exit code 2: its configuration is wrong now, the other processes continue"


def a_model_that_does_not_fit_is_refused_before_anything_starts(folder: Path) -> None:
    up = command(folder, "--topic", TOPIC, "--listen", f"127.0.0.1:{free_ports(1)[0]}")[3:]
    other = r"differ in: reduction \('sum', but 'mean' in the model file\)\. Undo"
    for change, words, said in (
        (ONE_MORE, up, r"differ in: schema, tables \(table more is new in the model file\)\. Undo"),
        (('reduction="sum"', 'reduction="mean"'), [*up, "--check"], other),
        (("linear", "linearr"), up, "graph fails with ValueError"),
    ):
        (folder / "model.py").write_text(MODEL.replace(*change))
        done = run(folder, *words)
        assert done.returncode == 2, done
        assert re.search(said, done.stderr), done
        assert "ps0" not in done.stdout
        assert not left(folder)
    (folder / "model.py").write_text(MODEL.replace("SGD(1.0)", "SGD(0.5)"))
    done = run(folder, *up, "--check")
    assert done.returncode == 0, done
    assert "stays as the run began, of table user: rate 1.0, not 0.5 as in the model file" in done.stdout


def test_all_is_learned_exactly_whoever_is_killed_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.until_ready()
        file = tmp_path / "samples.jsonl"
        file.write_bytes(b"\n".join(samples(0, 500)))
        produce = [*commands.COMMAND, "produce", str(file), "--topic", TOPIC]
        assert service.settings.stream.topic == TOPIC
        commands.run([*produce, "--config", str(service.file)], check=True, timeout=PATIENCE, env=environment())
        total = 500
        assert service.counted() == total
        nobody_else_gets_in(service, tmp_path)
        with service.asked() as asked:
            for words in KILLED:
                unanswered = asked[1]
                service.kill(*words)
                total = write(service.stream, total, 100)
                assert service.counted() == total, words
                # One request is under way at a time, so a server that is killed leaves no more than one without answer.
                assert asked[1] <= unanswered + ("serve" in words), words
            unanswered = asked[1]
            total = shards_change_in_number(service, tmp_path, total)
            assert asked[1] == unanswered
            until(lambda: len(service.pids("worker")) == 2, PATIENCE)
            worker, standby = service.pids("worker")
            os.kill(worker, signal.SIGKILL)
            total = write(service.stream, total, 100)
            assert service.counted() == total
            assert service.pid("worker") == standby
            assert any("worker0" in line and "its standby takes over" in line for line in service.lines)
            unanswered = asked[1]
            until(lambda: service.pid("serve", "--standby"), PATIENCE)
            service.kill("serve", "--index")
            total = write(service.stream, total, 100)
            assert service.counted() == total
            assert asked[1] <= unanswered + 1
            assert any("serve" in line and "its standby takes over" in line for line in service.lines)
        assert service.stop() == 0
        last = "".join(service.lines).partition("stopping all processes")[2]
        assert "coordinator is unreachable" not in last
    until(lambda: not left(tmp_path), PATIENCE)
    assert not service.file.exists()
    assert [*(tmp_path / "data" / "checkpoints").glob("epoch-*/manifest.json")]

    with running(tmp_path) as service:
        service.until_ready()
        total = write(service.stream, total, 100)
        assert service.counted() == total
        (tmp_path / "model.py").write_text(MODEL.replace(*ONE_MORE))
        for pid in service.pids("worker"):
            os.kill(pid, signal.SIGKILL)
        until(lambda: any(WRONG_NOW in line for line in service.lines), PATIENCE)
        assert service.counted() == total  # what is loaded is served on
        assert service.stop() == 0
    assert not left(tmp_path)
    a_model_that_does_not_fit_is_refused_before_anything_starts(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "worker.batch=3"], "worker.batch"),
        (["--set", "worker.batch_size=many"], "worker.batch_size"),
        (["--listen", "127.0.0.1:{taken}"], "cannot bind 127.0.0.1:{taken} (serve.listen)"),
        (["--set", "ps.addresses=127.0.0.1:{taken}"], "cannot bind 127.0.0.1:{taken} (ps.addresses)"),
        (["--set", "ps.backups=127.0.0.1:{taken}"], "cannot bind 127.0.0.1:{taken} (ps.backups)"),
        (["--set", "coordinator.address=127.0.0.1:{taken}"], "cannot bind 127.0.0.1:{taken} (coordinator.address)"),
        (["--set", "serve.grpc_listen=127.0.0.1:{shared}"], "cannot bind 127.0.0.1:{shared} (serve.grpc_listen)"),
        (
            ["--set", "serve.processes=2", "--set", "serve.metrics=127.0.0.1:{before}"],
            "(serve.metrics), choose another port",
        ),
        (["--model", "nowhere.py"], "model file 'nowhere.py' does not exist"),
        (["--set", "stream.url=kafka://127.0.0.1:{closed}"], "stream.url: "),
        (["--set", "stream.url=redis://127.0.0.1:{closed}"], "stream.url: "),
        (["--set", "publish.url=redis://127.0.0.1:{closed}"], "publish.url: "),
        (["--set", "up.workers=200"], "200 workers, 1 shards and the other processes need"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    """`shared` is a port that another server of this user would share, as gRPC's do by default."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind(("127.0.0.1", 0))
        sharing.listen()
        taken = server.getsockname()[1]
        ports = {"taken": taken, "before": taken - 1, "closed": free_ports(1)[0], "shared": sharing.getsockname()[1]}
        given = [one.format(**ports) for one in options]
        done = commands.run(
            command(tmp_path, "--topic", TOPIC, "--listen", f"127.0.0.1:{ports['closed']}", *given),
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("streamtrain: ")
    assert message.format(**ports) in line
    assert done.stdout == ""
    assert not left(tmp_path)
    assert not (tmp_path / "data").exists()


def load(**given: object) -> Settings:
    return load_settings(Path(os.devnull), {}, {key.replace("__", "."): of for key, of in given.items()})


def test_what_is_given_stays_and_what_is_left_open_is_closed_to_others() -> None:
    opened = fill_local_defaults(load(), kafka=True)
    kafka = json.loads(opened["stream.kafka"])
    assert kafka["session.timeout.ms"] == 6000
    assert kafka["security.protocol"] == "SASL_PLAINTEXT"
    assert urlsplit(opened["publish.url"]).password == kafka["sasl.password"]
    assert len({fill_local_defaults(load(), kafka=True)[key] for _ in range(3) for key in ["security.token"]}) == 3
    own = json.loads(fill_local_defaults(load(stream__kafka='{"fetch.min.bytes": 7}'), kafka=True)["stream.kafka"])
    assert (own["fetch.min.bytes"], "session.timeout.ms" in own, own["sasl.mechanism"]) == (7, False, "PLAIN")
    for given in ({"token": "mine"}, {"token_file": "mine"}, {"ca": "mine"}):
        assert "security.token" not in fill_local_defaults(
            load(**{f"security__{k}": v for k, v in given.items()}), kafka=False
        )
    theirs = fill_local_defaults(load(stream__url="kafka://a:1", publish__url="redis://b:1"), kafka=True)
    assert not {"stream.url", "stream.kafka", "publish.url"} & theirs.keys()


def test_commands_read_the_file_of_a_service_as_it_was_set(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    (data / "valkey").mkdir(mode=0o755)
    (data / "service.toml").write_text("left = true")
    given = {"model": "mödel 😀.py:m\x7f", "up__data": str(data), "stream__kafka": '{"a.b": "x", "n": 1, "t": true}'}
    settings = load(**given, serve__read_token='a"b\\', publish__every="250ms", serve__hosts="a.example,b.example")
    opened = fill_local_defaults(settings, kafka=False)
    settings = load(
        **given,
        serve__read_token='a"b\\',
        publish__every="250ms",
        serve__hosts="a.example,b.example",
        **{key.replace(".", "__"): of for key, of in opened.items()},
    )
    with ExitStack() as stack, kept_secrets(settings, opened) as file:
        assert load_settings(file) == settings
        assert file.stat().st_mode & 0o777 == 0o600
        assert (data / "valkey").stat().st_mode & 0o777 == 0o700
        password = (data / "valkey" / "password").read_text()
        assert password == urlsplit(opened["publish.url"]).password
        running = find_service(data)
        assert running == ServiceFile(file, os.getpid(), is_running=True)
        with pytest.raises(ConfigError, match=rf"already runs in {data} \(process {os.getpid()}\)"):
            stack.enter_context(kept_secrets(settings, opened))
        left_behind = file.read_text()
    assert not file.exists()
    assert not (data / "valkey" / "password").exists()
    assert find_service(data) is None
    file.write_text(left_behind)  # as after a kill -9
    assert find_service(data) == ServiceFile(file, os.getpid(), is_running=False)
    with kept_secrets(settings, opened):
        pass
