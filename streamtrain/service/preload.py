"""Preloader: a process that has imported TensorFlow and forks commands of streamtrain, which start without that import.

The import takes seconds and 300 MB, and that of a command without TensorFlow half a second. What is forked shares that
memory until it is written to. This is what gunicorn's `--preload` and multiprocessing's fork server do. The preloader
has imported modules, but run nothing: TensorFlow has no context yet, gRPC no channel.

A forked command is a process like one that was executed: its parent is the process that asked for it, which waits for
it and gets its exit code; it has its own environment, standard streams, session and command line. To make it a child of
another process than the one that forked it, its first parent ends at once while the other one is a subreaper (see
prctl(2), PR_SET_CHILD_SUBREAPER).
"""

import atexit
import contextlib
import ctypes
import importlib
import inspect
import json
import logging
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamtrain.child_process import start_child
from streamtrain.errors import StreamtrainError
from streamtrain.memory import exit_at_once, kept_for_good
from streamtrain.service.start_tensorflow import import_tensorflow

logger = logging.getLogger(__name__)

_COMMAND = [sys.executable, "-m", "streamtrain"]

_MODULES = (
    "streamtrain.cli",
    "streamtrain.cluster.client",
    "streamtrain.processes.serving",
    "streamtrain.processes.worker",
    "streamtrain.serve.http.app",
    "uvicorn.protocols.http.httptools_impl",
)
"""What commands import, in addition to TensorFlow."""

_READ_ON_IMPORT = re.compile(
    r"(ABSL|ARROW|BLIS|COV|CUDA|DNNL|GLIBC|GOTO|GRPC|JAX|KERAS|KMP|LC|LD|MALLOC|MKL|NPY|NUMEXPR|NVIDIA|OMP|ONEDNN|"
    r"OPENBLAS|PYTHON|TF|XLA)\w*|HOME|LANG|LANGUAGE|TZ"
)
_READ_LATER = {"PYTHONUNBUFFERED", "TF_CONFIG", "XLA_FLAGS"}  # XLA reads its flags when it first compiles

_STARTING = ("demo", "serve", "up")
"""Commands that have a preloader of their own."""

_SECONDS = 60.0  # for an answer of the preloader
_EXIT_UNWRITTEN = 120  # of an interpreter that cannot write what it still has to, too
_LONGEST = 1 << 18  # bytes of a request
_TITLE = 4000  # bytes for the command line of what is forked
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_adopting = threading.Lock()


class CannotFork(StreamtrainError):
    """The preloader cannot start this command: execute it."""


class _Request(NamedTuple):
    """What is to be forked.

    Attributes:
        words: of the command, after `python -m streamtrain`.
        environment: all of it.
        cwd: working directory.
        session: whether it gets a session of its own.
        fds: numbers of its descriptors, which come with the request in this order.
        death_signal: that it is sent once its parent has ended.
        parent: id of that process.
        hands_on: whether it gets a preloader if it is a command that needs one.
    """

    words: list[str]
    environment: dict[str, str]
    cwd: str
    session: bool
    fds: list[int]
    death_signal: int
    parent: int
    hands_on: bool


