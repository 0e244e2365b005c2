"""Checks: what a service has learned, published and set aside, beside what was written."""

import http.client
import json
from pathlib import Path

import numpy as np

from streamtrain.model.spec import Spec
from streamtrain.ps.nodes.shards import RunTemplate, Shards
from streamtrain.ps.nodes.topology import connect_shards
from streamtrain.ps.replication.failover import open_control
from streamtrain.ps.rpc.security import Security
from tests.chaos.letters import wrong_letters
from tests.chaos.load import Load
from tests.chaos.samples import NOBODY, Counted, Offsets
from tests.chaos.service import Service
from tests.cluster.counted import FEATURES, IDS, wrong_counts

_SECONDS = 60.0


class Found:
    """What came of all checks of a service.

    Attributes:
        wrong: all that is not exact.
        lost: occurrences of ids, or samples, that were not learned.
        doubled: those that were learned once more than they should.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.lost = self.doubled = 0

    def compare(self, what: str, counted: float, expected: float) -> None:
        """A count that should be exact."""
        if counted != expected:
            self.lost += int(max(0, expected - counted))
            self.doubled += int(max(0, counted - expected))
            self.wrong.append(f"{what}: {counted:g} instead of {expected:g}")


def check(service: Service, load: Load, folder: Path) -> Found:
    """Compares all, once the service has come to rest at the end of what was written."""
    found = Found()
    good = load.good(load.written)
    total = sum(map(len, good))
    shards = _shards(service)
    for index, control in enumerate(shards.controls):  # themselves: what the coordinator says may be a second old
        found.compare(f"samples of shard {index}", control.status().counters["samples"], total)
    found.wrong += [] if service.status() else ["the coordinator does not answer"]
    found.wrong += ["a partition stood still: see the logs of workers"] if service.has_said("stands still at") else []
    found.wrong += wrong_letters(service.settings.stream, load.bad())
    if isinstance(service.samples, Counted):
        logs = [log[of] for log, of in zip(service.samples.logs, good, strict=True)]
        wrong, weights = wrong_counts(shards, logs)
        for one, (n, expected) in wrong.items():
            found.compare(f"id {one}", n, expected)
        for weight in weights:
            found.compare("a weight", weight, total)
        _check_served(service, np.concatenate(logs), found)
    _verify(service, folder, found)
    return found


def _shards(service: Service) -> Shards:
    now = service.shard_map()
    places = connect_shards(now.shards, now.backups, Security(insecure=True), lambda channel: None)
    # They say themselves what they hold, so nobody here has to build the model.
    spec = Spec.from_json(open_control(places[0], (), _SECONDS).status().spec)
    nothing = np.zeros(0, np.float32)
    return Shards(places, RunTemplate(spec, nothing, nothing, {}))


def _check_served(service: Service, log: Offsets, found: Found) -> None:
    """Every id, as it is predicted."""
    expected = np.bincount(log.ravel(), minlength=IDS)
    instances = [{"id0": one} | {f"id{i}": NOBODY for i in range(1, FEATURES)} for one in [NOBODY, *range(IDS)]]
    host, _, port = service.listen.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_SECONDS)
    connection.request("POST", f"/v1/models/{service.samples.model}:predict", json.dumps({"instances": instances}))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    served = np.array(answer["predictions"])[:, 0]
    found.compare("samples as served", served[0], len(log))
    for one in np.flatnonzero(served[1:] - served[0] != expected):
        found.wrong.append(f"id {one} as served: {served[1 + one] - served[0]:g} instead of {expected[one]}")


def _verify(service: Service, folder: Path, found: Found) -> None:
    """`streamtrain verify`: shards, Redis and a server agree."""
    samples = folder / f"{service.name}.jsonl"
    samples.write_text("".join(json.dumps(one) + "\n" for one in service.samples.instances()))
    done = service.command("verify", "--json", "--url", f"http://{service.listen}", "--samples", str(samples))
    if done.returncode:
        found.wrong.append(f"verify: {done.stdout} {done.stderr}")
