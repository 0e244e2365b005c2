"""Scaling of a service on one machine: `streamtrain scale` leaves a request in its folder, and `up` answers there.

With `scale.auto`, `up` also does by itself what the coordinator proposes.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from streamtrain.address import reserve_port
from streamtrain.cluster.client import CoordinatorClient
from streamtrain.cluster.scaling import MOST_SHARDS, next_places
from streamtrain.errors import ConfigError, ShardError, StreamtrainError
from streamtrain.logs import counted
from streamtrain.memory import free_megabytes
from streamtrain.periodic import PeriodicTask
from streamtrain.service.autoscaler import Autoscaler, Numbers
from streamtrain.service.local import MEGABYTES
from streamtrain.service.programs import Program
from streamtrain.service.service_file import ServiceFile, find_service, rewrite_service_file, write_private
from streamtrain.service.supervisor import Supervisor
from streamtrain.settings.groups import Settings

logger = logging.getLogger(__name__)

_REQUEST, _ANSWER = "scale-{}.request", "scale-{}.answer"
_EVERY = 0.2  # seconds between two looks
_FIRST = "ps0"
_ADDRESSES, _PROCESS = "STREAMTRAIN_PS__ADDRESSES", "STREAMTRAIN_LOG__PROCESS"
_MOST_WORKERS = 256
_FOLLOW_EVERY = 5.0  # seconds between two looks at what is proposed


def ask(service: ServiceFile, shards: int | None, rate: float = 0.0, *, workers: int | None = None) -> list[str]:
    """Asks a service for other numbers of shards and workers; returns the addresses of the shards.

    Args:
        service: which one.
        shards: how many there are to be; None: as many as there are.
        rate: bytes per second that each reads at most meanwhile; 0: as many as it can.
        workers: how many there are to be; None: as many as there are.

    Raises:
        ConfigError: it refuses.
        StreamtrainError: it fails, or the service ends meanwhile.
    """
    folder, name = service.path.parent, secrets.token_hex(8)
    request, answer = folder / _REQUEST.format(name), folder / _ANSWER.format(name)
    _write(request, {"shards": shards, "rate": rate, "workers": workers})
    try:
        while not answer.exists():
            if (now := find_service(folder)) is None or not now.is_running:
                raise StreamtrainError(f"the service of {service} has ended")
            time.sleep(_EVERY)
        found = json.loads(answer.read_bytes())
    finally:
        for file in (request, answer):
            file.unlink(missing_ok=True)
    if "error" in found:
        raise (ConfigError if found["refused"] else StreamtrainError)(found["error"])
    return [str(one) for one in found["shards"]]


def _write(path: Path, values: Mapping[str, object]) -> None:
    """At once, for those who look meanwhile."""
    new = path.with_suffix(".new")
    with write_private(new) as file:
        os.write(file, json.dumps(values).encode())
    new.rename(path)


class ServiceScaler:
    """Starts and ends shards and workers of a service, as requests in its folder say; to be entered.

    Args:
        settings: of the service, with what was completed.
        completed: keys of what was.
        supervisor: of its programs.
        file: of the service.
        report: is given what has become of shards.
    """

    def __init__(
        self,
        settings: Settings,
        completed: Sequence[str],
        supervisor: Supervisor,
        file: Path,
        report: Callable[[str, str], object],
    ) -> None:
        self._settings, self._supervisor, self._file, self._report = settings, supervisor, file, report
        self._is_placed_here = "ps.addresses" in completed
        self._addresses = list(settings.ps.addresses)
        self._names = {address: f"ps{index}" for index, address in enumerate(self._addresses)}
        self._workers = [f"worker{index}" for index in range(settings.up.workers)]
        self._folder = file.parent
        self._autoscaler = Autoscaler(settings.scale, self._follow, partial(report, "up"))
        self._followed_at = 0.0
        self._task = PeriodicTask("scale", self._look, _EVERY, subject="answering requests for other shards")

    def __enter__(self) -> "ServiceScaler":
        for left in (*self._folder.glob(_REQUEST.format("*")), *self._folder.glob(_ANSWER.format("*"))):
            left.unlink(missing_ok=True)
        self._task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._task.stop()

    def _look(self) -> None:
        for request in sorted(self._folder.glob(_REQUEST.format("*"))):
            with suppress(FileNotFoundError):  # who asked has gone
                text = request.read_bytes()
                request.unlink()  # before: one that is damaged must not be in the way of others
                asked = json.loads(text)
                answer = self._answer(asked["shards"], asked.get("rate", 0.0), asked.get("workers"))
                _write(request.with_suffix(".answer"), answer)
        if self._settings.scale.auto and time.monotonic() - self._followed_at > _FOLLOW_EVERY:
            self._followed_at = time.monotonic()
            with suppress(ShardError), CoordinatorClient.from_settings(self._settings) as client:
                self._follow_proposal(client.status())

    def _answer(self, shards: int | None, rate: float, workers: int | None) -> dict[str, object]:
        try:
            if workers is not None:
                self.scale_workers(workers)
            return {"shards": self._addresses if shards is None else self.scale(shards, rate)}
        except (StreamtrainError, OSError) as exc:
            shards_now = counted(len(self._addresses), "shard")
            self._report("up", f"still {shards_now} and {counted(len(self._workers), 'worker')}: {exc}")
            return {"error": str(exc), "refused": isinstance(exc, ConfigError)}

    def _follow_proposal(self, status: Mapping[str, Any]) -> None:
        numbers = Numbers(len(self._addresses), len(self._workers))
        is_whole = numbers == (len(status["shards"]), len(status["workers"]))  # none has just died, or starts
        proposal = status["proposal"] if is_whole else None
        if proposal and (self._settings.ps.backups or not self._is_placed_here):
            proposal = {**proposal, "shards": numbers.shards}
        if proposal and self._settings.consistency.mode == "bulk":
            proposal = {**proposal, "workers": numbers.workers}
        self._autoscaler.follow(proposal, numbers)

    def _follow(self, numbers: Numbers) -> None:
        if numbers.workers != len(self._workers):
            self.scale_workers(numbers.workers)
        if numbers.shards != len(self._addresses):
            self.scale(numbers.shards)

    def scale_workers(self, workers: int) -> None:
        """Has so many workers learn from now on. Those that leave finish their batches first.

        Raises:
            ConfigError: that cannot be.
        """
        if not 1 <= workers <= _MOST_WORKERS:
            raise ConfigError(f"--workers must be 1 to {_MOST_WORKERS}, not {workers}")
        if self._settings.consistency.mode == "bulk":
            raise ConfigError("with consistency.mode bulk, the number of workers changes at a restart only")
        before, first = len(self._workers), self._supervisor.program(self._workers[0])
        free, needed = free_megabytes(), MEGABYTES["tensorflow"] * (workers - before)
        if needed > free:
            raise ConfigError(f"not enough memory: {workers} workers need {needed:,} MB more, and {free:,} MB are free")
        while len(self._workers) < workers:
            name = next(name for i in count() if (name := f"worker{i}") not in self._workers)
            command = [name if word == self._workers[0] else word for word in first.command]
            environment = {**first.environment, _PROCESS: name}
            self._supervisor.add(replace(first, name=name, command=command, environment=environment))
            self._workers.append(name)
        while len(self._workers) > workers:
            self._supervisor.remove(self._workers.pop())
        if workers != before:
            self._report("up", f"{counted(workers, 'worker')} instead of {before}")

    def scale(self, shards: int, rate: float = 0.0) -> list[str]:
        """Has so many shards hold the rows from now on, see `ask`; returns their addresses.

        Raises:
            ConfigError: that cannot be.
            StreamtrainError: it fails. The shards are those of before then.
        """
        self._check(shards)
        before, added = self._addresses, list[str]()
        first = self._supervisor.program(_FIRST)
        try:
            for _ in range(shards - len(before)):
                added.append(self._start_spare(first))
            new = iter(added)
            after = [next(new) if one is None else before[one] for one in next_places(len(before), shards)]
            with CoordinatorClient.from_settings(self._settings) as client:
                try:
                    client.scale(after, rate=rate)
                except BaseException:
                    client.scale_back(before, self._task.closing)
                    raise
        except BaseException:
            self._remove(added)
            raise
        self._addresses = after
        self._supervisor.update(partial(self._placed, {self._names[one]: i for i, one in enumerate(after)}))
        self._settings = self._settings.model_copy(
            update={"ps": self._settings.ps.model_copy(update={"addresses": tuple(after)})}
        )
        rewrite_service_file(self._settings, self._file)
        self._remove([one for one in before if one not in after])
        self._report("up", f"{counted(shards, 'shard')} instead of {len(before)}")
        return after

    def _start_spare(self, first: Program) -> str:
        """Starts a shard that has its place from the coordinator, also when it is started again; its address."""
        address = f"127.0.0.1:{reserve_port()}"
        name = next(name for i in count() if (name := f"ps{i}") not in self._names.values())
        at = list(first.command).index("--index")
        command = [*first.command[:at], "--spare", address, *first.command[at + 2 :]]
        environment = {**first.environment, _PROCESS: name}
        self._supervisor.add(replace(first, name=name, command=command, environment=environment))
        self._names[address] = name
        return address

    def _remove(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            self._supervisor.remove(self._names.pop(address))

    def _placed(self, indexes: Mapping[str, int], program: Program) -> Program:
        """A program that is to know the shards, and one that began with a place its own."""
        environment = {**program.environment, _ADDRESSES: ",".join(self._addresses)}
        command = list(program.command)
        if program.name in indexes and "--index" in command:
            command[command.index("--index") + 1] = str(indexes[program.name])
        return replace(program, command=command, environment=environment)

    def _check(self, shards: int) -> None:
        if not 1 <= shards <= MOST_SHARDS:
            raise ConfigError(f"--ps must be 1 to {MOST_SHARDS} shards, not {shards}")
        if self._settings.ps.backups:
            raise ConfigError(
                "ps.backups is set: up starts no new shards with backups; start them with ps --spare, and give scale "
                "the addresses of all with --ps and --backups"
            )
        if not self._is_placed_here:
            raise ConfigError("ps.addresses is set: up changes the number only of shards that it has placed itself")
        free, needed = free_megabytes(), MEGABYTES["ps"] * (shards - len(self._addresses))
        if needed > free:
            raise ConfigError(f"not enough memory: {shards} shards need {needed:,} MB more, and {free:,} MB are free")