class _HandedOn:
    """A preloader that was forked together with this process, which is its parent.

    Attributes:
        pid: its id.
        connection: to it.
        environment: that it was forked with.
    """

    def __init__(self, pid: int, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self.pid, self.connection, self.environment = pid, connection, environment
        self._ended = False

    def kill(self) -> None:
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if not self._ended:
            os.waitpid(self.pid, 0)
            self._ended = True


_handed_on: _HandedOn | None = None


class Preloader:
    """Starts a preloader, and has it fork commands. Thread-safe. It ends with this process.

    Args:
        environment: of the preloader. Commands with other values of variables that libraries read when they are
            imported, such as KERAS_BACKEND, cannot be forked.
        hands_on: whether commands that need a preloader, too, get one that is forked from this one. Otherwise they
            start their own, which imports TensorFlow anew.
    """

    def __init__(self, environment: Mapping[str, str], *, hands_on: bool = False) -> None:
        self._environment = dict(environment)
        self._hands_on = hands_on
        self._process: subprocess.Popen[Any] | _HandedOn
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._is_closed = False
        self._error = ""
        self._start()

    @property
    def pid(self) -> int:
        """Id of the preloader's process."""
        return self._process.pid

    def _start(self) -> None:
        ours = self._take_handed_on() or self._execute()
        self._socket = ours
        self._error = ""
        self._ready.clear()
        threading.Thread(target=self._await_ready, args=(ours,), name="preloader", daemon=True).start()

    def _take_handed_on(self) -> socket.socket | None:
        global _handed_on
        given, _handed_on = _handed_on, None
        if given is None:
            return None
        self._process = given
        if _differing(given.environment, self._environment):
            given.kill()
            given.wait()
            given.connection.close()
            return None
        return given.connection

    def _execute(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_child(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                signal.SIGKILL,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment | {"_": " " * _TITLE},  # what is forked writes its command line there
            )
        return ours

    def _await_ready(self, connection: socket.socket) -> None:
        try:
            self._error = str(json.loads(connection.recv(_LONGEST) or b'{"error": "it has ended"}')["error"])
            connection.settimeout(_SECONDS)
        except OSError as exc:
            self._error = str(exc)
        if self._error and not self._is_closed:
            logger.warning("processes start more slowly, as TensorFlow cannot be preloaded: %s", self._error)
        self._ready.set()

    def wait_ready(self) -> None:
        """Waits until it can fork, it has failed, or it is closed."""
        self._ready.wait()

    def fork(self, command: Sequence[str], death_signal: signal.Signals, **options: Any) -> "subprocess.Popen[Any]":
        """Starts a command once TensorFlow is loaded; see `start_child`.

        Args:
            command: `python -m streamtrain`, and its arguments.
            death_signal: that it is sent once this process has ended.
            options: see `subprocess.Popen`: standard streams, cwd, env, pass_fds, start_new_session, and those of text.

        Raises:
            CannotFork: it has to be executed.
            OSError: it cannot be started.
        """
        environment = options.get("env")
        if list(command[: len(_COMMAND)]) != _COMMAND:
            raise CannotFork(f"{command[0]} is not a command of streamtrain")
        if environment is not None and (differs := _differing(self._environment, environment)):
            raise CannotFork(f"{', '.join(differs)} in its environment: libraries read this when they are imported")
        self.wait_ready()
        if self._error or self._is_closed:
            raise CannotFork(f"the preloader failed: {self._error}")
        return _Forked(self, command, death_signal, **options)

    def request(self, wanted: _Request, fds: Sequence[int]) -> int:
        """Has a command forked; returns the id of its process, which is a child of this one.

        Raises:
            CannotFork: it has to be executed. The next one can be forked again.
        """
        with self._lock:
            try:
                with _subreaper():
                    socket.send_fds(self._socket, [json.dumps(wanted._asdict()).encode()], fds)
                    answer = self._socket.recv(_LONGEST)
            except OSError as exc:
                answer = json.dumps({"error": str(exc)}).encode()
            found = json.loads(answer or b'{"error": "it has ended"}')
            if "pid" in found:
                return int(found["pid"])
            if not self._is_closed:
                self._stop()
                self._start()
        raise CannotFork(f"the preloader failed and is started again: {found['error']}")

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def close(self) -> None:
        """Ends the preloader; what it has forked runs on."""
        self._is_closed = True
        self._process.kill()
        with self._lock:
            self._stop()
        self._ready.set()


def start_preloaded(
    preloader: Preloader | None, command: Sequence[str], death_signal: signal.Signals, **options: Any
) -> "subprocess.Popen[Any]":
    """Forks a command if that is possible, else executes it; see `start_child`.

    Raises:
        OSError: it cannot be started.
    """
    if preloader is not None:
        try:
            return preloader.fork(command, death_signal, **options)
        except CannotFork as exc:
            logger.debug("%s is executed: %s", " ".join(command[3:5]), exc)
    return start_child(command, death_signal, **options)


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Variables that libraries read when they are imported, and that are not alike."""
    return sorted(
        name
        for name in {*one, *other} - _READ_LATER
        if _READ_ON_IMPORT.fullmatch(name) and one.get(name) != other.get(name)
    )


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """In this context, descendants of this process that lose their parent become its children."""
    with _adopting:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _Forked(subprocess.Popen[Any]):
    """A forked process. Pipes, waiting and signals are those of `subprocess.Popen`."""

    def __init__(
        self, preloader: Preloader, command: Sequence[str], death_signal: signal.Signals, **options: Any
    ) -> None:
        self._preloader, self._death_signal = preloader, death_signal
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        """Takes the place of what forks and executes in `subprocess.Popen`, with the same arguments."""
        base: Any = subprocess.Popen
        of = inspect.signature(base._execute_child).bind(self, *given).arguments
        keep = sorted(of["pass_fds"])
        streams = [of[name] if of[name] != -1 else fd for fd, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in (of["env"] or {}).items()}
        wanted = _Request(
            words=[os.fsdecode(word) for word in of["args"][len(_COMMAND) :]],
            environment=environment if of["env"] is not None else dict(self._preloader._environment),
            cwd=os.fsdecode(of["cwd"] or os.getcwd()),
            session=of["start_new_session"],
            fds=[0, 1, 2, *keep],
            death_signal=self._death_signal,
            parent=os.getpid(),
            hands_on=self._preloader._hands_on,
        )
        try:
            self.pid = self._preloader.request(wanted, [*streams, *keep])
            self._child_created = True
        finally:
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(of[name] for name in pipes))  # type: ignore[attr-defined]


# From here on: in the preloader, and in what it forks.


def main() -> None:
    """Imports modules, then forks what is asked for at the socket whose descriptor is the argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: it is for the parent
    exit_at_once()
    try:
        import_tensorflow()
        with kept_for_good():  # the collector would write to all objects, so that nothing is shared
            for module in _MODULES:
                importlib.import_module(module)
    except BaseException as exc:
        connection.send(json.dumps({"error": f"{type(exc).__name__}: {exc}"}).encode())
        raise
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    _serve(connection)


def _serve(connection: socket.socket) -> None:
    """Forks what is asked for; returns at the end of the connection, and in a fork, at the end of its command."""
    connection.send(json.dumps({"error": ""}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(connection, _LONGEST, 250)
        if not message:
            return
        wanted = _Request(**json.loads(message))
        if _fork(connection):
            os.close(connection.detach())  # else its end would close whatever has this number by then
            _become(wanted, fds)
            given = _hand_on() if wanted.hands_on and wanted.words[:1] in ([name] for name in _STARTING) else None
            if given is None:
                _run()
            else:
                _serve(given)
            return
        for fd in fds:
            os.close(fd)


def _run() -> None:
    """Runs the command, and ends this process as multiprocessing ends what it has forked.

    Objects are not given back one by one, which would copy most of the memory that is shared, only to end. Exceptions
    other than SystemExit are left to the interpreter, which ends by itself.
    """
    code: object = None
    try:
        runpy.run_module("streamtrain", run_name="__main__", alter_sys=True)
    except SystemExit as exc:
        code = exc.code
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        code = code or _EXIT_UNWRITTEN
    os._exit(code or 0)


def _hand_on() -> socket.socket | None:
    """Forks a preloader for this process, before it has threads.

    Returns:
        None in this process; in the preloader, its connection.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent, number = os.getpid(), theirs.fileno()
    pid = os.fork()
    if pid:
        theirs.close()
        module: Any = importlib.import_module("streamtrain.service.preload")  # this one is __main__
        module._handed_on = _HandedOn(pid, ours, dict(os.environ))
        return None
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ours.close()
    null = os.open(os.devnull, os.O_RDWR)
    _take_descriptors([0, 1, 2, number], [null, null, null, number])
    _show_command([sys.executable, "-m", "streamtrain.service.preload", str(number)])
    return theirs


def _fork(connection: socket.socket) -> bool:
    """Forks a process that has no parent here, and answers with its id; returns whether this is that process."""
    go, may_go = os.pipe()
    told, tell = os.pipe()
    between = os.fork()
    if not between:
        try:
            pid = os.fork()
        except OSError as exc:
            os.write(tell, json.dumps({"error": str(exc)}).encode())
            os._exit(1)
        if pid:
            os.write(tell, json.dumps({"pid": pid}).encode())
            os._exit(0)
        os.close(may_go)
        if not os.read(go, 1):  # by then it has its new parent
            os._exit(1)
        return True
    os.waitpid(between, 0)
    connection.send(os.read(told, _LONGEST))
    os.write(may_go, b"1")
    for fd in (go, may_go, told, tell):
        os.close(fd)
    return False


def _become(wanted: _Request, fds: Sequence[int]) -> None:
    """Makes this process what it would be if the command had been executed."""
    if wanted.session:
        os.setsid()
    _prctl(_PR_SET_PDEATHSIG, wanted.death_signal)
    if os.getppid() != wanted.parent:
        os._exit(1)
    _take_descriptors(wanted.fds, fds)
    os.environ.clear()
    os.environ.update(wanted.environment)
    home = sys.path[0] == os.getcwd()
    os.chdir(wanted.cwd)
    if home:
        sys.path[0] = os.getcwd()
    sys.argv = ["streamtrain", *wanted.words]
    sys.orig_argv = [*_COMMAND, *wanted.words]
    _show_command(sys.orig_argv)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _open_stream(fd, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module("numpy.random").seed()  # Python's own is seeded by the fork
    time.tzset()
    tempfile.tempdir = None  # found anew, by TMPDIR


def _take_descriptors(numbers: Sequence[int], fds: Sequence[int]) -> None:
    """Gives descriptors their numbers, and closes all others."""
    import fcntl

    free = max([*numbers, *fds]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for fd in fds]
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in numbers:
            with contextlib.suppress(OSError):  # that of this list
                os.close(int(name))


def _open_stream(fd: int, like: Any) -> Any:
    """A standard stream, as Python opens it."""
    is_unbuffered = fd > 0 and bool(os.environ.get("PYTHONUNBUFFERED"))
    stream: Any = open(  # noqa: SIM115  # it stays open
        fd,
        "r" if fd == 0 else "w",
        buffering=1 if fd == 2 or os.isatty(fd) else -1,
        encoding=like.encoding,
        errors=like.errors,
        closefd=False,
    )
    if is_unbuffered:
        stream.reconfigure(write_through=True, line_buffering=True)
    return stream


def _show_command(words: Sequence[str]) -> None:
    """Has `ps` show a command, by writing it over that of the preloader and its environment, as setproctitle does."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end, after, last = (int(field) for field in fields[45:49])
    room = (last if after == end else end) - start
    text = os.fsencode(" ".join(words))[: room - 1].ljust(end - start)  # up to `end`: else the kernel looks only there
    if start and len(text) < room:
        ctypes.memset(start, 0, room)
        ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    main()
