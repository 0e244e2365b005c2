"""The chart on a real Kubernetes, under load, while everything that may happen to a cluster happens: `make kubernetes`.

A model that counts is learned from a real Kafka and published to a real Valkey, both outside of the cluster. Clients
ask for predictions through the Service all the time and look at every answer. At the end every shard must have counted
every sample once.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.embedded.valkey import Valkey
from streamtrain.ps.nodes.shards import Shards
from streamtrain.ps.rpc.control import CHANNEL_OPTIONS
from streamtrain.ps.rpc.security import Security, metadata
from streamtrain.settings.load import load_settings
from streamtrain.stream.opening import open_stream
from tests.chaos.asking import Asker, Clients, Seen
from tests.chaos.load import Load
from tests.chaos.samples import Counted
from tests.cluster.counted import beginning, wrong_counts
from tests.kubernetes.helm import CHART, executable
from tests.kubernetes.kube import GATEWAY, Cluster, run, until
from tests.kubernetes.standalone import counting_file
from tests.ports import free_ports

PARTITIONS, RATE = 4, 40.0
NODES = 3
RELEASE, NAMESPACE, TOKEN = "st", "default", "of-the-proof"
PODS = {"worker": 2, "coordinator": 1, "serving": 2}  # beside shards
MOST = 400_000  # samples that a partition may get


class Outside(NamedTuple):
    """Kafka and Valkey on this machine.

    Attributes:
        servers: of Kafka, from here.
        kafka, redis: URLs for pods.
    """

    servers: str
    kafka: str
    redis: str


@contextmanager
def outside() -> Iterator[Outside]:
    """Starts them."""
    plain, pods, control, redis = free_ports(4)
    listeners = f"PLAINTEXT://127.0.0.1:{plain},PODS://{GATEWAY}:{pods}"
    protocols = "PLAINTEXT:PLAINTEXT,PODS:PLAINTEXT,CONTROLLER:PLAINTEXT"
    properties = {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{control}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": protocols,
        "inter.broker.listener.name": "PLAINTEXT",
        "controller.quorum.voters": f"1@127.0.0.1:{control}",
    }
    bound = (f"bind 127.0.0.1 {GATEWAY}", "protected-mode no")
    with Broker(resolve(), port=plain, properties=properties) as broker, Valkey(port=redis, config=bound):
        yield Outside(broker.servers, f"kafka://{GATEWAY}:{pods}", f"redis://{GATEWAY}:{redis}/0")


class Proof:
    """The release, its clients, and what has been done to it."""

    def __init__(self, cluster: Cluster, folder: Path, servers: Outside, image: str, slim: str) -> None:
        self.cluster = cluster
        self.samples = Counted(PARTITIONS, MOST)
        stream = {"stream.url": f"kafka://{servers.servers}", "stream.topic": "counting"}
        self.stream = open_stream(load_settings(overrides=stream).stream)
        self.stream.create(PARTITIONS)
        self.load = Load(self.stream, self.samples, PARTITIONS, RATE)
        self.seen = Seen(self.samples)
        self.rows: list[tuple[str, str]] = []
        self.count = 2  # shards
        self._values = folder / "values.json"
        repository, _, tag = image.rpartition(":")
        small = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
        self._settings: dict[str, Any] = {
            "stream": {"url": servers.kafka, "topic": "counting", "commit_every": "1s"},
            "publish": {"url": servers.redis, "model": "counting", "every": "300ms"},
            "checkpoint": {"every": "5s"},
            "security": {"insecure": True},
        }
        self._rest: dict[str, Any] = {
            "image": {"repository": repository, "slim": slim.rpartition(":")[0], "tag": tag, "pullPolicy": "Never"},
            "secret": "streamtrain",
            "model": {"name": "counting.py:model", "files": {"counting.py": counting_file("counting")}},
            "checkpoints": {"claim": "checkpoints"},
            **{name: {"resources": small} for name in ("shards", "workers", "coordinator", "serving")},
        }

    def install(self) -> None:
        """The Secret, the volume and the release, until there is a prediction."""
        kept = {"storageClassName": "", "accessModes": ["ReadWriteMany"]}
        self.cluster.apply(
            [
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "metadata": {"name": "streamtrain", "namespace": NAMESPACE},
                    "stringData": {"STREAMTRAIN_SECURITY__TOKEN": TOKEN},
                },
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": "checkpoints"},
                    "spec": kept
                    | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(self._values.parent / "checkpoints")}},
                },
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "checkpoints", "namespace": NAMESPACE},
                    "spec": kept | {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": "checkpoints"},
                },
            ]
        )
        began = time.monotonic()
        self.helm("install")
        address = self.cluster.kubectl("get", "service", f"{RELEASE}-serving", "-o", "jsonpath={.spec.clusterIP}")
        asker = Asker(f"{address}:80", self.samples, self.load, self.seen)
        until(asker.ask, 300, "the first prediction")
        self.say("helm install to the first prediction", time.monotonic() - began)
        until(self.is_whole, 120, "all pods ready")
        self.say("and to all pods ready", time.monotonic() - began)
        self.seen.begin()
        self.clients = Clients(asker, self.load, 0.02)
        self.clients.start()

    def refuse(self) -> None:
        """What cannot work is refused, and changes nothing."""
        uids = {pod["metadata"]["uid"] for pod in self.cluster.pods()}
        for command, words in (
            (("upgrade", RELEASE, str(CHART), "--set", "shards.count=3"), "cannot change while it runs"),
            (("upgrade", RELEASE, str(CHART), "--set", "shards.count=1"), "cannot change while it runs"),
            (("install", "other", str(CHART)), f"release {RELEASE} publishes model counting to the same Redis"),
        ):
            given = ("--values", str(self._values))
            with pytest.raises(RuntimeError, match=words):
                run(executable(), *command, *given, environment=self.cluster.environment)
        assert uids == {pod["metadata"]["uid"] for pod in self.cluster.pods()}

    def helm(self, what: str, **settings: dict[str, Any]) -> None:
        """Installs or upgrades the release, with more settings."""
        self._settings |= {name: self._settings.get(name, {}) | of for name, of in settings.items()}
        shards = self._rest["shards"] | {"count": self.count}
        self._values.write_text(json.dumps(self._rest | {"settings": self._settings, "shards": shards}))
        command = [executable(), what, RELEASE, str(CHART), "--values", str(self._values)]
        run(*command, environment=self.cluster.environment)

    def is_whole(self) -> bool:
        """Whether all pods are there and ready, and none is left from before."""
        left = self.cluster.get("pods", "--selector", "app.kubernetes.io/name=streamtrain")
        return all(
            len(pods) == count and all(self.cluster.is_ready(pod) for pod in pods)
            for component, count in {**PODS, "shard": 2 * self.count}.items()
            for pods in [self.cluster.pods(component)]
        ) and not any("deletionTimestamp" in pod["metadata"] for pod in left)

    def do(self, what: str, act: Callable[[], object], done: Callable[[], bool] | None = None) -> None:
        """Does something to the cluster, and waits until it is at full strength again and has learned on."""
        before, began = sum(self.seen.outcomes.values()), time.monotonic()
        act()
        if done is not None:
            until(done, 300, what)
        until(self.is_whole, 300, f"{what}: full strength")
        strong = time.monotonic() - began
        ends = [*self.load.written]
        until(lambda: self.learned(ends), 120, f"{what}: what was written is learned")
        self.say(what, strong, f"{sum(self.seen.outcomes.values()) - before} requests")

    def say(self, what: str, seconds: float, more: str = "") -> None:
        self.rows.append((what, f"{seconds:.1f}"))
        refused = {kind: n for kind, n in self.seen.outcomes.items() if kind != "answered"}
        print(
            f"{time.strftime('%T')} {what}: {seconds:.1f} s; {more} {refused or ''} {self.seen.refusals or ''}",
            flush=True,
        )

    def shards(self, *, tensorflow: bool = False) -> Shards:
        """As a worker knows them, by the addresses of pods; `tensorflow`: with the model, to read rows."""
        given = load_settings(overrides={"security.token": TOKEN, "security.insecure": True}).security
        token = metadata(Security.from_settings(given))
        at = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in self.cluster.pods("shard")}

        def channel(index: int, place: int) -> Any:
            address = f"{at[f'{RELEASE}-shard-{index}-{place}']}:2222"
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS), address

        return Shards(
            [(channel(i, 0), channel(i, 1)) for i in range(self.count)], beginning(tensorflow=tensorflow), token
        )

    def learned(self, ends: list[int]) -> bool:
        try:
            clocks = self.shards().clocks()
        except Exception as exc:  # a shard is being replaced
            raise RuntimeError(str(exc)) from exc
        return all(clock.get(partition, 0) >= end for clock in clocks for partition, end in enumerate(ends))

    def roll(self) -> None:
        """Every part is replaced, as settings change."""
        old = {pod["metadata"]["uid"] for pod in self.cluster.pods()}

        def is_new() -> bool:
            return not old & {pod["metadata"]["uid"] for pod in self.cluster.pods()}

        self.do("helm upgrade of every part", lambda: self.helm("upgrade", log={"level": "debug"}), is_new)

    def kill(self, component: str) -> None:
        """A pod's processes are killed, kill -9; the kubelet starts them again where they were."""

        def restarts() -> int:
            return sum(pod["status"]["containerStatuses"][0]["restartCount"] for pod in self.cluster.pods(component))

        before = restarts()
        # Process 1 of a container takes no SIGKILL from within; here, processes of pods are those of this machine.
        command = {"shard": "ps"}.get(component, component)
        process = run("pgrep", "--full", f"/opt/streamtrain/bin/streamtrain {command}$").split()[0]
        self.do(f"kill -9 of a {component}", lambda: run("kill", "-9", process), lambda: restarts() > before)

    def lose(self, node: str) -> None:
        """A node is lost for good, as a cloud says by the taint."""

        def gone() -> bool:
            (one,) = (of for of in self.cluster.get("nodes") if of["metadata"]["name"] == node)
            if self.cluster.is_ready(one):
                return False
            self.cluster.kubectl(
                "taint", "node", node, "node.kubernetes.io/out-of-service=lost:NoExecute", "--overwrite"
            )
            return True

        self.do(f"{node} lost", lambda: self.cluster.lose(node), gone)

    def drain(self, node: str) -> None:
        """All pods are evicted from a node, as budgets allow."""
        self.do(
            f"kubectl drain {node}",
            lambda: self.cluster.kubectl(
                "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s"
            ),
        )
        self.cluster.kubectl("uncordon", node)

    def miscounted(self, ends: list[int]) -> list[str]:
        """Ids and weights that have another count than the log."""
        good = self.load.good(ends)
        logs = [log[of] for log, of in zip(self.samples.logs, good, strict=True)]
        wrong, weights = wrong_counts(self.shards(tensorflow=True), logs)
        total = sum(map(len, good))
        return [
            *(f"id {one}: {n} instead of {expected}" for one, (n, expected) in wrong.items()),
            *(f"a weight: {n} instead of {total}" for n in set(weights) if n != total),
        ]

    def reinstall(self, count: int) -> list[str]:
        """What is wrong once the release was uninstalled, and installed with another number of shards."""
        began = time.monotonic()
        self.cluster.kubectl("exec", f"deployment/{RELEASE}-coordinator", "--", "streamtrain", "checkpoint")
        run(executable(), "uninstall", RELEASE, environment=self.cluster.environment)
        label = "app.kubernetes.io/name=streamtrain"
        until(lambda: not self.cluster.get("pods", "--selector", label), 120, "all pods have ended")
        self.count = count
        self.helm("install")
        until(self.is_whole, 300, f"{count} shards: full strength")
        ends = [*self.load.written]
        until(lambda: self.learned(ends), 120, f"{count} shards: everything is learned")
        self.say(f"uninstalled, and installed with {count} shards", time.monotonic() - began)
        return self.miscounted(ends)

    def finish(self) -> list[str]:
        """What is wrong, once everything that was written is learned."""
        self.load.stop()
        ends = [*self.load.written]
        until(lambda: self.learned(ends), 120, "everything is learned")
        self.clients.stop()
        miscounted, total = self.miscounted(ends), sum(map(len, self.load.good(ends)))
        outcomes = dict(self.seen.outcomes)
        # 412: what the client has just written was not learned within seconds, as while all workers are replaced.
        refused = {kind: n for kind, n in outcomes.items() if kind.isdigit() and kind != "412"}
        print("\n| what | back at full strength after, s |\n|---|---|")
        print("\n".join(f"| {what} | {seconds} |" for what, seconds in self.rows))
        print(f"\n{sum(ends)} messages, {total} good; clients: {outcomes}, longest gap {self.seen.longest:.1f} s")
        return [
            *miscounted,
            *(f"{n} predictions were refused with {kind}: {self.seen.refusals[kind]}" for kind, n in refused.items()),
            *self.seen.wrong,
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes", description=__doc__)
    parser.add_argument("--image", required=True, help="its name and tag")
    parser.add_argument("--slim", default="", help="that of the one without TensorFlow; default: the same for all")
    parser.add_argument("archives", nargs="+", type=Path, help="the images, as docker-archive")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamtrain-kubernetes-")))
        (folder / "checkpoints").mkdir(mode=0o777)
        (folder / "checkpoints").chmod(0o777)
        folder.chmod(0o755)
        cluster = stack.enter_context(Cluster(folder / "cluster", NODES))
        for archive in args.archives:
            cluster.load(archive)
        proof = Proof(cluster, folder, stack.enter_context(outside()), args.image, args.slim)
        proof.load.start()
        stack.callback(proof.load.abandon)
        try:
            proof.install()
            proof.refuse()
            proof.roll()
            proof.kill("worker")
            proof.kill("shard")
            proof.drain("node1")
            proof.lose("node2")
            wrong = [*proof.finish(), *proof.reinstall(3)]
        except BaseException:
            print(cluster.kubectl("get", "pods", "--output", "wide"), file=sys.stderr)
            for pod in cluster.pods():
                print(f"== {pod['metadata']['name']}", file=sys.stderr)
                print(
                    cluster.kubectl("logs", pod["metadata"]["name"], "--tail", "8", "--ignore-errors"), file=sys.stderr
                )
            raise
    if wrong:
        sys.exit("\n".join(wrong))
    print("all is exact, and no prediction was refused")


if __name__ == "__main__":
    main()
