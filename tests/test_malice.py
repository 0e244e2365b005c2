"""What somebody may put into Redis or a checkpoint to have code executed, files written or memory taken: it fails."""

import io
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from streamtrain.errors import CheckpointError, PublicationError, StreamtrainError
from streamtrain.publish.export import Export
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.store.checkpoint.checkpoint import CheckpointReader
from streamtrain.store.checkpoint.epochs import Epochs
from streamtrain.store.checkpoint.manifest import MANIFEST, _digest
from streamtrain.store.checkpoint.source import CheckpointOrigin
from streamtrain.store.redis.source import RedisOrigin
from tests.serve.conftest import published, redis_binary, redis_url, valkey
from tests.serve.in_redis import MODEL, InRedis
from tests.store.checkpoint.checkpoints import write

__all__ = ["published", "redis_binary", "redis_url", "valkey"]

EXECUTES = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen"}
EVIL = "evil_module_of_the_test"
_seen: list[str] = []
_watching: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and (event in EXECUTES or (event == "import" and arguments[0] == EVIL)):
        _seen.append(f"{event} {arguments}")


sys.addaudithook(_audit)  # stays for the process, so it looks away unless a test watches


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that payloads would make; nothing that executes happens in the test."""
    canary = tmp_path / "canary"
    (tmp_path / f"{EVIL}.py").write_text(f"open({str(canary)!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    _seen.clear()
    _watching.append(True)
    yield canary
    _watching.clear()
    assert _seen == []
    assert not canary.exists()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def payloads(canary: Path) -> dict[str, bytes]:
    lambda_ = {"class_name": "Lambda", "config": {"function": {"class_name": "__lambda__", "config": {"code": "4wE="}}}}
    custom = {"module": EVIL, "class_name": "Layer", "config": {}, "registered_name": f"{EVIL}>Layer"}
    keras, array = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(keras, "w") as archive:
        archive.writestr("config.json", json.dumps({"module": "keras", "config": {"layers": [lambda_, custom]}}))
        archive.writestr("../../canary", "")
    bomb = np.empty(1, object)
    bomb[0] = Bomb(canary)
    np.save(array, bomb, allow_pickle=True)
    return {
        "pickle": pickle.dumps(Bomb(canary)),
        "pickle in npy": array.getvalue(),
        "a keras file": keras.getvalue(),
        "a Lambda": json.dumps(lambda_).encode(),
        "a module": json.dumps(custom).encode(),
        "deep": b"[" * 100_000,
        "deep objects": b'{"tables":' * 50_000,
        "paths": json.dumps({"tables": {"../../canary": [1, 8]}, "dictionary": "../../canary"}).encode(),
        "a number": b"9" * 30,
        "nothing": b"",
    }


def test_the_payloads_would_work(canary: Path) -> None:
    """Otherwise none of these tests says anything."""
    pickle.loads(payloads(canary)["pickle"])
    assert canary.exists()
    __import__(EVIL)
    assert len(_seen) >= 3
    _seen.clear()
    canary.unlink()
    sys.modules.pop(EVIL)


# Redis.


def read_all(published: InRedis) -> None:
    """All that a server reads; what is damaged is refused with an error of ours."""
    origin = RedisOrigin(published.model)
    for number in (None, 1):
        with suppress(StreamtrainError):
            found = origin.find(number)
            if found is not None:
                origin.load(found, lambda change: None)
                origin.open(found)
                list(origin.follow(found, 0.0))
    for read in (origin.versions, origin.labels, published.versions.history):
        with suppress(StreamtrainError):
            read()


def values_of(published: InRedis) -> Iterator[tuple[str, Any, Any]]:
    """Every value that is kept: its key's name, and commands that set it to something and back."""
    call = published.server.call
    for key in call("KEYS", f"*{published.model.keys.model}*"):
        name = key.decode()
        match call("TYPE", key).decode():
            case "string":
                before = call("GET", key)
                yield name, lambda v, k=key: call("SET", k, v), lambda k=key, b=before: call("SET", k, b)
            case "hash":
                flat = call("HGETALL", key)
                fields = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
                for field, before in list(fields.items())[:8]:
                    yield (
                        f"{name} {field!r}",
                        lambda v, k=key, f=field: call("HSET", k, f, v),
                        lambda k=key, f=field, b=before: call("HSET", k, f, b),
                    )
            case "zset":
                yield (
                    name,
                    lambda v, k=key: call("ZADD", k, 1e9, v),
                    lambda k=key: call("ZREMRANGEBYSCORE", k, 1e9, "+inf"),
                )


