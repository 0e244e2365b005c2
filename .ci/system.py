"""Checks what building needs of the system beside python3, make and g++, and installs it on Debian as root.

With the argument "servers" also what tests need to run real ones, with "fuzzers" what `make fuzz` is built with. Helm,
which Debian does not have, is built where there is Go.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MINIMUM = (3, 11)


# What runs the servers that tests talk to, and `make kafka`, the browser that looks at the console, what reads
# docker-compose.yml, and what evaluates alerts, by command.
SERVERS = {
    "java": "default-jre-headless",
    "mvn": "maven",
    "redis-server": "redis-server",
    "chromium": "chromium",
    "docker-compose": "docker-compose",
    "promtool": "prometheus",
}

HELM = "helm.sh/helm/v3/cmd/helm@v3.18.6"
TOOLS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamtrain" / "kubernetes" / "bin"

# And what builds fuzzers: a compiler that has libFuzzer, with its runtime.
FUZZERS = {"clang++": "clang libclang-rt-dev"}


def missing(asked: list[str]) -> list[str]:
    """Names the Debian packages whose contents this machine lacks."""
    wanted = (SERVERS if "servers" in asked else {}) | (FUZZERS if "fuzzers" in asked else {})
    packages = [one for command, names in wanted.items() if shutil.which(command) is None for one in names.split()]
    if importlib.util.find_spec("ensurepip") is None:
        packages.append("python3-venv")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        packages.append("python3-dev")
    if shutil.which("g++") is None:
        packages.append("g++")
    return packages


def install_helm() -> None:
    """Once for all checkouts of a user, as it takes more than a minute."""
    if shutil.which("helm") or (TOOLS / "helm").exists():
        return
    go = shutil.which("go")
    if go is None:
        print("helm is not installed, nor is Go to build it: tests of the chart are skipped", file=sys.stderr)
        return
    TOOLS.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"GOBIN": str(TOOLS), "CGO_ENABLED": "0"}
    subprocess.run([go, "install", "-ldflags=-s -w", HELM], env=environment, check=True)


def main() -> None:
    if sys.version_info < MINIMUM:
        sys.exit(f"Python {'.'.join(map(str, MINIMUM))} or newer is needed, this is {sys.version.split()[0]}")
    if "servers" in sys.argv[1:]:
        install_helm()
    packages = missing(sys.argv[1:])
    if not packages:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    apt = shutil.which("apt-get")
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    if apt is None or (sudo and shutil.which("sudo") is None):
        sys.exit(f"please install first: {' '.join(packages)} (on Debian: {' '.join(command)})")
    subprocess.run([*sudo, "apt-get", "update", "-qq"], check=True)
    subprocess.run([*sudo, *command], check=True)


if __name__ == "__main__":
    main()
