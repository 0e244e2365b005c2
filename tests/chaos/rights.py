"""Rights: each kind of process is a user of Kafka and of Redis who may do what SECURITY.md lists, and nothing else."""

import re
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from streamtrain.stream.dead_letters import SUFFIX
from tests.stream.servers import ACCESS

SCHEMAS = Path(__file__).parent.parent.parent / "schemas" / "README.md"
USERS = {"worker": "w-secret", "joiner": "j-secret", "nobody": "n-secret"}
REDIS_USER = "learner"
REDIS_PASSWORD = "l-secret"
PROPERTIES = ACCESS | {"super.users": "User:ANONYMOUS"}

_admins: dict[str, AdminClient] = {}  # kept: one that ends while its thread still answers crashes the process

Rights = set[tuple[str, str, str]]
"""Kind of a resource, its name, with a * at its end what begins so, and the operation."""


def sasl(user: str) -> dict[str, str]:
    """Options of a client."""
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": USERS[user],
    }


def of_worker(topic: str, group: str) -> Rights:
    """Those of a worker; the topic of dead letters is not there yet."""
    dead = topic + SUFFIX
    return {
        ("GROUP", group, "READ"),
        ("TOPIC", topic, "READ"),
        ("TOPIC", topic, "DESCRIBE_CONFIGS"),
        *(("TOPIC", dead, operation) for operation in ("WRITE", "CREATE", "DESCRIBE_CONFIGS")),
    }


def of_joiner(impressions: str, outcomes: str, samples: str, group: str) -> Rights:
    """Those of `streamtrain join`; the topics that it writes are not there yet."""
    written = [samples, f"{outcomes}.late", f"{outcomes}.orphaned", impressions + SUFFIX, outcomes + SUFFIX]
    return {
        ("GROUP", group, "READ"),
        ("TRANSACTIONAL_ID", f"{group}.*", "WRITE"),
        *(("TOPIC", topic, "READ") for topic in (impressions, outcomes)),
        *(("TOPIC", topic, operation) for topic in written for operation in ("WRITE", "CREATE")),
        *(("TOPIC", topic, "DESCRIBE_CONFIGS") for topic in (impressions, outcomes, *written)),
    }


def allow(servers: str, user: str, rights: Rights) -> None:
    """Gives a user of Kafka these rights."""
    bindings = [
        AclBinding(
            ResourceType[kind],
            name.removesuffix("*"),
            ResourcePatternType.PREFIXED if name.endswith("*") else ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            AclOperation[operation],
            AclPermissionType.ALLOW,
        )
        for kind, name, operation in sorted(rights)
    ]
    if servers not in _admins:
        _admins[servers] = AdminClient({"bootstrap.servers": servers})
    for made in _admins[servers].create_acls(bindings).values():
        made.result(120)


def redis_user() -> str:
    """A line of the configuration of Redis: the user whom schemas/README.md describes."""
    text = SCHEMAS.read_text().partition("## Redis dictionaries")[2]
    rights = re.search(r"needs `(~streamtrain:\*)` and `([^`]*)`", text)
    assert rights is not None
    return f"user {REDIS_USER} on >{REDIS_PASSWORD} {rights[1]} -@dangerous {' '.join(rights[2].split())}"
