"""The gate: what holds a publication back."""

from typing import Any

import pytest

from streamtrain.errors import GateClosed
from streamtrain.quality.gate import check_gate, gate_faults
from streamtrain.settings.groups import GateSettings

GOOD = {
    "samples": 20_000,
    "auc": 0.78,
    "log_loss": 0.30,
    "mean_squared_error": None,
    "calibration": 1.02,
    "non_finite": 0,
}


def window(**figures: Any) -> dict[str, Any]:
    return {"label": GOOD | figures}


def test_what_is_not_finite_is_held_back_without_any_other_to_compare_with() -> None:
    assert gate_faults(GateSettings(), window(non_finite=3)) == ["label: 3 predictions in the window are not finite"]
    assert gate_faults(GateSettings(non_finite=False), window(non_finite=3)) == []
    with pytest.raises(GateClosed, match="version 7 is held back: label: 3 predictions"):
        check_gate(GateSettings(), "version 7", window(non_finite=3))


@pytest.mark.parametrize(
    ("gate", "passes", "fails"),
    [
        (GateSettings(auc_drop=0.01), {"auc": 0.7701}, {"auc": 0.7699}),
        (GateSettings(loss_rise=0.1), {"log_loss": 0.3299}, {"log_loss": 0.3301}),
        (GateSettings(calibration=0.05), {"calibration": 1.069}, {"calibration": 1.071}),
        (GateSettings(calibration=0.05), {"calibration": 0.931}, {"calibration": 0.929}),
    ],
)
def test_worse_by_more_than_the_margin_is_held_back(
    gate: GateSettings, passes: dict[str, Any], fails: dict[str, Any]
) -> None:
    assert gate_faults(gate, window(**passes), window()) == []
    (fault,) = gate_faults(gate, window(**fails), window())
    assert next(iter(fails)) in fault
    assert gate_faults(gate, window(**fails)) == []
    assert gate_faults(GateSettings(), window(**fails), window()) == []


@pytest.mark.parametrize(
    ("gate", "good", "now"),
    [
        (GateSettings(auc_drop=0.25), {"auc": 0.75}, {"auc": 0.5}),
        (GateSettings(loss_rise=0.5), {"log_loss": 0.5}, {"log_loss": 0.75}),
        (GateSettings(calibration=0.25), {"calibration": 1.0}, {"calibration": 1.25}),
        (GateSettings(calibration=0.25), {"calibration": 0.75}, {"calibration": 1.5}),
    ],
)
def test_the_margin_itself_is_allowed(gate: GateSettings, good: dict[str, Any], now: dict[str, Any]) -> None:
    assert gate_faults(gate, window(**now), window(**good)) == []


def test_calibration_is_compared_by_its_distance_from_1() -> None:
    (fault,) = gate_faults(GateSettings(calibration=0.25), window(calibration=1.75), window(calibration=0.75))
    assert fault == "label: calibration 1.7500 is further from 1 than 0.7500 by more than 0.25"


def test_the_loss_of_a_regression_counts_too() -> None:
    gate, regression = GateSettings(loss_rise=0.5, auc_drop=1e-9), {"auc": None, "log_loss": None}
    good = window(**regression, mean_squared_error=4.0)
    assert gate_faults(gate, window(**regression, mean_squared_error=5.9), good) == []
    assert gate_faults(gate, window(**regression, mean_squared_error=6.5), good)


@pytest.mark.parametrize("side", ["now", "good"])
def test_small_windows_are_not_compared(side: str) -> None:
    gate, small = GateSettings(auc_drop=1e-9), {"samples": 9_999}
    now = window(auc=0.5, **(small if side == "now" else {}))
    assert gate_faults(gate, now, window(**(small if side == "good" else {}))) == []
    assert gate_faults(gate, window(auc=0.5, samples=10_000), window(samples=10_000)) != []


@pytest.mark.parametrize("none", [0, None])
def test_windows_without_samples_are_never_compared(none: int | None) -> None:
    gate = GateSettings(auc_drop=1e-9, min_samples=0)
    assert gate_faults(gate, window(auc=0.5, samples=none), window()) == []
    assert gate_faults(gate, window(auc=0.5), window(samples=none)) == []
    assert gate_faults(gate, window(auc=0.5, samples=1), window(samples=1)) != []


def test_undefined_figures_and_other_labels_hold_nothing_back() -> None:
    gate = GateSettings(auc_drop=1e-9, loss_rise=1e-9, calibration=1e-9)
    assert gate_faults(gate, window(auc=None, log_loss=None, calibration=None), window()) == []
    assert gate_faults(gate, {}, window()) == []
    assert gate_faults(gate, {"other": {"samples": 50_000, "auc": 0.1}}, window()) == []
