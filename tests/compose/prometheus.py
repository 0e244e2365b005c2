"""Prometheus itself, for tests: its tools, and a server that scrapes what services/prometheus/prometheus.yml names."""

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtrain.address import free_port
from tests.compose.composed import ROOT
from tests.patience import PATIENCE, until

FOLDER = ROOT / "services" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]


def command(name: str) -> str | None:
    """Path of `prometheus` or `promtool`; None: it is not installed, and need not be."""
    found = shutil.which(name)
    if found is None and "prometheus" in os.environ.get("STREAMTRAIN_REQUIRE", "").split(","):
        pytest.fail(f"{name} is required, and is not there", pytrace=False)
    return found


class Prometheus:
    """A server that runs.

    Args:
        port: of its API.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def values(self, query: str) -> list[float]:
        """What a query returns now, without NaN."""
        with urllib.request.urlopen(f"{self._url}/query?{urllib.parse.urlencode({'query': query})}", timeout=30) as got:
            result = json.load(got)["data"]["result"]
        return [value for one in result if (value := float(one["value"][1])) == value]


@contextmanager
def scraping(executable: str, targets: Mapping[str, Sequence[str]], folder: Path) -> Iterator[Prometheus]:
    """A Prometheus with the jobs and rules of services/prometheus, which scrapes every second.

    Args:
        executable: of Prometheus.
        targets: addresses by job.
        folder: of its configuration, data and log.
    """
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    jobs = [one["job_name"] for one in config["scrape_configs"]]
    config["scrape_configs"] = [{"job_name": job, "static_configs": [{"targets": [*targets[job]]}]} for job in jobs]
    (folder / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [executable, *words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    try:
        _wait_until_ready(process, port, folder / "prometheus.log")
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    def is_ready() -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=PATIENCE).close()
        except OSError:
            assert process.poll() is None, log.read_text()
            return False
        return True

    until(is_ready, told=log.read_text)
