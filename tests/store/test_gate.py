"""The gate: what holds a publication back."""

from typing import Any

import pytest

from streamtrain.store.gate import Gate, GateClosed

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
    assert Gate().faults(window(non_finite=3)) == ["label: 3 predictions of its window are not finite"]
    assert Gate(non_finite=False).faults(window(non_finite=3)) == []
    with pytest.raises(GateClosed, match="version 7 is held back: label: 3 predictions"):
        Gate().check("version 7", window(non_finite=3))


@pytest.mark.parametrize(
    ("gate", "passes", "fails"),
    [
        (Gate(auc_drop=0.01), {"auc": 0.7701}, {"auc": 0.7699}),
        (Gate(loss_rise=0.1), {"log_loss": 0.3299}, {"log_loss": 0.3301}),
        (Gate(calibration=0.05), {"calibration": 1.069}, {"calibration": 1.071}),
        (Gate(calibration=0.05), {"calibration": 0.931}, {"calibration": 0.929}),
    ],
)
def test_worse_by_more_than_the_margin_is_held_back(gate: Gate, passes: dict[str, Any], fails: dict[str, Any]) -> None:
    assert gate.faults(window(**passes), window()) == []
    (fault,) = gate.faults(window(**fails), window())
    assert next(iter(fails)) in fault
    assert gate.faults(window(**fails)) == []
    assert Gate().faults(window(**fails), window()) == []


def test_the_loss_of_a_regression_counts_too() -> None:
    good = window(auc=None, log_loss=None, mean_squared_error=4.0)
    assert Gate(loss_rise=0.5, auc_drop=0.0).faults(window(auc=None, log_loss=None, mean_squared_error=6.5), good)


@pytest.mark.parametrize("side", ["now", "good"])
def test_small_windows_are_not_compared(side: str) -> None:
    gate, small = Gate(auc_drop=0.0), {"samples": 9_999}
    now = window(auc=0.5, **(small if side == "now" else {}))
    assert gate.faults(now, window(**(small if side == "good" else {}))) == []
    assert gate.faults(window(auc=0.5), window()) != []


def test_undefined_figures_and_other_labels_hold_nothing_back() -> None:
    gate = Gate(auc_drop=0.0, loss_rise=0.0, calibration=0.0)
    assert gate.faults(window(auc=None, log_loss=None, calibration=None), window()) == []
    assert gate.faults({}, window()) == []
    assert gate.faults({"other": {"samples": 50_000, "auc": 0.1}}, window()) == []
