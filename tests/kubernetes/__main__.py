"""The chart on a real Kubernetes, under load, while everything that may happen to a cluster happens: `make kubernetes`.

A model that counts is learned from a real Kafka and published to a real Valkey, both outside of the cluster, on this
machine. Clients ask for predictions through the Service all the time and look at every answer. At the end every shard
must have counted every sample once.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tests.kubernetes.kube import Cluster, Own, run, until
from tests.kubernetes.standalone import counting_file
from tests.ports import free_ports

PARTITIONS, RATE = 4, 40.0
NODES = 3
RELEASE, NAMESPACE, TOKEN = "st", "streamtrain-proof", "of-the-proof"
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
def outside(host: str) -> Iterator[Outside]:
    """Starts them; pods reach them at the address `host`."""
    plain, pods, control, redis = free_ports(4)
    listeners = f"PLAINTEXT://127.0.0.1:{plain},PODS://{host}:{pods}"
    protocols = "PLAINTEXT:PLAINTEXT,PODS:PLAINTEXT,CONTROLLER:PLAINTEXT"
    properties = {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{control}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": protocols,
        "inter.broker.listener.name": "PLAINTEXT",
        "controller.quorum.voters": f"1@127.0.0.1:{control}",
    }
    bound = (f"bind 127.0.0.1 {host}", "protected-mode no")
    with Broker(resolve(), port=plain, properties=properties) as broker, Valkey(port=redis, config=bound):
        yield Outside(broker.servers, f"kafka://{host}:{pods}", f"redis://{host}:{redis}/0")


class Proof:
    """The release, its clients, and what has been done to it."""

    def __init__(
        self, cluster: Cluster, folder: Path, servers: Outside, image: Mapping[str, str], more: Sequence[str] = ()
    ) -> None:
        self.cluster, self._more = cluster, more
        self._small = f"{image['slim'] or image['repository']}:{image['tag']}"
        self.samples = Counted(PARTITIONS, MOST)
        stream = {"stream.url": f"kafka://{servers.servers}", "stream.topic": "counting"}
        self.stream = open_stream(load_settings(overrides=stream).stream)
        self.stream.create(PARTITIONS)
        self.load = Load(self.stream, self.samples, PARTITIONS, RATE)
        self.seen = Seen(self.samples)
        self.rows: list[tuple[str, str]] = []
        self.count = 2  # shards
        self._values = folder / "values.json"
        small = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
        self._settings: dict[str, Any] = {
            "stream": {"url": servers.kafka, "topic": "counting", "commit_every": "1s"},
            "publish": {"url": servers.redis, "model": "counting", "every": "300ms"},
            "checkpoint": {"every": "5s"},
            "security": {"insecure": True},
        }
        self._rest: dict[str, Any] = {
            "image": image,
            "secret": "streamtrain",
            "model": {"name": "counting.py:model", "files": {"counting.py": counting_file("counting")}},
            **{name: {"resources": small} for name in ("shards", "workers", "coordinator", "serving")},
        }
        self._rest["serving"]["service"] = {"type": "NodePort"}

    def install(self) -> None:
        """The Secret and the release, until there is a prediction."""
        self.cluster.apply(
            [
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "metadata": {"name": "streamtrain"},
                    "stringData": {"STREAMTRAIN_SECURITY__TOKEN": TOKEN},
                }
            ]
        )
        began = time.monotonic()
        self.helm("install")
        first = next(iter(self.cluster.nodes().values()))  # which stays
        (port,) = (
            of["nodePort"]
            for service in self.cluster.get("services", "--selector", "app.kubernetes.io/component=serving")
            for of in service["spec"]["ports"]
            if of["name"] == "http"
        )
        asker = Asker(f"{first}:{port}", self.samples, self.load, self.seen)
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
            with pytest.raises(RuntimeError, match=words):
                self._helm(*command)
        assert uids == {pod["metadata"]["uid"] for pod in self.cluster.pods()}

    def helm(self, what: str, **settings: dict[str, Any]) -> None:
        """Installs or upgrades the release, with more settings."""
        self._settings |= {name: self._settings.get(name, {}) | of for name, of in settings.items()}
        shards = self._rest["shards"] | {"count": self.count}
        self._values.write_text(json.dumps(self._rest | {"settings": self._settings, "shards": shards}))
        self._helm(what, RELEASE, str(CHART))

    def _helm(self, *command: str) -> None:
        given = [argument for path in (str(self._values), *self._more) for argument in ("--values", path)]
        run(executable(), "--namespace", NAMESPACE, *command, *given, environment=self.cluster.environment)

    def uninstall(self) -> None:
        """What is not there needs not to be removed."""
        command = (executable(), "--namespace", NAMESPACE, "uninstall", RELEASE, "--ignore-not-found")
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
        """As a worker knows them; `tensorflow`: with the model, to read rows."""
        given = load_settings(overrides={"security.token": TOKEN, "security.insecure": True}).security
        token = metadata(Security.from_settings(given))
        at = {pod["metadata"]["name"]: pod for pod in self.cluster.pods("shard")}

        def channel(index: int, place: int) -> Any:
            address = self.cluster.forward(at[f"{RELEASE}-shard-{index}-{place}"], 2222)
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

        before, pod = restarts(), self.cluster.pods(component)[0]
        self.do(f"kill -9 of a {component}", lambda: self.cluster.kill(pod, self._small), lambda: restarts() > before)

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
        self.uninstall()
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


def volume(cluster: Cluster, folder: Path) -> Path:
    """Values by which all nodes of this machine keep checkpoints in a folder of it."""
    (folder / "checkpoints").mkdir(mode=0o777)
    (folder / "checkpoints").chmod(0o777)
    folder.chmod(0o755)
    kept = {"storageClassName": "", "accessModes": ["ReadWriteMany"]}
    of = {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder / "checkpoints")}}
    claim = {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": "checkpoints"}
    cluster.apply(
        [
            {"apiVersion": "v1", "kind": kind, "metadata": {"name": "checkpoints"}, "spec": kept | spec}
            for kind, spec in (("PersistentVolume", of), ("PersistentVolumeClaim", claim))
        ]
    )
    (folder / "volume.json").write_text(json.dumps({"checkpoints": {"claim": "checkpoints"}}))
    return folder / "volume.json"


def image_of(name: str, slim: str, *, pulled: bool) -> dict[str, str]:
    """The chart's values for images."""
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag or (slim and slim.rpartition(":")[2] != tag):
        sys.exit(f"images are {name} and {slim or 'the same'}; expected REPOSITORY:TAG, both with the same tag")
    policy = "IfNotPresent" if pulled else "Never"
    return {"repository": repository, "slim": slim.rpartition(":")[0], "tag": tag, "pullPolicy": policy}


