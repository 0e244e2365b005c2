"""Who may read what of Kafka, and what is told to those who may not, or speak another protocol."""

import socket
import time

import pytest
from confluent_kafka import Consumer, KafkaError
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from streamtrain.embedded.kafka import Broker
from streamtrain.errors import SourceRefused, SourceUnavailable
from streamtrain.stream.kafka import client as kafka_service
from streamtrain.stream.kafka.stream import KafkaStream
from tests.patience import PATIENCE, until
from tests.stream.kinds import KAFKA_OPTIONS, Place, fill
from tests.stream.members import Member, group_of, settle
from tests.stream.servers import as_user


@pytest.fixture
def place(kafka: Broker) -> Place:
    return Place("kafka", kafka.servers)


def test_credentials(kafka: Broker, place: Place) -> None:
    place.make(2)
    fill(place.open(), {0: 5, 1: 5})
    with Member(KafkaStream(kafka.secured, place.topic, KAFKA_OPTIONS | as_user("ann"))) as member:
        member.take_until(lambda m: m.count == 10)
    wrong = KafkaStream(kafka.secured, place.topic, as_user("ann", "wrong-secret"))
    for question in (wrong.bounds, wrong.writer, lambda: Member(wrong)):
        with pytest.raises(SourceRefused, match=rf"{kafka.secured}.* check .*sasl\.password") as told:
            question()
        assert "wrong-secret" not in str(told.value)
    allowed_nothing = KafkaStream(kafka.secured, place.topic, as_user("bob"))
    with pytest.raises(SourceRefused, match=r"authorization failed.*allow this user"):
        allowed_nothing.bounds()


def test_credentials_that_end_under_a_reader_are_told(kafka: Broker, place: Place) -> None:
    """The topic is refused to a user who had it."""
    place.make(1)
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    topic = (ResourceType.TOPIC, place.topic, ResourcePatternType.LITERAL, "User:bob")
    group = (ResourceType.GROUP, group_of(place.open()), ResourcePatternType.LITERAL, "User:bob")
    rules = [AclBinding(*of, "*", AclOperation.ALL, AclPermissionType.ALLOW) for of in (topic, group)]
    for made in admin.create_acls(rules).values():
        made.result(120)
    fill(place.open(), {0: 5})
    with Member(KafkaStream(kafka.secured, place.topic, KAFKA_OPTIONS | as_user("bob"))) as member:
        member.take_until(lambda m: m.count == 5)
        for gone in admin.delete_acls(
            [AclBindingFilter(*topic, "*", AclOperation.ALL, AclPermissionType.ALLOW)]
        ).values():
            gone.result(120)
        with pytest.raises(SourceRefused, match=r"authorization failed.*allow this user"):
            member.take_until(lambda m: False)


def test_a_broker_that_does_not_answer_is_waited_for_shortly_if_it_refuses_connections(
    kafka: Broker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_service, "REQUEST_SECONDS", 4.0)
    monkeypatch.setattr(kafka_service, "_CONNECT_AGAIN_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for servers, options, seconds, reason in (
            (kafka.servers, {"security.protocol": "ssl"}, 2, "SSL"),
            (kafka.secured, {"client.rack": "a"}, 2, "Disconnected"),
            ("localhost:1", {"client.rack": "a"}, 2, "refused"),
            (f"127.0.0.1:{silent.getsockname()[1]}", {"client.rack": "a"}, 4, "no reason known"),
        ):
            begin = time.monotonic()
            with pytest.raises(SourceUnavailable, match=rf"{servers} does not answer within {seconds} s: .*{reason}"):
                KafkaStream(servers, place.topic, options).bounds()
            assert time.monotonic() - begin < PATIENCE


def test_a_topic_for_more_replicas_than_brokers_is_refused_but_while_all_restart() -> None:
    """The messages are Kafka's."""

    def meaning(reason: str) -> SourceRefused | None:
        text = f"Unable to replicate the partition 3 time(s): {reason}"
        return kafka_service.refusal(KafkaError(KafkaError.INVALID_REPLICATION_FACTOR, text), "Kafka")

    few = "The target replication factor of 3 cannot be reached because only 2 broker(s) are registered."
    assert isinstance(meaning(few), SourceRefused)
    assert meaning("All brokers are currently fenced.") is None


def test_members_that_are_not_ours_are_refused(place: Place) -> None:
    stream = place.make(1)
    other = Consumer({"bootstrap.servers": place.server, "group.id": group_of(stream), "client.id": "somebody"})
    other.subscribe([place.topic])
    until(other.assignment, doing=lambda: other.poll(0.1))
    with pytest.raises(SourceRefused, match=rf"group {group_of(stream)} of .* members like somebody"):
        Member(stream)
    other.close()
    with Member(stream) as member:
        settle(1, member)
