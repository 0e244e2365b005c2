"""The programs of a whole service on one machine."""

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamtrain.embedded.valkey import find_binary
from streamtrain.settings.groups import Settings

# Stages: whatever is needed by others starts before them and ends after them.
_SERVERS, _SHARDS, _COORDINATOR, _SERVING, _WORKERS = range(5)
KAFKA, VALKEY = "kafka", "valkey"
PASSWORD_FILE = "password"


@dataclass(frozen=True)
class Program:
    """A program that is kept running.

    Attributes:
        name: stands in front of its lines.
        command: path and arguments.
        environment: all of it.
        stage: programs of a lower stage are started first and stopped last.
        drain: seconds that it has to end by itself, before it is killed.
        again: more arguments for when it is started again.
        fds: file descriptors that it inherits.
        standby: programs that give one name here share a standby: one process more, of the first one's command with
            --standby, which loads all that takes time and then waits for a line on its standard input: the `instance`
            of the program that has ended, and whose place it takes. None: the program is restarted.
        instance: by which others know it, such as a consumer group; "": its name.
        preload: whether it is a command of streamtrain, which is forked from a process that has imported TensorFlow.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    stage: int = 0
    drain: float = 45.0
    again: Sequence[str] = ()
    fds: Sequence[int] = ()
    standby: str | None = None
    instance: str = ""
    preload: bool = False


def replicate(program: Program, count: int, sockets: Sequence[socket.socket]) -> list[Program]:
    """Copies of `streamtrain serve` that take connections from the same sockets.

    Args:
        program: the command; stands for all if `count` is 1.
        count: of copies; each has its index in its name and its arguments.
        sockets: belong to the supervisor, so that connections wait, and are not refused, while a copy restarts.
    """
    fds = tuple(one.fileno() for one in sockets)
    command = [*program.command, *(word for fd in fds for word in ("--fd", str(fd)))]
    return [
        replace(
            program,
            name=program.name if count == 1 else f"{program.name}{index}",
            command=[*command, "--index", str(index)],
            again=("--again",),
            fds=fds,
        )
        for index in range(count)
    ]


def programs(
    settings: Settings,
    given: Mapping[str, str],
    options: Sequence[str],
    environment: Mapping[str, str],
    sockets: Sequence[socket.socket],
) -> list[Program]:
    """All processes of the service.

    Args:
        settings: with what was completed.
        given: what was completed; processes find it in their environment.
        options: of every command: where the settings are.
        environment: of this process.
        sockets: that serve predictions; see `replicate`.
    """
    inherited = dict(environment) | {f"STREAMTRAIN_{key.upper().replace('.', '__')}": of for key, of in given.items()}
    inherited["PYTHONUNBUFFERED"] = "1"

    def program(name: str, stage: int, *command: str, drain: float = 45.0) -> Program:
        named = inherited | {"STREAMTRAIN_LOG__PROCESS": name}
        return Program(name, [sys.executable, "-m", *command], named, stage, drain, preload=command[0] == "streamtrain")

    def standby(kind: str) -> str | None:
        return kind if settings.up.standby else None

    result = []
    for server, port in embedded_servers(given).items():
        data = Path(settings.up.data, server).resolve()
        words = ["--port", str(port), "--data", str(data), "--password-file", str(data / PASSWORD_FILE)]
        if server == VALKEY:
            words += ["--binary", find_binary(settings.up.redis)]
        elif settings.up.kafka is not None:
            words += ["--cache", str(Path(settings.up.kafka).resolve())]
        result.append(program(server, _SERVERS, f"streamtrain.embedded.{server}", *words))
    serve = replace(program("serve", _SERVING, "streamtrain", "serve", *options), standby=standby("serve"))
    result += replicate(serve, settings.serve.processes, sockets)
    for index in range(len(settings.ps.addresses)):
        result.append(program(f"ps{index}", _SHARDS, "streamtrain", "ps", "--index", str(index), *options))
    for index in range(len(settings.ps.backups)):
        result.append(
            program(f"ps{index}-backup", _SHARDS, "streamtrain", "ps", "--index", str(index), "--backup", *options)
        )
    result.append(program("coordinator", _COORDINATOR, "streamtrain", "coordinator", *options))
    if settings.join.is_configured:
        result.append(program("join", _WORKERS, "streamtrain", "join", *options, "--instance", "join"))
    count, drain = ("--workers", str(settings.up.workers)), settings.worker.drain + 15
    for index in range(settings.up.workers):
        command = ("streamtrain", "worker", *count, *options)
        one = program(f"worker{index}", _WORKERS, *command, "--instance", f"worker{index}", drain=drain)
        result.append(replace(one, standby=standby("worker")))
    return result


def embedded_servers(given: Mapping[str, str]) -> dict[str, int]:
    """Ports of the servers that were completed, by kind."""
    urls = [given[key] for key in ("stream.url", "publish.url") if key in given]
    kinds = {KAFKA if url.startswith("kafka:") else VALKEY: url for url in urls}
    return {kind: int(url.rpartition(":")[2].partition("/")[0]) for kind, url in kinds.items()}
