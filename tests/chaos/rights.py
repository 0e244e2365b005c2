"""Rights: each kind of process is a user of Kafka and of Redis who may do what SECURITY.md lists, and nothing else."""

import re
from pathlib import Path

from streamtrain.stream.dead_letters import SUFFIX
from tests.stream.servers import ACCESS, Right, as_user

SCHEMAS = Path(__file__).parent.parent.parent / "schemas" / "README.md"
USERS = {"worker": "w-secret", "joiner": "j-secret", "nobody": "n-secret"}
REDIS_USER = "learner"
REDIS_PASSWORD = "l-secret"
PROPERTIES = ACCESS | {"super.users": "User:ANONYMOUS"}


def sasl(user: str) -> dict[str, str | int]:
    """Options of a client."""
    return as_user(user, USERS[user])


def of_worker(topic: str, group: str) -> set[Right]:
    """Those of a worker; the topic of dead letters is not there yet."""
    dead = topic + SUFFIX
    return {
        ("GROUP", group, "READ"),
        ("TOPIC", topic, "READ"),
        ("TOPIC", topic, "DESCRIBE_CONFIGS"),
        *(("TOPIC", dead, operation) for operation in ("WRITE", "CREATE", "DESCRIBE_CONFIGS")),
    }


def of_joiner(impressions: str, outcomes: str, samples: str, group: str) -> set[Right]:
    """Those of `streamtrain join`; the topics that it writes are not there yet."""
    written = [samples, f"{outcomes}.late", f"{outcomes}.orphaned", impressions + SUFFIX, outcomes + SUFFIX]
    return {
        ("GROUP", group, "READ"),
        ("TRANSACTIONAL_ID", f"{group}.*", "WRITE"),
        *(("TOPIC", topic, "READ") for topic in (impressions, outcomes)),
        *(("TOPIC", topic, operation) for topic in written for operation in ("WRITE", "CREATE")),
        *(("TOPIC", topic, "DESCRIBE_CONFIGS") for topic in (impressions, outcomes, *written)),
    }


def of_redis() -> list[str]:
    """Words of Redis's ACL, as schemas/README.md has them: keys and commands of whoever uses dictionaries."""
    text = SCHEMAS.read_text().partition("## Redis dictionaries")[2]
    rights = re.search(r"needs `(~streamtrain:\*)` and `([^`]*)`", text)
    assert rights is not None
    return [rights[1], "-@dangerous", *rights[2].split()]


def redis_user() -> str:
    """A line of the configuration of Redis: a user with these rights."""
    return f"user {REDIS_USER} on >{REDIS_PASSWORD} {' '.join(of_redis())}"
