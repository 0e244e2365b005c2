"""The whole service on one machine: what its settings leave open, and the programs that make it up."""

import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from streamtrain.address import check_free, parse_address, reserve_port
from streamtrain.embedded.valkey import find_binary
from streamtrain.errors import CheckpointCorrupt, ConfigError, OriginUnavailable, SourceUnavailable, TopicMissing
from streamtrain.memory import WITH_TENSORFLOW, free_megabytes
from streamtrain.model.spec import Spec
from streamtrain.service.programs import KAFKA, PASSWORD_FILE, VALKEY, embedded_servers
from streamtrain.service.service_file import CHECKPOINTS, kept_service_file, refuse_second, write_private
from streamtrain.settings.groups import Settings
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.redis.layout import RedisKeys
from streamtrain.store.redis.server import RedisServer
from streamtrain.stream.opening import open_stream

logger = logging.getLogger(__name__)


_LAST_PORT = 65_535
MEGABYTES = {"tensorflow": WITH_TENSORFLOW, "ps": 150, "kafka": 600, "valkey": 100}
"""Memory that a process needs at least, in addition to rows."""

_KAFKA: dict[str, str | int | float | bool] = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000}
"""For an embedded broker: a killed worker is replaced after this session timeout, not after Kafka's 45 s."""


_SERVERS_FILE = "servers.json"
"""In the folder of the service: password and ports of its embedded servers, which stay the same when it is restarted,
for services that use them, too."""


def fill_local_defaults(settings: Settings, *, kafka: bool) -> dict[str, str]:
    """What `up` sets where settings leave it open: embedded servers, free ports, a folder for checkpoints, secrets.

    Other users of the machine can reach its ports: servers get a password, and processes a new token each time. Servers
    keep their password and, while these are free, their ports.

    Args:
        settings: as they were given.
        kafka: whether Apache Kafka can be run here; else an embedded stream is one of Valkey.

    Returns:
        Values by dotted key.
    """
    given: dict[str, str] = {}
    kept = _kept_servers(Path(settings.up.data))
    password = kept.password or secrets.token_urlsafe(24)
    valkey = f"redis://:{password}@127.0.0.1:{reserve_port(kept.ports.get(VALKEY, 6379))}/0"
    if "url" not in settings.stream.model_fields_set:
        given["stream.url"] = f"kafka://127.0.0.1:{reserve_port(kept.ports.get(KAFKA, 9092))}" if kafka else valkey
        if kafka:
            own = {} if "kafka" not in settings.stream.model_fields_set else settings.stream.kafka
            given["stream.kafka"] = json.dumps((own or _KAFKA) | credentials(password))
    if "create" not in settings.stream.model_fields_set:
        given["stream.create"] = str(2 * settings.up.workers)
    if settings.publish.url is None:
        given["publish.url"] = valkey
    if not settings.ps.addresses:
        given["ps.addresses"] = ",".join(f"127.0.0.1:{reserve_port()}" for _ in range(settings.up.ps))
    if settings.coordinator.address is None:
        given["coordinator.address"] = f"127.0.0.1:{reserve_port()}"
    security = settings.security
    if security.token is None and security.token_file is None and security.ca is None:
        given["security.token"] = secrets.token_urlsafe(24)
    if settings.serve.admin_token is None:
        given["serve.admin_token"] = secrets.token_urlsafe(24)
    if settings.checkpoint.url is None:
        given["checkpoint.url"] = str(Path(settings.up.data, CHECKPOINTS).resolve())
    return given


class _KeptServers(NamedTuple):
    """What embedded servers keep from start to start.

    Attributes:
        password: of all of them; "": none yet.
        ports: by kind.
    """

    password: str = ""
    ports: Mapping[str, int] = {}


def _kept_servers(folder: Path) -> _KeptServers:
    path = folder / _SERVERS_FILE
    try:
        found = json.loads(path.read_bytes())
        return _KeptServers(str(found["password"]), {kind: int(port) for kind, port in found["ports"].items()})
    except OSError:
        return _KeptServers()
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{path} is damaged: delete it, and the embedded servers get a new password") from exc


def _keep_servers(folder: Path, given: Mapping[str, str]) -> None:
    """Writes what the embedded servers keep; of servers that do not run this time, as it was."""
    ports, passwords = embedded_servers(given), _passwords(given)
    if not ports:
        return
    before = _kept_servers(folder)
    for kind, port in ports.items():
        if before.ports.get(kind, port) != port:
            logger.warning(
                "embedded %s listens on port %d, as its port %d is taken: services that use it must be given the new "
                "address", kind, port, before.ports[kind]
            )  # fmt: skip
    kept = _KeptServers(next(iter(passwords.values())), {**before.ports, **ports})
    if kept != before:
        with write_private(folder / _SERVERS_FILE) as opened:
            os.write(opened, json.dumps(kept._asdict()).encode())


