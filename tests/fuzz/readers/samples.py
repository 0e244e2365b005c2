"""Samples: the decoder gives what the oracle in plain Python, with the json module, gives.

Input: as of decode.cc, with fewer messages.
"""

from collections.abc import Iterator

from tests.fuzz import seeds as made
from tests.native.test_decode import SCHEMA, assert_as_oracle, make_decoder
from tests.oracles.decode import Categorical, Cross, Label, Numeric, Schema

_MOST_MESSAGES = 4
HARD = Schema(
    labels=(Label("a", "real", optional=True),),
    categoricals=(
        Categorical("a", 2, ("0",)),
        Categorical("b"),
        Categorical("", 1, ("",)),
        Categorical('qu"ote', 0, ("x",)),
        Categorical("nul\0", 7, ()),
    ),
    crosses=(Cross("x1", (0, 1, 2), 2), Cross("x2", (1, 1))),
    numerics=(Numeric("a", 0.0, "standardize", 2.5, 0.5), Numeric("b", 1.0)),
    time="a",
    max_message_bytes=120,
    max_id_bytes=14,
    max_ids=6,
    max_depth=3,
)
_CLASSES = Schema(
    labels=(Label("label", optional=True, positive="1"), Label("user", positive="u1")),
    time="ts",
    per_second=1e3,
    max_ids=1,
    max_depth=256,
)
_SCHEMAS = [SCHEMA, HARD, Schema(max_depth=256), _CLASSES]
_DECODERS = [make_decoder(schema) for schema in _SCHEMAS]


def run(data: bytes) -> None:
    """One input."""
    if not data:
        return
    which = data[0] % len(_SCHEMAS)
    messages = data[1:].split(b"\xff")[:_MOST_MESSAGES]
    assert_as_oracle(_DECODERS[which], _SCHEMAS[which], messages, data[0] >= 0x80)


def seeds() -> Iterator[bytes]:
    """Those of decode.cc."""
    return made.decode()
