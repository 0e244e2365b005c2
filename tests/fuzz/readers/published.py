"""Published: whatever is in Redis under a model's keys, it is read or refused as a publication that is damaged.

Input: edits (see edits.py) of the values of a model with a head of three publications, and a version.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import PublicationError
from streamtrain.store.publication import Publication, RowChange, Weights
from streamtrain.store.redis.buckets import BucketChecksums, EncodedChange, add_rows
from streamtrain.store.redis.dictionary import RedisDictionaries, encode_changes
from streamtrain.store.redis.layout import Layout, TableLayout
from streamtrain.store.redis.log import WriteToken, _entries
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.source import RedisOrigin
from streamtrain.store.redis.versions import RedisVersions
from tests.fuzz import edits
from tests.fuzz.readers import tried
from tests.fuzz.readers.kept import KeptServer, packed, unpacked

_MODEL = "model"
_DIMS = {"item": 3, "user": 2}
_LAYOUT = Layout(7, "float16", 2, {"item": TableLayout(3, 4), "user": TableLayout(2, 1)})
_KEYS = {table: np.arange(1, 6, dtype=np.uint64) * np.uint64(1 << 10) for table in _DIMS}
_VERSION = b"7 "
_SERVER = KeptServer(_MODEL, {})
_MOST_ROWS = 1 << 16


def run(data: bytes) -> None:
    """One input."""
    values = dict(written())
    edits.apply(data, values, {"versions/1": _VERSION})
    _SERVER.values = values
    read(RedisModel(_SERVER, _MODEL))


def read(model: RedisModel) -> None:
    """All that is done with what is kept, each of which may be refused."""
    versions, origin, dictionaries = RedisVersions(model), RedisOrigin(model), RedisDictionaries(model)
    refused(versions.all)
    refused(versions.labels)
    refused(origin.labels)
    refused(versions.history)
    for version in (None, 1):
        refused(partial(load, origin, version))
        refused(partial(look_up, origin, version))
    refused(lambda: follow(origin))
    refused(lambda: dictionaries.apply(0))
    refused(lambda: dictionaries.stored()[1].sums("item"))
    refused(model.sweep)


def refused(what: Callable[[], object]) -> None:
    """Tried, where these are the refusals."""
    tried(what, PublicationError)


def load(origin: RedisOrigin, version: int | None) -> None:
    """Columns fit each other, whatever they hold."""
    publication = origin.find(version)
    if publication is not None:
        _check(publication)
        loaded, weights = origin.load(publication, _check_change)
        _check(loaded)
        assert all(one.dtype == np.float32 for one in weights)


def _check(publication: Publication) -> None:
    json.dumps(publication.to_json())
    assert isinstance(publication.number, int)
    assert all(isinstance(one, str) for one in (publication.model, publication.run, publication.spec))
    assert all(isinstance(rows, int) for rows in publication.rows.values())
    assert publication.watermark + publication.published < float("inf")


def _check_change(change: RowChange) -> None:
    assert change.keys.dtype == change.gone.dtype == np.uint64
    assert change.rows.dtype == np.float32
    assert len(change.rows) == len(change.keys) < _MOST_ROWS
    assert change.rows.ndim == 2


def look_up(origin: RedisOrigin, version: int | None) -> None:
    """Some rows."""
    publication = origin.find(version)
    if publication is None:
        return
    _, lookup = origin.open(publication)
    for rows, there in lookup.look_up({table: keys[:3] for table, keys in _KEYS.items()}).tables.values():
        assert len(rows) == len(there) == 3


def follow(origin: RedisOrigin) -> None:
    """The steps from the first publication on."""
    first = Publication(**{**vars(_publication(1)), "published": 1.0})
    for step in origin.follow(first, 0.0):
        _check(step.publication)
        for change in step.changes:
            _check_change(change)


def _publication(number: int, version: int | None = None) -> Publication:
    rows = {table: 3 + number - 1 for table in _DIMS}
    metrics = {"label": {"auc": 0.5, "loss": None}}
    return Publication(number, version, _MODEL, "run", "{}", {0: 5}, 2.0, float(number), "float16", rows, metrics)


@functools.cache
def written() -> dict[str, bytes]:
    """By name the values; each publication after the first adds a row to each table and shard 0 writes them all."""
    values: dict[str, bytes] = {}
    buckets: dict[str, list[tuple[bytes, bytes]]] = {}
    commits: list[str] = []
    entry = 0

    def add(fields: Mapping[str, bytes]) -> str:
        nonlocal entry
        entry += 1
        values.update({f"log/{entry}-0/{name}": value for name, value in fields.items()})
        return f"{entry}-0"

    for number in (1, 2, 3):
        change = list(_encoded(slice(0, 3) if number == 1 else slice(number + 1, number + 2)))
        for table, keys, rows, _ in change:
            for key, row, at in zip(keys, rows, _LAYOUT.buckets(table, keys), strict=True):
                buckets.setdefault(f"rows/{table}/{at}", []).append((key.tobytes(), row.tobytes()))
        tokens = []
        for shard in (0, 1):
            told = [] if shard or number == 1 else change
            made = [*_entries(told, Weights(np.ones(2, np.float32), np.zeros(1, np.float32)))]
            token = WriteToken(shard, f"{number}{shard}", len(made))
            tokens.append(token)
            for fields in made:
                named = dict(zip((one.decode() for one in fields[::2]), fields[1::2], strict=True))
                add({"a": token.name.encode()} | named)
        about = json.dumps(_publication(number).to_json()).encode()
        shown = json.dumps(tokens).encode()
        layout = _LAYOUT.to_json().encode()
        commits.append(add({"c": about, "l": layout, "a": shown, "f": b"%d" % (number == 1)}))
        values[f"steps/{number}"] = f"{commits[-1]}:{100 * number}".encode()
    head = {"number": b"3", "id": commits[-1].encode(), "before": commits[-2].encode(), "dictionary": b"7"}
    head |= {"publication": about, "layout": layout, "tokens": shown}
    values |= {f"head/{field}": value for field, value in head.items()}
    values |= {"applied/0": commits[-2].encode(), "labels/prod": b"1", "decided/0": b"1700000000000"}
    values |= {"garbage/6": layout}
    values |= {name: packed(rows) for name, rows in buckets.items()}
    return values | _version(values)


def _encoded(part: slice) -> Iterator[EncodedChange]:
    for table, dim in _DIMS.items():
        keys = _KEYS[table][part]
        rows = np.full((len(keys), dim), 0.5, np.float32)
        yield from encode_changes([RowChange(table, keys, rows, _KEYS[table][:0])], _LAYOUT)


def _version(values: Mapping[str, bytes]) -> dict[str, bytes]:
    """A version that has the same dictionary as the head."""
    manifest = {"publication": _publication(3, 1).to_json(), "layout": json.loads(_LAYOUT.to_json())}
    found = {"versions/1": _VERSION + json.dumps(manifest).encode(), "sums/format": b"1"}
    for table, one in _LAYOUT.tables.items():
        sums = BucketChecksums(np.zeros(one.buckets, np.uint32), np.zeros(one.buckets, np.uint64))
        for bucket in range(one.buckets):
            flat = unpacked(values.get(f"rows/{table}/{bucket}", b""))
            keys: NDArray[np.uint64] = np.frombuffer(b"".join(flat[::2]), np.uint64)
            rows = np.frombuffer(b"".join(flat[1::2]), np.uint8).reshape(len(keys), -1 if len(keys) else 0)
            if len(keys):
                add_rows(sums, keys, rows, np.full(len(keys), bucket))
        found |= {f"sums/rows:{table}": sums.rows.tobytes(), f"sums/sums:{table}": sums.sums.tobytes()}
    weights = {"dense": np.ones(4, np.float32).tobytes(), "statistics": np.zeros(2, np.float32).tobytes()}
    deed = {"what": b"label", "who": b"me", "why": b"", "version": b"1", "label": b"prod", "was": b"", "metrics": b"{}"}
    found |= {f"weights/{field}": value for field, value in weights.items()}
    return found | {f"history/9-0/{field}": value for field, value in deed.items()}


def seeds() -> Iterator[bytes]:
    """Nothing changed; every value replaced by itself, patched, cut and deleted; and nodes of JSON replaced."""
    yield b""
    for i, (name, value) in enumerate(written().items()):
        yield edits.replace(i, value)
        yield bytes([1, i, 1, 0, 1, 0xFF])
        yield bytes([2, i, len(value) // 2, 0])
        yield bytes([4, i])
        if b"{" in value or name.endswith("tokens"):
            yield from (bytes([3, i, node, (node * 11 + i) % len(edits.VALUES)]) for node in range(12))
