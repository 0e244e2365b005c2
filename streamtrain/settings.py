"""The settings of a cluster's processes: which there are, what each may be and what it is by default.

docs/configuration.md says what each means to an operator.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationInfo

from streamtrain.address import parse_address
from streamtrain.clock import parse_duration

MASK = "***"
SECRETS = frozenset({"security.token"})
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+(?=@)")


def mask_credentials(text: str) -> str:
    """Text with what stands before the @ of URLs masked."""
    return _CREDENTIALS.sub(MASK, text)


def _addresses(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    texts = [text.strip() for text in value.split(",")] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts:
        raise ValueError('must be a list of addresses such as ["10.0.0.1:2222"], or these separated by commas')
    addresses = tuple(str(parse_address(text, str(info.field_name))) for text in texts)
    if len(set(addresses)) < len(addresses):
        raise ValueError("must name every address once")
    return addresses


def _listen(value: Any, info: ValidationInfo) -> str:
    return str(parse_address(value, str(info.field_name), any_port=True))


def _seconds(value: Any, info: ValidationInfo) -> float:
    if _is_text(info) and isinstance(value, str) and re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", value):
        value = float(value)
    return parse_duration(value, str(info.field_name))


def _count(value: Any, info: ValidationInfo) -> int:
    if _is_text(info) and isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("must be an integer")
    return value


def _flag(value: Any, info: ValidationInfo) -> bool:
    if _is_text(info) and value in ("true", "false"):
        return bool(value == "true")
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be non-empty text")
    return value


def _is_text(info: ValidationInfo) -> bool:
    """Whether numbers and truth may come as text: environment and command line have nothing else."""
    return bool(info.context and info.context["text"])


Addresses = Annotated[tuple[str, ...], BeforeValidator(_addresses)]
Listen = Annotated[str, BeforeValidator(_listen)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Count = Annotated[int, BeforeValidator(_count)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]
Secret = Annotated[SecretStr, BeforeValidator(_text)]


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, mask_credentials(value) if isinstance(value, str) else value


class PsSettings(_Group):
    """The shards and how workers talk with them.

    Attributes:
        addresses: of all shards, in order of their index: "host:port", "[ipv6]:port" or "unix:path"; as text,
            separated by commas.
        listen: address that this process binds; None: its own of `addresses`.
        max_message_bytes: of one request or answer, in bytes; gRPC allows less than 2 GiB.
        max_keys: of one request, summed over tables.
        wire_dtype: of rows and gradients on their way.
        timeout: deadline of a call, in seconds.
        sessions: of workers with one shard, open at once; each holds a thread.
    """

    addresses: Addresses = ()
    listen: Listen | None = None
    max_message_bytes: Annotated[Count, Field(ge=65_536, le=2_147_483_647)] = 268_435_456
    max_keys: Annotated[Count, Field(ge=1)] = 4_000_000
    wire_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    timeout: Seconds = 10.0
    sessions: Annotated[Count, Field(ge=1, le=4096)] = 256


class ConsistencySettings(_Group):
    """How far workers may run apart.

    Attributes:
        mode: "async": not at all held back; "bounded": by `staleness`; "bulk": in step.
        staleness: steps that the fastest worker may be ahead of the slowest; given exactly where mode is "bounded".
        lease: seconds after which a silent worker counts as dead.
    """

    mode: Literal["async", "bounded", "bulk"] = "async"
    staleness: Annotated[Count, Field(ge=0)] | None = None
    lease: Seconds = 10.0


class CheckpointSettings(_Group):
    """When state is saved, and where.

    Attributes:
        url: folder or object store; None: nothing is saved. Credentials in it are masked wherever it is shown.
        every: seconds between two.
        keep: epochs that are kept.
        full_every: deltas after which a full one is written; 0: every one is full.
    """

    url: Text | None = None
    every: Seconds = 60.0
    keep: Annotated[Count, Field(ge=1)] = 3
    full_every: Annotated[Count, Field(ge=0)] = 10


class SecuritySettings(_Group):
    """What the processes trust; `streamtrain.ps.security.Security` says what each does.

    Attributes:
        certificate: path of a PEM file.
        key: path of a PEM file.
        ca: path of a PEM file.
        token: the shared secret.
        token_file: path of a file that holds it.
        insecure: whether plaintext may leave the machine.
    """

    certificate: Text | None = None
    key: Text | None = None
    ca: Text | None = None
    token: Secret | None = None
    token_file: Text | None = None
    insecure: Flag = False

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `streamtrain.ps.security.Security.read`; the token is among them in the clear."""
        values = dict(self)
        return values | {"token": None if self.token is None else self.token.get_secret_value()}


class Settings(_Group):
    """All settings, by concern.

    Attributes:
        model: "path/to/file.py:name"; None: the command names it.
        ps: the shards.
        consistency: of workers.
        checkpoint: when and where.
        security: of the wire.
    """

    model: Text | None = None
    ps: PsSettings = PsSettings()
    consistency: ConsistencySettings = ConsistencySettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    security: SecuritySettings = SecuritySettings()


GROUPS = frozenset(name for name, field in Settings.model_fields.items() if isinstance(field.default, _Group))
KEYS = tuple(
    sorted(
        [name for name in Settings.model_fields if name not in GROUPS]
        + [f"{group}.{name}" for group in GROUPS for name in type(Settings.model_fields[group].default).model_fields]
    )
)
