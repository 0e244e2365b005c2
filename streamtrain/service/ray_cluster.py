"""The whole service on a Ray cluster: each process is the child of an actor, which Ray places, and starts again.

Rows and gradients go from process to process as everywhere else; nothing of them passes through Ray. Processes know
each other by name (`ps.rpc.registry`), so one that Ray starts on another node is found there.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamtrain.address import Address, parse_address
from streamtrain.child_process import start_child
from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.logs import fail
from streamtrain.service.service_file import to_toml
from streamtrain.settings.groups import Settings

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
_BACKUP = "-backup"
_SECONDS = {"worker": 60.0}  # to end in; others: 45


class Role(NamedTuple):
    """A process of the service.

    Attributes:
        name: of its actor.
        kind: the command that runs it.
        arguments: of the command.
        apart: roles with the same are never on one node; "": it may be anywhere.
    """

    name: str
    kind: str
    arguments: tuple[str, ...] = ()
    apart: str = ""


def roles(settings: Settings, shards: int, workers: int, servers: int) -> list[Role]:
    """All processes, in the order in which they end: workers first, shards last."""
    backups = range(2 if settings.ps.backups else 1)
    return [
        *(Role(f"worker-{i}", "worker") for i in range(workers)),
        *([Role("joiner", "join")] if settings.join.is_configured else []),
        *(Role(f"serving-{i}", "serve", apart="serving") for i in range(servers)),  # they have the same port
        Role("coordinator", "coordinator"),
        *(
            Role(f"shard-{i}{_BACKUP * place}", "ps", ("--index", str(i), *["--backup"] * place), f"shard-{i}")
            for i in range(shards)
            for place in backups
        ),
    ]


def addresses(shards: int, *, backups: bool) -> dict[str, object]:
    """Settings by which the processes know each other."""
    names = [f"registry:shard-{i}" for i in range(shards)]
    return {
        "ps.addresses": ",".join(names),
        "coordinator.address": "registry:coordinator",
        **({"ps.backups": ",".join(name + _BACKUP for name in names)} if backups else {}),
    }


def check(settings: Settings) -> None:
    """Refuses what cannot work on several nodes.

    Raises:
        ConfigError: a setting is missing.
    """
    for key, why in (
        ("publish.url", "processes find each other in this Redis"),
        ("checkpoint.url", "a shard that Ray starts on another node restores itself from there"),
        ("stream.topic", "workers learn it"),
        ("model", "workers and serving processes read it, from the folder that Ray takes to all nodes"),
    ):
        group, _, name = key.rpartition(".")
        if getattr(getattr(settings, group) if group else settings, name) is None:
            raise ConfigError(f"{key} is not set: {why}")
    if not (settings.security.insecure or settings.security.certificate):
        raise ConfigError(
            "nodes would reach each other in plaintext: set security.certificate, security.key and security.ca, or "
            "security.insecure = true"
        )


class Process:
    """An actor with a process of the service as its child; neither outlives the other.

    Args:
        role: what it runs.
        settings: of the service, as TOML.
        port: of predictions.
    """

    def __init__(self, role: Role, settings: str, port: int) -> None:
        import ray

        self._role, self._is_ending, self._failed = role, False, False
        file, path = tempfile.mkstemp(prefix="streamtrain-", suffix=".toml")  # for this user alone
        with os.fdopen(file, "w") as written:
            written.write(settings)
        command = [sys.executable, "-m", "streamtrain", role.kind, *role.arguments, "--config", path]
        of_this_node: Callable[[], str] = ray.util.get_node_ip_address
        self._host = of_this_node()
        known = {"serve.listen": port, "ps.listen": 0, "coordinator.listen": 0}
        command += [part for key, at in known.items() for part in ("--set", f"{key}={Address(self._host, at)}")]
        command += ["--set", f"log.process={role.name}"]
        self._child = start_child(command, signal.SIGKILL)
        threading.Thread(target=self._follow, args=(path,), name="child", daemon=True).start()

    def __repr__(self) -> str:
        return self._role.name  # before lines of its log that Ray shows

    def _follow(self, path: str) -> None:
        code = self._child.wait()
        Path(path).unlink(missing_ok=True)
        self._failed = code == EXIT_CONFIG
        if not self._is_ending and not self._failed:
            os._exit(1)  # Ray starts another one, wherever there is room

    def state(self) -> dict[str, Any]:
        """Where it is; "failed": its settings are wrong, so it is not started again."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "host": self._host, "pid": self._child.pid, "failed": self._failed}

    def end(self) -> None:
        """Ends the child as SIGTERM does."""
        self._is_ending = True
        self._child.terminate()
        try:
            self._child.wait(_SECONDS.get(self._role.kind, 45.0))
        except subprocess.TimeoutExpired:
            self._child.kill()


