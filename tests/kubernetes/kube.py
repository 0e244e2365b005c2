"""A cluster for tests: the one that KUBECONFIG names, or one of this machine, with real kubelets and containers."""

import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "cluster"

# Kills the first process of a container from outside of it; as process 1, it takes no SIGKILL from within.
_KILL = """
import os, pathlib, signal
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    try:
        first = status.read_text().partition("NSpid:")[2].split("\\n")[0].split()[-1] == "1"
        if first and "{container}" in (status.parent / "cgroup").read_text():
            os.kill(int(status.parent.name), signal.SIGKILL)
            raise SystemExit(0)
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended meanwhile
raise SystemExit("no process of container {container}")
"""


def run(*command: str, text: str | None = None, environment: Mapping[str, str] = {}) -> str:
    """What a command says.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(
        command, input=text, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Waits for a condition; seconds that it took. Errors of commands count as not yet."""
    began, error = time.monotonic(), ""
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except RuntimeError as exc:
            error = str(exc)
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s {error}")
        time.sleep(0.25)


class Cluster:
    """The one that KUBECONFIG names.

    Args:
        namespace: of everything that is done in it; made if it is not there, and then deleted at the end.
        lose: command by which a node is lost, with `{node}`; "" if none may be.
    """

    environment: Mapping[str, str] = {}

    def __init__(self, namespace: str, lose: str = "") -> None:
        self.namespace, self._lose = namespace, lose
        self._forwards: dict[str, tuple[subprocess.Popen[str], str]] = {}
        self._made = False

    def __enter__(self) -> "Cluster":
        name = f"namespace/{self.namespace}"
        self._made = not self.kubectl("get", name, "--ignore-not-found", "--output", "name")
        if self._made:
            self.kubectl("create", "namespace", self.namespace)
            self.kubectl("label", name, "pod-security.kubernetes.io/enforce=privileged")  # what kills is privileged
        return self

    def __exit__(self, *_: object) -> None:
        for process, _address in self._forwards.values():
            process.kill()
            process.communicate()
        if self._made:
            self.kubectl("delete", "namespace", self.namespace, "--wait=false")  # pods of a lost node may stay

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        return run("kubectl", "--namespace", self.namespace, *arguments, text=text, environment=self.environment)

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        """Objects."""
        return list(json.loads(self.kubectl("get", *arguments, "--output", "json"))["items"])

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Makes objects, or changes them."""
        self.kubectl(
            "apply", "--filename", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )

    def pods(self, component: str = "") -> list[dict[str, Any]]:
        """Of the release, or of a component of it, those that are not being deleted."""
        label = "app.kubernetes.io/name=streamtrain" + (
            f",app.kubernetes.io/component={component}" if component else ""
        )
        return [pod for pod in self.get("pods", "--selector", label) if "deletionTimestamp" not in pod["metadata"]]

    def is_ready(self, one: Mapping[str, Any]) -> bool:
        """Of a pod or a node."""
        conditions = one["status"].get("conditions", ())
        return any(of["type"] == "Ready" and of["status"] == "True" for of in conditions)

    def nodes(self) -> dict[str, str]:
        """Nodes that take pods, by name, with their addresses within the cluster's network."""
        return {
            node["metadata"]["name"]: of["address"]
            for node in self.get("nodes")
            if self.is_ready(node)
            and all(taint["effect"] == "PreferNoSchedule" for taint in node["spec"].get("taints", ()))
            for of in node["status"]["addresses"]
            if of["type"] == "InternalIP"
        }

    def here(self) -> str:
        """Address of this machine for pods: the one from which it reaches their nodes."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect((next(iter(self.nodes().values())), 9))  # sends nothing
            return str(asked.getsockname()[0])

    def forward(self, pod: Mapping[str, Any], port: int) -> str:
        """Address on this machine of a pod's port; the same one for as long as the pod can be reached by it."""
        uid = pod["metadata"]["uid"]
        if uid not in self._forwards or self._forwards[uid][0].poll() is not None:
            command = ("kubectl", "--namespace", self.namespace, "port-forward")
            process = subprocess.Popen(
                [*command, f"pod/{pod['metadata']['name']}", f":{port}"],
                env={**os.environ, **self.environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdout is not None
            said = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
            if said is None:
                process.kill()
                process.communicate()
                raise RuntimeError(f"no port of pod {pod['metadata']['name']} yet")
            self._forwards[uid] = process, said[0]
        return self._forwards[uid][1]

    def kill(self, pod: Mapping[str, Any], image: str) -> None:
        """Kills the processes of a pod's first container, kill -9, by a pod of an image with Python on its node."""
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        spec = {
            "nodeName": pod["spec"]["nodeName"],
            "hostPID": True,
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "kill",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python", "-c", _KILL.format(container=container)],
                    "securityContext": {"runAsUser": 0, "runAsGroup": 0},
                }
            ],
        }
        name = f"kill-{container[:8]}"
        self.apply([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}])

        def killed() -> bool:
            phase = self.kubectl("get", "pod", name, "--output", "jsonpath={.status.phase}")
            if phase == "Failed":
                raise AssertionError(self.kubectl("logs", name))
            return phase == "Succeeded"

        until(killed, 60, f"kill -9 of {pod['metadata']['name']}")

    @property
    def loses(self) -> bool:
        """Whether nodes can be lost."""
        return bool(self._lose)

    def lose(self, node: str) -> None:
        """Kills a node with all its pods."""
        run(*shlex.split(self._lose.format(node=node)))


class Own(Cluster):
    """Nodes of this machine, each a real one but for the kernel that they share.

    Args:
        folder: of its state; must not exist.
        nodes: how many.
        namespace: as of `Cluster`.
    """

    def __init__(self, folder: Path, nodes: int, namespace: str) -> None:
        super().__init__(namespace, lose=f"{FOLDER / 'cluster.sh'} lose {folder} {{node}}")
        self._folder, self._nodes = folder, nodes
        self.environment = {"KUBECONFIG": str(folder / "kubeconfig")}

    def __enter__(self) -> "Own":
        run(str(FOLDER / "build.sh"))
        try:
            run(str(FOLDER / "cluster.sh"), "up", str(self._folder), str(self._nodes))
            super().__enter__()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._made = False  # it goes with the cluster
        super().__exit__()
        self._down()

    def _down(self) -> None:
        run(str(FOLDER / "cluster.sh"), "down", str(self._folder))

    def load(self, archive: Path) -> None:
        """Gives all nodes an image."""
        for n in range(self._nodes):
            socket_of = str(self._folder / f"node{n}" / "containerd.sock")
            run("ctr", "-a", socket_of, "-n", "k8s.io", "images", "import", str(archive))