def prove(proof: Proof, spare: Sequence[str]) -> list[str]:
    """What is wrong after everything has happened; `spare`: the nodes that may be drained, and the last one lost."""
    try:
        proof.install()
        proof.refuse()
        proof.roll()
        proof.kill("worker")
        proof.kill("shard")
        proof.drain(spare[0])
        if proof.cluster.loses:
            proof.lose(spare[-1])
        return [*proof.finish(), *proof.reinstall(3)]
    except BaseException:
        print(proof.cluster.kubectl("get", "pods", "--output", "wide"), file=sys.stderr)
        for pod in proof.cluster.pods():
            name = pod["metadata"]["name"]
            print(f"== {name}", file=sys.stderr)
            print(proof.cluster.kubectl("logs", name, "--tail", "8", "--ignore-errors"), file=sys.stderr)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes", description=__doc__)
    parser.add_argument("--image", required=True, help="its name and tag")
    parser.add_argument("--slim", default="", help="that of the one without TensorFlow; default: the same for all")
    parser.add_argument("--values", default=[], action="append", help="more values for the chart: checkpoints, …")
    parser.add_argument("--lose", default="", help="command that loses a node, with {node}; default: none is lost")
    parser.add_argument("--address", default="", help="address of this machine for pods; default: as nodes reach it")
    parser.add_argument(
        "archives",
        nargs="*",
        type=Path,
        help="the images, as docker-archive, for nodes of this machine; else KUBECONFIG's",
    )
    args = parser.parse_args()
    image = image_of(args.image, args.slim, pulled=not args.archives)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamtrain-kubernetes-")))
        if args.archives:
            own = stack.enter_context(Own(folder / "cluster", NODES, NAMESPACE))
            for archive in args.archives:
                own.load(archive)
            args.values.append(str(volume(own, folder)))
            cluster: Cluster = own
        else:
            cluster = stack.enter_context(Cluster(NAMESPACE, args.lose))
            if not args.values:
                args.values.append(str(folder / "volume.json"))
                (folder / "volume.json").write_text(json.dumps({"checkpoints": {"size": "1Gi"}}))
        nodes = list(cluster.nodes())
        if len(nodes) < NODES:
            sys.exit(f"the cluster has {len(nodes)} nodes that take pods, {nodes}; expected {NODES} or more")
        servers = stack.enter_context(outside(args.address or cluster.here()))
        proof = Proof(cluster, folder, servers, image, args.values)
        proof.load.start()
        stack.callback(proof.load.abandon)
        stack.callback(proof.uninstall)
        wrong = prove(proof, nodes[1:3])
    if wrong:
        sys.exit("\n".join(wrong))
    print("all is exact, and no prediction was refused" + ("" if cluster.loses else "; no node was lost: give --lose"))


if __name__ == "__main__":
    main()
