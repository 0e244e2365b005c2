"""Codecs: rows as they are kept in Redis, and checksums over them.

float32 keeps what it is given. float16 is off by at most |x| / 2048, or 2^-25 where that is less; beyond 65504 it
becomes 65504. int8 keeps a scale of the row, its largest |x| / 127 in float32, before the elements, and is off by at
most that largest |x| / 253 + 1e-43.
"""

from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import narrow, widen
from streamtrain.errors import ConfigError, PublicationError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
RowType = Literal["float32", "float16", "int8"]

_PRIMES = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # 127 of it are finite
_BLOCK = 1 << 12  # rows whose words are in the cache


class Codec:
    """Rows of one table to bytes and back. Bytes are little-endian.

    Args:
        dtype: "float32", "float16" or "int8".
        dim: floats of a row.

    Attributes:
        width: bytes of a row.

    Raises:
        ConfigError: there is no such type, or a row has no elements.
    """

    def __init__(self, dtype: str, dim: int) -> None:
        sizes = {"float32": 4 * dim, "float16": 2 * dim, "int8": 4 + dim}
        if dtype not in sizes:
            raise ConfigError(f"unknown dtype {dtype!r}: expected {', '.join(sizes)}")
        if dim < 1:
            raise ConfigError(f"rows must have at least 1 element, not {dim}")
        self.dtype, self.dim, self.width = cast(RowType, dtype), dim, sizes[dtype]

    def encode(self, rows: Floats) -> Bytes:
        """Rows float32 [n, dim] as uint8 [n, width].

        Raises:
            PublicationError: they have another width, or elements that are not finite.
        """
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise PublicationError(f"expected rows of {self.dim} elements, got an array of shape {rows.shape}")
        rows = np.ascontiguousarray(rows, "<f4")
        if not np.isfinite(rows).all():
            bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
            raise PublicationError(f"row {bad} of {len(rows)} is not finite")
        if self.dtype == "float32":
            return rows.view(np.uint8).reshape(-1, self.width)
        if self.dtype == "float16":
            return narrow(rows.ravel(), "float16").astype("<u2").view(np.uint8).reshape(-1, self.width)
        return self._quantized(rows)

    def decode(self, data: Bytes) -> Floats:
        """What `encode` gave, as float32 [n, dim]."""
        data = np.ascontiguousarray(data)
        if self.dtype == "float32":
            return data.view("<f4").reshape(-1, self.dim).astype(np.float32, copy=False)
        if self.dtype == "float16":
            return widen(data.view("<u2").ravel().astype(np.uint16, copy=False), "float16").reshape(-1, self.dim)
        scales = np.ascontiguousarray(data[:, :4]).view("<f4").astype(np.float32, copy=False)
        return data[:, 4:].view(np.int8).astype(np.float32) * scales

    def _quantized(self, rows: Floats) -> Bytes:
        scales = np.minimum(np.abs(rows).max(axis=1, keepdims=True) / np.float32(127), _LARGEST_SCALE)
        # In float64, since a scale that is not a normal number is far from the quotient that it stands for.
        levels = np.divide(rows, scales, out=np.zeros(rows.shape), where=scales > 0, dtype=np.float64)
        data = np.empty((len(rows), self.width), np.uint8)
        data[:, :4] = scales.astype("<f4").view(np.uint8).reshape(-1, 4)
        data[:, 4:] = np.clip(np.rint(levels), -127, 127).astype(np.int8).view(np.uint8)
        return data


def checksums(keys: NDArray[np.uint64], rows: Bytes) -> NDArray[np.uint64]:
    """A checksum of each row with its key; that of a set of rows is their sum modulo 2^64, in whatever order.

    With all integers being 64-bit and wrapping, words being the row as little-endian uint64, the last one padded with
    zero bytes, numbered from 0:

        part(j) = x ^ x >> 29,  x = (word ^ word >> 32) * (0x9E3779B97F4A7C15 * (2 * j + 1))
        mix(x):   x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;  x = (x ^ x >> 27) * 0x94D049BB133111EB;  x ^ x >> 31
        sum     = mix(mix(key) + part(0) + part(1) + …)

    Args:
        keys: uint64 [n].
        rows: uint8 [n, width], encoded.

    Returns:
        uint64 [n].
    """
    sums = np.empty(len(keys), np.uint64)
    words = -(-rows.shape[1] // 8)
    factors = np.arange(1, 2 * words, 2, dtype=np.uint64) * np.uint64(_GOLDEN)
    padded = np.zeros((min(len(keys), _BLOCK), words * 8), np.uint8)
    for at in range(0, len(keys), _BLOCK):
        block = rows[at : at + _BLOCK]
        padded[: len(block), : rows.shape[1]] = block
        parts = padded[: len(block)].view("<u8").astype(np.uint64)
        parts ^= parts >> np.uint64(32)
        parts *= factors
        parts ^= parts >> np.uint64(29)
        sums[at : at + _BLOCK] = _mix(
            _mix(keys[at : at + _BLOCK].astype(np.uint64)) + parts.sum(axis=1, dtype=np.uint64)
        )
    return sums


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_PRIMES[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_PRIMES[1])
    return x ^ (x >> np.uint64(31))
