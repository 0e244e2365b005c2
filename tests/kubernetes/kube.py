"""A cluster for tests: the one that KUBECONFIG names, or one of their own, with real kubelets, containerd and runc."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "cluster"
GATEWAY = "10.88.0.1"  # of the bridge between pods and this machine


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
    """Nodes of this machine, each a real one but for the kernel that they share.

    Args:
        folder: of its state; must not exist.
        nodes: how many.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder, self._nodes = folder, nodes
        self.environment = {"KUBECONFIG": str(folder / "kubeconfig")}

    def __enter__(self) -> "Cluster":
        run(str(FOLDER / "build.sh"))
        try:
            run(str(FOLDER / "cluster.sh"), "up", str(self._folder), str(self._nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        run(str(FOLDER / "cluster.sh"), "down", str(self._folder))

    def load(self, archive: Path) -> None:
        """Gives all nodes an image."""
        for n in range(self._nodes):
            socket = str(self._folder / f"node{n}" / "containerd.sock")
            run("ctr", "-a", socket, "-n", "k8s.io", "images", "import", str(archive))

    def lose(self, node: str) -> None:
        """Kills a node with all its pods, kill -9."""
        run(str(FOLDER / "cluster.sh"), "lose", str(self._folder), node)

    def revive(self, node: str) -> None:
        """Starts a node again that was lost."""
        run(str(FOLDER / "cluster.sh"), "revive", str(self._folder), node)

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        return run("kubectl", *arguments, text=text, environment=self.environment)

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

    def is_ready(self, pod: Mapping[str, Any]) -> bool:
        conditions = pod["status"].get("conditions", ())
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
