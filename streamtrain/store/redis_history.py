"""The history of a model's versions: what was done to them, by whom and why."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.plain import converted, parsed


class Deed(NamedTuple):
    """Something that was done to versions.

    Attributes:
        at: when, seconds since the epoch.
        what: "version", "label", "rollback" or "delete".
        who: did it.
        why: as was said.
        version: of which it was done; None: a label was removed, so that of "prod" the head is served.
        label: that was changed, or "".
        was: the label's version before; None: no version had it.
        metrics: of the version, or of the head that is served from then on.
    """

    at: float
    what: str
    who: str
    why: str
    version: int | None
    label: str
    was: int | None
    metrics: Mapping[str, Mapping[str, float | None]]


def deed_of(entry: bytes, flat: Any) -> Deed:
    """What an entry of the history says: its id, and its fields, flat or as a dict.

    Raises:
        PublicationCorrupt: it lacks something, or is damaged.
    """
    try:
        return _deed_of(entry, flat)
    except (KeyError, ValueError) as exc:
        raise PublicationCorrupt(f"entry {entry.decode()} of the history of versions is damaged: {exc!r}") from exc


def _deed_of(entry: bytes, flat: Any) -> Deed:
    fields = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    text = {name.decode(): value.decode() for name, value in fields.items()}
    version, was = (int(text[name]) if text[name] else None for name in ("version", "was"))
    at = int(entry.partition(b"-")[0]) / 1000
    metrics = converted(dict[str, dict[str, int | float | None]], parsed(text["metrics"]))
    return Deed(at, text["what"], text["who"], text["why"], version, text["label"], was, metrics)
