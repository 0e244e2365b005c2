"""Servers for tests: real ones, started once. A test that needs one is skipped where it is missing.

`STREAMTRAIN_REQUIRE=kafka,redis` makes it fail there instead.
"""

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.errors import StreamtrainError

USERS = {"ann": "anns-secret", "bob": "bobs-secret", "cy": "cys-secret"}
"""Ann may do all, Bob nothing, Cy what a test allows."""
PROPERTIES = {
    "group.min.session.timeout.ms": "1000",
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "500",
}
ACCESS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS;User:ann",
}


def as_user(name: str, password: str | None = None) -> dict[str, str | int]:
    """Options of a user at the secured listener."""
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": name,
        "sasl.password": password or USERS[name],
    }


Right = tuple[str, str, str]
"""Kind of the resource, its name or what begins so with a * at its end, and the operation."""


def allow(servers: str, user: str, rights: set[Right]) -> None:
    """Gives a user of Kafka these rights; `servers` is where whoever may do all is asked for nothing."""
    bindings = [
        AclBinding(
            ResourceType[kind],
            name.removesuffix("*"),
            ResourcePatternType.PREFIXED if name.endswith("*") else ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            AclOperation[operation.upper()],
            AclPermissionType.ALLOW,
        )
        for kind, name, operation in sorted(rights)
    ]
    admin = AdminClient({"bootstrap.servers": servers})
    for made in admin.create_acls(bindings).values():
        made.result(120)


def missing(server: str, why: Exception) -> NoReturn:
    """Skips the test that needs this server, or fails it where the server must be there."""
    if server in os.environ.get("STREAMTRAIN_REQUIRE", "").split(","):
        pytest.fail(f"{server} is required and cannot be started: {why}", pytrace=False)
    pytest.skip(f"NOT TESTED, as {server} cannot be started: {why}")


# Nobody kills the shared broker: one that is busy need not lose its partitions for a heartbeat that came late.
_PATIENT = {"broker.session.timeout.ms": "60000"}
_shared: list[Broker] = []


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Broker:
    """A broker for all tests, which none of them may stop.

    To pytest, the fixture is another one in each conftest and module that imports it: the broker is the same.
    """
    if not _shared:
        try:
            broker = Broker(resolve(), users=USERS, properties=PROPERTIES | ACCESS | _PATIENT)
            broker.start()
        except StreamtrainError as exc:
            missing("kafka", exc)
        request.config.add_cleanup(broker.close)
        _shared.append(broker)
    return _shared[0]


@pytest.fixture(scope="module")
def own_kafka() -> Iterator[Broker]:
    """A broker for tests that stop it: they leave it running. It ends connections that are idle for a second."""
    try:
        broker = Broker(resolve(), properties=PROPERTIES | {"connections.max.idle.ms": "1000"})
        broker.start()
    except StreamtrainError as exc:
        missing("kafka", exc)
    yield broker
    broker.close()
