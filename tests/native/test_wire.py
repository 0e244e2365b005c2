"""Sixteen-bit floats against those of NumPy and ml_dtypes."""

from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from streamtrain import _core

Name = Literal["float16", "bfloat16"]
NAMES: list[Name] = ["float16", "bfloat16"]
TYPES: dict[Name, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LARGEST: dict[Name, float] = {"float16": 65504.0, "bfloat16": 255 * 2.0**120}
SIGN = np.uint16(0x8000)


def nearest(values: NDArray[np.float32], name: Name) -> NDArray[np.uint16]:
    """Bits of what NumPy rounds to, except that finite values stay finite."""
    clipped = np.where(np.isfinite(values), np.clip(values, -LARGEST[name], LARGEST[name]), values).astype(np.float32)
    bits: NDArray[np.uint16] = clipped.astype(TYPES[name]).view(np.uint16)
    return bits


def assert_narrow(values: NDArray[np.float32], name: Name) -> None:
    bits = _core.narrow(values, name)
    number = ~np.isnan(values)
    assert_array_equal(bits[number], nearest(values[number], name))
    assert np.isnan(bits[~number].view(TYPES[name]).astype(np.float32)).all()
    assert_array_equal(bits & SIGN != 0, np.signbit(values))


@pytest.mark.parametrize("name", NAMES)
def test_every_sixteen_bits_widened(name: Name) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    wide = _core.widen(bits, name)
    expected = bits.view(TYPES[name]).astype(np.float32)
    number = ~np.isnan(expected)
    assert_array_equal(np.isnan(wide), ~number)
    assert_array_equal(wide[number].view(np.uint32), expected[number].view(np.uint32))
    assert_array_equal(_core.narrow(wide, name)[number], bits[number])


@pytest.mark.parametrize("name", NAMES)
def test_random_bits_narrowed(name: Name) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 1_000_001, dtype=np.uint32)
    assert_narrow(bits.view(np.float32), name)


@pytest.mark.parametrize("name", NAMES)
def test_values_around_every_step_narrowed(name: Name) -> None:
    """Both sides of each value that the format has, and of the middle between it and the next one."""
    steps = np.arange(2**16, dtype=np.uint16).view(TYPES[name]).astype(np.float32)
    exact = np.sort(steps[np.isfinite(steps)].astype(np.float64))
    values = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2]).astype(np.float32)
    sides = [np.nextafter(values, np.float32(end)) for end in (-np.inf, np.inf)]
    assert_narrow(np.concatenate([values, *sides]), name)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_so_and_what_is_finite_too(name: Name) -> None:
    payloads = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC00000, 0x7F801000], np.uint32).view(np.float32)
    back = _core.widen(_core.narrow(payloads, name), name)
    assert np.isnan(back).all()
    values = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, -0.0, 1e-45], np.float32)
    back = _core.widen(_core.narrow(values, name), name)
    largest = np.float32(LARGEST[name])
    assert back.tolist() == [np.inf, -np.inf, largest, -largest, 0, 0, 0]
    assert_array_equal(np.signbit(back), np.signbit(values))


def test_into_what_is_given() -> None:
    values = np.array([1, -2, 0.5], np.float32)
    bits = np.zeros(5, np.uint16)
    assert np.shares_memory(_core.narrow(values, "float16", out=bits[1:4]), bits)
    assert_array_equal(bits.view(np.float16), [0, 1, -2, 0.5, 0])
    wide = np.full(4, 9, np.float32)
    assert np.shares_memory(_core.widen(bits[1:4], "float16", out=wide[:3]), wide)
    assert wide.tolist() == [1, -2, 0.5, 9]
    assert len(_core.narrow(values[:0], "bfloat16")) == len(_core.widen(bits[:0], "bfloat16")) == 0


def test_bad_arguments() -> None:
    values, bits = np.ones(3, np.float32), np.ones(3, np.uint16)
    for name in ("float32", "half"):
        with pytest.raises(ValueError, match="dtype must be float16 or bfloat16"):
            _core.narrow(values, name)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="dtype must be float16 or bfloat16"):
            _core.widen(bits, name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out must have as many elements"):
        _core.narrow(values, "float16", out=np.ones(2, np.uint16))
    with pytest.raises(ValueError, match="out must have as many elements"):
        _core.widen(bits, "float16", out=np.ones(4, np.float32))
    with pytest.raises(TypeError):
        _core.narrow(np.ones(3), "float16")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _core.widen(values, "float16")  # type: ignore[arg-type]
