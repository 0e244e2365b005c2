"""Chaos: the whole service, twice, on real Kafka and Valkey, while everything goes wrong: make chaos MINUTES=20.

    python -m tests.chaos --minutes 20 --seed 7

One service counts, one learns real flights, side by side. Each has two shards, those of the first one with backups, two
workers, a coordinator and two serving processes, and publishes every second. Two joiners join impressions and outcomes
beside them. Each process is a user of Kafka and of Redis with exactly the rights that SECURITY.md lists. Samples are
written and predictions asked for all the time. Faults of all kinds that are possible here come one after another; after
each, everything has to be well again within a deadline, by itself: all processes there, and all that was written before
learned, published and served, or joined. In the end all counts have to be exact. A report goes to standard output, as
Markdown, and to --report, as JSON.

As root each process has a network of its own, and checkpoints a small disk; else faults that need these are left out.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.chaos.endings import ENDINGS, Ending
from tests.chaos.faults import CLOCK, SCALES, Fault, Site, possible
from tests.chaos.network import container
from tests.chaos.report import Injected, Report
from tests.chaos.samples import Counted, Flights, Samples
from tests.chaos.service import PARTITIONS, ended
from tests.chaos.whole import Whole

MODELS = ["counting", "flights"]
_PAUSE = threading.Event()


def run(args: argparse.Namespace, folder: Path) -> Report:
    """One run; raises SystemExit if services are not well again in time."""
    chosen = random.Random(args.seed)
    most = int(2 * args.rate * (60 * args.minutes + 600))
    made: dict[str, Callable[[], Samples]] = {"counting": lambda: Counted(PARTITIONS, most), "flights": Flights}
    samples = [made[name]() for name in args.models]
    began = time.monotonic()
    clocks = not args.kinds or CLOCK in args.kinds
    spare = not args.kinds or bool({*SCALES} & {*args.kinds})
    whole = Whole(
        *(folder, samples),
        rate=args.rate,
        every=args.every,
        contained=args.contained,
        backed=args.backups,
        spare=spare,
        clocks=clocks,
        joined=random.Random(args.seed) if args.join else None,
    )
    try:
        with whole:
            loads = [one.load for one in whole.running]
            site = Site(whole.services, loads, whole.servers, whole.disk, chosen, args.longest, whole.joining)
            faults, missing = possible(site)
            report = Report(args.seed, args.deadline, missing)
            end = time.monotonic() + 60 * args.minutes
            for kind, fault in itertools.islice(deck(faults, args.kinds, chosen), args.faults):
                if time.monotonic() > end:
                    break
                report.faults.append(inject(whole, site, kind, fault, args))
                _PAUSE.wait(chosen.uniform(0.5, 1.5) * args.pause)
            report.services = whole.come_to_rest(args.deadline)
            report.join = whole.joining.as_json() if whole.joining is not None else None
            for kind, ending in ENDINGS.items():
                if not args.kinds or kind in args.kinds:
                    end_with(whole, report, kind, ending, folder)
    except BaseException as exc:
        sys.stderr.write(
            f"{whole.joining.said() if whole.joining else ''}\n{ended(whole.services)}\n{type(exc).__name__}: {exc}\n"
        )
        raise
    report.seconds = time.monotonic() - began
    return report


def deck(faults: dict[str, Fault], kinds: Sequence[str], chosen: random.Random) -> Iterator[tuple[str, Fault]]:
    """Faults in random order, each kind as often as others."""
    named = [kind for kind in faults if not kinds or kind in kinds]
    if not named and not set(kinds) & set(ENDINGS):
        raise SystemExit(f"none of these faults is possible here; there are {', '.join(faults)}")
    while named:
        chosen.shuffle(named)
        for kind in named:
            yield kind, faults[kind]


def inject(whole: Whole, site: Site, kind: str, fault: Fault, args: argparse.Namespace) -> Injected:
    """Has something go wrong, and waits until all is well again."""
    with fault(site) as what:
        over = time.monotonic()
    whole.until_well(args.deadline)
    recovered = time.monotonic() - over
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {kind}, {what}: well again after {recovered:.1f} s\n")
    return Injected(kind, what, round(recovered, 2))


def end_with(whole: Whole, report: Report, kind: str, ending: Ending, folder: Path) -> None:
    """Ends the first service."""
    running = whole.running[0]
    seconds, wrong = ending(whole, running, folder)
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {kind}: as it should be after {seconds:.1f} s\n")
    report.faults.append(Injected(kind, running.service.name, round(seconds, 2)))
    report.services[running.service.name].wrong.extend(f"{kind}: {one}" for one in wrong)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="for which faults come")
    parser.add_argument("--faults", type=int, default=10_000, help="after which there are no more")
    parser.add_argument("--seed", type=int, default=None, help="of what is chosen at random; it is printed")
    parser.add_argument("--kinds", nargs="*", default=[], help="of faults; all that are possible")
    parser.add_argument("--rate", type=float, default=25.0, help="samples per second of each of 4 partitions")
    parser.add_argument("--every", type=float, default=0.1, help="seconds between two requests of a client")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two faults, on average")
    parser.add_argument("--longest", type=float, default=12.0, help="seconds that a fault lasts at most")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds to be well again after a fault")
    parser.add_argument("--report", type=Path, help="file for the report as JSON")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="one service learns each")
    parser.add_argument("--backups", nargs="*", choices=MODELS, default=MODELS[:1], help="their shards have some")
    parser.add_argument("--join", action=argparse.BooleanOptionalAction, default=True, help="joiners beside them")
    parser.add_argument("--folder", type=Path, help="for data and logs, which stay; a temporary one")
    parser.add_argument("--loopback", action="store_true", help="as if not root; processes share what they import")
    parser.add_argument("--contained", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> None:
    """Runs it, in a container if there can be one."""
    args = parse()
    if not (args.contained or args.loopback) and (words := container()) is not None:
        command = [*words, sys.executable, "-m", "tests.chaos", *sys.argv[1:], "--contained"]
        os.execvp(command[0], command)
    args.seed = random.randrange(1 << 32) if args.seed is None else args.seed
    sys.stderr.write(f"seed {args.seed}, {args.deadline:g} s to be well again after each fault\n")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="streamtrain-chaos-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            report = run(args, folder)
        finally:
            if (folder / "disk").is_mount():
                subprocess.run(["umount", folder / "disk"], check=True)
    if args.report:
        args.report.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    print(report.as_markdown())
    sys.exit(0 if report.is_exact else 1)


if __name__ == "__main__":
    main()
