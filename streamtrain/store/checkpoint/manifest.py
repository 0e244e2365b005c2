"""Manifest of a checkpoint: what it is of, and size and checksum of every file of it."""

import hashlib
import json
import re
from typing import Any, Literal, NamedTuple, get_args

from streamtrain.errors import CheckpointCorrupt, CheckpointError
from streamtrain.store.files import Directory, FileFacts
from streamtrain.store.json import parse_json

FORMAT = 2
MANIFEST = "manifest.json"
# No name of this form leads out of the directory.
FILE = r"shards/(\d{1,9})\.safetensors|(?:tables|tombstones)/[A-Za-z0-9_~%-]+/shard-(\d{1,9})\.parquet"

EpochKind = Literal["full", "delta"]


class Manifest(NamedTuple):
    """What manifest.json says.

    Attributes:
        kind: "full" or "delta".
        base: of a delta, the epoch number of the checkpoint that it builds on.
        base_digest: of a delta, the `sha256` of the manifest that it builds on; None: it does not say.
        about: facts of the whole.
        shards: facts of every shard.
        rows: number of rows by table.
        files: size and checksum by name of file.
    """

    kind: EpochKind
    base: int | None
    base_digest: str | None
    about: dict[str, Any]
    shards: list[dict[str, Any]]
    rows: dict[str, int]
    files: dict[str, FileFacts]


def encode(manifest: Manifest, directory: Directory) -> bytes:
    """The content of the file.

    Raises:
        CheckpointError: facts are not JSON, or the manifest contradicts itself.
    """
    if fault := _fault(manifest):
        raise CheckpointError(f"cannot complete {directory.url}: {fault}")
    shards = [{"about": about} for about in manifest.shards]
    try:
        text = json.dumps({"format": FORMAT, **manifest._asdict(), "shards": shards}, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise CheckpointError(f"cannot complete {directory.url}: its facts are not JSON: {exc}") from exc
    content = json.loads(text)  # as its reader sees it: keys are strings
    return (json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n").encode()


def decode(data: bytes, directory: Directory) -> tuple[Manifest, str]:
    """What the file says, and its own checksum.

    Raises:
        CheckpointError: it is of another format.
        CheckpointCorrupt: it is damaged, or says what makes no sense.
    """
    where = f"{directory.url}/{MANIFEST}"
    try:
        content = parse_json(data)
    except ValueError as exc:
        raise CheckpointCorrupt(f"{where} cannot be read: {exc}") from exc
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointCorrupt(f"{where} is not the manifest of a checkpoint")
    digest = content.pop("sha256", None)
    if digest is not None and digest != _digest(content):  # of every format, so that a damaged one is not just unknown
        raise CheckpointCorrupt(f"{where} is damaged: its checksum does not match")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{directory.url} has format {content['format']!r}; this version reads {FORMAT}")
    if digest is None:
        raise CheckpointCorrupt(f"{where} has no checksum")
    fields: dict[str, Any] = {name: content.get(name) for name in Manifest._fields}
    manifest = Manifest(**{**fields, "shards": _abouts(fields["shards"])})
    if fault := _fault(manifest):
        raise CheckpointCorrupt(f"{where} is invalid: {fault}")
    return manifest, str(digest)


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _abouts(shards: Any) -> list[dict[str, Any]]:
    return [one.get("about") for one in shards] if isinstance(shards, list) and _all(shards, dict) else []


def _fault(manifest: Manifest) -> str | None:
    """What is wrong with it, if anything is."""
    kind, base, base_digest, about, shards, rows, files = manifest
    if kind not in get_args(EpochKind):
        return f"kind {kind!r} is not full or delta"
    if (base is not None) != (kind == "delta") or not isinstance(base, int | None):
        return f"a {kind} checkpoint has the base {base!r}"
    if not isinstance(base_digest, str | None) or (base_digest is not None and base is None):
        return f"a {kind} checkpoint has the base digest {base_digest!r}"
    if not isinstance(about, dict) or not shards or not _all(shards, dict):
        return "the facts of the checkpoint or its shards are missing"
    if not isinstance(rows, dict) or not _all(rows.values(), int):
        return "the row counts are missing"
    return _fault_of_files(files, len(shards), kind)


def _fault_of_files(files: Any, shards: int, kind: EpochKind) -> str | None:
    if not isinstance(files, dict):
        return "the list of files is missing"
    for name, facts in files.items():
        found = re.fullmatch(FILE, name, re.ASCII)
        if not found or int(found[1] or found[2]) >= shards or (kind == "full" and name.startswith("tombstones")):
            return f"{name!r} is not a file of a {kind} checkpoint of {shards} shards"
        if not isinstance(facts, dict) or set(facts) != {"bytes", "sha256"}:
            return f"the size and checksum of {name!r} are missing"
    if missing := [i for i in range(shards) if f"shards/{i}.safetensors" not in files]:
        return f"the arrays of shards {missing} are missing"
    return None


def _all(values: Any, kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)
