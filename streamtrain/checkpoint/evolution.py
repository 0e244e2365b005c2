"""Evolution: what a changed model keeps of what was learned by the model before it.

Tables are recognized by name. Weights are recognized by the name of their layer; layers that Keras has named are
aligned in order, per class, such that as much as possible is kept. What the columns of a weight stand for decides where
its old values go: a new feature in front of a Dense layer does not shift those after it. Weights for new inputs of a
unit that is kept begin at zero, so its output does not change before it has learned; everything else that is new begins
as in the new model.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain.errors import ConfigError
from streamtrain.model.dense import Segment, WeightInfo
from streamtrain.model.spec import Spec

Floats = NDArray[np.float32]
Action = Literal["kept", "new", "changed", "reset", "dropped"]

ALLOWABLE = {
    "drop": "rows of tables that the model no longer has are lost",
    "truncate": "columns of rows are lost where the dim of a table shrinks",
    "meaning": "rows and weights stay, but what a feature reads or how it is made of that changes",
}
"""What a change may need to be allowed, and what that means."""

# Vectors as long as a row, and scalars after them, of a row's optimizer state: _native/optimizer.h.
_STATE = {"sgd": (0, 0), "adagrad": (1, 0), "rowwise_adagrad": (0, 1), "adam": (2, 1), "ftrl": (2, 0)}
_RATES = ("rate", "initial_accumulator", "epsilon", "decay", "beta1", "beta2", "beta", "l1", "l2")


class PlannedChange(NamedTuple):
    """One line of a plan.

    Attributes:
        part: "table", "feature", "label", "weight", "layer", "optimizer" or "setting".
        name: which one.
        action: what becomes of it.
        detail: how, for people; may be empty.
        needs: which of ALLOWABLE it needs; "": none.
    """

    part: str
    name: str
    action: Action
    detail: str = ""
    needs: str = ""


class _Range(NamedTuple):
    """Adjacent columns of an old weight and where they stand in the new one."""

    old: slice
    new: slice


@dataclass(frozen=True)
class _Weight:
    """A weight of the old and of the new flat vector: its place, shape and description."""

    at: slice
    shape: tuple[int, ...]
    info: WeightInfo


@dataclass(frozen=True)
class TableEvolution:
    """How rows of an old table become those of a new one.

    Attributes:
        old: settings of the old table.
        new: settings of the new table.
    """

    old: Mapping[str, Any]
    new: Mapping[str, Any]

    @property
    def keeps_state(self) -> bool:
        """Whether the optimizer's state is kept."""
        return bool(self.old["optimizer"] == self.new["optimizer"])

    @property
    def keeps_rows(self) -> bool:
        """Whether rows and their state stay as they are."""
        return bool(self.old["dim"] == self.new["dim"]) and self.keeps_state

    def convert(self, embeddings: Floats, state: Floats, born: Floats) -> tuple[Floats, Floats]:
        """Embeddings and optimizer state of rows in the new table.

        Args:
            embeddings: float32 [n, old dim].
            state: float32 [n, old state size].
            born: float32 [n, new dim + new state size], the same rows as if they were new.

        Returns:
            float32 [n, new dim] and float32 [n, new state size].
        """
        if self.keeps_rows:
            return embeddings, state
        old_dim, dim = self.old["dim"], self.new["dim"]
        shared = min(old_dim, dim)
        rows, fresh = born[:, :dim].copy(), born[:, dim:].copy()
        rows[:, :shared] = embeddings[:, :shared]
        if self.new["optimizer"] == "ftrl":
            fresh[:, :dim] = _ftrl_start(rows, self.new)
        if self.keeps_state:
            vectors, scalars = _STATE[self.old["optimizer"]]
            for v in range(vectors):
                fresh[:, v * dim : v * dim + shared] = state[:, v * old_dim : v * old_dim + shared]
            if scalars:
                fresh[:, vectors * dim :] = state[:, vectors * old_dim :]
        return rows, fresh


