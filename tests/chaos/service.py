"""Service: one model's processes, each where the network has it, started again by a supervisor when they end."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from streamtrain.cluster.client import CoordinatorClient
from streamtrain.cluster.status_reader import StatusReader
from streamtrain.errors import ShardError
from streamtrain.ps.nodes.topology import ShardMap
from streamtrain.ps.rpc.security import Security
from streamtrain.service.preload import Preloader
from streamtrain.service.programs import Program
from streamtrain.service.supervisor import Supervisor
from streamtrain.settings.load import load_settings
from streamtrain.stream.opening import open_stream
from tests.chaos import rights
from tests.chaos.network import Network
from tests.chaos.samples import Samples
from tests.chaos.servers import Servers
from tests.children import children
from tests.ports import free_ports
from tests.stream.servers import allow

ROOT = str(Path(__file__).parent.parent.parent)
PARTITIONS = 4
SHARDS = WORKERS = SERVERS = 2
PS, WORKER, COORDINATOR, SERVE = "ps", "worker", "coordinator", "serve"
BACKUP = "-backup"  # after the name of a shard: its second place
_FAKETIME = "libfaketimeMT.so.1"
_BUFFER = "1048576"  # bytes, the least: buffers are full after long faults


def names_of(service: str, backed: bool = False, spare: bool = False) -> list[str]:
    """Names of a service's processes, and of where each is in the network.

    Args:
        service: its name.
        backed: whether shards have backups.
        spare: whether there is a process, or a pair of them, that may become a shard.
    """
    shards = [f"{PS}{i}{place}" for place in ("", BACKUP)[: 1 + backed] for i in range(SHARDS + spare)]
    workers = [f"{WORKER}{i}" for i in range(WORKERS)]
    return [f"{service}-{one}" for one in (*shards, *workers, COORDINATOR, SERVE)]


def faketime() -> Path | None:
    """The library that can set the clock of one process; None: it is not installed."""
    return next(iter(sorted(Path("/usr/lib").glob(f"*/faketime/{_FAKETIME}"))), None)


class Service:
    """Two shards, with backups or without, two workers, a coordinator, and two serving processes at one address.

    Args:
        samples: what is learned.
        folder: for logs and the model file.
        network: where processes are.
        servers: Kafka and Valkey.
        checkpoints: folder.
        backed: whether shards have backups.
        spare: whether there is a process, or a pair of them, that may become a shard.
        clocks: whether the clock of a process can be set.
        settings: more of them, by dotted key.

    Attributes:
        names: of its processes.
        has_spare: whether there is one that may become a shard.
        listen: "host:port" of the endpoint.
        settings: of all processes.
        stream: of the samples; it is made.
        clocked: names of those processes whose clock can be set.
    """

    def __init__(
        self,
        samples: Samples,
        folder: Path,
        network: Network,
        *,
        servers: Servers,
        checkpoints: Path,
        backed: bool = False,
        spare: bool = False,
        clocks: bool = False,
        settings: Mapping[str, str] = {},
    ) -> None:
        self.samples, self.name, self.network = samples, samples.name, network
        self._backed, self.has_spare = backed, spare
        self.names = names_of(self.name, backed, spare)
        self._at: dict[str, str] = {}  # addresses of shards and spares, by name
        self._folder = folder / self.name
        self._folder.mkdir(parents=True)
        (self._folder / "model.py").write_text(samples.file)
        self._library = self._faked_clock() if clocks else None
        # Not all: reading the clock then takes a lock, which costs a process with many threads a third more.
        self.clocked = [f"{self.name}-{one}" for one in (f"{PS}1", f"{WORKER}1", COORDINATOR, SERVE)]
        given = self._given(servers, checkpoints) | dict(settings)
        self.settings = load_settings(overrides=given)
        allow(servers.kafka.servers, "worker", rights.of_worker(self.name, self.name))
        self._environment = _environment(given | {"stream.url": servers.secured, "stream.kafka": _kafka("nobody")})
        self.listen = self.settings.serve.listen
        self._map = ShardMap(0, self.settings.ps.addresses, self.settings.ps.backups)
        self.stream = open_stream(self.settings.stream)
        self.stream.create(PARTITIONS)
        programs = [self._program(name) for name in self.names]
        preloaded = [one for one in programs if one.preload]
        # Serving processes are started by one of them, which gets a preloader from this one.
        preloader = Preloader(preloaded[0].environment, hands_on=True) if preloaded else None
        self._supervisor = Supervisor(programs, self._write, standby_after=30.0, preloader=preloader)
        self._lock = threading.Lock()
        self._logs = {name: (self._folder / f"{name}.log").open("a") for name in self.names}

    def _given(self, servers: Servers, checkpoints: Path) -> dict[str, str]:
        def at(name: str) -> str:
            return f"{self.network.address(name)}:{next(ports)}"

        ports = iter(free_ports(len(self.names)))
        # Where there are no backups, sockets of files: workers and shards then exchange messages by shared memory.
        self._at = {name: at(name) if self._backed else f"unix:{self._folder}/{name}.sock" for name in self.of(PS)}
        begin = range(SHARDS)
        backups = {"ps.backups": ",".join(self._places(begin, BACKUP))} if self._backed else {}
        return backups | {
            "model": f"{self._folder / 'model.py'}:model",
            "stream.url": servers.stream,
            "stream.topic": self.name,
            "stream.group": self.name,
            "stream.commit_every": "0.5s",
            "stream.buffer_bytes": _BUFFER,
            "stream.kafka": _kafka(),
            "worker.batch_size": "512",
            "worker.batch_age": "50ms",
            "ps.addresses": ",".join(self._places(begin)),
            "ps.timeout": "3s",
            "consistency.lease": "3s",
            "coordinator.address": at(*self.of(COORDINATOR)),
            "checkpoint.url": str(checkpoints / self.name),
            "checkpoint.every": "5s",
            "publish.url": servers.redis,
            "publish.model": self.name,
            "publish.every": "1s",
            "publish.version_every": "30s",
            "serve.listen": at(*self.of(SERVE)),
            "serve.processes": str(SERVERS),
            "security.insecure": str(self.network.is_wire).lower(),
        }

    def _places(self, indices: Iterable[int], place: str = "") -> list[str]:
        """Addresses of shards, or with BACKUP as their place of their backups."""
        return [self._at[f"{self.name}-{PS}{index}{place}"] for index in indices]

    def _program(self, name: str) -> Program:
        kind, index, backup = re.fullmatch(rf"{self.name}-([a-z]+)(\d*)({BACKUP})?", name).groups()  # type: ignore[union-attr]
        environment = os.environ | self._environment
        environment |= {"PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment |= _environment({"stream.kafka": _kafka("worker")}) if kind == WORKER else {}
        prefix = self.network.within(name)
        if self._library is not None and name in self.clocked:
            self.set_clock(name, 0)
            told = {"LD_PRELOAD": self._library, "FAKETIME_TIMESTAMP_FILE": str(self._clock_of(name))}
            told |= {"FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
            prefix = [*prefix, "env", *(f"{key}={of}" for key, of in told.items())]
        command = [*prefix, sys.executable, "-m", "streamtrain", kind]
        if kind == PS and int(index) >= SHARDS:
            command += ["--spare", self._at[name]]
        elif kind == PS:
            command += ["--index", index, *(["--backup"] if backup else [])]
        # A copy of the service has instances of its own, as it would have on other machines.
        instance = f"{self._folder.parent.name}-{name}" if kind == WORKER else ""
        command += ["--instance", instance] if instance else []
        stage = [SERVE, PS, COORDINATOR, WORKER].index(kind)
        standby = name if kind == WORKER else None  # one for each, as each has a place of its own in the network
        return Program(
            name, command, environment, stage, drain=60.0, standby=standby, instance=instance, preload=not prefix
        )  # as `up` does it

    def _write(self, name: str, line: str) -> None:
        with self._lock:
            self._logs[name].write(f"{time.strftime('%H:%M:%S')} {line}\n")
            self._logs[name].flush()

    def _clock_of(self, name: str) -> Path:
        return self._folder / f"{name}.clock"

    def _faked_clock(self) -> str | None:
        """What processes load before all other libraries, so that their clocks can be set."""
        library, waits = faketime(), self._folder / "cnd_timedwait.so"
        if library is None:
            return None
        source = Path(__file__).with_name("cnd_timedwait.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(waits), str(source), "-lpthread"], check=True)
        return f"{waits} {library}"

    def set_clock(self, name: str, seconds: float) -> None:
        """The clock of a process goes wrong by so many seconds."""
        beside = self._clock_of(name).with_suffix(".new")
        beside.write_text(f"{seconds:+.0f}\n")
        beside.rename(self._clock_of(name))

    @contextmanager
    def guest(self) -> Iterator[None]:
        """One more worker, where the first one is in the network."""
        program = self._program(self.of(WORKER)[0])
        at = program.command.index("--instance")
        command = [*program.command[:at], *program.command[at + 2 :]]
        with (self._folder / "guest.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(program.environment))
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def of(self, kind: str) -> list[str]:
        """Names of the processes of a kind; of shards those of `ps.addresses`, then their backups."""
        return [name for name in self.names if name.startswith(f"{self.name}-{kind}")]

    def scale(self, indices: Sequence[int]) -> subprocess.CompletedProcess[str]:
        """Has these shards hold the rows; what the command said."""
        backups = ["--backups", ",".join(self._places(indices, BACKUP))] if self._backed else []
        done = self.command("scale", "--ps", ",".join(self._places(indices)), *backups, "--timeout", "100s")
        self.shard_map()
        return done

    def shards(self) -> list[int]:
        """Those that hold the rows, as the coordinator has said last."""
        names = [name for one in self.shard_map().shards for name, address in self._at.items() if address == one]
        return [int(name.removeprefix(f"{self.name}-{PS}")) for name in names]

    def shard_map(self) -> ShardMap:
        """As the coordinator has said last; at first that of the settings."""
        with CoordinatorClient.from_settings(self.settings) as client, suppress(ShardError):
            self._map = client.slots()
        return self._map

    def peer(self, shard: str) -> str | None:
        """Name of a shard's other place; None: it has none."""
        other = shard.removesuffix(BACKUP) if shard.endswith(BACKUP) else f"{shard}{BACKUP}"
        return other if other in self.names else None

    def start(self) -> None:
        """Starts all processes."""
        self._supervisor.start()

    def stop(self) -> None:
        """Ends all, workers first."""
        self._supervisor.stop()
        for log in self._logs.values():
            log.close()

    def pid(self, name: str) -> int | None:
        """Of a process."""
        return self._supervisor.pid(name)

    def serving(self) -> list[int]:
        """Processes that answer requests now, of those that serve: a standby does once the coordinator knows it."""
        pid = self.pid(f"{self.name}-{SERVE}")
        found = {} if pid is None else {of: words for of, words in children(pid).items() if "--index" in words}
        if all("--standby" not in words for words in found.values()):
            return [*found]
        members = _servers(self.status() or {"servers": []})
        return [of for of, words in found.items() if "--standby" not in words or of in members]

    def starts(self) -> int:
        """How often processes have been started."""
        return sum(self._supervisor.starts(name) for name in self.names)

    def pids(self) -> dict[str, int]:
        """All processes, by name."""
        found = {name: pid for name in self.names if (pid := self.pid(name)) is not None}
        return found | {f"{self.name}-serving{i}": pid for i, pid in enumerate(self.serving())}

    def clocks(self) -> list[dict[int, int]] | None:
        """Of the shards, wherever they are; None: one does not answer, or they have become others just now."""
        now, trusted = self._map, Security(insecure=True)
        try:
            with StatusReader(now.shards[:1], now.shards, trusted, 2.0, backups=now.backups) as reader:
                shards = reader.read_shards()["shards"]
        except ShardError:
            shards = []
        if not shards or any(one["state"] != "ready" for one in shards):
            self.shard_map()
            return None
        return [{int(partition): at for partition, at in one["clock"].items()} for one in shards]

    def status(self) -> dict[str, Any] | None:
        """As the coordinator says; None: it does not answer."""
        assert self.settings.coordinator.address is not None
        client = CoordinatorClient([self.settings.coordinator.address], Security(insecure=True), 2.0)
        try:
            return client.status()
        except ShardError:
            return None
        finally:
            client.close()

    def troubles(self) -> list[str]:
        """What is not as it should be; empty: nothing."""
        status = self.status()
        if status is None:
            return ["the coordinator does not answer"]
        found = [f"shard {one['index']} is {one['state']}" for one in status["shards"] if one["state"] != "ready"]
        found += [
            f"shard {one['index']} has no backup" for one in status["shards"] if one.get("backup_in_step") is False
        ]
        # One that was killed counts as there until its lease ends, so it is asked for by its process.
        workers = {int(one["name"].split("-")[-2]) for one in status["workers"]}
        servers = _servers(status)
        if workers != {self.pid(f"{self.name}-{WORKER}{i}") for i in range(WORKERS)}:
            found.append(f"workers that are there: {sorted(workers)}")
        if servers != set(self.serving()) or len(servers) != SERVERS:
            found.append(f"servers that are there: {sorted(servers)}, not {sorted(self.serving())}")
        return found + [f"{name} does not run" for name in self.names if self.pid(name) is None]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of streamtrain with the service's settings."""
        command = [sys.executable, "-m", "streamtrain", *arguments]
        environment = os.environ | self._environment | {"PYTHONPATH": ROOT, "TF_CPP_MIN_LOG_LEVEL": "3"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)

    def has_said(self, words: str) -> bool:
        """Whether these words are in a log."""
        return any(words in log.read_text(errors="replace") for log in self._folder.glob("*.log"))

    def said(self) -> str:
        """The ends of all logs."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: …{log.read_text(errors='replace')[-1500:]}" for log in logs)


def _kafka(user: str | None = None) -> str:
    """Options of a client, of a user or of whoever may do all."""
    return json.dumps({"session.timeout.ms": 6000, "heartbeat.interval.ms": 500, **(rights.sasl(user) if user else {})})


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Settings as variables."""
    return {f"STREAMTRAIN_{key.upper().replace('.', '__')}": of for key, of in given.items()}


def _servers(status: dict[str, Any]) -> set[int]:
    """Serving processes that send heartbeats to the coordinator."""
    return {int(one["name"].split(":")[-2]) for one in status["servers"]}


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Waits for a condition; whether it came about."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.25)
    return True


def ended(services: Sequence[Service]) -> str:
    """The ends of all logs of some services."""
    return "\n".join(one.said() for one in services)
