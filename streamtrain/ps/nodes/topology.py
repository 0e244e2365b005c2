"""Membership: which shards a cluster has, how many workers, and which of them this process is."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from streamtrain.address import parse_address
from streamtrain.errors import ConfigError
from streamtrain.ps.replication.failover import TargetPair
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, ServerChannel
from streamtrain.ps.rpc.security import Security, connect

logger = logging.getLogger(__name__)

_CHIEFS = ("chief", "master")  # two names of one role, of which the second is the older
_ROLES = ("ps", "worker", *_CHIEFS)
_JOBS = (*_ROLES, "evaluator")


@dataclass(frozen=True)
class Task:
    """The part of one process.

    Attributes:
        type: "ps" or "worker".
        index: of the shard or the worker, from 0.
    """

    type: Literal["ps", "worker"]
    index: int


@dataclass(frozen=True)
class Cluster:
    """The processes of a cluster, as every one of them knows it.

    Attributes:
        ps: addresses of all shards, in order of their index, each "host:port", "[ipv6]:port" or "unix:path".
        workers: how many there are, worker 0 among them; None: not known beforehand.
        task: what this process is; None: not known from here.

    Raises:
        ConfigError: there are no shards, two have the same address, one has none, or the task's index is out of range.
    """

    ps: tuple[str, ...]
    workers: int | None = None
    task: Task | None = None

    def __post_init__(self) -> None:
        if not self.ps:
            raise ConfigError("ps.addresses is empty: a cluster needs the address of at least one shard")
        object.__setattr__(self, "ps", _addresses(self.ps, "ps.addresses", set()))
        if self.task is not None:
            count = len(self.ps) if self.task.type == "ps" else self.workers
            if self.task.index < 0 or (count is not None and self.task.index >= count):
                among = "" if count is None else f": there are {count}, counted from 0"
                raise ConfigError(f"task {self.task.type} {self.task.index} is out of range{among}")

    def own_place(self, host: str, backups: Sequence[str] = (), *, backup: bool = False) -> tuple[int, bool]:
        """Which shard this process is, and whether it is its backup: as TF_CONFIG says, else by the name of its host.

        Args:
            host: name of this host, of which the part before the first dot is compared.
            backups: addresses of the backups of all shards.
            backup: whether it is a backup for sure.

        Raises:
            ConfigError: neither says it; or it is another task; or several shards have addresses of this host.
        """
        if self.task is not None:
            if self.task.type != "ps":
                raise ConfigError(f"--index is required: TF_CONFIG makes this process a {self.task.type}, not a ps")
            return self.task.index, backup
        name = host.lower().partition(".")[0]
        places = [
            (index, is_backup)
            for is_backup, addresses in ((False, () if backup else self.ps), (True, backups))
            for index, address in enumerate(addresses)
            if parse_address(address, "the address of a shard", names=True).host.partition(".")[0] == name
        ]
        if len(places) != 1:
            found = f"{len(places)} addresses have" if places else "no address has"
            raise ConfigError(
                f"--index is required: there is no TF_CONFIG, and {found} the name of this host, {host}, in "
                f"{'ps.backups' if backup else 'ps.addresses or ps.backups'}"
            )
        return places[0]

    @classmethod
    def of_addresses(cls, text: str) -> Self:
        """Topology from the addresses of all shards, separated by commas.

        Raises:
            ConfigError: as for the class.
        """
        texts = [part.strip() for part in text.split(",")] if text.strip() else []
        return cls(tuple(texts))

    @classmethod
    def of_tf_config(cls, text: str) -> Self:
        """Topology from the JSON that schedulers of TensorFlow's parameter-server jobs put into TF_CONFIG.

        Task "ps" i is shard i. The chief (or "master", its older name) is worker 0, and the workers follow it; without
        one, worker i is worker i. Evaluators and jobs of other names are passed over, unless this process is one.

        Raises:
            ConfigError: it is not JSON of that form, has no ps, names an address twice, or its task is an evaluator,
                of an unknown type or out of range; the message names the key.
        """
        config = _object(_json(text), "TF_CONFIG")
        given = _object(_entry(config, "cluster", "TF_CONFIG"), "TF_CONFIG cluster")
        seen: set[str] = set()
        jobs = {name: _addresses(given[name], f"TF_CONFIG cluster.{name}", seen) for name in _JOBS if name in given}
        if not jobs.get("ps"):
            raise ConfigError("TF_CONFIG cluster.ps is missing or empty: a cluster needs at least one parameter server")
        chiefs = [name for name in _CHIEFS for _ in jobs.get(name, ())]
        if len(chiefs) > 1:
            raise ConfigError(f"TF_CONFIG cluster.{chiefs[1]}: there may be one chief or master, not {len(chiefs)}")
        task = _task(_object(_entry(config, "task", "TF_CONFIG"), "TF_CONFIG task"), jobs, len(chiefs))
        return cls(jobs["ps"], len(chiefs) + len(jobs.get("worker", ())) or None, task)

    @classmethod
    def of(cls, addresses: Sequence[str], tf_config: str | None) -> Self:
        """Topology from what is given: addresses take precedence over TF_CONFIG, which still names this task.

        Where the two differ, which is logged as a warning, the scheduler has started other shards than are spoken to.

        Args:
            addresses: of all shards, from the command line or the configuration; empty: not given.
            tf_config: as for `of_tf_config`; None or blank: not given.

        Raises:
            ConfigError: neither is given, or one is wrong.
        """
        planned = cls.of_tf_config(tf_config) if tf_config and not tf_config.isspace() else None
        if not addresses:
            if planned is None:
                raise ConfigError("ps.addresses is not set, nor is there a TF_CONFIG: a cluster needs shards")
            return planned
        explicit = _addresses(list(addresses), "ps.addresses", set())
        if planned is None:
            return cls(explicit)
        if explicit != planned.ps:
            logger.warning("ps.addresses %s overrides cluster.ps of TF_CONFIG %s", list(explicit), list(planned.ps))
        return cls(explicit, planned.workers, planned.task)


def _task(task: dict[str, Any], jobs: dict[str, tuple[str, ...]], chiefs: int) -> Task:
    job, index = (_entry(task, key, "TF_CONFIG task") for key in ("type", "index"))
    if job == "evaluator":
        raise ConfigError(
            "TF_CONFIG task.type is 'evaluator', which does not exist here: predictions are evaluated during training; "
            "leave evaluators out of the job"
        )
    if job not in _ROLES:
        raise ConfigError(f"TF_CONFIG task.type must be one of {', '.join(_ROLES)}, not {job!r}")
    index = int(index) if isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index) else index
    count = len(jobs.get(job, ()))
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ConfigError(f"TF_CONFIG task.index must count the {count} of cluster.{job} from 0, not be {index!r}")
    return Task("ps", index) if job == "ps" else Task("worker", index + (chiefs if job == "worker" else 0))


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"TF_CONFIG is not JSON: {exc}") from exc


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, not {value!r}")
    return value


def _entry(values: dict[str, Any], key: str, name: str) -> Any:
    if key not in values:
        raise ConfigError(f"{name} has no {key!r}")
    return values[key]


def _addresses(values: object, name: str, seen: set[str]) -> tuple[str, ...]:
    """Addresses in their one form; `seen` has those of other jobs, and gets these."""
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{name} must be a list of addresses, not {values!r}")
    addresses = tuple(str(parse_address(value, f"{name}[{i}]", names=True)) for i, value in enumerate(values))
    for i, address in enumerate(addresses):
        if address in seen:
            raise ConfigError(f"{name}[{i}] is {address!r}, which another process has already")
        seen.add(address)
    return addresses


def connect_shards(
    addresses: Sequence[str], backups: Sequence[str], security: Security, opened: Callable[[Any], object]
) -> list[ServerChannel | TargetPair]:
    """Where all shards are.

    Args:
        addresses: of all shards.
        backups: of their backups, if they have some.
        security: of the wire.
        opened: is given every channel that is opened, to close it some time.

    Raises:
        ConfigError: there are not as many backups as shards, or one has the address of a shard.
    """
    check_backups(addresses, backups)

    def place(address: str) -> ServerChannel:
        channel = connect(address, security, CHANNEL_OPTIONS)
        opened(channel)
        return channel, address

    if not backups:
        return [place(address) for address in addresses]
    return [(place(first), place(second)) for first, second in zip(addresses, backups, strict=True)]


def check_backups(addresses: Sequence[str], backups: Sequence[str]) -> None:
    """Refuses backups that do not fit the shards; raises the errors of `connect_shards`."""
    if not backups:
        return
    if len(backups) != len(addresses):
        raise ConfigError(
            f"ps.backups has {len(backups)} addresses, but there are {len(addresses)} shards: "
            "each needs a backup, or none"
        )
    if twice := set(addresses) & set(backups):
        raise ConfigError(f"ps.backups has {min(twice)}, which is the address of a shard in ps.addresses")


class ShardMap(NamedTuple):
    """There are as many slots as shards: a key belongs to slot `shards_of(key)`.

    Attributes:
        epoch: grows with every change.
        shards: address of the shard that has it, by slot.
        backups: address of its backup, which may have taken over; empty: shards have none.
        scaled: whether the settings of the coordinator have others.
    """

    epoch: int
    shards: tuple[str, ...]
    backups: tuple[str, ...] = ()
    scaled: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all processes of shards."""
        return self.shards + self.backups

    def pair(self, index: int) -> tuple[str, ...]:
        """Addresses of both processes of a shard; empty: it has no backup."""
        return (self.shards[index], self.backups[index]) if self.backups else ()

    def has(self, other: "ShardMap") -> bool:
        """Whether its shards are where those of another one are."""
        return (self.shards, self.backups) == (other.shards, other.backups)
