"""The embedded Valkey as a process: it starts, ends, is killed, paused, restarted, and never outlives its parent."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import SourceUnavailable
from tests.stream.redis_fixtures import redis_binary

__all__ = ["redis_binary"]


def ask(server: Valkey, timeout: float = 5.0) -> "redis.Redis":
    return redis.Redis.from_url(server.url, socket_timeout=timeout, retry=Retry(NoBackoff(), 0))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until_dead(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives"
        pause.wait(0.02)


def test_it_answers_until_it_is_stopped(redis_binary: str | None) -> None:
    with Valkey(binary=redis_binary) as server:
        pid, folder = server.pid, server.folder
        assert pid
        assert server.start().pid == pid  # it runs already
        with ask(server) as client:
            assert client.ping()
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert not alive(pid)
    assert not folder.exists()
    server.stop()


def test_data_outlives_a_kill_with_appendonly_only(redis_binary: str | None, tmp_path: Path) -> None:
    for appendonly in (True, False):
        with Valkey(tmp_path / str(appendonly), appendonly=appendonly, binary=redis_binary) as server:
            with ask(server) as client:
                client.set("a", "1")
            url = server.url
            server.restart()
            assert server.url == url
            with ask(server) as client:
                assert client.get("a") == (b"1" if appendonly else None)


def test_a_given_folder_stays_and_is_read_again(tmp_path: Path) -> None:
    with Valkey(tmp_path, appendonly=True) as server, ask(server) as client:
        client.set("a", "1")
    with Valkey(tmp_path, appendonly=True) as server, ask(server) as client:
        assert client.get("a") == b"1"


def test_password_socket_and_lines_of_configuration(redis_binary: str | None, tmp_path: Path) -> None:
    password = 'p @/"\\%ü'
    lines = ["maxclients 17"]
    with Valkey(password=password, unix=tmp_path / "a b.sock", config=lines, binary=redis_binary) as server:
        assert server.url.startswith("unix://")
        with ask(server) as client:
            assert client.config_get("maxclients") == {"maxclients": "17"}
        with redis.Redis(port=server.port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert (server.folder / "server.conf").stat().st_mode & 0o077 == 0


def test_memory_is_limited() -> None:
    with Valkey(maxmemory=4 << 20) as server, ask(server) as client:
        client.set("small", b"x")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.mset({f"key{i}": b"x" * (1 << 16) for i in range(100)}) and client.set("one more", b"x")


def test_a_paused_one_does_not_answer_and_goes_on() -> None:
    with Valkey() as server:
        server.pause()
        with ask(server, 0.2) as client:
            with pytest.raises(redis.TimeoutError):
                client.ping()
            server.resume()
            assert client.ping()
        server.pause()  # stopping a paused one does not hang


def test_it_says_why_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"(?s)its log ends:.*no-such-setting"):
        Valkey(config=["no-such-setting 1"]).start()
    with pytest.raises(SourceUnavailable, match=r"(?s)/no/such/server.*No such file"):
        Valkey(binary="/no/such/server").start()
    with Valkey() as server, pytest.raises(SourceUnavailable, match=r"(?s)in use"):
        Valkey(port=server.port).start()


def test_it_outlives_the_thread_that_started_it() -> None:
    server = Valkey()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    with server, ask(server) as client:
        assert client.ping()


@pytest.mark.parametrize("end", ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit"])
def test_it_does_not_outlive_its_parent(end: str, tmp_path: Path) -> None:
    program = f"""
from streamtrain.embedded.valkey import Valkey
server = Valkey({str(tmp_path)!r}).start()
print(server.pid, flush=True)
{end}
"""
    run = subprocess.run([sys.executable, "-c", program], check=False, stdout=subprocess.PIPE, timeout=60)
    until_dead(int(run.stdout))