def credentials(password: str) -> dict[str, str | int | float | bool]:
    """What clients of an embedded broker set, by the names of librdkafka; see embedded/kafka.py."""
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "streamtrain",
        "sasl.password": password,
    }


@contextmanager
def kept_secrets(settings: Settings, given: Mapping[str, str]) -> Iterator[Path]:
    """Writes what must be in no command's words, for this user alone; it is deleted with the end of the block.

    Args:
        settings: with what was completed.
        given: what was completed.

    Yields:
        The file of all settings, by which commands reach the service.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = Path(settings.up.data)
    passwords = {Path(folder, server, PASSWORD_FILE): password for server, password in _passwords(given).items()}
    with ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = stack.enter_context(kept_service_file(settings, folder))
            _keep_servers(folder, given)
            for place, password in passwords.items():
                place.parent.mkdir(exist_ok=True)
                place.parent.chmod(0o700)  # it may be of a version that left it open
                stack.callback(place.unlink, missing_ok=True)
                with write_private(place) as opened:
                    os.write(opened, password.encode())
        except OSError as exc:
            raise ConfigError(f"up.data: {folder} cannot be written: {exc}") from exc
        yield file


def _passwords(given: Mapping[str, str]) -> dict[str, str]:
    """Passwords of the embedded servers, by kind."""
    passwords = {}
    for kind in embedded_servers(given):
        if kind == KAFKA:
            passwords[kind] = str(json.loads(given["stream.kafka"])["sasl.password"])
        else:
            url = next(given[key] for key in ("publish.url", "stream.url") if given.get(key, "").startswith("redis:"))
            passwords[kind] = urlsplit(url).password or ""
    return passwords


def check(settings: Settings, given: Mapping[str, str]) -> None:
    """Whether the service can be started here.

    Raises:
        ConfigError: the topic is not named, there is no server to start, a service runs in the folder, a port is taken,
            a server that was given does not answer, or there is too little memory.
    """
    refuse_second(Path(settings.up.data))
    if settings.stream.topic is None:
        raise ConfigError("stream.topic is not set: name it there, or with --topic")
    if VALKEY in embedded_servers(given):
        find_binary(settings.up.redis)
    for address, whose in _addresses(settings):
        place = parse_address(address, whose, any_port=whose.endswith((".metrics", ".grpc_listen")))
        more = settings.serve.processes - 1 if whose == "serve.metrics" else 0  # each has the next port
        for port in range(place.port, min(place.port + more, _LAST_PORT) + 1) if place.port else ():
            check_free(place.host, port, whose)
    _check_memory(settings, given)
    if "stream.url" not in given:
        try:
            open_stream(settings.stream).bounds()
        except TopicMissing:
            pass  # workers make it
        except SourceUnavailable as exc:
            raise ConfigError(f"stream.url: {exc}; without stream.url, up runs a stream itself") from exc
    if "publish.url" not in given and settings.publish.url:
        server = RedisServer(settings.publish.url, cluster=settings.publish.cluster)
        try:
            server.call(
                "EXISTS", RedisKeys(settings.publish.model).head
            )  # which a user of the documented rights may ask
        except OriginUnavailable as exc:
            raise ConfigError(f"publish.url: {exc}; without publish.url, up runs a Redis itself") from exc
        finally:
            server.close()


def newest_spec(url: str) -> tuple[Spec, str] | None:
    """What the newest readable checkpoint is of, and where it is; None: there is none.

    Args:
        url: the root of the epochs.

    Raises:
        CheckpointError: it cannot be reached.
    """
    epochs = Epochs(url)
    for number in reversed(epochs.numbers()):
        try:
            chain = epochs.open(number)
            return Spec.from_json(chain.about["spec"]), f"epoch {number} of {epochs.url}"
        except (CheckpointCorrupt, ConfigError, KeyError) as exc:
            logger.debug("%s", exc)  # shards say that they pass over it
    return None


def _addresses(settings: Settings) -> list[tuple[str, str]]:
    """Where the processes are going to listen, and which setting says so."""
    listening = {
        "serve.listen": settings.serve.listen,
        "serve.grpc_listen": settings.serve.grpc_listen,
        "serve.metrics": settings.serve.metrics,
        "coordinator.metrics": settings.coordinator.metrics,
        "join.metrics": settings.join.metrics,
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
    counts |= dict.fromkeys(embedded_servers(given), 1)
    needed = sum(MEGABYTES[kind] * count for kind, count in counts.items())
    free = free_megabytes()
    if free < needed:
        raise ConfigError(
            f"not enough memory: {settings.up.workers} workers, {shards} shards and the other processes need "
            f"{needed:,} MB, and {free:,} MB are free; lower up.workers or up.ps"
        )
