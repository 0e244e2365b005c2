"""What the suite measures: parts, whose contestants take turns; each is one command that prints a line of JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suite.running import python

Figure = tuple[str | int, ...]  # where a figure is in the JSON of a command: keys, from outside in
RATE = {"samples/s": ("samples_per_s",)}


@dataclass(frozen=True)
class Contestant:
    """One command.

    Attributes:
        name: unique in its part.
        command: program and arguments; {tmp}: see `suite.running.run`; {broker}: see `Part.topic`.
        figures: where they are in what it prints, by name; a list there is of several runs.
        timeout: seconds.
        missing: what it needs and is not there; empty: it can run.
    """

    name: str
    command: Sequence[str]
    figures: Mapping[str, Figure]
    timeout: float = 300.0
    missing: str = ""


@dataclass(frozen=True)
class Part:
    """Contestants that take turns.

    Attributes:
        name: on the command line.
        title: for people.
        contestants: in the order of their turns, which is the other way round in every second round.
        once: its commands make rounds of their own, and are run once.
        topic: the workload whose samples a broker is filled with meanwhile; empty: none is needed.
    """

    name: str
    title: str
    contestants: Sequence[Contestant]
    once: bool = False
    topic: str = ""


@dataclass(frozen=True)
class Peers:
    """Where peers are that are not part of the project.

    Attributes:
        folder: of their scripts; None: none are there.
        environments: folder of virtual environments, by name.
    """

    folder: Path | None = None
    environments: Path | None = None

    def contestant(self, name: str, environment: str, script: str, *arguments: object) -> Contestant:
        """A peer's script, in an environment of its own."""
        figures = RATE | {"memory MB": ("peak_rss_mb",)}
        if self.folder is None:
            return Contestant(name, (), figures, missing="no folder of peers is given")
        program = (self.environments or self.folder / "venvs") / environment / "bin" / "python"
        missing = [str(one.name) for one in (program, self.folder / script) if not one.exists()]
        said = f"{environment}: not installed" if missing else ""
        command = (str(program), str(self.folder / script), *map(str, arguments))
        return Contestant(name, command, figures, missing=said)


@dataclass(frozen=True)
class Scope:
    """How much is measured.

    Attributes:
        rounds: of parts whose contestants take turns, and of scripts that make their own.
        seconds: of one run of a contestant that trains.
        peers: where they are.
    """

    rounds: int = 5
    seconds: float = 4.0
    peers: Peers = field(default_factory=Peers)


def ours(scope: Scope, workload: str, batch: int, topology: str, count: int, *, lanes: bool = True) -> Contestant:
    """Our workers on ready batches, with as many shards; as on one machine, or without lanes as over a network."""
    options: list[Any] = ["--workload", workload, "--batch", batch, "--topologies", topology]
    options += ["--workers", count, "--shards", count, "--seconds", scope.seconds, "--warmup", 3, "--rounds", 1]
    figures: dict[str, Figure] = {**RATE, "memory MB": ("peak_mb",)}
    if lanes:
        return Contestant(label(topology, count), python("cluster.py", *options), figures)
    figures |= {"bytes/sample": ("wire_bytes_per_sample",)}
    return Contestant(over_grpc(label(topology, count)), python("cluster.py", *options, "--no-lanes"), figures)


def from_kafka(scope: Scope, workload: str, batch: int, topology: str, count: int) -> Contestant:
    """Our workers on samples as JSON in Kafka."""
    options: list[Any] = ["--workload", workload, "--batch", batch, "--topology", topology, "--broker", "{broker}"]
    options += ["--workers", count, "--shards", count, "--seconds", scope.seconds, "--warmup", 3, "--rounds", 1]
    return Contestant(f"{label(topology, count)}, from Kafka", python("stream.py", *options), RATE)


def label(topology: str, workers: int) -> str:
    """How a topology is called."""
    return f"{topology}, {workers} worker{'s' if workers > 1 else ''}"


def over_grpc(name: str) -> str:
    """How a topology is called whose messages do not go through shared memory."""
    return f"{name}, over gRPC"


