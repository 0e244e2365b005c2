"""docker-compose.yml as this machine can run it: its own commands and variables, at other addresses and paths.

What is rewritten, and nothing else: names of hosts and ports become free ports of this machine, folders of the
containers folders of this machine.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from streamtrain.address import free_port

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
TOKEN = "STREAMTRAIN_SECURITY__TOKEN"

# As services/Dockerfile has it: where the entry files are, and where processes begin.
APP, WORKING = "/app", "/model"

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


class Missing(Exception):
    """A variable that must be given is not."""


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """A value of the file with its ${…} filled in, as Compose does it."""
    if isinstance(value, dict):
        return {key: interpolated(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [interpolated(inner, variables) for inner in value]
    return _VARIABLE.sub(lambda found: _filled(found, variables), value) if isinstance(value, str) else value


def _filled(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name, kind, rest = found.groups()
    if variables.get(name):
        return variables[name]
    if kind != "-":
        raise Missing(rest or name)
    return str(rest)


class Composed:
    """The file, read with some variables.

    Attributes:
        services: by name; environments without what is passed on only if it is set, and is not.
        ours: those of the streamtrain image.
        demo: those of them that need `--profile demo`.
    """

    def __init__(self, variables: Mapping[str, str], file: Path = FILE) -> None:
        whole = yaml.safe_load(file.read_text())
        self.services: dict[str, dict[str, Any]] = interpolated(whole["services"], variables)
        for one in self.services.values():
            given = {key: variables.get(key) if value is None else value for key, value in self._set(one)}
            one["environment"] = {key: value for key, value in given.items() if value is not None}
        here = [name for name, one in self.services.items() if "build" in one]
        self.ours = [name for name in here if not self.services[name].get("profiles")]
        self.demo = [name for name in here if self.services[name].get("profiles") == ["demo"]]

    @staticmethod
    def _set(service: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        yield from service.get("environment", {}).items()

    def ends(self) -> Iterator[set[str]]:
        """Ours in the order in which Compose ends them: those together that none needs which is left."""
        left = {*self.ours}
        while left:
            needed = {other for name in left for other in self.services[name].get("depends_on", [])}
            yield left - needed
            left &= needed

    def replicas(self, name: str) -> int:
        """How many containers of a service there are."""
        return int(self.services[name].get("deploy", {}).get("replicas", 1))

    def folders(self, name: str) -> dict[str, str]:
        """What is mounted into a service's containers: source by target."""
        parts = [volume.split(":") for volume in self.services[name].get("volumes", [])]
        return {part[1]: part[0] for part in parts}


@dataclass(frozen=True)
class Program:
    """A container as a process: what to run, and how to see that it is well; None: nothing says so."""

    name: str
    command: list[str]
    environment: dict[str, str]
    folder: str
    check: list[str] | None


class Machine:
    """Where things are here that the file has in containers.

    Args:
        composed: the file.
        servers: "host:port" of what is not of this project, by service.
        folder: of all volumes and temporary files.
    """

    def __init__(self, composed: Composed, servers: Mapping[str, str], folder: Path) -> None:
        self._composed, self._servers, self._folder = composed, servers, folder
        self._ports: dict[tuple[str, int, str], int] = {}

    def address(self, service: str, port: str, instance: int = 0) -> str:
        """Where a port of a container is; always the same."""
        if service in self._servers:
            return self._servers[service]
        key = (service, instance, port)
        while key not in self._ports:
            chosen = free_port()
            if chosen not in self._ports.values():
                self._ports[key] = chosen
        return f"127.0.0.1:{self._ports[key]}"

    def programs(self, name: str) -> list[Program]:
        """One for each container of a service."""
        return [self._program(name, instance) for instance in range(self._composed.replicas(name))]

    def _program(self, name: str, instance: int) -> Program:
        service, rewrite = self._composed.services[name], self._rewriting(name, instance)
        check = service.get("healthcheck", {}).get("test")
        return Program(
            f"{name}-{instance}",
            [rewrite(word) for word in service["command"]],
            {key: rewrite(value) for key, value in service["environment"].items()},
            rewrite(WORKING),
            check and [rewrite(word) for word in check[1:]],
        )

    def _rewriting(self, name: str, instance: int) -> Callable[[str], str]:
        folders = {APP: str(ROOT), "/tmp": self._made(f"tmp-{name}-{instance}")}
        for target, source in self._composed.folders(name).items():
            folders[target] = str((ROOT / source).resolve()) if source[0] in "./" else self._made(source)
        hosts = "|".join(map(re.escape, [*self._composed.services, "0.0.0.0", "127.0.0.1"]))
        targets = "|".join(map(re.escape, folders))
        place = re.compile(rf"(?<![\w.-])({hosts}):(\d+)|(?<![\w.:/-])({targets})(?![\w.-])")

        def here(found: re.Match[str]) -> str:
            host, port, target = found.groups()
            if target:
                return folders[target]
            if host in ("0.0.0.0", "127.0.0.1"):
                return self.address(name, port, instance)
            return self.address(host, port)

        return lambda text: place.sub(here, text)

    def _made(self, name: str) -> str:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return str(folder)
