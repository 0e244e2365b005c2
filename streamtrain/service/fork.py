"""Forks: a changed model that begins with what another has learned, and learns the same stream in parallel."""

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from streamtrain.address import free_port, parse_address, redacted
from streamtrain.checkpoint.evolve import Evolved, evolve, plan
from streamtrain.checkpoint.restore import open_epochs, shard_addresses
from streamtrain.checkpoint.shard_state import check_shard_count
from streamtrain.cluster.client import CoordinatorClient
from streamtrain.durations import parse_duration
from streamtrain.errors import CheckpointCorrupt, CheckpointError, ConfigError
from streamtrain.service.service_file import CHECKPOINTS, to_toml, write_private
from streamtrain.settings.groups import GROUPS, Settings
from streamtrain.settings.load import DEFAULT_FILE, load_settings
from streamtrain.store.checkpoint.epochs import CheckpointChain, Epochs
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.stream.opening import open_stream
from streamtrain.stream.source import Bounds, Stream

if TYPE_CHECKING:
    from streamtrain.checkpoint.cluster_checkpoint import CheckpointInfo
    from streamtrain.checkpoint.evolution import Evolution
    from streamtrain.model.model import Model

NOW = "now"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_TRIES = 3  # of a checkpoint that the parent deletes while it is read

# What a fork does not take over: it has its own.
_OWN = frozenset({
    "checkpoint.url", "coordinator.address", "log.process", "model", "ps.addresses", "ps.backups", "publish.model",
    "stream.group", "stream.start", "up.data", "up.ps",
})  # fmt: skip
# On the machine of its parent it also has ports of its own; elsewhere it has the same ones on other machines.
_OWN_PORTS = frozenset({
    "coordinator.listen", "coordinator.metrics", "ps.listen", "ps.metrics", "serve.grpc_listen", "serve.listen",
    "serve.metrics", "worker.metrics",
})  # fmt: skip
_MADE_BY_UP = frozenset({"security.token", "serve.admin_token"})
_PATHS = frozenset({
    "security.ca", "security.certificate", "security.key", "security.token_file", "stream.schema_file", "up.kafka",
    "up.redis",
})  # fmt: skip


class Parent(NamedTuple):
    """The cluster that is forked.

    Attributes:
        settings: all of them.
        chosen: what was set by its user, where `up` has set the rest; None: it is not one of `up`.
        tf_config: of the environment, if there is one.
    """

    settings: Settings
    chosen: Settings | None
    tf_config: str | None = None

    @property
    def shards(self) -> Sequence[str]:
        return shard_addresses(self.settings, self.tf_config)

    @property
    def is_local(self) -> bool:
        """Whether all of its shards are on this machine."""
        return all(parse_address(address, "ps.addresses").is_local for address in self.shards)


class Forked(NamedTuple):
    """A fork, ready to be started.

    Attributes:
        file: its settings.
        url: its first checkpoint; None: it begins with no rows.
        epoch: the parent's epoch that it begins with; None: none.
        start: the time of the stream at which it begins, ISO 8601; None: where that epoch ends.
        rows: number of rows by table.
        pause_ms: for how long the parent's training was paused for a checkpoint; None: none was taken.
        seconds: how long all of it took.
    """

    file: Path
    url: str | None
    epoch: int | None
    start: str | None
    rows: dict[str, int]
    pause_ms: float | None
    seconds: float


class _Origin(NamedTuple):
    """Where a fork begins: at an epoch, which was taken for it or not, or at a time."""

    epoch: int | None = None
    start: str | None = None
    taken: "CheckpointInfo | None" = None


