"""Helm, for tests: the chart with some values."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "services" / "helm" / "streamtrain"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamtrain" / "kubernetes" / "bin"

KUBERNETES = ("--kube-version", "1.31.0")

BUCKET: dict[str, Any] = {
    "settings": {
        "stream": {"url": "kafka://kafka.example:9092", "topic": "clicks"},
        "publish": {"url": "redis://redis.example:6379", "model": "news"},
        "checkpoint": {"url": "s3://bucket/news"},
    },
    "secret": "news",
    "tls": "news-tls",
}
"""The least that a release of one's own needs."""


def executable() -> str:
    """Path of helm; skips the test where it is neither there nor required."""
    found = shutil.which("helm") or shutil.which("helm", path=str(CACHE))
    if found is None:
        required = "helm" in os.environ.get("STREAMTRAIN_REQUIRE", "").split(",")
        (pytest.fail if required else pytest.skip)("helm is not installed")
    return found


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs helm, with values on its standard input."""
    given = ["--values", "-"] if values is not None else []
    text = json.dumps(values) if values is not None else None
    command = [executable(), *arguments, *given]
    return subprocess.run(command, check=False, input=text, capture_output=True, text=True)


def rendered(*arguments: str, values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The objects that the chart makes of values, as release "st"."""
    done = helm("template", "st", str(CHART), "--namespace", "ads", *KUBERNETES, *arguments, values=values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def refusal(*arguments: str, values: Mapping[str, Any] | None = None) -> str:
    """Why it makes nothing of them."""
    done = helm("template", "st", str(CHART), *KUBERNETES, *arguments, values=values)
    assert done.returncode != 0, done.stdout
    return done.stderr
