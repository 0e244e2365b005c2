"""Probes: samples of the stream with which a server tries what it serves.

A worker picks them from those that it has just learned, and that it predicted with finite numbers before; so what
predicts them badly is bad itself. They are sent with ids as keys, without labels, weights and times, and are published
with the model. schemas/README.md describes the bytes.
"""

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamtrain.model.batch import Batch
from streamtrain.model.schema import Schema

MOST_SAMPLES = 64
"""Samples of one group of probes."""
MOST_BYTES = 128 << 10
"""Maximum size of one group of probes; a group of samples with many ids has fewer samples."""


class _Probes(msgspec.Struct, array_like=True):
    schema: str
    samples: int
    keys: bytes
    lengths: bytes
    numeric: bytes


def encode_probes(schema: Schema, batch: Batch, predictions: NDArray[np.float32]) -> bytes:
    """Picks a group of probes out of samples; empty if none can be one.

    Args:
        schema: schema of the samples.
        batch: n samples.
        predictions: float32 [n, L], of these samples.
    """
    good = np.flatnonzero(np.isfinite(predictions).all(axis=1))
    count = min(len(good), MOST_SAMPLES)
    while count:
        mask = np.zeros(len(batch), bool)
        mask[good[-count:]] = True
        picked = batch.select(mask)
        keys, lengths = picked.keys.astype("<u8"), np.diff(picked.offsets, axis=1).astype("<u4")
        numeric = picked.numeric.astype("<f4")
        if keys.nbytes + lengths.nbytes + numeric.nbytes < MOST_BYTES - 1024:
            probes = _Probes(schema.fingerprint(), count, keys.tobytes(), lengths.tobytes(), numeric.tobytes())
            return msgspec.msgpack.encode(probes)
        count //= 2
    return b""


def decode_probes(schema: Schema, groups: Iterable[bytes], most: int) -> Batch | None:
    """Decodes groups of probes as one batch; groups that are damaged, or of another schema, are skipped.

    Args:
        schema: schema of the samples.
        groups: bytes from `encode_probes`.
        most: samples at most.

    Returns:
        The batch; None if there are no samples of this schema.
    """
    features, numerics = len(schema.embedded), len(schema.numerics)
    keys: list[list[NDArray[np.uint64]]] = [[] for _ in range(features)]
    lengths: list[NDArray[np.int64]] = []
    numeric: list[NDArray[np.float32]] = []
    left = most
    for group in groups:
        if (found := _read(schema, group)) is None or left == 0:
            continue
        of_group, its_lengths, its_numeric = found
        count = min(left, its_lengths.shape[1])
        left -= count
        start = 0
        for of_feature, feature in zip(its_lengths, keys, strict=True):
            feature.append(of_group[start : start + int(of_feature[:count].sum())])
            start += int(of_feature.sum())
        lengths.append(its_lengths[:, :count])
        numeric.append(its_numeric[:count])
    if left == most:
        return None
    samples = most - left
    offsets = np.zeros((features, samples + 1), np.int32)
    np.cumsum(np.concatenate(lengths, axis=1), axis=1, out=offsets[:, 1:])
    return Batch(
        keys=np.concatenate([part for feature in keys for part in feature] or [np.empty(0, np.uint64)]),
        starts=np.concatenate([[0], np.cumsum(offsets[:, -1], dtype=np.int64)]).astype(np.int64),
        offsets=offsets,
        numeric=np.concatenate(numeric).reshape(samples, numerics),
        labels=np.empty((samples, 0), np.float32),
        weights=np.ones(samples, np.float32),
        times=np.zeros(samples),
        kept=np.arange(samples, dtype=np.int32),
    )


def _read(schema: Schema, group: bytes) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.float32]] | None:
    """Keys, lengths int64 [F, n] and numbers float32 [n, D]; None: they are not of this schema."""
    try:
        found = msgspec.msgpack.decode(group, type=_Probes)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    features, numerics, samples = len(schema.embedded), len(schema.numerics), found.samples
    if found.schema != schema.fingerprint() or not 1 <= samples <= MOST_SAMPLES or len(group) > MOST_BYTES:
        return None
    sizes = len(found.lengths), len(found.numeric)
    if sizes != (4 * features * samples, 4 * numerics * samples) or len(found.keys) % 8:
        return None
    lengths = np.frombuffer(found.lengths, "<u4").astype(np.int64).reshape(features, samples)
    keys = np.frombuffer(found.keys, "<u8").astype(np.uint64)
    numeric = np.frombuffer(found.numeric, "<f4").astype(np.float32).reshape(samples, numerics)
    limits = np.array([one.max_length or len(keys) for one in schema.embedded], np.int64).reshape(features, 1)
    if int(lengths.sum()) != len(keys) or (lengths > limits).any() or not np.isfinite(numeric).all():
        return None
    return keys, lengths, numeric