def _ftrl_start(rows: Floats, settings: Mapping[str, Any]) -> Floats:
    """The z of FTRL from which its rows are computed; see Ftrl::start in _native/optimizer.h."""
    beta, l1, rate = (np.float32(settings[name]) for name in ("beta", "l1", "rate"))
    scale = (beta + np.sqrt(np.float32(settings["initial_accumulator"]))) / rate + np.float32(settings["l2"])
    return np.where(rows == 0, np.float32(0), -(rows * scale + np.copysign(l1, rows))).astype(np.float32)


@dataclass(frozen=True)
class Evolution:
    """A plan: what a new model keeps of what an old one has learned.

    Args:
        old: spec of what was learned.
        new: spec of the changed model.
        rows: rows of each old table, for messages; empty: they are not known.
    """

    old: Spec
    new: Spec
    rows: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def tables(self) -> dict[str, TableEvolution]:
        """The tables that are kept, by name."""
        old = {one["name"]: one for one in self.old.tables}
        return {one["name"]: TableEvolution(old[one["name"]], one) for one in self.new.tables if one["name"] in old}

    @cached_property
    def changes(self) -> tuple[PlannedChange, ...]:
        """All lines of the plan, what is kept as it is included."""
        return (
            *self._table_changes(),
            *self._feature_changes(),
            *self._weight_changes(),
            *self._mix_changes(),
            *self._setting_changes(),
        )

    @property
    def is_needed(self) -> bool:
        """Whether the models differ in what shards and checkpoints must agree on."""
        return self.old.identity != self.new.identity

    def missing(self, allow: Collection[str]) -> list[PlannedChange]:
        """The changes that need to be allowed and are not."""
        return [one for one in self.changes if one.needs and one.needs not in allow]

    def check(self, allow: Collection[str]) -> None:
        """Raises unless everything that needs to be allowed is.

        Raises:
            ConfigError: it is not; the message says what would be lost. Or `allow` names something unknown.
        """
        if unknown := [one for one in allow if one not in ALLOWABLE]:
            raise ConfigError(f"allow must be some of {', '.join(ALLOWABLE)}, not {unknown[0]!r}")
        if missing := self.missing(allow):
            listed = "; ".join(f"{one.part} {one.name}: {one.detail} (allow {one.needs!r})" for one in missing)
            raise ConfigError(f"the changed model would lose or reinterpret what was learned: {listed}")

    def summary(self) -> str:
        """What changes, in one line."""
        told = [one for one in self.changes if one.action != "kept"]
        return "; ".join(_told(one) for one in told) or "nothing changes"

    # --- tables ---

    def _table_changes(self) -> Iterator[PlannedChange]:
        for one in self.new.tables:
            name = one["name"]
            yield self._kept_table(name) if name in self.tables else PlannedChange("table", name, "new")
        for one in self.old.tables:
            if one["name"] not in self.tables:
                name = one["name"]
                needs = "drop" if self.rows.get(name, 1) else ""
                yield PlannedChange("table", name, "dropped", f"{self._counted(name)} would be lost", needs)

    def _counted(self, name: str) -> str:
        return f"{self.rows[name]:,} rows" if name in self.rows else "its rows"

    def _kept_table(self, name: str) -> PlannedChange:
        one, details = self.tables[name], []
        old_dim, dim = one.old["dim"], one.new["dim"]
        if dim > old_dim:
            details.append(f"dim {old_dim} -> {dim}: the new columns begin at their first values")
        if dim < old_dim:
            details.append(f"dim {old_dim} -> {dim}: the last {old_dim - dim} columns would be lost")
        if not one.keeps_state:
            details.append(f"optimizer {one.old['optimizer']} -> {one.new['optimizer']}: its state begins anew")
        for option in ("dtype", "init", "init_scale"):
            if one.old.get(option) != one.new.get(option):
                details.append(f"{option} {one.old.get(option)} -> {one.new.get(option)}")
        kept = f"{self._counted(name)} kept" if name in self.rows else ""
        detail = ", ".join(filter(None, [kept, *details]))
        return PlannedChange(
            "table", name, "changed" if details else "kept", detail, "truncate" if dim < old_dim else ""
        )

    # --- features and labels ---

    def _feature_changes(self) -> Iterator[PlannedChange]:
        if "features" not in self.old.about or "features" not in self.new.about:
            if self.old.schema != self.new.schema:
                unknown = "the schema differs, and what was learned does not say how"
                yield PlannedChange("feature", "all", "changed", unknown, "meaning")
            return
        old, new = self.old.about["features"], self.new.about["features"]
        for name, about in new.items():
            if name not in old:
                yield PlannedChange("feature", name, "new")
                continue
            keys = [key for key in about if key != "dim" and old[name].get(key) != about[key]]
            if keys:
                differing = ", ".join(f"{key} {old[name].get(key)} -> {about[key]}" for key in keys)
                yield PlannedChange("feature", name, "changed", differing, "meaning")
        yield from (PlannedChange("feature", name, "dropped") for name in old if name not in new)
        labels, wanted = self.old.about["labels"], self.new.about["labels"]
        yield from (PlannedChange("label", name, "new") for name in wanted if name not in labels)
        yield from (PlannedChange("label", name, "dropped") for name in labels if name not in wanted)

    # --- settings ---

    def _setting_changes(self) -> Iterator[PlannedChange]:
        if self.old.reduction != self.new.reduction:
            yield PlannedChange("setting", "reduction", "changed", f"{self.old.reduction} -> {self.new.reduction}")
        if self.old.seed != self.new.seed:
            effect = "ids not learned yet have other first values"
            yield PlannedChange("setting", "seed", "changed", f"{self.old.seed} -> {self.new.seed}: {effect}")
        old, new = self.old.dense_optimizer, self.new.dense_optimizer
        if old["optimizer"] != new["optimizer"]:
            anew = f"{old['optimizer']} -> {new['optimizer']}: its state begins anew"
            yield PlannedChange("optimizer", "of the dense weights", "reset", anew)
        pairs = {f"of table {name}": (one.old, one.new) for name, one in self.tables.items()}
        for name, (before, after) in {**pairs, "of the dense weights": (old, new)}.items():
            keys = [key for key in _RATES if key in before and key in after and before[key] != after[key]]
            if keys and before["optimizer"] == after["optimizer"]:
                differing = ", ".join(f"{key} {before[key]:g} -> {after[key]:g}" for key in keys)
                yield PlannedChange("optimizer", name, "changed", differing)

    # --- weights ---

    def dense(self, old: Floats, slots: Floats, new: Floats, new_slots: Floats) -> tuple[Floats, Floats]:
        """The flat dense vector and its optimizer's state.

        Args:
            old: float32 [old size], as learned.
            slots: float32 [slots, old size].
            new: float32 [new size], first values of the new model.
            new_slots: float32 [new slots, new size], those of its optimizer.
        """
        values = self._carry("weights", old, new, zero_new_inputs=True)
        if self.old.dense_optimizer["optimizer"] != self.new.dense_optimizer["optimizer"]:
            return values, new_slots
        carried = [self._carry("weights", a, b) for a, b in zip(slots, new_slots, strict=True)]
        return values, np.stack(carried) if carried else new_slots

    def statistics(self, old: Floats, new: Floats) -> Floats:
        """The flat vector of statistics; arguments as for `dense`."""
        return self._carry("statistics", old, new)

    @property
    def keeps_dense_steps(self) -> bool:
        """Whether the dense optimizer continues its count of steps."""
        return bool(self.old.dense_optimizer["optimizer"] == self.new.dense_optimizer["optimizer"])

    def _carry(self, part: str, old: Floats, new: Floats, *, zero_new_inputs: bool = False) -> Floats:
        result = new.copy()
        for one, other, axes in self._matches(part):
            source, target = old[one.at].reshape(one.shape), result[other.at].reshape(other.shape)
            if zero_new_inputs and other.info.inputs and len(axes) == 2:
                for columns in axes[1]:
                    target[:, columns.new] = 0
            _copy(source, target, axes)
        return result

    def _weights(self, spec: Spec, part: str) -> list[_Weight] | None:
        """None: the spec does not describe them."""
        shapes = spec.dense if part == "weights" else spec.statistics
        described = spec.about.get(part)
        if described is None or len(described) != len(shapes):
            return None
        at, weights = 0, []
        for shape, one in zip(shapes, described, strict=True):
            size = math.prod(shape)
            segments = {key: tuple(Segment(*segment) for segment in one[key]) for key in ("inputs", "columns")}
            weights.append(_Weight(slice(at, at + size), shape, WeightInfo(**{**one, **segments})))
            at += size
        return weights

    def _matches(self, part: str) -> Iterator[tuple[_Weight, _Weight, list[list[_Range]]]]:
        """Old weights, the new ones that they become, and by axis what of them is kept."""
        old, new = self._weights(self.old, part), self._weights(self.new, part)
        if old is None or new is None:
            yield from self._same_shapes(part)
            return
        layers = self._layers
        new_by_name = {(one.info.layer, one.info.name): one for one in new}
        for one in old:
            other = new_by_name.get((layers.get(one.info.layer, ""), one.info.name))
            if other is not None and (axes := _shared_axes(one, other, layers)) is not None:
                yield one, other, axes

    def _same_shapes(self, part: str) -> Iterator[tuple[_Weight, _Weight, list[list[_Range]]]]:
        """For what earlier releases wrote: all weights are kept if all shapes are the same, and none otherwise."""
        old, new = (spec.dense if part == "weights" else spec.statistics for spec in (self.old, self.new))
        if old != new:
            return
        size = sum(map(math.prod, old))
        whole = _Weight(slice(0, size), (size,), WeightInfo("", "", False, (), ()))
        yield whole, whole, [[_Range(slice(0, size), slice(0, size))]]

    @cached_property
    def _layers(self) -> dict[str, str]:
        """New name of each old layer that is recognized, also of those without weights, and of features."""
        old, new = (self._layer_shapes(spec) for spec in (self.old, self.new))
        names = {name: name for name in old if name in new and not (old[name][0] and new[name][0])}
        for kind in {_kind(name) for name, (is_numbered, _) in old.items() if is_numbered}:
            ours, theirs = (
                [(name, shapes) for name, (is_numbered, shapes) in of.items() if is_numbered and _kind(name) == kind]
                for of in (old, new)
            )
            names |= _align(ours, theirs)
        origins = {name: name for name in self._origins(self.old) if name not in old}
        return origins | names

    @staticmethod
    def _origins(spec: Spec) -> set[str]:
        infos = [one for part in ("weights", "statistics", "constants") for one in spec.about.get(part, ())]
        return {origin for one in infos for key in ("inputs", "columns") for origin, _ in one[key]}

    @staticmethod
    def _layer_shapes(spec: Spec) -> dict[str, tuple[bool, list[tuple[int, ...]]]]:
        """Whether it is numbered, and the shapes of its trainable weights, by layer in order of the graph."""
        layers: dict[str, tuple[bool, list[tuple[int, ...]]]] = {}
        others: dict[str, list[tuple[int, ...]]] = {}  # in any order: constants were among the statistics once
        for part, shapes in (
            ("weights", spec.dense),
            ("statistics", spec.statistics),
            ("constants", spec.constants),
        ):
            for one, shape in zip(spec.about.get(part, ()), shapes, strict=False):
                of_layer = layers.setdefault(one["layer"], (one["is_numbered"], []))[1]
                (of_layer if part == "weights" else others.setdefault(one["layer"], [])).append(shape)
        for name, shapes_of in others.items():
            layers[name][1].extend(sorted(shapes_of))
        return layers

    def _weight_changes(self) -> Iterator[PlannedChange]:
        old, new = self._weights(self.old, "weights"), self._weights(self.new, "weights")
        if old is None or new is None:
            kept = any(True for _ in self._same_shapes("weights"))
            unknown = "the shapes differ, and what was learned does not say which weights it had: all begin anew"
            yield PlannedChange("weight", "all", "kept" if kept else "reset", "" if kept else unknown)
            return
        by_place = {other.at.start: (one, axes) for one, other, axes in self._matches("weights")}
        kept_old = {one.at.start for one, _ in by_place.values()}
        lost = {f"{one.info.layer}/{one.info.name}": one.shape for one in old if one.at.start not in kept_old}
        names = {f"{other.info.layer}/{other.info.name}" for other in new}
        for other in new:
            name = f"{other.info.layer}/{other.info.name}"
            if other.at.start not in by_place:
                is_reset = name in lost
                detail = (
                    f"{_shape(lost[name])} -> {_shape(other.shape)}, begins anew" if is_reset else _shape(other.shape)
                )
                yield PlannedChange("weight", name, "reset" if is_reset else "new", detail)
                continue
            one, axes = by_place[other.at.start]
            copied = math.prod(sum(r.new.stop - r.new.start for r in axis) for axis in axes)
            total, was = math.prod(other.shape), math.prod(one.shape)
            if copied == total == was:
                yield PlannedChange("weight", name, "kept", _shape(other.shape))
                continue
            detail = f"{_shape(one.shape)} -> {_shape(other.shape)}, {copied:,} of {was:,} values kept"
            yield PlannedChange("weight", name, "changed", detail)
        if self.old.constants != self.new.constants:
            sizes = " -> ".join(f"{sum(map(math.prod, of.constants)):,}" for of in (self.old, self.new))
            yield PlannedChange("weight", "frozen", "changed", f"{sizes} values, which are those of the model file")
        yield from (
            PlannedChange("weight", name, "dropped", _shape(shape)) for name, shape in lost.items() if name not in names
        )

    def _mix_changes(self) -> Iterator[PlannedChange]:
        """Layers that mix what is new with what was there: the weights behind them cannot make up for it."""
        if self._weights(self.old, "weights") is None:
            return
        widths = self._old_widths
        visible = self._origins(self.new) - {*widths}
        recognizable = {*self.new.about.get("features", ()), *self._layer_shapes(self.new)}
        for one in self.new.about.get("mixes", ()):
            if one["layer"] in visible:  # the old model had no such layer
                continue
            # Of each input, whether each part of its columns is as it was; None: it is new.
            inputs = [
                [widths[origin] == width if origin in widths else None for origin, width in segments]
                for segments in one["inputs"]
                if any(origin in widths or origin in recognizable for origin, _ in segments)
            ]
            flat = [part for parts in inputs for part in parts]
            is_joined = any(all(part is None for part in parts) for parts in inputs)
            is_changed = is_joined or (not one["by_column"] and not all(flat))
            if is_changed and any(part is not None for part in flat):
                detail = "mixes columns, of which some are new or gone: predictions change"
                yield PlannedChange("layer", one["layer"], "changed", detail)

    @cached_property
    def _old_widths(self) -> dict[str, int]:
        """How many columns what gives columns had in the old model, by its name in the new one."""
        old, new = (of.about.get("features", {}) for of in (self.old, self.new))
        dims = {name: of.get("dim", "1") for name, of in old.items() if name in new}
        found = {name: int(dim) for name, dim in dims.items() if re.fullmatch(r"[0-9]{1,4}", dim)}  # none, if damaged
        for part in ("weights", "statistics", "constants"):
            for one in self.old.about.get(part, ()):
                segments = [*one["inputs"], *one["columns"]]
                found |= {self._layers[origin]: width for origin, width in segments if origin in self._layers}
        return found


