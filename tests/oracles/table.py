"""The embedding table in plain Python and NumPy: what the native one must equal, written for reading, not for speed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
f32 = np.float32
M64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
NOISE = 0xD1B54A32D192ED03
SALT = 0xA0761D6478BD642F
MAX_COUNT = (1 << 28) - 1
GRADIENT_LIMIT = f32(2.0**56)


def mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


# Storage of embeddings. Values are kept widened to float32.


def nearest(dtype: str, values: Floats) -> Floats:
    if dtype == "float32":
        return values.copy()
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return np.clip(values.astype(np.float16).astype(f32), -65504, 65504).astype(f32)
    return bfloat16(values, 0x7FFF + ((values.view(np.uint32).astype(np.int64) >> 16) & 1))


def bfloat16(values: Floats, noise: NDArray[np.int64]) -> Floats:
    bits = values.view(np.uint32).astype(np.int64)
    kept = np.minimum(((bits & 0x7FFFFFFF) + noise) >> 16, 0x7F7F) << 16
    rounded: Floats = (kept | (bits & 0x80000000)).astype(np.uint32).view(f32)
    return rounded


def float16(value: float, noise: int) -> float:
    """Stochastic rounding in units of the last place, which is 2^-24 for subnormals; exact in double precision."""
    size = abs(value)
    if size >= 2.0**-14:
        unit = math.ldexp(1.0, math.frexp(size)[1] - 11)
        size = math.floor(size / unit + (noise >> 3) / 8192) * unit
    else:
        size = ((math.floor(size * 2.0**40) + noise) >> 16) * 2.0**-24
    return math.copysign(min(size, 65504.0), value)


def stochastic(dtype: str, values: Floats, seed: int, key: int, count: int) -> Floats:
    if dtype == "float32":
        return values
    base = mix64((mix64(key ^ seed) + NOISE * (count + 1)) & M64)
    words = [mix64((base + (j // 4 + 1) * GOLDEN) & M64) >> (16 * (j % 4)) & 0xFFFF for j in range(len(values))]
    if dtype == "bfloat16":
        return bfloat16(values, np.array(words, np.int64))
    return np.array([float16(float(v), n) for v, n in zip(values, words, strict=True)], f32)


def birth(key: int, dim: int, *, seed: int, init: str, init_scale: float, dtype: str = "float32") -> Floats:
    if init == "constant":
        values = np.full(dim, init_scale, f32)
    else:
        base = mix64(key ^ seed)
        u = np.array([mix64((base + (j + 1) * GOLDEN) & M64) >> 40 for j in range(dim)]).astype(f32) * f32(2.0**-24)
        values = (f32(2) * u - f32(1)) * f32(init_scale)
    return nearest(dtype, values)


# Optimizers: start(w) gives the state, apply(w, state, g) the next (w, state).


@dataclass
class Optimizer:
    name: str
    rate: float
    initial_accumulator: float = 0.1
    epsilon: float = 1e-7
    decay: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def start(self, w: Floats, rate: f32) -> Floats:
        dim = len(w)
        a = f32(self.initial_accumulator)
        match self.name:
            case "sgd":
                return np.zeros(0, f32)
            case "adagrad":
                return np.full(dim, a)
            case "rowwise_adagrad":
                return np.full(1, a)
            case "adam":
                return np.zeros(2 * dim + 1, f32)
        scale = (f32(self.beta) + np.sqrt(a)) / rate + f32(self.l2)
        z = np.where(w == 0, f32(0), -(w * scale + np.copysign(f32(self.l1), w)))
        return np.concatenate([z, np.full(dim, a)])

    @property
    def _refill(self) -> f32:
        return f32((f32(1) - f32(self.decay)) * f32(self.initial_accumulator))

    def apply(self, w: Floats, state: Floats, g: Floats, rate: f32) -> tuple[Floats, Floats]:
        dim = len(w)
        epsilon: Any = f32(self.epsilon)
        match self.name:
            case "sgd":
                return w - rate * g, state
            case "adagrad":
                a = f32(self.decay) * state + (self._refill + g * g)
                return w - rate * g / (np.sqrt(a) + epsilon), a
            case "rowwise_adagrad":
                s = np.zeros(8, f32)
                for part in np.pad(g * g, (0, -dim % 8)).reshape(-1, 8):
                    s = s + part
                total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
                a = f32(self.decay) * state + (self._refill + total / f32(dim))
                return w - rate / (np.sqrt(a) + epsilon) * g, a
            case "adam":
                t = state[2 * dim] + f32(1)
                b1, b2 = f32(self.beta1), f32(self.beta2)
                m = b1 * state[:dim] + (f32(1) - b1) * g
                v = b2 * state[dim : 2 * dim] + (f32(1) - b2) * (g * g)
                c1, c2 = (f32(1.0 / (1.0 - math.pow(float(b), float(t)))) for b in (b1, b2))
                return w - rate * (m * c1) / (np.sqrt(v * c2) + epsilon), np.concatenate([m, v, [t]]).astype(f32)
        z, n = state[:dim], state[dim:]
        n2 = n + g * g
        z2 = z + (g - (np.sqrt(n2) - np.sqrt(n)) / rate * w)
        excess = np.abs(z2) - f32(self.l1)
        value = -np.copysign(excess, z2) / ((f32(self.beta) + np.sqrt(n2)) / rate + f32(self.l2))
        return np.where(excess > 0, value, f32(0)), np.concatenate([z2, n2])


class Sketch:
    def __init__(self, width: int) -> None:
        self.width = width
        self.cells = np.zeros((4, width), np.int64)
        self.total = 0
        self.cursor = width

    def add(self, key: int, count: int) -> int:
        h = mix64(key ^ SALT)
        low, high = h & 0xFFFFFFFF, h >> 32 | 1
        at = (np.arange(4), np.array([(low + r * high) % self.width for r in range(4)]))
        estimate = min(int(self.cells[at].min()) + count, 255)
        self.cells[at] = np.maximum(self.cells[at], estimate)
        self.total += count
        if self.cursor < self.width:
            self.cells[:, self.cursor : self.cursor + 64] //= 2
            self.cursor += 64
        elif self.total > 8 * self.width:
            self.total //= 2
            self.cursor = 0
        return estimate

    def bytes(self) -> bytes:
        header = np.array([self.total, self.cursor], np.uint64)
        return header.tobytes() + self.cells.astype(np.uint8).tobytes()


@dataclass
class Row:
    embedding: Floats
    state: Floats
    count: int = 0
    last_seen: int = 0


@dataclass
class Channel:
    changed: set[int] = field(default_factory=set)
    tombstones: set[int] = field(default_factory=set)
    sealed: dict[int, Row] | None = None  # all rows as of the seal


class Table:
    """Without a capacity: which rows that takes is stated as properties, in the tests."""

    def __init__(
        self,
        dim: int,
        *,
        optimizer: str,
        rate: float,
        seed: int = 0,
        init: str = "uniform",
        init_scale: float = 0.01,
        dtype: str = "float32",
        min_count: int = 1,
        sketch_width: int = 1 << 20,
        expire_after: int = 0,
        **constants: Any,
    ) -> None:
        self.dim, self.seed, self.init, self.init_scale, self.dtype = dim, seed, init, init_scale, dtype
        self.optimizer = Optimizer(optimizer, rate, **constants)
        self.min_count, self.expire_after = min_count, expire_after
        self.sketch = Sketch(sketch_width)
        self.rows: dict[int, Row] = {}
        self.channels: dict[int, Channel] = {}

    def birth(self, key: int) -> Floats:
        return birth(key, self.dim, seed=self.seed, init=self.init, init_scale=self.init_scale, dtype=self.dtype)

    def pull(self, keys: Iterable[int]) -> Floats:
        values = [self.rows[k].embedding if k in self.rows else self.birth(k) for k in keys]
        return np.array(values, f32).reshape(-1, self.dim)

    def push(
        self, keys: list[int], gradients: Floats, counts: list[int], times: list[int], rate: float | None = None
    ) -> tuple[int, int, int, list[int]]:
        """Return applied, inserted, unadmitted, and the positions of gradients that are not finite."""
        r = f32(self.optimizer.rate if rate is None else rate)
        applied = inserted = unadmitted = 0
        non_finite = []
        for i, key in enumerate(keys):
            g = gradients[i]
            if not bool(np.all(np.abs(g) < GRADIENT_LIMIT)):
                non_finite.append(i)
                continue
            if key not in self.rows:
                if self.min_count > 1 and self.sketch.add(key, counts[i]) < self.min_count:
                    unadmitted += 1
                    continue
                w = self.birth(key)
                self.write(key, Row(w, self.optimizer.start(w, r)))
                inserted += 1
            row = self.rows[key]
            w, state = self.optimizer.apply(row.embedding, row.state, g, r)
            w = stochastic(self.dtype, w, self.seed, key, row.count)
            self.write(key, Row(w, state, min(row.count + counts[i], MAX_COUNT), max(row.last_seen, times[i])))
            applied += 1
        return applied, inserted, unadmitted, non_finite

    def write(self, key: int, row: Row) -> None:
        self.rows[key] = row if self.expire_after else replace(row, last_seen=0)
        for channel in self.unsealed():
            channel.changed.add(key)
            channel.tombstones.discard(key)

    def load(self, key: int, row: Row) -> None:
        self.write(key, replace(row, embedding=nearest(self.dtype, row.embedding), count=min(row.count, MAX_COUNT)))

    def remove(self, keys: Iterable[int]) -> int:
        gone = {k for k in keys if k in self.rows}
        for key in gone:
            del self.rows[key]
            for channel in self.unsealed():
                channel.changed.discard(key)
                channel.tombstones.add(key)
        return len(gone)

    def expire(self, now: int) -> int:
        if not self.expire_after or now <= self.expire_after:
            return 0
        old = [k for k, row in self.rows.items() if row.last_seen + self.expire_after < now]
        for key in old:
            if not self.rows[key].last_seen:
                self.write(key, replace(self.rows[key], last_seen=now))
        return self.remove(key for key in old if self.rows[key].last_seen != now)

    def unsealed(self) -> list[Channel]:
        return [channel for channel in self.channels.values() if channel.sealed is None]

    def seal(self, channel: int) -> None:
        sealed = self.channels[channel]
        sealed.sealed = dict(self.rows)

    def mark_dirty(self, channel: int, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self.rows:
                self.channels[channel].changed.add(key)
            else:
                self.channels[channel].tombstones.add(key)
