"""Faults: what goes wrong, for how long, and whether it can be made to here."""

import errno
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

from tests.chaos.joining import Joining
from tests.chaos.load import Load, Poison, broken, future, large
from tests.chaos.servers import Servers
from tests.chaos.service import COORDINATOR, PS, SERVE, WORKER, Service, faketime, until
from tests.chaos.wire import Trouble

CLOCK = "clock jump"
SCALES = ("other shards", "kill among other shards", "cut among other shards")
_SCALING = 4.0  # seconds within which something goes wrong: about as long as it takes
_PAUSE = threading.Event()
_BLOCK = bytes(1 << 16)
_LATE = 6.0  # seconds: longer than a command to Redis may take
_STOPPED = 2.5  # times as long as others: longer than any lease and session
_AWAY = 3.5  # the same: longer than a request to Kafka may take


@dataclass(frozen=True)
class Site:
    """Where faults happen.

    Attributes:
        services: all of them.
        loads: theirs, in the same order.
        servers: Kafka and Valkey.
        disk: a small disk with the checkpoints; None: they are on a large one.
        random: chooses.
        longest: seconds that a fault may last.
        joining: joiners; None: there are none.
    """

    services: list[Service]
    loads: list[Load]
    servers: Servers
    disk: Path | None
    random: random.Random
    longest: float
    joining: Joining | None = None

    def service(self) -> Service:
        """Any."""
        return self.random.choice(self.services)

    def seconds(self, least: float = 0.3) -> float:
        """How long a fault lasts, from a share of the longest on."""
        return self.longest * self.random.uniform(least, 1)

    def process(self, kind: str) -> tuple[Service, str]:
        """Any process of a kind."""
        service = self.service()
        return service, self.random.choice(service.of(kind))

    def any(self) -> tuple[Service, str]:
        """Any process of a service."""
        return self.process(self.random.choice([PS, WORKER, COORDINATOR, SERVE]))


Fault = Callable[[Site], AbstractContextManager[str]]
"""Goes wrong on entering, which says what does, and is over on leaving."""


def _pid_of(service: Service, name: str) -> int:
    """A process that runs; of serving processes any."""
    until(lambda: service.pid(name) is not None, 60)
    if name.endswith(SERVE):
        until(service.serving, 60)
        return service.serving()[-1]
    pid = service.pid(name)
    if pid is None:
        raise SystemExit(f"{name} does not start again")
    return pid


def killed(kind: str) -> Fault:
    """Kill -9 of one of the service's processes."""

    @contextmanager
    def kill(site: Site) -> Iterator[str]:
        service, name = site.process(kind)
        os.kill(_pid_of(service, name), signal.SIGKILL)
        yield name

    return kill


def server_killed(kind: str) -> Fault:
    """Kill -9 of "kafka" or "valkey", and away for a while."""

    @contextmanager
    def kill(site: Site) -> Iterator[str]:
        server = getattr(site.servers, kind)
        server.kill()
        seconds = _AWAY * site.longest if site.random.random() < 0.2 else site.seconds(0.0) / 3
        _PAUSE.wait(seconds)
        server.start()
        yield f"for {seconds:.1f} s"

    return kill


def stopped(kind: str) -> Fault:
    """SIGSTOP, and SIGCONT after a while: a process that does not know how late it is."""

    @contextmanager
    def stop(site: Site) -> Iterator[str]:
        service, name = site.process(kind)
        pid, seconds = _pid_of(service, name), _STOPPED * site.seconds()
        os.kill(pid, signal.SIGSTOP)
        _PAUSE.wait(seconds)
        os.kill(pid, signal.SIGCONT)
        yield f"{name} for {seconds:.1f} s"

    return stop


def joiner_gone(number: int) -> Fault:
    """A signal for a joiner: one that ends it, or SIGSTOP, and SIGCONT after a while."""

    @contextmanager
    def go(site: Site) -> Iterator[str]:
        assert site.joining is not None
        name = site.random.choice(site.joining.names)
        seconds = _STOPPED * site.seconds() if number == signal.SIGSTOP else 0.0
        with site.joining.gone(name, number):
            _PAUSE.wait(seconds)
        yield f"{name} for {seconds:.1f} s" if seconds else name

    return go


@contextmanager
def flushed(site: Site) -> Iterator[str]:
    """All that was published is gone."""
    site.servers.forget()
    yield "Valkey"


