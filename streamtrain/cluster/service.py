"""The whole service on one machine: what its settings leave open, and the programs that make it up."""

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from streamtrain.address import check_free, free_port, parse_address
from streamtrain.cluster.streams import open_stream
from streamtrain.cluster.supervisor import Program
from streamtrain.errors import ConfigError, OriginUnavailable, SourceUnavailable, TopicMissing
from streamtrain.settings import Settings
from streamtrain.store.redis_server import RedisServer

# Stages: whatever is needed by others starts before them and ends after them.
_SERVERS, _SERVING, _SHARDS, _COORDINATOR, _WORKERS = range(5)

_MEGABYTES = {"tensorflow": 600, "ps": 150, "kafka": 600, "valkey": 100}
"""What a process needs at least, beside rows."""

_KAFKA = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000}
"""Of an embedded broker: who takes the place of a worker that was killed waits for so long, not for Kafka's 45 s."""

KAFKA, VALKEY = "kafka", "valkey"


def completed(settings: Settings, *, kafka: bool) -> dict[str, str]:
    """What the settings leave open, for one machine: embedded servers, free ports, a folder for checkpoints.

    Args:
        settings: as they were given.
        kafka: whether Apache Kafka can be run here; else an embedded stream is one of Valkey.

    Returns:
        Values by dotted key.
    """
    given: dict[str, str] = {}
    valkey = f"redis://127.0.0.1:{free_port(6379)}/0"
    if "url" not in settings.stream.model_fields_set:
        given["stream.url"] = f"kafka://127.0.0.1:{free_port(9092)}" if kafka else valkey
        if kafka and "kafka" not in settings.stream.model_fields_set:
            given["stream.kafka"] = json.dumps(_KAFKA)
    if "create" not in settings.stream.model_fields_set:
        given["stream.create"] = str(2 * settings.up.workers)
    if settings.publish.url is None:
        given["publish.url"] = valkey
    if not settings.ps.addresses:
        given["ps.addresses"] = ",".join(f"127.0.0.1:{free_port()}" for _ in range(settings.up.ps))
    if settings.coordinator.address is None:
        given["coordinator.address"] = f"127.0.0.1:{free_port()}"
    if settings.checkpoint.url is None:
        given["checkpoint.url"] = str(Path(settings.up.data, "checkpoints").resolve())
    return given


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
        sockets: at which predictions are asked for. They belong to whoever keeps the programs running, so that
            connections wait, and are not refused, while a program is away.
    """
    inherited = dict(environment) | {f"STREAMTRAIN_{key.upper().replace('.', '__')}": of for key, of in given.items()}
    inherited["PYTHONUNBUFFERED"] = "1"

    def program(name: str, stage: int, *command: str, drain: float = 45.0) -> Program:
        named = inherited | {"STREAMTRAIN_LOG__PROCESS": name}
        return Program(name, [sys.executable, "-m", *command], named, stage, drain)

    found = []
    for server, port in _embedded(given).items():
        data = str(Path(settings.up.data, server).resolve())
        found.append(program(server, _SERVERS, f"streamtrain.embedded.{server}", "--port", str(port), "--data", data))
    found += _serving(program("serve", _SERVING, "streamtrain", "serve", *options), settings.serve.processes, sockets)
    for index in range(len(settings.ps.addresses)):
        found.append(program(f"ps{index}", _SHARDS, "streamtrain", "ps", "--index", str(index), *options))
    for index in range(len(settings.ps.backups)):
        found.append(
            program(f"ps{index}-backup", _SHARDS, "streamtrain", "ps", "--index", str(index), "--backup", *options)
        )
    found.append(program("coordinator", _COORDINATOR, "streamtrain", "coordinator", *options))
    count = ("--workers", str(settings.up.workers))
    for index in range(settings.up.workers):
        command = ("streamtrain", "worker", *count, *options)
        found.append(program(f"worker{index}", _WORKERS, *command, drain=settings.worker.drain + 15))
    return found


def _serving(one: Program, count: int, sockets: Sequence[socket.socket]) -> list[Program]:
    """The programs that serve, which stand side by side."""
    fds = tuple(each.fileno() for each in sockets)
    inherited = [word for fd in fds for word in ("--fd", str(fd))]

    def at(index: int) -> Program:
        name = one.name if count == 1 else f"{one.name}{index}"
        command = [*one.command, *inherited, "--index", str(index)]
        return replace(one, name=name, command=command, again=("--again",), fds=fds)

    return [at(index) for index in range(count)]


def _embedded(given: Mapping[str, str]) -> dict[str, int]:
    """Ports of the servers that were completed, by kind."""
    urls = [given[key] for key in ("stream.url", "publish.url") if key in given]
    kinds = {KAFKA if url.startswith("kafka:") else VALKEY: url for url in urls}
    return {kind: int(url.rpartition(":")[2].partition("/")[0]) for kind, url in kinds.items()}


def check(settings: Settings, given: Mapping[str, str]) -> None:
    """Whether the service can be started here.

    Raises:
        ConfigError: the topic is not named, a port is taken, a server that was given does not answer, or there is too
            little memory.
    """
    if settings.stream.topic is None:
        raise ConfigError("stream.topic is not set: name it there, or with --topic")
    for address, whose in _addresses(settings):
        place = parse_address(address, whose, any_port=whose.endswith(".metrics"))
        if place.port:
            check_free(place.host, place.port, whose)
    _check_memory(settings, given)
    if "stream.url" not in given:
        try:
            open_stream(settings.stream).bounds()
        except TopicMissing:
            pass  # workers make it
        except SourceUnavailable as exc:
            raise ConfigError(f"stream.url: {exc}") from exc
    if "publish.url" not in given and settings.publish.url:
        server = RedisServer(settings.publish.url, cluster=settings.publish.cluster)
        try:
            server.call("EXISTS", "streamtrain")
        except OriginUnavailable as exc:
            raise ConfigError(f"publish.url: {exc}") from exc
        finally:
            server.close()


def _addresses(settings: Settings) -> list[tuple[str, str]]:
    """Where the processes are going to listen, and which setting says so."""
    listening = {
        "serve.listen": settings.serve.listen,
        "serve.metrics": settings.serve.metrics,
        "coordinator.metrics": settings.coordinator.metrics,
    }
    if settings.coordinator.listen:
        listening["coordinator.listen"] = settings.coordinator.listen
    else:
        listening["coordinator.address"] = settings.coordinator.address
    shards = [(address, "ps.addresses") for address in settings.ps.addresses]
    shards += [(address, "ps.backups") for address in settings.ps.backups]
    return [(address, whose) for whose, address in listening.items() if address] + shards


def _check_memory(settings: Settings, given: Mapping[str, str]) -> None:
    shards = len(settings.ps.addresses) + len(settings.ps.backups)
    counts = {"tensorflow": settings.up.workers + settings.serve.processes, "ps": shards}
    counts |= dict.fromkeys(_embedded(given), 1)
    needed = sum(_MEGABYTES[kind] * count for kind, count in counts.items())
    free = _free_megabytes()
    if free < needed:
        raise ConfigError(
            f"{free:,} MB of memory are free, but {settings.up.workers} workers, {shards} shards "
            f"and what else runs need {needed:,} MB: set up.workers or up.ps lower"
        )


def _free_megabytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(found.split()[1]) // 1024
