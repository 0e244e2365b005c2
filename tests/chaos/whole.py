"""Whole: services on one Kafka and one Valkey, with what is written, what is asked, and who watches."""

import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.asking import Asker, Clients, Seen
from tests.chaos.checks import Found, check
from tests.chaos.joining import Joining
from tests.chaos.load import Load
from tests.chaos.network import Loopback, Network, Wired
from tests.chaos.report import Outcome
from tests.chaos.samples import Samples
from tests.chaos.servers import Servers
from tests.chaos.service import PARTITIONS, Service, names_of, until
from tests.chaos.watch import Training

_START = 600.0  # seconds within which services are well for the first time, also on a machine that others use
_DISK = "256m"


class Running:
    """One service, and all that is around it."""

    def __init__(self, service: Service, rate: float, every: float) -> None:
        self.service = service
        self.load = Load(service.stream, service.samples, PARTITIONS, rate)
        self.seen = Seen(service.samples)
        self.asker = Asker(service.listen, service.samples, self.load, self.seen)
        self.clients = Clients(self.asker, self.load, every)
        self.training = Training(service, self.load)

    def is_well(self, ends: Sequence[int]) -> bool:
        """Whether all processes are there, and what is before these offsets is learned, published and served."""
        return not self.service.troubles() and self.asker.ask([*ends])

    def outcome(self, found: Found) -> Outcome:
        """Of the run that has ended."""
        standstill, of = self.training.standstill.worst()
        freshness = max((seconds for _, seconds in self.seen.freshness), default=float("inf"))
        return Outcome(
            samples=sum(self.load.written),
            bad=len(self.load.bad()),
            lost=found.lost,
            doubled=found.doubled,
            training=self.training.longest,
            standstill=standstill,
            standstill_of=of,
            serving=self.seen.longest,
            freshness=freshness,
            requests=dict(self.seen.outcomes),
            wrong=[*found.wrong, *self.seen.wrong],
            starts=self.service.starts(),
        )


class Whole:
    """All of it, from entering on.

    Args:
        folder: for data and logs.
        samples: of each service.
        rate: samples per second that each of the four partitions of a topic gets.
        every: seconds between two requests of a client.
        contained: whether this process is in a container of its own (`network.container`).
        backed: names of those services whose shards have backups.
        spare: whether each service has a process, or a pair of them, that may become a shard.
        clocks: whether clocks of processes can be set.
        settings: of all services, by dotted key, beside their own.
        joined: what is written for joiners; None: there are none.
    """

    def __init__(
        self,
        folder: Path,
        samples: Sequence[Samples],
        *,
        rate: float,
        every: float,
        contained: bool,
        backed: Sequence[str] = (),
        spare: bool = False,
        clocks: bool = True,
        settings: Mapping[str, str] = {},
        joined: random.Random | None = None,
    ) -> None:
        self._folder, self._settings, self._spare = folder, settings, spare
        self.disk = folder / "disk" if contained else None
        checkpoints = folder / "disk"
        checkpoints.mkdir()
        if self.disk is not None:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", self.disk], check=True)
        names = [name for one in samples for name in names_of(one.name, one.name in backed, spare)]
        self.network: Network = Wired(names) if contained else Loopback()
        self.servers = Servers(folder, self.network)
        self._checkpoints = checkpoints
        self.running: list[Running] = []
        for one in samples:
            service = self._service(one, folder, one.name in backed, clocks and not self.running)  # one shows it
            self.running.append(Running(service, rate, every))
        self.joining: Joining | None = None
        if joined is not None:
            secured = self.servers.secured.removeprefix("kafka://")
            self.joining = Joining(folder / "join", self.servers.kafka.servers, secured, joined)

    def _service(self, samples: Samples, folder: Path, backed: bool, clocks: bool) -> Service:
        return Service(
            *(samples, folder, self.network),
            servers=self.servers,
            checkpoints=self._checkpoints,
            backed=backed,
            spare=self._spare,
            clocks=clocks,
            settings=self._settings,
        )

    def copy(self, service: Service, folder: Path) -> Service:
        """The same service once more, with its stream, model and checkpoints, at addresses of its own."""
        return self._service(service.samples, folder, bool(service.settings.ps.backups), clocks=False)

    @property
    def services(self) -> list[Service]:
        """All of them."""
        return [one.service for one in self.running]

    def __enter__(self) -> "Whole":
        try:
            for one in self.running:
                one.service.start()
                one.load.start()
            if self.joining is not None:
                self.joining.start()
            self.until_well(_START)
        except BaseException:
            self.close()
            raise
        for one in self.running:
            one.seen.begin()
            one.clients.start()
            one.training.start()
        return self

    def until_well(self, seconds: float) -> None:
        """Waits until all that is written by now is served by services that lack nothing.

        Raises:
            SystemExit: it takes too long; says what is not well.
        """
        ends = [[*one.load.written] for one in self.running]
        for one, of_one in zip(self.running, ends, strict=True):
            if not until(lambda one=one, of_one=of_one: one.is_well(of_one), seconds):  # type: ignore[misc]
                troubles = one.service.troubles() or [f"{of_one} is not served; shards are at {one.service.clocks()}"]
                raise SystemExit(
                    f"not well within {seconds:g} s: {', '.join(troubles)}, requests: {dict(one.seen.outcomes)}"
                )
        if self.joining is not None:
            self.joining.until_well(seconds)

    def come_to_rest(self, seconds: float) -> dict[str, Outcome]:
        """Ends load and clients, waits until all is learned, and compares everything."""
        for one in self.running:
            one.load.stop()
        self.until_well(seconds)
        found = {}
        for one in self.running:
            one.clients.stop()
            one.training.stop()
            found[one.service.name] = one.outcome(check(one.service, one.load, self._folder))
        if self.joining is not None:
            self.joining.come_to_rest(seconds)
        return found

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all."""
        for one in self.running:
            one.load.abandon()
            one.clients.stop()
            one.training.stop()
            one.service.stop()
        if self.joining is not None:
            self.joining.stop()
        self.servers.stop()
        self.network.close()