class RayService:
    """The actors of a service; they end with it, and with the process that has made it.

    Args:
        settings: of the service.
        parts: its processes.
        cpus: of a node that each process reserves.
    """

    def __init__(self, settings: Settings, parts: Sequence[Role], cpus: float) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, text = ray, to_toml(settings, "settings of a service on Ray")
        remote: Any = ray.remote  # its types know functions only
        actor = remote(num_cpus=cpus, max_restarts=-1, max_concurrency=2)(Process)
        port = parse_address(settings.serve.listen, "serve.listen", any_port=True).port
        apart: dict[str, list[Role]] = {}
        for role in parts:
            apart.setdefault(role.apart, []).append(role)
        bundles = {name: [{"CPU": cpus}] * len(of) for name, of in apart.items() if name}
        groups = {name: placement_group(of, strategy="STRICT_SPREAD") for name, of in bundles.items()}
        self._roles = {role.name: role for role in parts}
        self._actors: dict[str, Any] = {}
        for role in parts:
            strategy: Any = "SPREAD"
            if role.apart:
                index = apart[role.apart].index(role)
                strategy = PlacementGroupSchedulingStrategy(groups[role.apart], placement_group_bundle_index=index)
            options = actor.options(name=role.name, scheduling_strategy=strategy)
            self._actors[role.name] = options.remote(role, text, port)

    def states(self, seconds: float = 5.0) -> Iterator[tuple[str, dict[str, Any]]]:
        """Of all actors; empty: Ray has not started it yet, or starts it again."""
        asked = {name: actor.state.remote() for name, actor in self._actors.items()}
        end = time.monotonic() + seconds
        for name, answer in asked.items():
            try:
                yield name, self._ray.get(answer, timeout=max(end - time.monotonic(), 0.01))
            except (self._ray.exceptions.GetTimeoutError, self._ray.exceptions.RayActorError):
                yield name, {}

    def run(self, stopped: threading.Event) -> None:
        """Watches the actors until `stopped` is set, and says where they are.

        Raises:
            StreamtrainError: the settings of one are wrong: its log says which.
        """
        places: dict[str, str] = {}
        while not stopped.wait(1.0):
            for name, state in self.states():
                if state.get("failed"):
                    raise StreamtrainError(f"{name} has ended, as its settings are wrong; its log says which")
                place = f"on {state['host']}, node {state['node'][:8]}" if state else "not running"
                if places.get(name) != place:
                    logger.info("%s: %s", name, place)
                places[name] = place

    def close(self) -> None:
        """Ends all processes: workers first, shards last."""
        running = [
            self._roles[name] for name, state in self.states() if state
        ]  # others wait for room, and do not answer
        for kind in ("worker", "join", "serve", "coordinator", "ps"):
            ending = [self._actors[role.name].end.remote() for role in running if role.kind == kind]
            done, late = self._ray.wait(ending, num_returns=len(ending), timeout=70) if ending else ([], [])
            if late:
                fail(f"{len(late)} of {len(done) + len(late)} {kind} processes did not end in time")
        for actor in self._actors.values():
            self._ray.kill(actor)