def _told(change: PlannedChange) -> str:
    """A change in a few words."""
    detail = (
        change.detail if change.action == "changed" and change.detail else f"{change.action} {change.detail}".rstrip()
    )
    return f"{change.part} {change.name}: {detail}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _kind(layer: str) -> str:
    """The class of a layer that is numbered: dense of dense_1; outputs are recognized by their label alone."""
    head, _, tail = layer.rpartition("_")
    return head if tail.isdigit() else layer


def _align(
    old: Sequence[tuple[str, list[tuple[int, ...]]]], new: Sequence[tuple[str, list[tuple[int, ...]]]]
) -> dict[str, str]:
    """Pairs layers of one class in order, such that the sum of their scores is highest (edit distance's recurrence)."""
    best = np.zeros((len(old) + 1, len(new) + 1))
    for i in reversed(range(len(old))):
        for j in reversed(range(len(new))):
            score = _score(old[i][1], new[j][1])
            best[i, j] = max(best[i + 1, j], best[i, j + 1], score + best[i + 1, j + 1] if score else 0)
    pairs, i, j = {}, 0, 0
    while i < len(old) and j < len(new):
        score = _score(old[i][1], new[j][1])
        if score and best[i, j] == score + best[i + 1, j + 1]:
            pairs[old[i][0]] = new[j][0]
            i, j = i + 1, j + 1
        elif best[i, j] == best[i + 1, j]:
            i += 1
        else:
            j += 1
    return pairs


