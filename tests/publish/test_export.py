"""Exports: what is published as files that anybody reads."""

import hashlib
import json
from pathlib import Path

import fsspec
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from streamtrain.errors import CheckpointError, PublicationCorrupt, PublicationError
from streamtrain.model.spec import Spec
from streamtrain.publish.export import Export
from streamtrain.store.publication import Publication, Weights
from streamtrain.testing.store import MemoryOrigin
from tests.cli.commands import Commands
from tests.ps.counting import DENSE, SPEC

KEYS = np.arange(1, 70_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
WEIGHTS = Weights(np.arange(DENSE, dtype=np.float32), np.array([7, 8], np.float32))


def memory(spec: Spec = SPEC, dim: int = 1) -> MemoryOrigin:
    origin = MemoryOrigin(spec.to_json(), "counted")
    name = spec.tables[0]["name"]
    rows = np.arange(len(KEYS) * dim, dtype=np.float32).reshape(-1, dim)
    origin.publish({name: (KEYS, rows)}, WEIGHTS, clock={0: 5}, watermark=1_700_000_000.0)
    return origin


def head_of(origin: MemoryOrigin) -> Publication:
    head = origin.find(None)
    assert head is not None
    return head


def content(url: str) -> bytes:
    with fsspec.open(url, "rb") as file:
        return bytes(file.read())


def test_everybody_reads_it(place: str) -> None:
    named = Spec(**{**vars(SPEC), "tables": ({**SPEC.tables[0], "name": "a/b.c", "dim": 3},)})
    origin = memory(named, dim=3)
    url = f"{place}/out"
    assert Export(url).write(origin, head_of(origin)) == head_of(origin)
    manifest = json.loads(content(f"{url}/manifest.json"))
    assert manifest["format"] == 1
    assert Publication.from_json(manifest["publication"]) == head_of(origin)
    assert manifest["tables"] == {"a/b.c": {"dim": 3, "rows": len(KEYS)}}
    assert sorted(manifest["files"]) == ["tables/a%2Fb%2Ec.parquet", "weights.safetensors"]
    for name, facts in manifest["files"].items():
        data = content(f"{url}/{name}")
        assert facts == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    parquet = content(f"{url}/tables/a%2Fb%2Ec.parquet")
    table = pq.read_table(pa.BufferReader(parquet))
    assert table.schema.field("key").type == pa.uint64()
    assert table.schema.field("embedding").type == pa.list_(pa.field("element", pa.float32(), nullable=False), 3)
    frame = pandas.read_parquet(pa.BufferReader(parquet))
    order = np.argsort(KEYS)
    frame = frame.sort_values("key")
    assert frame["key"].to_numpy().tolist() == KEYS[order].tolist()
    assert np.array_equal(np.stack(frame["embedding"].to_list()), np.arange(len(KEYS) * 3).reshape(-1, 3)[order])
    arrays = safetensors.numpy.load(content(f"{url}/weights.safetensors"))
    assert {name: array.tolist() for name, array in arrays.items()} == {"dense": [0, 1, 2, 3, 4], "statistics": [7, 8]}


def test_only_into_an_empty_folder(place: str, tmp_path: Path) -> None:
    origin = memory()
    Export(f"{place}/out").write(origin, head_of(origin))
    with pytest.raises(PublicationError, match="out is not empty: choose another directory"):
        Export(f"{place}/out")
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    Export(tmp_path / "empty").write(origin, head_of(origin))
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(PublicationError, match="file is not empty"):
        Export(file)
    with pytest.raises(CheckpointError, match=r"cannot write .*file/deeper/tables/ids\.parquet"):
        Export(file / "deeper").write(origin, head_of(origin))
    assert file.read_text() == "mine"
    with pytest.raises(CheckpointError, match="Protocol not known: xyz"):
        Export("xyz://nowhere")


def test_what_is_damaged_is_not_exported(tmp_path: Path) -> None:
    origin = memory()
    head = head_of(origin)
    origin.publish({"ids": (KEYS[:1], np.array([[np.nan]], np.float32))}, WEIGHTS)
    with pytest.raises(PublicationCorrupt, match="table 'ids' has rows that are not finite"):
        Export(tmp_path).write(origin, head_of(origin))
    origin = memory()
    origin.publish({}, Weights(WEIGHTS.dense[:2], WEIGHTS.statistics))
    with pytest.raises(PublicationCorrupt, match=r"publication 2 has dense \(2,\), not \[5\]"):
        Export(tmp_path).write(origin, head_of(origin))
    origin = memory()
    origin.spec = "{}"
    origin.publish({}, WEIGHTS)
    with pytest.raises(PublicationCorrupt, match="invalid model spec"):
        Export(tmp_path).write(origin, head_of(origin))
    assert head.number == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    nobody = Commands("redis://127.0.0.1:1", "model")
    out = str(tmp_path / "out")
    assert "Redis at 127.0.0.1:1" in nobody.refused("export", "1", out)
    line = nobody.refused("export", "7", out, "--checkpoint", str(tmp_path / "none"))
    assert line == f"there is no version 7 of the checkpoints at {tmp_path}/none"
    assert nobody.refused("export", "1.5", out) == "VERSION must be a number from 1, or head, not '1.5'"
    assert "model file 'no.py' does not exist" in nobody.refused("export", "1", out, "--model", "no.py")
    (tmp_path / "mine").write_text("")
    assert nobody.refused("export", "1", str(tmp_path)) == f"{tmp_path} is not empty: choose another directory"
    assert not (tmp_path / "out").exists()