def test_nothing_that_is_in_redis_executes(published: InRedis, canary: Path) -> None:
    published.keep(1)
    published.publish(2)
    changed = []
    for name, put, undo in values_of(published):
        for payload in payloads(canary).values():
            put(payload)
            read_all(published)
        undo()
        changed.append(name)
    assert len(changed) >= 5
    origin = RedisOrigin(published.model)
    head = origin.find(None)
    assert head is not None
    assert origin.load(head, lambda change: None)[0] == head  # all is as it was: each was tried alone


def test_nothing_in_the_log_executes(published: InRedis, canary: Path) -> None:
    published.publish(1)
    origin = RedisOrigin(published.model)
    head = origin.find(None)
    assert head is not None
    log = published.model.keys.log
    for payload in payloads(canary).values():
        for fields in (("c", "l", "a", "f"), ("t", "k", "v", "g", "a"), ("d", "x", "a")):
            published.server.call("XADD", log, "*", *[part for field in fields for part in (field, payload)])
            with suppress(StreamtrainError):
                list(origin.follow(head, 0.0))


def test_graphs_do_not_come_from_redis(published: InRedis) -> None:
    """A spec of another model, graph or code is refused; the graph is that of the operator's own file."""
    published.publish(1)
    registry = Registry(MODEL, RedisOrigin(published.model))
    registry.promote(HEAD)
    head = published.model.head()
    assert head is not None
    for spec in (
        json.loads(head.publication.spec) | {"graph": {"class_name": "Lambda"}, "schema": EVIL},
        json.loads(head.publication.spec) | {"dense_optimizer": {"name": EVIL, "class_name": "Lambda"}},
        json.loads(head.publication.spec) | {"dense": [[1 << 40]]},
    ):
        about = head.publication.to_json() | {"spec": json.dumps(spec), "number": 2}
        state = next(
            k
            for k in published.server.call("KEYS", f"*{published.model.keys.model}*")
            if _has(published, k, b"publication")
        )
        published.server.call("HSET", state, "publication", json.dumps(about))
        with pytest.raises(StreamtrainError):
            Registry(MODEL, RedisOrigin(published.model)).promote(HEAD)
    assert registry.served is not None
    assert registry.served.publication.number == 1


def _has(published: InRedis, key: bytes, field: bytes) -> bool:
    return published.server.call("TYPE", key) == b"hash" and bool(published.server.call("HEXISTS", key, field))


def test_declared_sizes_take_no_memory(published: InRedis) -> None:
    """A layout that tells of more buckets or floats than there can be is refused before anything is made of it."""
    published.keep(1)
    for dim, buckets in ((1 << 40, 8), (1, 1 << 40), (-1, 8), (0, 8), (1, 0), (1, 3), (1.5, 8), ("1", "8")):
        for key in published.server.call("KEYS", f"*{published.model.keys.model}*"):
            if not _has(published, key, b"layout"):
                continue
            before = published.server.call("HGET", key, "layout")
            layout = json.loads(before) | {"tables": {"user": [dim, buckets]}}
            published.server.call("HSET", key, "layout", json.dumps(layout))
            origin = RedisOrigin(published.model)
            for number in (None, 1):
                with suppress(PublicationError):
                    found = origin.find(number)
                    assert found is not None
                    origin.load(found, lambda change: None)
            published.server.call("HSET", key, "layout", before)
    _fits()


def test_names_of_tables_lead_nowhere(published: InRedis, tmp_path: Path) -> None:
    """A table of Redis that is called like a path is exported below the folder, or not at all."""
    published.publish(1)
    head = published.model.head()
    assert head is not None
    spec = json.loads(head.publication.spec)
    spec["tables"][0]["name"] = "../../../canary"
    state = next(
        k
        for k in published.server.call("KEYS", f"*{published.model.keys.model}*")
        if _has(published, k, b"publication")
    )
    published.server.call(
        "HSET", state, "publication", json.dumps(head.publication.to_json() | {"spec": json.dumps(spec)})
    )
    origin = RedisOrigin(published.model)
    found = origin.find(None)
    assert found is not None
    with suppress(StreamtrainError):
        Export(tmp_path / "a" / "b" / "exported").write(origin, found)
    outside = [one for one in tmp_path.rglob("*canary*") if "exported" not in one.parts]
    assert outside == []