def alone(scope: Scope, workload: str, batch: int, name: str, contestant: str) -> Contestant:
    """Someone of step.py: one process, two threads."""
    batches = 200 if batch >= 1024 else 2000
    options: list[Any] = ["--workload", workload, "--batch", batch, "--batches", batches, "--only", contestant]
    options += ["--rounds", 1, "--seconds", scope.seconds, "--threads", 2]
    figures = {"samples/s": ("samples_per_s", contestant), "memory MB": ("peak_mb",)}
    return Contestant(name, python("step.py", *options), figures)


def dense(scope: Scope, workload: str, batch: int) -> Contestant:
    """The limit of two processes."""
    options = ("--workload", workload, "--batch", batch, "--processes", 2, "--seconds", scope.seconds)
    return Contestant(DENSE, python("dense_only.py", *options), RATE)


ONE = "one process"
PLAIN = "plain TensorFlow"
DENSE = "dense step only, 2 processes"
PSS = "ParameterServerStrategy"
TORCH = "TorchRec"
COLOCATED, DEDICATED = label("colocated", 2), label("dedicated", 2)


def training(scope: Scope) -> list[Part]:
    """W1 and W2 in all topologies, and peers."""
    return [_w1(scope), _w2_small(scope), _w2_large(scope)]


def _w1(scope: Scope) -> Part:
    work = ("w1", 1024)
    places = [(topology, count) for topology in ("colocated", "dedicated") for count in (2, 1)]
    # ParameterServerStrategy is fastest here with one worker, one server and unique ids.
    pss = scope.peers.contestant(
        *(PSS, "tf", "pss_tf.py", "--workload", "w1", "--workers", 1, "--ps", 1, "--dedup", "--runs", 1),
        *("--min-seconds", scope.seconds, "--batches", 200, "--data-dir", "{tmp}"),
    )
    torch = scope.peers.contestant(
        *(TORCH, "torch", "torch_ebc.py", "--workload", "w1", "--mode", "torchrec", "--optimizer", "rowwise"),
        *("--threads", 2, "--runs", 1, "--min-seconds", scope.seconds, "--batches", 300),
    )
    contestants = [
        *(ours(scope, *work, *place) for place in places),
        *(ours(scope, *work, topology, 2, lanes=False) for topology in ("colocated", "dedicated")),
        *(from_kafka(scope, *work, *place) for place in places),
        alone(scope, *work, ONE, "batch"),
        alone(scope, *work, PLAIN, "plain_tf"),
        dense(scope, *work),
        *(pss, torch),
    ]
    return Part("w1", "W1, batch 1024", contestants, topic="w1")


def _w2_small(scope: Scope) -> Part:
    work = ("w2", 64)
    places = [(topology, count) for topology in ("colocated", "dedicated") for count in (2, 1)]
    contestants = [
        *(ours(scope, *work, *place) for place in places),
        *(ours(scope, *work, topology, 2, lanes=False) for topology in ("colocated", "dedicated")),
        *(from_kafka(scope, *work, topology, 2) for topology in ("colocated", "dedicated")),
        alone(scope, *work, ONE, "batch"),
        alone(scope, *work, PLAIN, "plain_tf"),
        _pss_w2(scope, 64, "--workers", 2, "--ps", 2, "--inner-steps", 10, "--steps", 3000, "--batches", 2000),
    ]
    return Part("w2-64", "W2, batch 64", contestants, topic="w2")


def _w2_large(scope: Scope) -> Part:
    work = ("w2", 1024)
    contestants = [
        *(ours(scope, *work, topology, 2) for topology in ("colocated", "dedicated")),
        ours(scope, *work, "dedicated", 2, lanes=False),
        alone(scope, *work, ONE, "batch"),
        alone(scope, *work, PLAIN, "plain_tf"),
        _pss_w2(scope, 1024, "--workers", 1, "--ps", 1, "--steps", 1000, "--batches", 400),
    ]
    return Part("w2-1024", "W2, batch 1024", contestants)


def _pss_w2(scope: Scope, batch: int, *arguments: object) -> Contestant:
    """In the configuration that is its fastest here."""
    common = ("--workload", "w2", "--batch", batch, "--runs", 1, "--min-seconds", scope.seconds, "--data-dir", "{tmp}")
    return scope.peers.contestant(PSS, "tf", "pss_tf.py", *common, *arguments)
