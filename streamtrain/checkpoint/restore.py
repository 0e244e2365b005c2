"""Restoring: which epochs there are, and how a stopped cluster is made to start from one of them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, NamedTuple

from streamtrain.checkpoint.shard_map import load_shard_map
from streamtrain.checkpoint.shard_state import check_shard_count
from streamtrain.errors import CheckpointCorrupt, CheckpointError, ConfigError, ShardError, ShardUnavailable
from streamtrain.ps.nodes.topology import Cluster, ShardMap
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS, RemoteControl
from streamtrain.ps.rpc.security import Security, connect, metadata
from streamtrain.settings.groups import Settings
from streamtrain.store.checkpoint.checkpoint import CheckpointReader
from streamtrain.store.checkpoint.epochs import CheckpointChain, Epochs

_SECONDS = 5.0  # within which a shard that runs answers


class Listed(NamedTuple):
    """An epoch.

    Attributes:
        epoch: its number.
        kind: "full" or "delta"; None: its manifest is damaged.
        base: what a delta builds on.
        rows: by table: all of them, or those that changed; None: its manifest is damaged.
        bytes: size of its files.
        fault: what is wrong with it or with what it builds on; "": nothing.
    """

    epoch: int
    kind: str | None
    base: int | None
    rows: dict[str, int] | None
    bytes: int
    fault: str


class Restored(NamedTuple):
    """What shards start from now.

    Attributes:
        epoch: number.
        moved: the epochs that were set aside.
        aside: where they are; None: there were none.
    """

    epoch: int
    moved: list[int]
    aside: str | None


def open_epochs(settings: Settings) -> Epochs:
    """Those of the cluster.

    Raises:
        ConfigError: there is no place for them.
    """
    if settings.checkpoint.url is None:
        raise ConfigError("checkpoint.url is not set: it is where the checkpoints are")
    return Epochs(settings.checkpoint.url)


def listed(epochs: Epochs) -> list[Listed]:
    """All complete epochs, ascending. All their files are read.

    Raises:
        CheckpointError: a checkpoint is out of reach, or of another format.
    """
    faults, found = epochs.check(), []
    for number in epochs.numbers():
        directory = epochs.directory(number)
        size, fault = sum(directory.sizes().values()), faults.get(number, "")
        try:
            reader = CheckpointReader(directory)
            found.append(Listed(number, reader.kind, reader.base, dict(reader.row_counts), size, fault))
        except CheckpointCorrupt:
            found.append(Listed(number, None, None, None, size, fault))
    return found


def restore(settings: Settings, tf_config: str | None, epoch: int | None) -> Restored:
    """Has shards start from an epoch when they are started, by setting later ones aside.

    Args:
        settings: of the cluster.
        tf_config: of the environment, if there is one.
        epoch: its number; None: the newest that is good.

    Raises:
        ConfigError: it is not set where checkpoints or shards are.
        ShardError: a shard runs.
        CheckpointCorrupt: the epoch is damaged.
        CheckpointError: there is no such epoch, it cannot be divided among the shards, or others cannot be moved.
    """
    epochs, following = open_epochs(settings), next_shards(settings, tf_config)
    refuse_running(settings, following)
    shards = len(following.shards)
    chain = epochs.newest(shards) if epoch is None else _given(epochs, epoch, shards)
    name = f"aside-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
    moved = epochs.set_aside(chain.epoch, name)
    return Restored(chain.epoch, moved, f"{epochs.url}/{name}" if moved else None)


def _given(epochs: Epochs, number: int, shards: int) -> CheckpointChain:
    if number not in epochs.numbers():
        raise CheckpointError(f"there is no epoch {number} at {epochs.url}; --list shows those that exist")
    chain = epochs.open(number)
    check_shard_count(chain, shards)
    chain.verify()
    return chain


def shard_addresses(settings: Settings, tf_config: str | None) -> Sequence[str]:
    """Addresses of all shards, as they are set, or as the last coordinator knew them.

    Raises:
        ConfigError: neither is known.
    """
    if settings.ps.addresses or (tf_config and not tf_config.isspace()):
        return Cluster.of(settings.ps.addresses, tf_config).ps
    return next_shards(settings, tf_config).shards


def next_shards(settings: Settings, tf_config: str | None) -> ShardMap:
    """The shards with which the next coordinator begins: not those that are set, if they were scaled.

    Raises:
        ConfigError: none are known.
        CheckpointError: what the last coordinator knew cannot be read.
    """
    url = settings.checkpoint.url
    if settings.ps.addresses or (tf_config and not tf_config.isspace()):
        given = ShardMap(0, tuple(Cluster.of(settings.ps.addresses, tf_config).ps), tuple(settings.ps.backups))
        return (load_shard_map(url, given.shards, given.backups) if url else None) or given
    kept = load_shard_map(url) if url else None
    if kept is None:
        raise ConfigError("ps.addresses is not set, so it is not known whether shards run: give --ps host:port,…")
    return kept


def refuse_running(settings: Settings, shards: ShardMap) -> None:
    """Raises if a shard, or a backup, of the cluster answers.

    Raises:
        ShardError: one does; the message names it.
    """
    addresses = [*dict.fromkeys([*shards.addresses, *settings.ps.backups])]
    security = Security.from_settings(settings.security)

    def runs(address: str) -> bool:
        channel: Any = connect(address, security, CHANNEL_OPTIONS)
        try:
            RemoteControl(channel, address, metadata(security), _SECONDS).status()
        except ShardUnavailable:
            return False
        except ShardError:  # it is there, and refuses
            return True
        finally:
            channel.close()
        return True

    with ThreadPoolExecutor(len(addresses)) as pool:
        running = [address for address, found in zip(addresses, pool.map(runs, addresses), strict=True) if found]
    if running:
        raise ShardError(
            f"the shard at {running[0]} runs: stop workers and all shards first, as they go back together or not at all"
        )
