"""What docker-compose.yml starts, started without Docker: its own commands, variables and health checks.

Real Kafka, a real server of Redis' protocol, two shards, two workers, coordinator, endpoint. The flights are produced
as its demo does it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from streamtrain.settings.groups import StreamSettings
from streamtrain.stream.kafka.stream import KafkaStream
from tests.compose.composed import ROOT, TOKEN, Composed, Machine, Program
from tests.compose.prometheus import command, scraping
from tests.patience import PATIENCE, until
from tests.processes.test_whole_path import ask
from tests.stream.servers import kafka

__all__ = ["kafka"]

FLIGHT = {"carrier": "UA", "tail": "N14228", "flight": 1545, "origin": "EWR", "dest": "IAH", "route": "EWR-IAH"}
FLIGHT |= {"hour": 5, "weekday": 1, "month": 1}
# Queries of the dashboard by title. That of the alerts is empty, as it should be, while none fires.
PANELS = [
    (panel["title"], target["expr"])
    for panel in json.loads((ROOT / "services" / "grafana" / "streamtrain.json").read_text())["panels"]
    for target in panel.get("targets", ())
    if panel["title"] != "Alerts"
]
_COMPILED = {"TF_XLA_FLAGS": os.environ["TF_XLA_FLAGS"]}  # of tests/conftest.py
NEVER_SEEN = dict.fromkeys(FLIGHT, "never seen")


class Containers:
    """Programs of services, with nothing in their environment but what the file and the image say."""

    def __init__(self, composed: Composed, machine: Machine, folder: Path) -> None:
        self.composed, self.machine, self._folder = composed, machine, folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._programs: list[Program] = []

    def start(self, service: str) -> None:
        for program in self.machine.programs(service):
            with self._log(program.name).open("wb") as log:
                self.running[program.name] = subprocess.Popen(
                    program.command, cwd=program.folder, env=self._environment(program), stdout=log, stderr=log
                )
            self._programs.append(program)

    def _environment(self, program: Program) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self._folder), "TF_CPP_MIN_LOG_LEVEL": "3", **_COMPILED} | program.environment

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def wait_until_well(self) -> None:
        """Until every process answers what the file checks."""
        for program in self._programs:
            if program.check:
                self.wait_until(partial(self._is_well, program))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Asks once a second, as it takes whole processes to answer; all of them have to stay."""
        pause = threading.Event()

        def look() -> None:
            ended = [name for name, one in self.running.items() if one.poll() is not None]
            assert not ended, f"{ended} have ended\n{self.said()}"
            pause.wait(1.0)

        until(condition, doing=look, told=lambda: f"it does not happen\n{self.said()}")

    def _is_well(self, program: Program) -> bool:
        assert program.check
        done = subprocess.run(
            program.check, cwd=program.folder, env=self._environment(program), capture_output=True, check=False
        )
        return done.returncode == 0

    def run(self, program: Program, command: list[str], given: str) -> None:
        """A command in the container of a program, until it has done its work."""
        done = subprocess.run(
            command,
            cwd=program.folder,
            env=self._environment(program),
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def scraped(self) -> dict[str, list[str]]:
        """Addresses of the metrics of all containers, by the job of Prometheus that scrapes them."""
        targets = defaultdict(list)
        for service in self.composed.ours:
            for instance in range(self.composed.replicas(service)):
                port = "8501" if service == "serving" else "9100"
                targets[service.partition("-")[0]].append(self.machine.address(service, port, instance))
        return targets

    def stop(self, *services: str) -> dict[str, int]:
        """SIGTERM to all of some services at the same time; exit codes by container."""
        names = [name for name in self.running if name.rpartition("-")[0] in services]
        for name in names:
            self.running[name].send_signal(signal.SIGTERM)
        return {name: self.running[name].wait(PATIENCE) for name in names}

    def said(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self._folder.glob("*.log")))


@pytest.fixture
def containers(kafka: Broker, tmp_path: Path) -> Iterator[Containers]:
    topic = f"flights-{uuid.uuid4().hex}"
    composed = Composed({TOKEN: "a-token", "STREAMTRAIN_STREAM__TOPIC": topic})
    # Brokers are shared, and take workers of the same group that another test has killed for members for a while.
    until(lambda: KafkaStream(kafka.servers, topic, {}).members(StreamSettings().group) == 0)
    with Valkey() as valkey, tempfile.TemporaryDirectory() as folder:
        servers = {"kafka": kafka.servers, "redis": f"127.0.0.1:{valkey.port}"}
        started = Containers(composed, Machine(composed, servers, Path(folder)), tmp_path)
        for service in composed.ours:
            started.start(service)
        yield started
        for one in started.running.values():
            one.kill()
            one.wait()


def check_panels(prometheus: str, containers: Containers, predict: Callable[[], object]) -> None:
    """A Prometheus that scrapes the containers answers every query of the dashboard."""
    for service in ("worker", "coordinator"):
        (program, *_) = containers.machine.programs(service)
        words = ["produce", "-"] if service == "worker" else ["checkpoint"]
        containers.run(program, [sys.executable, "-m", "streamtrain", *words], "no JSON\n")
    with tempfile.TemporaryDirectory() as folder, scraping(prometheus, containers.scraped(), Path(folder)) as server:

        def unanswered() -> list[str]:
            predict()
            return [title for title, query in PANELS if not server.values(query)]

        containers.wait_until(lambda: not unanswered())


def test_what_compose_starts_learns_and_predicts(containers: Containers) -> None:
    assert {*containers.running} == {"ps-0-0", "ps-1-0", "coordinator-0", "worker-0", "worker-1", "serving-0"}
    containers.wait_until_well()

    containers.start("produce")
    listen = containers.machine.address("serving", "8501")
    predict = f"http://{listen}/v1/models/flights:predict"
    asked = {"instances": [FLIGHT, NEVER_SEEN]}

    def is_learned() -> bool:
        """The 200th sample of every partition; the server itself waits 5 seconds at most."""
        offsets = ",".join(f"{partition}:200" for partition in range(4))
        status, _, _ = ask(predict, asked, x_min_offset=offsets)
        return status == 200

    containers.wait_until(is_learned)
    _, answer, headers = ask(predict, asked)
    (flight,), (unknown,) = answer["predictions"]
    assert unknown == 0.5  # what was never seen has weight 0
    assert 0 < flight < 1
    assert flight != unknown, containers.said()
    assert headers["x-trained-through"].startswith("2013-")
    if (prometheus := command("prometheus")) is not None:
        check_panels(prometheus, containers, lambda: ask(predict, asked))

    assert containers.stop("produce") == {"produce-0": 128 + signal.SIGTERM}
    for services in containers.composed.ends():
        codes = containers.stop(*services)
        assert codes == dict.fromkeys(codes, 0), containers.said()
    assert not [name for name, one in containers.running.items() if one.poll() is None]
