"""Endings: what a service does not come back from, and must not learn wrongly from either, at the end of a run."""

import time
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.chaos.asking import Asker
from tests.chaos.checks import check
from tests.chaos.service import PARTITIONS, Service, until
from tests.chaos.whole import Running, Whole

_SECONDS = 240.0  # in which a cluster that is started must have everything, also on a machine that others use
_MORE = 50

Ending = Callable[[Whole, Running, Path], tuple[float, list[str]]]
"""Ends a service that is at rest; gives the seconds until all was as it should be, and what was not."""


def twin_cluster(whole: Whole, running: Running, folder: Path) -> tuple[float, list[str]]:
    """A second copy of the cluster is started, with its checkpoints: it takes over, and the first one stops.

    The second one goes on as the service.
    """
    first, began = running.service, time.monotonic()
    twin = whole.copy(first, folder / "twin")
    twin.start()
    running.service = twin
    ends = dict(enumerate(running.load.written))

    def is_at_the_end() -> bool:
        """Of what was written, in partitions that were there from the beginning."""
        return all(ends == {p: one.get(p, 0) for p in ends} for one in twin.clocks() or [{}])

    try:
        if not until(lambda: is_at_the_end() and not twin.troubles(), _SECONDS):
            return _SECONDS, [f"the twin is not well: {twin.clocks()}, {twin.troubles()}\n{twin.said()}"]
        if not until(lambda: first.has_said("has taken over this run"), _SECONDS):
            return _SECONDS, [f"the first cluster goes on beside its twin:\n{first.said()}"]
        seconds = time.monotonic() - began
    finally:
        first.stop()
    asker = Asker(twin.listen, twin.samples, running.load, running.seen)
    if not until(lambda: asker.ask([*running.load.written]), _SECONDS):
        return _SECONDS, [f"the twin does not serve what was learned:\n{twin.said()}"]
    found = check(twin, running.load, folder)
    return seconds, [f"of the twin: {one}" for one in found.wrong]


def topic_made_anew(whole: Whole, running: Running, folder: Path) -> tuple[float, list[str]]:
    """The topic is deleted, made again and filled beyond where the clocks stand: nothing of it may be learned."""
    service, began = running.service, time.monotonic()
    before = _learned(service)
    servers = whole.servers.stream.removeprefix("kafka://")
    _delete(servers, service.stream.topic)
    service.stream.create(PARTITIONS)
    writer = service.stream.writer()
    for partition, written in enumerate(running.load.written):
        for offset in range(written + _MORE):
            writer.write(service.samples.message(partition, offset, time.time()), partition=partition)
    while writer.flush(1.0):
        continue
    writer.close()
    if not until(lambda: service.has_said("has been deleted and created again"), _SECONDS):
        return _SECONDS, [f"nobody says that topic {service.stream.topic} is another:\n{service.said()}"]
    seconds = time.monotonic() - began
    return seconds, [] if _learned(service) == before else [f"samples went from {before} to {_learned(service)}"]


def _delete(servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    admin.delete_topics([topic])[topic].result(30)

    def is_gone() -> bool:
        try:
            return topic not in admin.list_topics(timeout=5).topics
        except KafkaException:
            return False

    if not until(is_gone, 30):
        raise SystemExit(f"topic {topic} cannot be deleted")


def _learned(service: Service) -> list[dict[int, int]] | None:
    """Clocks of the shards, once they answer."""
    until(lambda: service.clocks() is not None, _SECONDS)
    return service.clocks()


ENDINGS: dict[str, Ending] = {"twin cluster": twin_cluster, "topic made anew": topic_made_anew}
