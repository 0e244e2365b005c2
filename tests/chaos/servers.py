"""Kafka and Valkey, which are given to a service: whoever runs them starts them again."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from streamtrain.address import free_port
from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from tests.chaos import rights
from tests.chaos.network import Network


class Servers:
    """Both, where all processes of a network reach them.

    Args:
        folder: of their data, which outlive them.
        network: of the processes.

    Attributes:
        stream: URL of Kafka, for whoever may do all.
        secured: the same, where users are asked for.
        redis: URL of Valkey, as a user who may do what processes need.
    """

    def __init__(self, folder: Path, network: Network) -> None:
        port, control, secured = free_port(), free_port(), free_port()
        listeners = {
            "listeners": f"PLAINTEXT://0.0.0.0:{port},SASL_PLAINTEXT://0.0.0.0:{secured},CONTROLLER://127.0.0.1:{control}",
            "advertised.listeners": f"PLAINTEXT://{network.hub}:{port},SASL_PLAINTEXT://{network.hub}:{secured}",
            "controller.quorum.voters": f"1@127.0.0.1:{control}",
        }
        open_to_all = ["bind 0.0.0.0", "protected-mode no"] if network.is_wire else []
        properties = rights.PROPERTIES | listeners
        self.kafka = Broker(resolve(), data=folder / "kafka", port=port, users=rights.USERS, properties=properties)
        self.valkey = Valkey(folder / "valkey", appendonly=True, config=[*open_to_all, rights.redis_user()])
        self.kafka.start()
        self.valkey.start()
        self.stream = f"kafka://{network.hub}:{port}"
        self.secured = f"kafka://{network.hub}:{secured}"
        self.redis = f"redis://{rights.REDIS_USER}:{rights.REDIS_PASSWORD}@{network.hub}:{self.valkey.port}/0"

    def forget(self) -> None:
        """All that is in Valkey."""
        with redis.Redis.from_url(self.valkey.url) as client:
            client.flushall()

    def lose(self, share: random.Random) -> int:
        """Some buckets of published rows, as if a part of the server had been lost or evicted; returns how many."""
        with redis.Redis.from_url(self.valkey.url) as client:
            there = sorted(client.scan_iter("streamtrain:rows:*"))
            lost = share.sample(there, max(1, len(there) // 3)) if there else []
            return int(client.delete(*lost)) if lost else 0

    def lose_keys(self, share: random.Random) -> list[str]:
        """Some keys of models that are no rows: what is published, labelled and known of it; returns their names."""
        with redis.Redis.from_url(self.valkey.url) as client:
            there = sorted(client.scan_iter("streamtrain:model:*"))
            lost = share.sample(there, share.randint(1, len(there))) if there else []
            if lost:
                client.delete(*lost)
            return [name.decode().rpartition("}:")[2] for name in lost]

    def add_partition(self, topic: str) -> int:
        """One more, to which nobody writes samples; returns its number."""
        admin = AdminClient({"bootstrap.servers": self.kafka.servers})
        count = len(admin.list_topics(topic, timeout=60).topics[topic].partitions)
        admin.create_partitions([NewPartitions(topic, count + 1)])[topic].result(60)
        return count

    @contextmanager
    def transaction(self, topic: str, partition: int) -> Iterator[None]:
        """An open transaction with a message, which is aborted in the end."""
        producer = Producer({"bootstrap.servers": self.kafka.servers, "transactional.id": f"chaos of {topic}"})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"of a transaction", partition=partition)
        producer.flush(60)
        yield
        producer.abort_transaction(60)

    def pids(self) -> dict[str, int]:
        """Both, by name."""
        found = {"kafka": self.kafka.pid, "valkey": self.valkey.pid}
        return {name: pid for name, pid in found.items() if pid is not None}

    def stop(self) -> None:
        """Ends both."""
        self.kafka.close()
        self.valkey.stop()
