"""Remote: what is asked of a running cluster from outside."""

import json
import threading

from streamtrain.cluster.checkpoints import Taken
from streamtrain.cluster.coordinator_client import CoordinatorClient
from streamtrain.cluster.membership import Cluster
from streamtrain.cluster.verify_head import HeadFound
from streamtrain.errors import ShardError
from streamtrain.ps.control import CHANNEL_OPTIONS, RemoteControl, Retry, patiently
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


def publish_now(address: str, security: SecuritySettings, *, force: bool = False, timeout: float) -> Publication:
    """Has all shards publish what they have learned.

    Args:
        address: of shard 0.
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
    trusted = Security.read(**security.arguments())
    channel = connect(address, trusted, CHANNEL_OPTIONS)
    try:
        control = RemoteControl(channel, address, metadata(trusted), timeout)
        return _publication(address, control.publish_now(force=force, timeout=timeout))
    finally:
        channel.close()


def verify(address: str, security: SecuritySettings, *, timeout: float) -> HeadFound:
    """Has all shards publish what they have learned, and compares what is published with what they have.

    Args:
        address: of shard 0, or of the coordinator.
        security: what the processes trust.
        timeout: seconds that it may take.

    Raises:
        ShardUnavailable: it does not answer in time, or nothing has been learned yet.
        ShardRefused: the cluster publishes nowhere.
        ShardError: it cannot be compared; says why.
    """
    trusted = Security.read(**security.arguments())
    channel = connect(address, trusted, CHANNEL_OPTIONS)
    try:
        text = RemoteControl(channel, address, metadata(trusted), timeout).verify(timeout=timeout)
        return HeadFound.of_json(json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ShardError(f"{address} does not say what it has compared: it is of another release") from exc
    finally:
        channel.close()


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
