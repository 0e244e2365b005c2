"""`streamtrain publish`: of what shards have learned, of a head without shards, of a checkpoint."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from streamtrain.processes.ps import PsProcess
from streamtrain.ps.clock import Span
from streamtrain.ps.nodes.shards import Shards
from streamtrain.settings.groups import PsSettings, PublishSettings, Settings
from streamtrain.store.checkpoint.checkpoint import commit, write_part
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.checkpoint.parquet import TablePart
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.versions import RedisVersions
from tests.cli.commands import Commands
from tests.ports import free_ports
from tests.ps.counting import DENSE, SPEC, Log, pushes
from tests.ps.served import COUNTING
from tests.store.checkpoint.checkpoints import rows_of
from tests.store.published import Published
from tests.stream.redis_fixtures import valkey

__all__ = ["valkey"]

LOG: Log = {0: [[1, 2], [2], [3], [1], [7, 8], [9]]}

NO_SHARDS = (
    "neither coordinator.address nor ps.addresses is set, and `streamtrain up` does not run in this folder: "
    "give --ps host:port,…"
)


@contextmanager
def versions_of(url: str, name: str) -> Iterator[RedisVersions]:
    server = RedisServer(url)
    yield RedisVersions(RedisModel(server, name))
    server.close()


@contextmanager
def shard(url: str, name: str) -> Iterator[tuple[PsProcess, str]]:
    """The only shard of a cluster that publishes when it is told to; and its address."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    settings = Settings(
        ps=PsSettings(addresses=(address,)), publish=PublishSettings(url=url, model=name, every=86_400.0)
    )
    process = PsProcess(0, [address], settings)
    process.start()
    try:
        yield process, address
    finally:
        process.stop()


def learn(process: PsProcess, start: int, end: int) -> None:
    (push,) = pushes(LOG, [Span(0, start, end)], 1)
    process.node.shard.push(push)


def test_what_shards_have_learned(valkey: str) -> None:
    commands = Commands(valkey, "asked")
    with shard(valkey, "asked") as (process, address), versions_of(valkey, "asked") as versions:
        Shards([process.node], COUNTING).agree()
        learn(process, 0, 3)
        text = commands.told("publish", "--ps", address)
        assert text == "publication 1 of asked: 3 rows of ids\n"
        learn(process, 3, 5)
        found = commands.json("publish", "--ps", address)
        assert (found["number"], found["version"], found["clock"]) == (2, None, {"0": 5})
        assert found["rows"] == {"ids": 5}
        learn(process, 5, 6)
        found = commands.json("publish", "--version", "--why", "monday", "--who", "ann", "--ps", address)
        assert (found["number"], found["version"], found["clock"]) == (3, 1, {"0": 6})
        deed = versions.history(1)[0]
        assert (deed.what, deed.who, deed.why, deed.version) == ("version", "ann", "monday", 1)
    with versions_of(valkey, "asked") as versions:
        done = commands.run("publish", "--version", "--ps", address)
        assert done.returncode == 0
        assert done.stdout == "version 2 (publication 3) of asked: 6 rows of ids\n"
        assert done.stderr.startswith(f"creating a version of the current head: {address}: ")
        assert [one.version for one in versions.all()] == [1, 2]
    assert address in commands.refused("publish", "--ps", address)


def test_a_shard_that_cannot_publish(valkey: str) -> None:
    commands = Commands(valkey, "empty")
    with shard(valkey, "empty") as (_, address):
        assert address in commands.refused("publish", "--ps", address)  # nothing has been learned
        assert commands.run("publish", "--version", "--ps", address).returncode == 1
    with versions_of(valkey, "empty") as versions:
        assert versions.all() == []


def test_a_head_without_shards(valkey: str) -> None:
    published = Published(valkey)
    commands = Commands.of(published)
    line = commands.run("publish", "--version").stderr.splitlines()
    assert line[0] == f"creating a version of the current head: {NO_SHARDS}"
    assert line[1].startswith("streamtrain: cannot make a version: model")
    published.full(1)
    done = commands.run("publish", "--version", "--json")
    assert done.returncode == 0
    assert [one.version for one in published.origin.versions()] == [1]
    assert commands.refused("publish") == NO_SHARDS
    published.close()


def save(root: Path, epoch: int, watermark: float) -> None:
    url = Epochs(root).directory(epoch)
    arrays = {"dense": np.zeros(DENSE, np.float32), "statistics": np.zeros(2, np.float32)}
    about = {"clock": {"0": epoch}, "watermark": watermark}
    part = write_part(url, 0, arrays, [TablePart("ids", 1, 0, [rows_of(1234, 1, 0)])], about=about)
    commit(url, {"run": "a run", "spec": SPEC.to_json(), "aligned": True}, [part])


def test_a_checkpoint_without_a_trainer(valkey: str, tmp_path: Path) -> None:
    commands = Commands(valkey, "saved")
    save(tmp_path, 3, 1_700_000_000.0)
    text = commands.told(
        "publish", "--checkpoint", str(tmp_path), "--why", "disaster", settings=("publish.dtype=int8",)
    )
    assert text == ("version 1 (publication 3) of saved: 1,234 rows of ids, trained through 2023-11-14 22:13:20 UTC\n")
    assert commands.json("promote", "1")["served"] == 1
    with versions_of(valkey, "saved") as versions:
        assert (versions.head(), versions.all()[0].dtype) == (None, "int8")
        assert [(deed.what, deed.why) for deed in versions.history()] == [("label", ""), ("version", "disaster")]
        none = str(tmp_path / "none")
        line = commands.refused("publish", "--checkpoint", none)
        assert line == f"no epoch at {none} can be imported as a version"
        assert "--force" in commands.refused("publish", "--checkpoint", none, "--force")
        assert "Protocol not known: xyz" in commands.refused("publish", "--checkpoint", "xyz://x")
        assert len(versions.all()) == 1


ALL = """
import sys
from streamtrain.cli import main
options = ["--set", f"publish.url={sys.argv[1]}", "--set", "publish.model=light"]
place = sys.argv[2]
for arguments in (
    ["publish", "--checkpoint", place],
    ["publish", "--checkpoint", place],
    ["promote", "1"],
    ["promote", "2"],
    ["versions"],
    ["export", "1", f"{place}/out"],
    ["rollback"],
):
    sys.argv = ["streamtrain", *arguments, *options]
    try:
        main()
    except SystemExit as exc:
        assert exc.code == 0, arguments
assert not {"tensorflow", "keras"} & set(sys.modules)
"""


def test_none_loads_tensorflow(valkey: str, tmp_path: Path) -> None:
    save(tmp_path, 1, 0.0)
    command = [sys.executable, "-c", ALL, valkey, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.json").is_file()
    with versions_of(valkey, "light") as versions:
        assert versions.labels() == {"prod": 1}


@pytest.mark.parametrize("option", [["--timeout", "soon"], ["--ps", "nowhere"]])
def test_what_is_wrong_is_one_line(valkey: str, option: list[str]) -> None:
    assert option[1] in Commands(valkey, "wrong").refused("publish", *option)