def fork(
    parent: Parent,
    name: str,
    load: Callable[[], "Model"],
    *,
    location: str,
    since: str = NOW,
    given: Mapping[str, object] = {},
    allow: Collection[str] = (),
    show: Callable[["Evolution"], None] = lambda _: None,
) -> Forked:
    """Prepares a fork: its first checkpoint, and a folder of its name with its settings. The parent keeps running.

    Args:
        parent: the cluster.
        name: of the fork: of its folder in the working directory, and the name that it publishes under.
        load: loads the model of the fork, which takes a while: called once it is known that nothing is taken.
        location: of that model, as for `load_model`.
        since: "now", the number of an epoch, or a duration such as "7d": the newest epoch that is at least so old, or
            else a new start at the samples of that time.
        given: settings of the fork by dotted key that override the parent's.
        allow: what may be lost; see `streamtrain.checkpoint.evolution.ALLOWABLE`.
        show: called with what the model keeps, before its checkpoint is written.

    Raises:
        ConfigError: the name or an address is taken, a setting is wrong or missing, or what would be lost is not
            allowed, or the stream no longer has the samples.
        CheckpointError: there is no such epoch.
    """
    began, folder = time.monotonic(), Path(name).absolute()
    settings = fork_settings(parent, name, folder, location, given)
    _refuse_taken(parent, settings, folder)
    model = load()
    stream = open_stream(settings.stream)
    epochs = open_epochs(parent.settings)

    def evolved(source: str, to: str) -> Evolved:
        show(plan(parent.settings, model, source))
        return evolve(parent.settings, parent.tf_config, model, source=source, to=to, allow=allow)

    for left in reversed(range(_TRIES)):
        origin = _find_origin(parent, epochs, stream, since)
        try:
            forked = _write(parent, settings, folder, origin, evolved)
        except CheckpointCorrupt:
            if left and since == NOW:  # the parent has deleted it meanwhile, as it keeps only checkpoint.keep of them
                continue
            raise
        break
    paused = origin.taken.pause_ms if origin.taken else None
    return forked._replace(pause_ms=paused, seconds=time.monotonic() - began)


def fork_settings(parent: Parent, name: str, folder: Path, location: str, given: Mapping[str, object]) -> Settings:
    """The settings of a fork: those of its parent, but for what each of them must have for itself.

    Args:
        parent: the cluster.
        name: of the fork.
        folder: of the fork.
        location: of its model.
        given: settings that override these, by dotted key.

    Raises:
        ConfigError: the name is invalid, or a setting is wrong or missing.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"NAME must be letters, digits, dots, dashes and underscores, not {name!r}")
    own = _OWN | (_OWN_PORTS if parent.is_local else frozenset())
    own |= {key for key in _MADE_BY_UP if parent.chosen is not None and not _is_set(parent.chosen, key)}
    values = {key: value for key, value in _set_values(parent.settings) if key not in own}
    values |= {key: str(Path(str(values[key])).absolute()) for key in _PATHS & values.keys()}
    if (options := values.get("stream.kafka")) is not None:
        located = {key: str(Path(str(of)).absolute()) for key, of in options.items() if key.endswith(".location")}
        values["stream.kafka"] = options | located
    file, colon, attribute = location.partition(":")
    values |= {
        "model": f"{Path(file).absolute()}{colon}{attribute}",
        "publish.model": name,
        "stream.group": f"{parent.settings.stream.group}-{name}",
        "stream.dead_letters": False,
        "up.data": str(folder / ".streamtrain"),
        "up.ps": len(parent.shards),
    }
    values |= dict(_own_addresses(parent, given))
    values["checkpoint.url"] = _checkpoints(parent, name, folder)
    settings = load_settings(Path(os.devnull), None, values | dict(given))
    for key in ("publish.model", "stream.group", "checkpoint.url"):
        if _get(settings, key) == _get(parent.settings, key):
            raise ConfigError(f"{key} is {redacted(str(_get(settings, key)))!r}, as its parent's: a fork needs its own")
    shared = set(parent.shards) & {*settings.ps.addresses, *settings.ps.backups, settings.coordinator.address}
    if shared:
        raise ConfigError(f"{min(map(str, shared))} is an address of the parent: a fork needs its own")
    return settings


def _checkpoints(parent: Parent, name: str, folder: Path) -> str:
    """Next to the parent's; of one of `up` in the folder of the fork."""
    url = parent.settings.checkpoint.url
    if parent.chosen is not None or url is None:
        return str(folder / ".streamtrain" / CHECKPOINTS)
    return f"{url.rstrip('/')}-{name}"


