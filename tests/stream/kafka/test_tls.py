"""Kafka by SASL over TLS, with no more rights than SECURITY.md names."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trustme
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from cryptography.hazmat.primitives import serialization

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.errors import SourceRefused, SourceUnavailable, StreamtrainError, WriteFailed
from streamtrain.stream.kafka import client as kafka_service
from streamtrain.stream.kafka.stream import KafkaStream
from tests.stream.kinds import KAFKA_OPTIONS, Place, fill
from tests.stream.members import Member, group_of
from tests.stream.servers import ACCESS, PROPERTIES, USERS, as_user, missing

PAGE = Path(__file__).parents[3] / "SECURITY.md"
KINDS = {"topic": ResourceType.TOPIC, "group": ResourceType.GROUP}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificate of an authority, and of the broker with its key."""
    folder, ca = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "broker.pem")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "broker.key").write_bytes(key.private_bytes(*form))
    return folder


@pytest.fixture(scope="module")
def broker(authority: Path) -> Iterator[Broker]:
    """One whose listener with users speaks TLS."""
    tls = {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": (authority / "broker.pem").read_text().replace("\n", "\\n"),
        "ssl.keystore.key": (authority / "broker.key").read_text().replace("\n", "\\n"),
    }
    try:
        broker = Broker(resolve(), users=USERS, properties=PROPERTIES | ACCESS | tls)
        broker.start()
    except StreamtrainError as exc:
        missing("kafka", exc)
    yield broker
    broker.close()


def options(authority: Path, name: str, ca: str = "ca.pem") -> dict[str, str | int]:
    return as_user(name) | {"security.protocol": "SASL_SSL", "ssl.ca.location": str(authority / ca)}


def allow(broker: Broker, who: str, rights: list[tuple[str, str, str]]) -> None:
    """Allows operations, by name, on topics and groups."""
    admin = AdminClient({"bootstrap.servers": broker.servers})
    rules = [
        AclBinding(
            *(KINDS[kind], name, ResourcePatternType.LITERAL, f"User:{who}", "*"),
            *(AclOperation[operation.upper()], AclPermissionType.ALLOW),
        )
        for kind, name, operation in rights
    ]
    for made in admin.create_acls(rules).values():
        made.result(120)


def documented(who: str) -> list[tuple[str, str]]:
    """What SECURITY.md lets a worker or a producer do at Kafka, always: kind or "dead", and operation."""
    cell = re.search(rf"^\| {who} \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    assert cell
    found = []
    for kind, operations in re.findall(r"(topic|group|`{topic}\.dead`): ((?:`\w+`(?:, )?)+)", cell[1]):
        found += [("dead" if "dead" in kind else kind, one) for one in re.findall(r"`(\w+)`", operations)]
    return [(kind, one) for kind, one in found if one != "Create"]


def test_the_documented_rights_are_enough_and_no_more(broker: Broker, authority: Path) -> None:
    place = Place("kafka", broker.servers)
    stream = place.make(2)
    fill(stream, {0: 5, 1: 5})
    dead = KafkaStream(broker.servers, f"{place.topic}.dead", {})
    dead.create(1)
    names = {"topic": ("topic", place.topic), "group": ("group", group_of(stream)), "dead": ("topic", dead.topic)}
    rights = documented("worker")
    assert {kind for kind, _ in rights} == {*names}
    allow(broker, "bob", [(*names[kind], operation) for kind, operation in rights])
    mine = options(authority, "bob")
    with Member(KafkaStream(broker.secured, place.topic, KAFKA_OPTIONS | mine)) as member:
        member.take_until(lambda m: m.count == 10)
    with closing(KafkaStream(broker.secured, dead.topic, mine).writer()) as writer:
        writer.write(b"a letter")
        writer.flush(30)

    def forge() -> None:
        with closing(KafkaStream(broker.secured, place.topic, mine).writer()) as writer:
            writer.write(b"forged")
            writer.flush(30)

    with pytest.raises((SourceRefused, WriteFailed)):  # it may not write what it learns
        forge()
    assert stream.bounds() == {0: (0, 5), 1: (0, 5)}


def test_a_broker_that_is_not_trusted_gets_no_password(
    broker: Broker, authority: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka_service, "REQUEST_SECONDS", 4.0)
    place = Place("kafka", broker.servers)
    place.make(1)
    for bad in (options(authority, "ann", "other.pem"), as_user("ann")):
        with pytest.raises((SourceUnavailable, SourceRefused)) as told:
            KafkaStream(broker.secured, place.topic, bad).bounds()
        assert USERS["ann"] not in f"{told.value}{told.value.__cause__}{caplog.text}"
    assert KafkaStream(broker.secured, place.topic, options(authority, "ann")).bounds() == {0: (0, 0)}
