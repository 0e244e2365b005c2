"""Processes that know each other by name, as on machines that come and go: real ones, killed and started elsewhere."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError, ShardUnavailable
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.nodes.topology import connect_shards
from streamtrain.ps.rpc import registry
from streamtrain.ps.rpc.control import RemoteControl, Retry, patiently
from streamtrain.ps.rpc.security import Security
from streamtrain.settings.groups import PsSettings
from streamtrain.store.redis.registry import RedisRegistry
from tests.checkpoint.saved import restored
from tests.checkpoint.saved import until as log_until
from tests.patience import PATIENCE, until
from tests.processes import test_ps as processes
from tests.processes.test_ps import LOG, Process, Worker, saving, wait_for_epoch
from tests.ps.counting import assert_exact
from tests.ps.served import COUNTING

start = processes.start
NAMES = ["registry:shard-0", "registry:shard-1"]


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture
def names(valkey: Valkey) -> Iterator[RedisRegistry]:
    """The registry of this process."""
    made = RedisRegistry(valkey.url, "model")
    registry.use_registry(made)
    yield made
    registry.use_registry(None)
    made.close()


def test_a_shard_that_comes_back_elsewhere_is_found_there(
    tmp_path: Path, valkey: Valkey, names: RedisRegistry, start: Callable[..., Process]
) -> None:
    """By a worker that knows nothing but its name; counts are exact."""
    options = ["--ps", ",".join(NAMES), "--set", "ps.listen=127.0.0.1:0", *saving(tmp_path)]
    options += ["--set", f"publish.url={valkey.url}"]
    shards = [start("--index", str(index), *options) for index in range(2)]
    worker = Worker(NAMES, channels=connect_shards(NAMES, (), Security(), lambda channel: None))
    worker.learn(300)
    for offset in (600, 900):
        before = names.lookup("shard-0")
        shards[0].process.kill()
        shards[0].wait()
        shards[0] = start("--index", "0", *options)
        worker.learn(offset)
        assert names.lookup("shard-0") not in {None, before}
    epoch = wait_for_epoch(str(tmp_path), worker, 900)
    assert_exact(restored(str(tmp_path), epoch, 2), log_until(LOG, dict.fromkeys(LOG, 900)))
    worker.close()


def test_a_backup_that_comes_back_elsewhere_is_filled_there(
    valkey: Valkey, names: RedisRegistry, start: Callable[..., Process]
) -> None:
    options = ["--index", "0", "--ps", "registry:a", "--set", "ps.backups=registry:b"]
    options += ["--set", "ps.listen=127.0.0.1:0", "--set", f"publish.url={valkey.url}"]
    start(*options).serving()
    backup = start(*options, "--backup").serving()
    settings = PsSettings(addresses=("registry:a",), backups=("registry:b",))
    pair: Any
    (pair,) = connect_shards(["registry:a"], settings.backups, Security(), lambda channel: None)
    patiently(Shards([pair], COUNTING).agree, Retry(give_up=PATIENCE), threading.Event())
    control = RemoteControl(pair[0][0], pair[0][1], timeout=PATIENCE)
    for _ in range(2):
        until(lambda: control.status().standing.in_step, PATIENCE)
        backup.process.kill()
        backup.wait()
        until(lambda: not control.status().standing.in_step, PATIENCE)
        backup = start(*options, "--backup")
    until(lambda: control.status().standing.in_step, PATIENCE)


def test_who_registers_last_has_the_name_and_what_redis_loses_comes_back(valkey: Valkey) -> None:
    first, second = RedisRegistry(valkey.url, "model"), RedisRegistry(valkey.url, "model")
    try:
        first.register("shard-0", "127.0.0.1:1001")
        assert first.lookup("shard-0") == "127.0.0.1:1001"
        until(lambda: second.lookup("shard-0") == "127.0.0.1:1001", PATIENCE)
        second.register("shard-0", "127.0.0.1:1002")
        until(lambda: first.lookup("shard-0") == "127.0.0.1:1002", PATIENCE)
        valkey.stop()
        assert first.lookup("shard-0") == "127.0.0.1:1002"
        valkey.start()  # empty
        third = RedisRegistry(valkey.url, "model")
        until(lambda: third.lookup("shard-0") == "127.0.0.1:1002", PATIENCE)
        third.register("shard-0", "0.0.0.0:1003")
        until(lambda: second.lookup("shard-0") == "127.0.0.1:1003", PATIENCE)
        assert third.lookup("nobody") is None
        third.close()
    finally:
        first.close()
        second.close()


def test_a_name_that_nobody_has_is_waited_for(names: RedisRegistry) -> None:
    (place,) = connect_shards(["registry:shard-0"], (), Security(), lambda channel: None)
    with pytest.raises(ShardUnavailable, match="shard-0 is not registered"):
        RemoteControl(*place).status()


def test_names_need_a_redis_and_an_address_to_bind(valkey: Valkey, start: Callable[..., Process]) -> None:
    with pytest.raises(ConfigError, match=r'addresses "registry:…" need publish\.url'):
        connect_shards(["registry:shard-0"], (), Security(), lambda channel: None)
    process = start("--index", "0", "--ps", "registry:shard-0", "--set", f"publish.url={valkey.url}")
    assert process.wait() == 2
    assert "known as registry:shard-0 needs an address to bind: set ps.listen" in process.said[-1]
