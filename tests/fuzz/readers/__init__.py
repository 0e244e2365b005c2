"""Readers under atheris: each module has `run`, which raises on what must not be, and `seeds`."""

from collections.abc import Callable

import numpy as np

from streamtrain.model.samples import REASONS
from streamtrain.stream.formats.factory import Format

_REASONS = {*REASONS, "not_avro", "not_protobuf", "unknown_schema"}


def tried(what: Callable[[], object], *refusals: type[Exception]) -> None:
    """What refuses, refuses by a documented error with a message."""
    try:
        what()
    except refusals as exc:
        if not str(exc):
            raise AssertionError("the refusal does not say why") from exc


def read(one: Format, message: bytes) -> None:
    """A message is read or refused by a name that is documented, and means the same between others."""
    batch, bad = one.decode([message])
    assert len(batch) + len(bad) == 1
    assert all(refused.reason in _REASONS for refused in bad), bad
    among, bad_among = one.decode([b"\xff", message, b"", message])
    assert [refused.reason for refused in bad_among if refused.index in (1, 3)] == 2 * [
        refused.reason for refused in bad
    ]
    places = [place for place in range(len(among)) if among.kept[place] in (1, 3)]
    for place in places:
        np.testing.assert_array_equal(among.numeric[place], batch.numeric[0])
        np.testing.assert_array_equal(among.labels[place], batch.labels[0])