def _score(old: Sequence[tuple[int, ...]], new: Sequence[tuple[int, ...]]) -> int:
    """How much a layer with weights of these shapes looks like one with those; 0: not at all."""
    if len(old) != len(new) or any(len(a) != len(b) for a, b in zip(old, new, strict=True)):
        return 0
    if list(old) == list(new):
        return 4
    grown = all(a[-1] <= b[-1] and (a[-1] > 1 or b[-1] == 1) for a, b in zip(old, new, strict=True) if a)
    same = all(a[-1] == b[-1] for a, b in zip(old, new, strict=True) if a)
    return 3 if same else 2 if grown else 0


def _shared_axes(old: _Weight, new: _Weight, layers: Mapping[str, str]) -> list[list[_Range]] | None:
    """The part of each axis that both weights have; None: they have nothing in common."""
    if len(old.shape) != len(new.shape):
        return None
    if old.info.inputs and new.info.inputs and len(old.shape) == 2:
        axes = [
            _shared(old.info.inputs, new.info.inputs, layers),
            _shared(old.info.columns, new.info.columns, layers),
        ]
    elif len(old.shape) == 1:
        axes = [_shared(old.info.columns, new.info.columns, layers)]
    elif old.shape == new.shape:
        axes = [[_Range(slice(0, n), slice(0, n))] for n in old.shape]
    else:
        return None
    return axes if all(axes) else None


def _shared(old: Sequence[Segment], new: Sequence[Segment], layers: Mapping[str, str]) -> list[_Range]:
    starts, at = {}, 0
    for origin, width in new:
        starts[origin] = (at, width)
        at += width
    ranges, at = [], 0
    for origin, width in old:
        if (found := starts.get(layers.get(origin, ""))) is not None:
            start, room = found
            shared = min(width, room)
            ranges.append(_Range(slice(at, at + shared), slice(start, start + shared)))
        at += width
    return ranges


def _copy(source: Floats, target: Floats, axes: Sequence[Sequence[_Range]]) -> None:
    if not source.shape:
        target[...] = source
    elif len(axes) == 1:
        for columns in axes[0]:
            target[columns.new] = source[columns.old]
    else:
        for rows in axes[0]:
            if len(axes) == 2:
                for columns in axes[1]:
                    target[rows.new, columns.new] = source[rows.old, columns.old]
            else:  # of the same shape
                target[rows.new] = source[rows.old]
