"""Spec: what shards need to know of a model, as plain values: they hold rows for it without its code or TensorFlow."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamtrain._core import DenseVector, Table, hash_bytes
from streamtrain.errors import ConfigError

if TYPE_CHECKING:
    from streamtrain.model.model import Model


@dataclass(frozen=True)
class Spec:
    """What shards need to know of a model.

    Attributes:
        schema: fingerprint of the schema.
        seed: of birth values.
        reduction: "mean" or "sum", how the loss of a batch is made of its samples'.
        tables: by table "name" and the native core's settings.
        dense: shapes of the graph's trainable weights, in the order of the flat vector.
        statistics: shapes of the graph's non-trainable float weights, in their order.
        dense_optimizer: the native core's settings.
    """

    schema: str
    seed: int
    reduction: str
    tables: tuple[dict[str, Any], ...]
    dense: tuple[tuple[int, ...], ...]
    statistics: tuple[tuple[int, ...], ...]
    dense_optimizer: dict[str, Any]

    @classmethod
    def of(cls, model: "Model") -> "Spec":
        """The spec of a model. Builds its graph, so TensorFlow is loaded."""
        tables = model.schema.tables
        return cls(
            schema=model.schema.fingerprint(),
            seed=model.seed,
            reduction=model.reduction,
            tables=tuple({"name": t.name, **t.settings(model.embedding_optimizer, model.seed)} for t in tables),
            dense=model.dense.shapes,
            statistics=model.statistics.shapes,
            dense_optimizer=model.dense_optimizer.settings(),
        )

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        """The spec that `to_json` gave.

        Raises:
            ConfigError: the text is none, or no table or optimizer can be made of it.
        """
        try:
            given = json.loads(text)
            spec = cls(
                schema=str(given["schema"]),
                seed=int(given["seed"]),
                reduction=str(given["reduction"]),
                tables=tuple(dict(table) for table in given["tables"]),
                dense=_shapes(given["dense"]),
                statistics=_shapes(given["statistics"]),
                dense_optimizer=dict(given["dense_optimizer"]),
            )
            spec.make_tables()
            spec.make_dense([])
            spec._check()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as exc:
            raise ConfigError(f"spec of the model cannot be used: {type(exc).__name__}: {exc}") from exc
        return spec

    def _check(self) -> None:
        """What the native core does not: a shard that took it would fail much later."""
        names = [one["name"] for one in self.tables]
        if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
            raise ValueError(f"names of tables must be different texts, and are {names}")
        if not all("expire_after" in one for one in self.tables):  # the core has a default, shards have not
            raise ValueError("a table has no 'expire_after'")
        if any(extent < 0 for shape in (*self.dense, *self.statistics) for extent in shape):
            raise ValueError(f"a shape is negative: {self.dense}, {self.statistics}")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', and is {self.reduction!r}")

    def to_json(self) -> str:
        """The spec as JSON."""
        return json.dumps(asdict(self))

    @property
    def identity(self) -> str:
        """16 hex digits; shards and workers, and checkpoints and models, of another do not fit together."""
        return f"{hash_bytes(json.dumps(self.meaning(), sort_keys=True).encode()):016x}"

    def meaning(self) -> dict[str, Any]:
        """What must be the same. Rates, admission, expiry, capacity and storage may differ: they are operation."""
        return {
            "schema": self.schema,
            "seed": self.seed,
            "dense": [list(shape) for shape in self.dense],
            "dense_optimizer": self.dense_optimizer["optimizer"],
            "tables": {one["name"]: [one["dim"], one["optimizer"]] for one in self.tables},
        }

    def differing(self, other: "Spec") -> list[str]:
        """What of the meaning differs; nothing if they fit together."""
        if self.identity == other.identity:
            return []
        mine, theirs = self.meaning(), other.meaning()
        return [what for what in mine if mine[what] != theirs[what]]

    @property
    def dims(self) -> list[int]:
        """Width of a row, by table."""
        return [one["dim"] for one in self.tables]

    @property
    def dense_size(self) -> int:
        """Floats of the flat dense vector."""
        return _floats(self.dense)

    @property
    def statistics_size(self) -> int:
        """Floats of the flat vector of statistics."""
        return _floats(self.statistics)

    def make_tables(self) -> list[Table]:
        """Empty tables."""
        return [Table(**{name: value for name, value in one.items() if name != "name"}) for one in self.tables]

    def make_dense(self, values: Any) -> DenseVector:
        """A slice of the dense parameters, from its first values, float32 [n]."""
        return DenseVector(np.ascontiguousarray(values, np.float32), **self.dense_optimizer)


def _floats(shapes: tuple[tuple[int, ...], ...]) -> int:
    total = 0
    for shape in shapes:
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total


def _shapes(given: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(extent) for extent in shape) for shape in given)


def slice_of(size: int, part: int, parts: int) -> slice:
    """The part of a flat vector that a shard holds; sizes differ by at most one."""
    return slice(size * part // parts, size * (part + 1) // parts)
