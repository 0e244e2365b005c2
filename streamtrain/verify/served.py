"""Verify, the part of servers: the rows that a server holds against those in Redis."""

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from streamtrain.errors import PublicationCorrupt
from streamtrain.publish.versions import row_widths
from streamtrain.serve.client import Endpoint, EndpointError
from streamtrain.serve.registry import HEAD
from streamtrain.serve.rows.replica import Replica
from streamtrain.store.publication import Origin, Publication

_TRIES = 3  # of loading the head, which may be replaced
_PAUSE = 0.2  # seconds between polls of a server that is behind


class ServedComparison(NamedTuple):
    """How one publication that a server holds compares.

    Attributes:
        name: "head", or the number of the version.
        publication: its number.
        rows: by table, that the server holds.
        fault: what differs, in a sentence; "": nothing.
    """

    name: str
    publication: int
    rows: dict[str, int]
    fault: str

    @property
    def agrees(self) -> bool:
        return not self.fault


def compare_served(endpoint: Endpoint, model: str, origin: Origin, patience: float = 30.0) -> list[ServedComparison]:
    """Loads what a server holds afresh, as a server does, one publication after another, and compares.

    Needs the memory of the largest of them.

    Args:
        endpoint: of the server, with the admin token.
        model: as the server calls it.
        origin: where the server loads from.
        patience: seconds to wait for a server that is behind the head.

    Raises:
        EndpointError: the server does not answer, refuses, or holds no rows.
        OriginUnavailable: the origin does not answer.
    """
    found = []
    for first in endpoint.checksums(model):
        name, told = str(first["name"]), first
        try:
            if name == HEAD:
                told, loaded = _head(endpoint, model, origin, patience)
            else:
                loaded = _loaded(origin, int(name))
            fault = _fault(told, loaded)
        except PublicationCorrupt as exc:
            fault = str(exc)
        rows = {table: int(one["rows"]) for table, one in told["tables"].items()}
        found.append(ServedComparison(name, int(told["publication"]["number"]), rows, fault))
    return found


def _loaded(origin: Origin, version: int | None) -> Replica:
    publication = origin.find(version)
    if publication is None:
        what = "a head" if version is None else f"version {version}"
        raise PublicationCorrupt(f"{origin.name} no longer has {what}")
    replica = Replica(publication, [*row_widths(publication)], lambda weights: None)
    replica.complete(*origin.load(publication, replica.take))
    return replica


def _head(endpoint: Endpoint, model: str, origin: Origin, patience: float) -> tuple[dict[str, Any], Replica]:
    """What the server tells of its head, and the same publication: it is loaded, then followed so far."""
    for attempt in range(_TRIES):
        try:
            loaded = _loaded(origin, None)
            told = _told_of(endpoint, model, loaded.publication.number, patience)
            _follow(origin, loaded, int(told["publication"]["number"]), patience)
            return told, loaded
        except PublicationCorrupt:  # it was replaced, or moves faster than it is read
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _told_of(endpoint: Endpoint, model: str, number: int, patience: float) -> dict[str, Any]:
    """What the server tells of its head, once that is a publication or a later one."""
    deadline, pause = time.monotonic() + patience, threading.Event()
    while True:
        told = next((one for one in endpoint.checksums(model) if one["name"] == HEAD), None)
        if told is None:
            raise EndpointError(f"{endpoint.url} unloaded the head meanwhile: try again")
        if int(told["publication"]["number"]) >= number:
            return told
        if time.monotonic() >= deadline:
            raise PublicationCorrupt(
                f"the server is still at publication {told['publication']['number']} after {patience:g} s; the head is "
                f"{number}"
            )
        pause.wait(_PAUSE)


def _follow(origin: Origin, loaded: Replica, number: int, patience: float) -> None:
    deadline = time.monotonic() + patience
    while loaded.publication.number < number:
        if time.monotonic() >= deadline:
            raise PublicationCorrupt(f"the server has publication {number}, which {origin.name} does not")
        for step in origin.follow(loaded.publication, 1.0):
            loaded.apply(step)
            if step.publication.number == number:
                break


def _fault(told: Mapping[str, Any], loaded: Replica) -> str:
    """What differs, in a sentence."""
    theirs, mine = told["publication"], _identity(loaded.publication)
    if any(theirs.get(name) != value for name, value in mine.items()):
        return f"the server's publication {loaded.publication.number} is not the one in Redis"
    for table, one in loaded.checksums().tables.items():
        there = told["tables"].get(table, {"rows": 0, "checksum": ""})
        if there["rows"] != one.rows:
            return f"table {table} has {there['rows']} rows on the server, {one.rows} in Redis"
        if there["checksum"] != f"{one.checksum:016x}":
            return f"table {table}: rows differ from Redis"
    return ""


def _identity(publication: Publication) -> dict[str, Any]:
    described = publication.to_json()
    return {name: described[name] for name in ("number", "version", "run", "clock")}