def _fill(file: RawIOBase) -> None:
    """Writes until nothing more can be written, whatever others write or remove meanwhile."""
    try:
        while True:
            file.write(_BLOCK)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise


@contextmanager
def disk_full(site: Site) -> Iterator[str]:
    """No checkpoint can be written."""
    assert site.disk is not None
    filler, seconds = site.disk / "filler", site.seconds()
    with filler.open("wb", buffering=0) as file:
        _fill(file)
    _PAUSE.wait(seconds)
    filler.unlink()
    yield f"for {seconds:.1f} s"


@contextmanager
def cut(site: Site) -> Iterator[str]:
    """One process reaches nobody; or a shard not one of the workers, nor its own backup."""
    service, one = site.any()
    others: list[str | None] = [None]
    if (chosen := site.random.random()) < 0.6:
        one = site.random.choice(service.of(PS))
        others = [service.of(WORKER)[0]]
        others += [peer] if chosen < 0.3 and (peer := service.peer(one)) else []
    seconds = site.seconds()
    with service.network.trouble(*(Trouble(one, other) for other in others)):
        _PAUSE.wait(seconds)
    yield f"{one} from {' and '.join(other or 'all' for other in others)} for {seconds:.1f} s"


@contextmanager
def slow(site: Site) -> Iterator[str]:
    """100 ms more, and 1 % lost, between one process and all others."""
    service, one = site.any()
    seconds = site.seconds()
    with service.network.trouble(Trouble(one, None, delay=0.1, loss=0.01)):
        _PAUSE.wait(seconds)
    yield f"{one} for {seconds:.1f} s"


@contextmanager
def clock_wrong(site: Site) -> Iterator[str]:
    """The clock of one process jumps, and jumps back."""
    service = site.services[0]
    name = site.random.choice(service.clocked)
    by, seconds = site.random.choice([-86400, -60, 60, 3600, 86400]), site.seconds()
    service.set_clock(name, by)
    _PAUSE.wait(seconds)
    service.set_clock(name, 0)
    yield f"{name} by {by} s for {seconds:.1f} s"


@contextmanager
def slow_consumer(site: Site) -> Iterator[str]:
    """A worker that gets a tenth of its time."""
    service, name = site.process(WORKER)
    pid, seconds = _pid_of(service, name), site.seconds()
    for _ in range(round(seconds / 0.5)):
        os.kill(pid, signal.SIGSTOP)
        _PAUSE.wait(0.45)
        os.kill(pid, signal.SIGCONT)
        _PAUSE.wait(0.05)
    yield f"{name} for {seconds:.1f} s"


def poisoned(how: Poison, least: int, most: int) -> Fault:
    """Many bad messages, one after another."""

    @contextmanager
    def poison(site: Site) -> Iterator[str]:
        count = site.random.randrange(least, most)
        for load in site.loads:
            load.poison(count, how)
        yield f"{count} messages in each partition"

    return poison


@contextmanager
def lost_part(site: Site) -> Iterator[str]:
    """Some of the rows that were published are gone, and the head is not."""
    yield f"{site.servers.lose(site.random)} buckets"


@contextmanager
def lost_keys(site: Site) -> Iterator[str]:
    """Some of what is known of models beside their rows is gone."""
    yield ", ".join(site.servers.lose_keys(site.random)) or "nothing"


@contextmanager
def more_partitions(site: Site) -> Iterator[str]:
    """A topic gets a partition, and after a while a transaction in it that stays open, and is aborted."""
    service = site.service()
    number, seconds = site.servers.add_partition(service.name), site.seconds()
    with site.servers.transaction(service.name, number):
        _PAUSE.wait(seconds)
    yield f"partition {number} of {service.name}, and a transaction for {seconds:.1f} s"


@contextmanager
def another_worker(site: Site) -> Iterator[str]:
    """A worker comes, and leaves in good order."""
    service = site.service()
    seconds = _STOPPED * site.seconds()
    with service.guest():
        _PAUSE.wait(seconds)
    yield f"of {service.name} for {seconds:.1f} s"


_MAPS = ([0, 1], [0, 2, 1], [2, 1], [1], [1, 0, 2])
"""Shards by slot, to which their number is changed."""


def _next_shards(site: Site, service: Service) -> list[int]:
    now = service.shards()
    return site.random.choice([one for one in _MAPS if one != now])