# Checkpoints.


def signed(content: dict[str, Any]) -> bytes:
    """A manifest whose checksum is right: who writes a checkpoint can make it."""
    content.pop("sha256", None)
    return json.dumps({**content, "sha256": _digest(content)}).encode()


@pytest.mark.parametrize(
    "name", ["../../canary", "/etc/passwd", "shards/../../canary.safetensors", "tables/../x/shard-0.parquet"]
)
def test_files_of_a_manifest_are_below_it(tmp_path: Path, name: str) -> None:
    write(tmp_path / "c")
    manifest = tmp_path / "c" / MANIFEST
    content = json.loads(manifest.read_text())
    content["files"][name] = {"bytes": 0, "sha256": "0" * 64}
    manifest.write_bytes(signed(content))
    with pytest.raises(CheckpointError, match="is not a file of a"):
        CheckpointReader(tmp_path / "c")


def test_no_file_of_a_checkpoint_executes(tmp_path: Path, canary: Path) -> None:
    write(tmp_path / "c")
    for file in sorted((tmp_path / "c").rglob("*")):
        if not file.is_file():
            continue
        before = file.read_bytes()
        for payload in payloads(canary).values():
            file.write_bytes(payload)
            with suppress(CheckpointError):
                read_checkpoint(tmp_path / "c")
        file.write_bytes(before)
    assert read_checkpoint(tmp_path / "c") > 0


def read_checkpoint(url: Path) -> int:
    """Reads all of it, without the checksums that an attacker would have set right."""
    reader, rows = CheckpointReader(url), 0
    for shard in range(len(reader.shards)):
        reader.arrays(shard)
    for table in ("item", "user"):
        for part in reader.rows(table):
            rows += len(part.keys)
        for _ in reader.tombstones(table):
            pass
    return rows


def test_types_of_parquet_execute_nothing(tmp_path: Path, canary: Path) -> None:
    """Arrow had types that were pickled into the schema's metadata, and pandas has metadata that names types."""
    write(tmp_path / "c")
    for file in (tmp_path / "c").rglob("*.parquet"):
        table = pq.read_table(file)
        bomb = {
            b"ARROW:extension:name": b"arrow.py_extension_type",
            b"ARROW:extension:metadata": payloads(canary)["pickle"],
        }
        fields = [pa.field(one.name, one.type, one.nullable, bomb) for one in table.schema]
        schema = pa.schema(fields, {b"pandas": payloads(canary)["a module"], **(table.schema.metadata or {})})
        pq.write_table(pa.Table.from_arrays(table.columns, schema=schema), file)
    with suppress(CheckpointError):
        read_checkpoint(tmp_path / "c")


def test_a_bomb_of_arrays_is_not_unpacked(tmp_path: Path) -> None:
    """Headers that declare what the file has not; zips are no format of ours."""
    write(tmp_path / "c")
    file = tmp_path / "c" / "shards" / "0.safetensors"
    for header in (
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        {"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}},
    ):
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0\0\0")
        with suppress(CheckpointError):
            CheckpointReader(tmp_path / "c").arrays(0)
    for size in (1 << 63, 1 << 40, (1 << 27)):
        file.write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(CheckpointError):
            CheckpointReader(tmp_path / "c").arrays(0)
    file.write_bytes(safetensors.numpy.save({"a": np.zeros(1, np.float32)}))
    _fits()


@pytest.mark.parametrize("name", ["deep", "deep objects", "a Lambda", "paths", "a number"])
def test_a_manifest_of_another_mind(tmp_path: Path, canary: Path, name: str) -> None:
    write(tmp_path / "1")
    (tmp_path / "1" / MANIFEST).write_bytes(payloads(canary)[name])
    for read in (lambda: CheckpointReader(tmp_path / "1"), lambda: Epochs(tmp_path).newest_good()):
        with suppress(StreamtrainError):
            read()
    with suppress(StreamtrainError):
        CheckpointOrigin(tmp_path, "model").find(None)


def _fits() -> None:
    """The process has not taken gigabytes."""
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < 4 << 20, peak
