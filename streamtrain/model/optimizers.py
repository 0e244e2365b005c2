"""Optimizers: how a gradient changes embedding rows and dense parameters.

All of them are plain frozen values; the native core does the arithmetic (formulas: streamtrain/_native/optimizer.h).
`SGD`, `Adagrad` and `Adam` serve embedding rows and dense parameters, `RowWiseAdagrad` and `FTRL` embedding rows only.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from streamtrain.errors import ConfigError

# The core computes in float32.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimizers.

    Attributes:
        rate: learning rate, > 0.
    """

    rate: float

    kind: ClassVar[str]
    for_dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
                raise ConfigError(f"{type(self).__name__}: {name} must be a finite number >= 0, not {value!r}")
        for name in ("rate", "epsilon"):
            if getattr(self, name, 1.0) < _SMALLEST:
                raise ConfigError(f"{type(self).__name__}: {name} must be > 0, not {getattr(self, name)!r}")
        decay = getattr(self, "decay", 1.0)
        if not _SMALLEST <= decay <= 1:
            raise ConfigError(f"{type(self).__name__}: decay must be > 0 and at most 1, not {decay!r}")
        for name in ("beta1", "beta2"):
            if np.float32(getattr(self, name, 0.0)) >= 1:
                raise ConfigError(f"{type(self).__name__}: {name} must be < 1, not {getattr(self, name)!r}")

    def settings(self) -> dict[str, Any]:
        """The keyword arguments by which the native core makes this optimizer."""
        return {"optimizer": self.kind, **{name: float(value) for name, value in asdict(self).items()}}


# The optimizer here for each of Keras.
_OF_KERAS = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "Adagrad", "adadelta": "Adagrad", "ftrl": "FTRL"}
ALL = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "FTRL")


def ours(given: object, kinds: Sequence[str] = ALL) -> str:
    """What an optimizer must be instead of what was given, such as one of Keras or its name."""
    expected = f"st.{', st.'.join(kinds[:-1])} or st.{kinds[-1]}"
    name = given if isinstance(given, str) else type(given).__name__
    is_keras = type(given).__module__.partition(".")[0] in ("keras", "tensorflow", "tf_keras")
    if isinstance(given, type) and issubclass(given, Optimizer):
        return f"{expected}, not the class {given.__name__}: write st.{given.__name__}()"
    kind = _OF_KERAS.get(name.lower()) or ("Adam" if "adam" in name.lower() else "")
    if not (is_keras or isinstance(given, str)) or kind not in kinds:
        return f"{expected}, not {given!r}"
    rate = _rate(given)
    what = f"the name {given!r}" if isinstance(given, str) else f"Keras's {name}"
    return f"{expected}, not {what}: use st.{kind}({f'{rate:.4g}' if rate else ''})"


def _rate(optimizer: object) -> float | None:
    """The learning rate of an optimizer of Keras, if it is a number and no schedule."""
    try:
        return float(getattr(optimizer, "learning_rate"))  # noqa: B009  # of a library that is not loaded here
    except (AttributeError, TypeError, ValueError):
        return None


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: w -= rate * g."""

    rate: float = 0.01
    kind: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011), with one accumulator per weight.

    a = decay * a + (1 - decay) * initial_accumulator + g²; w -= rate * g / (√a + epsilon)

    With a `decay` of 1, steps become smaller for ever. With a smaller one, the accumulator forgets, as RMSprop's does,
    and the step of a typical gradient does not fall below rate * √(1 - decay): weights follow a stream that drifts. It
    forgets towards its first value, so that the step of a gradient far below √initial_accumulator is in proportion to
    it, as in SGD: where positives are rare, the many small gradients between two of them move little.
    """

    rate: float = 0.2
    initial_accumulator: float = 0.01
    epsilon: float = 1e-7
    decay: float = 1.0
    kind: ClassVar[str] = "adagrad"


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """`Adagrad` with one accumulator per row, fed with the mean of g² over the row: nearly no optimizer memory."""

    rate: float = 0.2
    initial_accumulator: float = 0.01
    epsilon: float = 1e-7
    decay: float = 1.0
    kind: ClassVar[str] = "rowwise_adagrad"
    for_dense: ClassVar[bool] = False


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma & Ba 2015). Rows are updated lazily: only those of the batch, each by its own step counter."""

    rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7
    kind: ClassVar[str] = "adam"


@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-proximal (McMahan et al. 2013, algorithm 1); `rate` is its alpha. `l1` drives weights to exactly zero."""

    rate: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator: float = 0.1
    kind: ClassVar[str] = "ftrl"
    for_dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta + self.initial_accumulator:
            raise ConfigError("FTRL: beta or initial_accumulator must be > 0")