@contextmanager
def scaled(site: Site) -> Iterator[str]:
    """Other shards hold the rows."""
    service = site.service()
    before, after = service.shards(), _next_shards(site, service)
    done = service.scale(after)
    if done.returncode:
        raise SystemExit(f"{service.name} has not got shards {after} instead of {before}: {done.stderr}")
    yield f"{before} to {after} of {service.name}"


def scaled_under(trouble: Callable[[Site, Service], AbstractContextManager[str]]) -> Fault:
    """Other shards are to hold the rows, while something else goes wrong: it is done, or it is not."""

    @contextmanager
    def scale(site: Site) -> Iterator[str]:
        service = site.service()
        before, after = service.shards(), _next_shards(site, service)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(service.scale, after)
            _PAUSE.wait(_SCALING * site.random.random())
            with trouble(site, service) as what:
                pass
            ended = "done" if done.result().returncode == 0 else "not done"
        yield f"{before} to {after} of {service.name}, {what}: {ended}"

    return scale


@contextmanager
def _someone_killed(site: Site, service: Service) -> Iterator[str]:
    name = site.random.choice([*service.of(PS), *service.of(COORDINATOR), *service.of(WORKER)])
    os.kill(_pid_of(service, name), signal.SIGKILL)
    yield f"{name} killed"


@contextmanager
def _someone_cut_off(site: Site, service: Service) -> Iterator[str]:
    """From all others, for longer than whoever waits for it."""
    name, seconds = site.random.choice([*service.of(PS), *service.of(COORDINATOR)]), _STOPPED * site.seconds()
    with service.network.trouble(Trouble(name, None)):
        _PAUSE.wait(seconds)
    yield f"{name} cut off for {seconds:.1f} s"


@contextmanager
def late(site: Site) -> Iterator[str]:
    """What a coordinator sends comes seconds late, so also commits that it has given up."""
    service, name = site.process(COORDINATOR)
    seconds = site.seconds()
    with service.network.trouble(Trouble(name, None, delay=_LATE)):
        _PAUSE.wait(seconds)
    yield f"{name} by {_LATE:g} s for {seconds:.1f} s"


def possible(site: Site) -> tuple[dict[str, Fault], dict[str, str]]:
    """Faults by kind, and why others are not possible here."""
    found: dict[str, Fault] = {
        f"kill {name}": killed(kind)
        for name, kind in ((PS, PS), (WORKER, WORKER), (COORDINATOR, COORDINATOR), ("serving process", SERVE))
    }
    found |= {"kill Valkey": server_killed("valkey"), "kill Kafka": server_killed("kafka")}
    found |= {
        f"stop {name}": stopped(kind)
        for name, kind in ((WORKER, WORKER), (PS, PS), (COORDINATOR, COORDINATOR), ("serving process", SERVE))
    }
    found |= {"FLUSHALL": flushed, "lost buckets": lost_part, "lost keys": lost_keys, "slow consumer": slow_consumer}
    found |= {"more partitions": more_partitions, "another worker": another_worker}
    found |= {"poison": poisoned(broken, 20, 100), "large poison": poisoned(large, 2, 6)}
    found |= {"future poison": poisoned(future, 20, 100)}
    if site.joining is not None:
        signals = {"kill joiner": signal.SIGKILL, "stop joiner": signal.SIGSTOP, "joiner leaves": signal.SIGTERM}
        found |= {kind: joiner_gone(number) for kind, number in signals.items()}
    if all(service.has_spare for service in site.services):
        found |= {SCALES[0]: scaled, SCALES[1]: scaled_under(_someone_killed)}
    missing = {}
    if site.disk is None:
        missing["full disk"] = "no small disk can be mounted here"
    else:
        found["full disk"] = disk_full
    if site.services[0].network.is_wire:
        found |= {"network cut": cut, "network slow": slow, "late commit": late}
        if SCALES[0] in found:
            found[SCALES[2]] = scaled_under(_someone_cut_off)
    else:
        wired = ["network cut", "network slow", "late commit", SCALES[2]]
        missing |= dict.fromkeys(wired, "there are no network namespaces here")
    if faketime() is None:
        missing[CLOCK] = "libfaketime is not installed"
    else:
        found[CLOCK] = clock_wrong
    return found, missing
