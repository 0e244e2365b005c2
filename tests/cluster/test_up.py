"""`streamtrain up` as a user runs it: real processes on the embedded stream, killed one after another."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamtrain.demo.endpoint import Endpoint, EndpointAway
from streamtrain.errors import SourceUnavailable
from streamtrain.stream.redis_streams import RedisStream
from tests.cluster.ports import free_ports
from tests.ps.raw import until

LONG = 240.0
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
KILLED = (
    ["ps"],
    ["worker"],
    ["coordinator"],
    ["serve", "--index", "0"],
    ["serve", "--index", "1"],
    ["streamtrain.embedded.valkey"],
)


def environment(folder: Path) -> dict[str, str]:
    """Kafka's jars are looked for at home, so there are none: the stream is the embedded Redis stream."""
    return os.environ | {"HOME": str(folder), "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def command(folder: Path, *options: str, settings: tuple[str, ...] = ()) -> list[str]:
    file = folder / "model.py"
    file.write_text(MODEL)
    chosen = ("up.workers=1", "up.ps=1", f"up.data={folder / 'data'}", *settings)
    given = [part for one in chosen for part in ("--set", one)]
    return [sys.executable, "-m", "streamtrain", "up", "--model", f"{file}:model", *given, *options]


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


class Service:
    """A running `up`."""

    def __init__(self, folder: Path) -> None:
        self.listen = f"127.0.0.1:{free_ports(1)[0]}"
        self._process = subprocess.Popen(
            command(folder, "--topic", TOPIC, "--listen", self.listen, settings=QUICK),
            env=environment(folder),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._endpoint = Endpoint(self.listen, "model")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self.lines.extend(lines)

    def until_ready(self) -> None:
        until(self._endpoint.is_ready, LONG)

    @property
    def stream(self) -> RedisStream:
        until(lambda: any("stream redis://" in line for line in self.lines), LONG)
        return RedisStream(re.findall(r"stream (redis://\S+),", "".join(self.lines))[0], TOPIC)

    def counted(self) -> float:
        """What is predicted once all that is in the stream is learned."""
        ends = {partition: bounds.high - 1 for partition, bounds in self.stream.bounds().items() if bounds.high}
        wanted = {"x-min-offset": ",".join(f"{partition}:{offset}" for partition, offset in ends.items())}
        found: list[float] = []

        def is_learned() -> bool:
            try:
                answer = self._endpoint.predict({"user": "all"}, headers=wanted)
            except EndpointAway:
                return False
            if answer.status == 200:
                found.append(answer.body["predictions"][0][0])
            return bool(found)

        until(is_learned, LONG)
        return found[0]

    def pid(self, *words: str) -> int | None:
        """The process of `up` that has these words in its command."""
        for children in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            for child in children.read_text().split():
                said = _command(child)
                if all(word in said for word in words):
                    return int(child)
        return None

    def kill(self, *words: str) -> None:
        """Kills a process, and waits for the one that takes its place."""
        pid = self.pid(*words)
        assert pid is not None, words
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.pid(*words) not in (pid, None), LONG)

    @contextmanager
    def asked(self) -> Iterator[list[int]]:
        """Asks for predictions, each time by a new connection; yields how often, and how often in vain."""
        asked, ended = [0, 0], threading.Event()

        def ask() -> None:
            while not ended.is_set():
                asked[0] += 1
                endpoint = Endpoint(self.listen, "model")
                try:
                    asked[1] += endpoint.predict({"user": "all"}).status != 200
                except EndpointAway:
                    asked[1] += 1
                finally:
                    endpoint.close()

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield asked
        finally:
            ended.set()
            thread.join()

    def stop(self) -> int:
        """Ctrl-C; the exit code."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(LONG)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._endpoint.close()


@contextmanager
def running(folder: Path) -> Iterator[Service]:
    service = Service(folder)
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

    until(is_there, LONG)
    writer = stream.writer()
    try:
        for one in samples(start, count):
            writer.write(one)
        until(lambda: not writer.flush(1.0), LONG)
    finally:
        writer.close()
    return start + count


def test_all_is_learned_exactly_whoever_is_killed_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.until_ready()
        file = tmp_path / "samples.jsonl"
        file.write_bytes(b"\n".join(samples(0, 500)))
        produce = [sys.executable, "-m", "streamtrain", "produce", str(file), "--topic", TOPIC]
        url = re.findall(r"stream (redis://\S+),", "".join(service.lines))[0]
        subprocess.run([*produce, "--url", url], check=True, timeout=LONG, env=environment(tmp_path))
        total = 500
        assert service.counted() == total
        with service.asked() as asked:
            for words in KILLED:
                unanswered = asked[1]
                service.kill(*words)
                total = write(service.stream, total, 100)
                assert service.counted() == total, words
                # One request is under way at a time, so a server that is killed leaves no more than one without answer.
                assert asked[1] <= unanswered + ("serve" in words), words
        assert service.stop() == 0
    until(lambda: not left(tmp_path), LONG)
    assert [*(tmp_path / "data" / "checkpoints").glob("epoch-*/manifest.json")]

    with running(tmp_path) as service:
        service.until_ready()
        total = write(service.stream, total, 100)
        assert service.counted() == total
        assert service.stop() == 0
    assert not left(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "worker.batch=3"], "worker.batch"),
        (["--set", "worker.batch_size=many"], "worker.batch_size"),
        (["--listen", "127.0.0.1:{taken}"], "port {taken} of 127.0.0.1 cannot be had for serve.listen"),
        (["--set", "ps.addresses=127.0.0.1:{taken}"], "port {taken} of 127.0.0.1 cannot be had for ps.addresses"),
        (["--set", "ps.backups=127.0.0.1:{taken}"], "port {taken} of 127.0.0.1 cannot be had for ps.backups"),
        (["--set", "coordinator.address=127.0.0.1:{taken}"], "cannot be had for coordinator.address"),
        (["--model", "nowhere.py"], "model file 'nowhere.py' does not exist"),
        (["--set", "stream.url=kafka://127.0.0.1:{closed}"], "stream.url: "),
        (["--set", "stream.url=redis://127.0.0.1:{closed}"], "stream.url: "),
        (["--set", "publish.url=redis://127.0.0.1:{closed}"], "publish.url: "),
        (["--set", "up.workers=200"], "200 workers, 1 shards and what else runs need"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"taken": server.getsockname()[1], "closed": free_ports(1)[0]}
        given = [one.format(**ports) for one in options]
        done = subprocess.run(
            command(tmp_path, "--topic", TOPIC, "--listen", f"127.0.0.1:{ports['closed']}", *given),
            env=environment(tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("streamtrain: ")
    assert message.format(**ports) in line
    assert done.stdout == ""
    assert not left(tmp_path)
    assert not (tmp_path / "data").exists()
