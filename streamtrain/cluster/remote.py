"""Remote: what is asked of a running cluster from outside."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from streamtrain.cluster.checkpoints import Taken
from streamtrain.cluster.coordinator_client import CoordinatorClient
from streamtrain.cluster.membership import Cluster
from streamtrain.cluster.places import check_backups
from streamtrain.cluster.verify_head import HeadFound
from streamtrain.errors import ShardError
from streamtrain.ps.control import CHANNEL_OPTIONS, RemoteControl, Retry, patiently
from streamtrain.ps.route import control_of
from streamtrain.ps.security import Security, connect, metadata
from streamtrain.settings import SecuritySettings, Settings
from streamtrain.store.origin import Publication


def cluster_of(settings: Settings, tf_config: str | None, stopped: threading.Event) -> Cluster:
    """The shards, as they are set; else as the coordinator says, once it answers.

    Args:
        settings: of the process.
        tf_config: of its environment, if there is one.
        stopped: ends the waiting.

    Raises:
        ConfigError: they are not set, nor is there a coordinator.
        ShardUnavailable: the coordinator did not answer until `stopped`.
    """
    address = settings.coordinator.address
    if settings.ps.addresses or tf_config or address is None:
        return Cluster.of(settings.ps.addresses, tf_config)
    client = CoordinatorClient(address, Security.read(**settings.security.arguments()))
    try:
        return Cluster(patiently(client.slots, Retry(), stopped).shards)
    finally:
        client.close()


def leader_of(settings: Settings, tf_config: str | None) -> Sequence[str]:
    """Where who leads the shards is: the coordinator's address, else that of shard 0, and of its backup if it has one.

    Args:
        settings: of the cluster.
        tf_config: of the environment, if there is one.

    Raises:
        ConfigError: neither is set, or the backups do not fit the shards.
    """
    if settings.coordinator.address is not None:
        return [settings.coordinator.address]
    shards = Cluster.of(settings.ps.addresses, tf_config).ps
    check_backups(shards, settings.ps)
    return [shards[0], *settings.ps.backups[:1]]


@contextmanager
def _control(leader: Sequence[str], security: SecuritySettings, timeout: float) -> Iterator[RemoteControl]:
    trusted = Security.read(**security.arguments())
    places = [(connect(address, trusted, CHANNEL_OPTIONS), address) for address in leader]
    try:
        place = (places[0], places[1]) if len(places) > 1 else places[0]
        yield control_of(place, metadata(trusted), timeout)
    finally:
        for channel, _ in places:
            channel.close()


def publish_now(
    leader: Sequence[str], security: SecuritySettings, *, force: bool = False, timeout: float
) -> Publication:
    """Has all shards publish what they have learned.

    Args:
        leader: as of `leader_of`.
        security: what the processes trust.
        force: whether it is published even if the gate would hold it back.
        timeout: seconds that it may take.

    Returns:
        The head.

    Raises:
        ShardUnavailable: the shard does not answer in time, or nothing has been learned yet.
        ShardRefused: the cluster publishes nowhere.
        ShardError: it is held back, or cannot be published; says why.
    """
    with _control(leader, security, timeout) as control:
        return _publication(control.target, control.publish_now(force=force, timeout=timeout))


def verify(leader: Sequence[str], security: SecuritySettings, *, timeout: float) -> HeadFound:
    """Has all shards publish what they have learned, and compares what is published with what they have.

    Args:
        leader: as of `leader_of`.
        security: what the processes trust.
        timeout: seconds that it may take.

    Raises:
        ShardUnavailable: it does not answer in time, or nothing has been learned yet.
        ShardRefused: the cluster publishes nowhere.
        ShardError: it cannot be compared; says why.
    """
    with _control(leader, security, timeout) as control:
        try:
            return HeadFound.of_json(json.loads(control.verify(timeout=timeout)))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ShardError(f"{control.target} does not say what it has compared: it is of another release") from exc


def take_checkpoint(address: str, security: SecuritySettings, *, full: bool, timeout: float) -> Taken:
    """Has a coordinator take a checkpoint, and waits for it.

    Args:
        address: of the coordinator.
        security: what the processes trust.
        full: all rows, also where those that changed would do.
        timeout: seconds that it may take.

    Raises:
        ShardUnavailable: the coordinator or a shard does not answer in time.
        ShardRefused: there is no place for checkpoints.
        ShardError: nothing has been learned yet.
        CheckpointError: it cannot be written.
    """
    client = CoordinatorClient(address, Security.read(**security.arguments()))
    try:
        return client.checkpoint(full=full, timeout=timeout)
    finally:
        client.close()


def _publication(address: str, text: str) -> Publication:
    try:
        return Publication.of_json(json.loads(text))
    except (KeyError, TypeError, ValueError) as exc:
        raise ShardError(f"{address} does not say what it has published: it is of another release") from exc