def _own_addresses(parent: Parent, given: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Addresses of processes on the parent's machine; `up` chooses those of shards and coordinator itself."""
    settings = parent.settings
    if not parent.is_local:
        needed = ["ps.addresses", *(["coordinator.address"] if settings.coordinator.address else [])]
        if missing := [key for key in needed if key not in given]:
            raise ConfigError(
                f"the parent's shards are on other machines: give the fork's {' and '.join(missing)} by --set"
            )
        return
    for key in ("serve.listen", "serve.grpc_listen"):
        if (listen := _get(settings, key)) and (address := parse_address(listen, key, any_port=True)).port:
            host = f"[{address.host}]" if ":" in address.host else address.host
            yield key, f"{host}:{free_port()}"
    if parent.chosen is None:
        yield "ps.addresses", [f"127.0.0.1:{free_port()}" for _ in parent.shards]
        if settings.coordinator.address:
            yield "coordinator.address", f"127.0.0.1:{free_port()}"


def _set_values(settings: Settings) -> Iterator[tuple[str, Any]]:
    """What was set, by dotted key; secrets in the clear."""
    for group in sorted(GROUPS):
        of = getattr(settings, group)
        for name in sorted(of.model_fields_set):
            if (value := getattr(of, name)) is not None:
                yield f"{group}.{name}", value.get_secret_value() if hasattr(value, "get_secret_value") else value


def _get(settings: Settings, key: str) -> Any:
    group, _, name = key.rpartition(".")
    return getattr(getattr(settings, group) if group else settings, name)


def _is_set(settings: Settings, key: str) -> bool:
    group, _, name = key.partition(".")
    return name in getattr(settings, group).model_fields_set


def _refuse_taken(parent: Parent, settings: Settings, folder: Path) -> None:
    """Raises if anything of the fork belongs to another cluster.

    Raises:
        ConfigError: it is.
    """
    if folder.exists():
        raise ConfigError(f"{folder} already exists: choose another name")
    if parent.settings.checkpoint.url is None:
        raise ConfigError("checkpoint.url of the parent is not set, and a fork begins with a checkpoint")
    assert settings.checkpoint.url is not None
    if Epochs(settings.checkpoint.url).numbers():
        raise ConfigError(f"{redacted(settings.checkpoint.url)} already has checkpoints: choose another name")
    members = open_stream(settings.stream).members(settings.stream.group)
    if members:
        raise ConfigError(f"consumer group {settings.stream.group} has {members} members: choose another name")
    if settings.publish.url is None:
        return
    with closing(RedisServer(settings.publish.url, cluster=settings.publish.cluster)) as server:
        model = RedisModel(server, settings.publish.model)
        lease = model.lease()
        if lease is not None and lease.live:
            raise ConfigError(f"{model.name} is published by a cluster on {lease.host}: choose another name")
        if model.head() is not None:
            drop = f"streamtrain drop {settings.publish.model}"
            raise ConfigError(f"{model.name} was published before: choose another name, or delete it with `{drop}`")


def _find_origin(parent: Parent, epochs: Epochs, stream: Stream, since: str) -> _Origin:
    """Where a fork begins; takes a checkpoint of the parent if that is now."""
    if since == NOW:  # a full one, whose rows can be used as they are
        with CoordinatorClient.from_settings(parent.settings, parent.tf_config) as client:
            taken = client.checkpoint(full=True, timeout=parse_duration("10m", "timeout"))
        return _Origin(taken.epoch, taken=taken)
    if since.isdecimal():
        number = int(since)
        if number not in epochs.numbers():
            raise CheckpointError(
                f"there is no epoch {number} at {epochs.url}; `streamtrain restore --list` lists them"
            )
        _check_stream_has(stream, epochs, number)
        return _Origin(number)
    at = int(time.time() - parse_duration(since, "--from"))
    chain = epochs.newest_good(lambda one: one.about.get("time", at + 1) <= at)
    if chain is not None:
        _check_stream_has(stream, epochs, chain.epoch)
        return _Origin(chain.epoch)
    _check_stream_goes_back(stream, at)
    return _Origin(start=datetime.fromtimestamp(at, UTC).isoformat())


def _clock(chain: CheckpointChain) -> dict[int, int]:
    """The offsets at which an epoch continues, by partition: the oldest of all shards."""
    clocks = [{int(partition): at for partition, at in shard["clock"].items()} for shard in chain.shards]
    return {partition: min(clock.get(partition, 0) for clock in clocks) for partition in set().union(*clocks)}


def _check_stream_has(stream: Stream, epochs: Epochs, number: int) -> None:
    """Raises unless the stream has all samples after an epoch.

    Raises:
        ConfigError: it has not; the message names the earliest epoch for which it has.
    """
    bounds = stream.bounds()

    def gone(chain: CheckpointChain) -> tuple[int, int] | None:
        clock = _clock(chain)
        missing = ((one, clock.get(one, 0)) for one, of in bounds.items() if clock.get(one, 0) < of.low)
        return next(missing, None)

    if (found := gone(epochs.open(number))) is None:
        return
    partition, offset = found
    later = (one for one in epochs.numbers() if one > number and gone(epochs.open(one)) is None)
    raise ConfigError(
        f"epoch {number} continues at offset {offset} of partition {partition}, and {stream.name} begins at offset "
        f"{bounds[partition].low} there; the earliest possible is --from {next(later, NOW)}"
    )


def _check_stream_goes_back(stream: Stream, at: float) -> None:
    """Raises unless the stream has all samples since a time.

    Raises:
        ConfigError: it has not; the message says since when it has.
    """
    now = time.time()
    for partition, of in stream.bounds().items():
        if not of.low:  # nothing was deleted
            continue
        first = next(stream.records({partition: Bounds(of.low, of.high)}), None)
        begins = now if first is None else first.time
        if begins > at:
            told = datetime.fromtimestamp(begins, UTC).isoformat(sep=" ", timespec="seconds")
            raise ConfigError(
                f"partition {partition} of {stream.name} begins at offset {of.low}, of {told}; the earliest possible "
                f"is --from {max(1, int(now - begins))}s"
            )


def _write(
    parent: Parent,
    settings: Settings,
    folder: Path,
    origin: _Origin,
    evolved: Callable[[str, str], Evolved],
) -> Forked:
    """Writes the folder; `evolved` writes a checkpoint from that at one place to another."""
    file = folder / DEFAULT_FILE
    comments = [f"streamtrain.toml of a fork of {parent.settings.publish.model}; contains secrets"]
    if origin.epoch is None:
        settings = settings.model_copy(update={"stream": settings.stream.model_copy(update={"start": origin.start})})
        with _new_folder(folder):
            _write_file(file, settings, comments)
        return Forked(file, None, None, origin.start, {}, None, 0.0)
    epochs = open_epochs(parent.settings)
    source, to = epochs.place(origin.epoch), str(settings.checkpoint.url)
    check_shard_count(epochs.open(origin.epoch), len(settings.ps.addresses) or settings.up.ps)
    with _new_folder(folder):
        first = evolved(source, to)
        _write_file(file, settings, comments)
    return Forked(file, first.url, origin.epoch, None, first.rows, None, 0.0)


def _write_file(file: Path, settings: Settings, comments: Sequence[str]) -> None:
    """The file is the last that is written: a fork that is not complete cannot be started."""
    with write_private(file) as opened:
        os.write(opened, to_toml(settings, *comments).encode())


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """A folder that is deleted if the block fails.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700)
    except OSError as exc:
        raise ConfigError(f"cannot make {folder}: {exc.strerror}") from exc
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
