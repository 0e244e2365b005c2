"""`streamtrain status` as a user runs it."""

import io
import os
import pty
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from streamtrain.cli.status import render_status
from streamtrain.cluster.client import Heartbeat
from tests import commands
from tests.cluster.coordinated import LOG, Coordinated, names, states
from tests.cluster.here import refused, run, told

ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("STREAMTRAIN_") and name != "TF_CONFIG"
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinated]:
    """Shards that have learned, and a coordinator."""
    with Coordinated() as one:
        one.learn()
        yield one


def addresses(cluster: Coordinated) -> tuple[str, ...]:
    return ("--ps", ",".join(cluster.addresses))


def asking(cluster: Coordinated) -> tuple[str, ...]:
    return ("--set", f"coordinator.address={cluster.address}")


def about() -> dict[str, Any]:
    return {
        "partitions": [4, 5],
        "lag": {"4": 1234},
        "samples_per_s": 777.0,
        "samples_per_batch": 31.0,
        "waits_for_samples": 0.87,
        "waits_for_shards": 0.04,
        "dead_letters": {"not_json": 12},
    }


def test_what_the_coordinator_says(cluster: Coordinated) -> None:
    with Heartbeat(cluster.client(), "worker", "first-worker", about):
        cluster.status(lambda found: names(found) and found["samples"])
        found = told("status", *asking(cluster))
        assert (found["samples"], found["lag"], states(found)) == (11, 1234, ["ready", "ready"])
        assert names(found) == ["first-worker"]
        shown = run("status", *asking(cluster)).stdout
    for text in ("first-worker", "4, 5", "1,234", "777", "31", "not_json 12", *cluster.addresses, "ids 6", "ids 3"):
        assert text in shown, shown
    assert "samples 87%, shards 4%" in shown
    assert found["proposal"] is None  # it is not known yet


def test_what_is_proposed_is_shown_with_its_reason(cluster: Coordinated) -> None:
    status = told("status", *addresses(cluster))

    def shown(shards: int, workers: int, *why: str) -> str:
        text = io.StringIO()
        proposal = {"shards": shards, "workers": workers, "why": why}
        Console(width=200, file=text).print(render_status(status | {"proposal": proposal}, ""))
        return text.getvalue()

    assert "proposed: 4 shards instead of 2: they are busy\n" in shown(4, 0, "they are busy")
    assert "proposed: 1 shard instead of 2 and 3 workers instead of 0: a; b\n" in shown(1, 3, "a", "b")
    assert "proposed: no other numbers: more partitions are needed\n" in shown(2, 0, "more partitions are needed")
    assert "proposed" not in shown(2, 0)


def test_what_shards_say_is_of_the_same_form(cluster: Coordinated) -> None:
    found, other = told("status", *addresses(cluster)), cluster.status(lambda found: found["samples"])
    assert set(found) == set(other)
    assert found["shards"] == other["shards"]
    assert (found["run"], found["samples"], found["lag"]) == (other["run"], 11, None)
    shown = run("status", *addresses(cluster), "--once").stdout
    assert "shard 0 is not the coordinator" in shown
    assert "this is what shards know" in shown
    assert "no workers" in shown


def test_shards_are_asked_while_the_coordinator_is_away() -> None:
    with Coordinated() as cluster:
        cluster.learn({0: LOG[0]})
        cluster.stop()
        assert "the coordinator does not answer: " in refused("status", *asking(cluster))
        cluster.stop_shard(1)
        done = run("status", *asking(cluster), *addresses(cluster))
        assert done.returncode == 0
        assert "the coordinator does not answer: this is what shards know" in done.stdout
        found = told("status", *asking(cluster), *addresses(cluster))
        assert states(found) == ["ready", "away"]
        assert found["samples"] == 8
        cluster.stop_shard(0)
        assert "no shard answers, of " in refused("status", *addresses(cluster))


def test_what_other_shards_would_take(cluster: Coordinated) -> None:
    cluster.status(lambda found: found["samples"])
    shown = run("scale", "--ps", "3", "--dry-run", *asking(cluster)).stdout
    assert "2 shards hold 9 rows" in shown
    assert "3 shards would hold 3 rows each" in shown
    found = told("scale", "--ps", "a:1,b:2,c:3", "--dry-run", *asking(cluster))
    assert (found["shards"], found["next"], found["rows"]) == (2, 3, 9)
    assert found["bytes_each"] < found["bytes_meanwhile"]
    assert "--ps must be 1 to 1024 shards, not 0" in refused(
        "scale", "--ps", "0", "--dry-run", *asking(cluster), code=2
    )


def test_what_cannot_be_drained(cluster: Coordinated) -> None:
    assert "a:1 is none of the shards, which are " in refused("drain", "a:1", *asking(cluster), code=2)
    assert "coordinator.address is not set" in refused("drain", "a:1", code=2)


def test_a_token_is_needed() -> None:
    with Coordinated(security__token="secret") as cluster:
        assert "token" in refused("status", *asking(cluster))
        found = told("status", *asking(cluster), "--set", "security.token=secret")
        assert len(found["shards"]) == 2


def test_nothing_is_set() -> None:
    assert refused("status", code=2) == (
        "neither coordinator.address nor ps.addresses is set, and `streamtrain up` does not run in this folder: "
        "give --ps host:port,…"
    )


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._side, inner = pty.openpty()
        command = [*commands.COMMAND, *arguments]
        environment = ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "150"}
        self.process = commands.start(command, stdin=inner, stdout=inner, stderr=inner, env=environment)
        os.close(inner)
        self.said = ""

    def until(self, condition: Callable[[str], object]) -> None:
        """Reads until a condition holds; the terminal's end is an error."""
        while not condition(self.said):
            self.said += os.read(self._side, 1 << 16).decode(errors="replace")

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(60)
        os.close(self._side)
        return code


def test_on_a_terminal_it_goes_on_until_it_is_ended(cluster: Coordinated) -> None:
    terminal = Terminal("status", *asking(cluster))
    terminal.until(lambda said: said.count("no workers") >= 2)
    with Heartbeat(cluster.client(), "worker", "comes-later", lambda: {}):
        terminal.until(lambda said: "comes-later" in said)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.said
