"""Windows: what the figures of workers are computed from, as it is sent and merged; LabelWindow of schemas/ps.proto."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import streamtrain.ps.ps_pb2 as pb
from streamtrain.errors import ShardRefused
from streamtrain.train.progressive import BINS, Metrics, Sums

_SUMS = ("weight", "labels", "predictions", "loss", "absolute")
_MOST_SAMPLES = 1 << 53  # beyond which floats do not count any more
_ROUNDING = 1e-6


def encode(sums: Mapping[str, Sums]) -> list[Any]:
    """Sums by label, as messages."""
    return [_encoded(label, of_label) for label, of_label in sums.items()]


def _encoded(label: str, sums: Sums) -> Any:
    flat = sums.counts.ravel()
    bins = np.flatnonzero(flat)
    return pb.LabelWindow(
        label=label,
        binary=sums.binary,
        samples=sums.samples,
        non_finite=sums.non_finite,
        **{name: getattr(sums, name) for name in _SUMS},
        bins=bins.astype("<u2").tobytes(),
        counts=flat[bins].astype("<f8").tobytes(),
    )


def decode(windows: Iterable[Any]) -> dict[str, Sums]:
    """Sums by label, of messages.

    Raises:
        ShardRefused: they are damaged.
    """
    found: dict[str, Sums] = {}
    for window in windows:
        if not window.label or window.label in found:
            raise ShardRefused(f"a window names label {window.label!r}, which is none or had one already")
        try:
            found[window.label] = _decoded(window)
        except ValueError as exc:
            raise ShardRefused(f"the window of label {window.label!r} is damaged: {exc}") from exc
    return found


def _decoded(window: Any) -> Sums:
    sums = Sums(window.binary)
    sums.samples, sums.non_finite = window.samples, window.non_finite
    for name in _SUMS:
        setattr(sums, name, getattr(window, name))
    given = np.array([getattr(sums, name) for name in _SUMS])
    if max(sums.samples, sums.non_finite) > _MOST_SAMPLES or not np.isfinite(given).all():
        raise ValueError(f"its sums are {given.tolist()} of {sums.samples} samples")
    if min(sums.weight, sums.absolute) < 0:
        raise ValueError("its weights or errors are negative")
    bins, counts = np.frombuffer(window.bins, "<u2"), np.frombuffer(window.counts, "<f8")
    if len(bins) != len(counts) or (len(bins) and not sums.binary):
        raise ValueError(f"it has {len(bins)} bins and {len(counts)} counts")
    if (np.diff(bins.astype(np.int64)) <= 0).any() or (bins >= 2 * BINS).any():
        raise ValueError(f"its bins do not ascend to at most {2 * BINS - 1}")
    if not (np.isfinite(counts) & (counts > 0)).all():
        raise ValueError("its counts are not finite and above 0")
    if sums.binary and abs(counts.sum() - sums.weight) > _ROUNDING * sums.weight:
        raise ValueError(f"its counts add up to {counts.sum()}, not to {sums.weight}")
    sums.counts.ravel()[bins] = counts
    return sums


def merged(windows: Iterable[Mapping[str, Sums]]) -> dict[str, Metrics]:
    """By label the figures over all samples of some windows."""
    found: dict[tuple[str, bool], Sums] = {}
    for window in windows:
        for label, sums in window.items():
            found.setdefault((label, sums.binary), Sums(sums.binary)).merge(sums)
    return {label: sums.metrics() for (label, _), sums in found.items()}
