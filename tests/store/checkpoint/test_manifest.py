"""The manifest: what is written is read, and what is damaged or makes no sense is refused by what is wrong with it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.store.checkpoint.manifest import Manifest, decode, encode
from streamtrain.store.files import Directory, FileFacts

WHERE = Directory(Path("/epoch"))


def facts(of: str) -> FileFacts:
    return {"bytes": len(of), "sha256": hashlib.sha256(of.encode()).hexdigest()}


def manifest(**more: Any) -> Manifest:
    names = (
        "shards/0.safetensors",
        "shards/1.safetensors",
        "tables/ids/shard-1.parquet",
        "tables/a-%7E_Z/shard-0.parquet",
    )
    given: dict[str, Any] = {
        "kind": "full",
        "base": None,
        "base_digest": None,
        "about": {"run": "a"},
        "shards": [{"clock": {"0": 5}}, {}],
        "rows": {"ids": 7},
        "files": {name: facts(name) for name in names},
    }
    return Manifest(**given | more)


def delta(**more: Any) -> Manifest:
    files = {**manifest().files, "tombstones/ids/shard-0.parquet": facts("dead")}
    return manifest(**{"kind": "delta", "base": 3, "base_digest": "ab", "files": files} | more)


def signed(content: dict[str, Any]) -> bytes:
    """A manifest of any content whose checksum is right."""
    text = json.dumps({k: v for k, v in content.items() if k != "sha256"}, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def without(name: str) -> dict[str, FileFacts]:
    return {one: of for one, of in manifest().files.items() if one != name}


@pytest.mark.parametrize(
    "given", [manifest(), delta(), delta(base=0), delta(base_digest=None), manifest(rows={}), manifest(about={})]
)
def test_what_is_written_is_read(given: Manifest) -> None:
    written = encode(given, WHERE)
    assert decode(written, WHERE)[0] == given
    content = json.loads(written)
    assert content["format"] == 2
    assert content["shards"] == [{"about": {"clock": {"0": 5}}}, {"about": {}}]
    assert decode(signed(content), WHERE)[0] == given
    assert written == (json.dumps(content, indent=2) + "\n").encode()


BAD_FACTS: list[Any] = [[], {}, {"bytes": 1}, {"sha256": ""}, {"bytes": 1, "sha256": "", "more": 1}]
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "half"}, "kind 'half' is not full or delta"),
    ({"base": 3}, "a full checkpoint has the base 3"),
    ({"kind": "delta"}, "a delta checkpoint has the base None"),
    ({"kind": "delta", "base": "3"}, "a delta checkpoint has the base '3'"),
    ({"base_digest": "ab"}, "a full checkpoint has the base digest 'ab'"),
    ({"kind": "delta", "base": 3, "base_digest": 7}, "a delta checkpoint has the base digest 7"),
    ({"about": []}, "facts of the checkpoint or its shards are missing"),
    ({"shards": []}, "facts of the checkpoint or its shards are missing"),
    ({"shards": [{}, 7]}, "facts of the checkpoint or its shards are missing"),
    ({"rows": [7]}, "row counts are missing"),
    ({"rows": {"ids": "7"}}, "row counts are missing"),
    ({"rows": {"ids": 7, "more": None}}, "row counts are missing"),
    ({"files": []}, "list of files is missing"),
    ({"files": without("shards/0.safetensors")}, r"the arrays of shards \[0\] are missing"),
    ({"files": without("shards/1.safetensors")}, r"the arrays of shards \[1\] are missing"),
    ({"files": {}}, r"the arrays of shards \[0, 1\] are missing"),
    *(
        ({"files": {**manifest().files, name: facts("")}}, f"'{name}' is not a file of a full checkpoint of 2 shards")
        for name in (
            "shards/2.safetensors",
            "shards/3.safetensors",
            "tables/ids/shard-2.parquet",
            "tombstones/ids/shard-0.parquet",
            "tables/ids/shard-0.parquet.tmp",
            "x/tables/ids/shard-0.parquet",
            "tables/a/b/shard-0.parquet",
            "shards/\u0660.safetensors",
            "manifest.json",
        )
    ),
    *(
        (
            {"files": {**manifest().files, "shards/0.safetensors": of}},
            "the size and checksum of 'shards/0.safetensors' are missing",
        )
        for of in BAD_FACTS
    ),
]


@pytest.mark.parametrize(("more", "fault"), FAULTS)
def test_what_makes_no_sense_is_neither_written_nor_read(more: dict[str, Any], fault: str) -> None:
    bad = manifest(**more)
    with pytest.raises(CheckpointError, match=f"^cannot complete /epoch: .*{fault}"):
        encode(bad, WHERE)
    shards = [{"about": one} for one in bad.shards]
    content = {**json.loads(encode(manifest(), WHERE)), **bad._asdict(), "shards": shards}
    with pytest.raises(CheckpointCorrupt, match=f"^/epoch/manifest.json is invalid: .*{fault}"):
        decode(signed(content), WHERE)


@pytest.mark.parametrize("shards", [None, {}, [7], [{"about": {}}, 7], [{}], "ab"])
def test_shards_of_another_shape(shards: Any) -> None:
    content = {**json.loads(encode(manifest(), WHERE)), "shards": shards}
    with pytest.raises(CheckpointCorrupt, match="facts of the checkpoint or its shards are missing"):
        decode(signed(content), WHERE)


def test_facts_that_are_no_json() -> None:
    for value in (object(), float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match=r"^cannot complete /epoch: its facts are not JSON"):
            encode(manifest(about={"value": value}), WHERE)


def test_keys_are_strings_as_its_reader_sees_them() -> None:
    assert decode(encode(manifest(about={7: 1}), WHERE), WHERE)[0].about == {"7": 1}


@pytest.mark.parametrize(
    ("data", "error", "fault"),
    [
        (b"{", CheckpointCorrupt, "/epoch/manifest.json cannot be read"),
        (b"\xff", CheckpointCorrupt, "/epoch/manifest.json cannot be read"),
        (b"[]", CheckpointCorrupt, "/epoch/manifest.json is not the manifest"),
        (b"{}", CheckpointCorrupt, "/epoch/manifest.json is not the manifest"),
        (b'{"format": 2}', CheckpointCorrupt, "/epoch/manifest.json has no checksum"),
        (b'{"format": 1}', CheckpointError, "/epoch has format 1; this version reads 2"),
        (signed({"format": 3}), CheckpointError, "/epoch has format 3; this version reads 2"),
        (b'{"format": 3, "sha256": "00"}', CheckpointCorrupt, "is damaged: its checksum"),
    ],
)
def test_what_is_no_manifest(data: bytes, error: type[Exception], fault: str) -> None:
    with pytest.raises(error, match=fault) as raised:
        decode(data, WHERE)
    assert type(raised.value) is error


def test_a_change_of_its_content_is_damage() -> None:
    written = encode(manifest(), WHERE)
    for old, new in ((b'"ids": 7', b'"ids": 8'), (b'"format": 2', b'"format": 1'), (b'"run"', b'"ran"')):
        with pytest.raises(CheckpointCorrupt, match=r"/epoch/manifest\.json is damaged"):
            decode(written.replace(old, new), WHERE)
