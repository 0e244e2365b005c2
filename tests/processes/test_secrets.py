"""No secret is said: by no role, at the most talkative level, while everything that it connects to fails or refuses."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from streamtrain.embedded.valkey import Valkey
from streamtrain.settings.groups import KEYS, SECRETS
from tests import commands
from tests.patience import PATIENCE, until
from tests.ports import free_ports

MODEL = "from tests.serve.published import counted\nmodel = counted()\n"

# Each is in no other word, so that whatever is left of one is found.
PASSWORDS = {
    "security.token": "zq-token-of-the-wire",
    "serve.admin_token": "zq-admin-token",
    "serve.read_token": "zq-read-token",
    "kafka": "zq-sasl-password",
    "registry": "zq-registry-password",
    "redis": "zq-redis-password",
    "store": "zq-store-password",
    "signature": "zq-signature-of-a-store",
    "stream": "zq-stream-password",
}
LEFT = re.compile(rb"zq-\w+|enEtc2Fzb|enEtcmVn|enEtcmVk|enEtd|enEtYWRt")  # and the same in Base64


URLS = ("checkpoint.url", "publish.url", "stream.registry", "stream.url")  # in which secrets may be


class Role:
    """A command with all secrets in its environment."""

    def __init__(self, folder: Path, environment: dict[str, str], name: str, *words: str, failed: str) -> None:
        self.name, self._failed = name, failed
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = commands.start(
                [*commands.COMMAND, *words], cwd=folder, env=environment, stdout=log, stderr=log
            )

    def has_failed(self) -> bool:
        """Whether it has said that something does not work, or ended for it."""
        return self.process.poll() is not None or bool(re.search(self._failed, self.log.read_text()))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def environment_of(folder: Path, redis: str, ports: dict[str, int], **more: str) -> dict[str, str]:
    """Of all roles: every secret that there may be, and nobody where they connect."""
    user = PASSWORDS["registry"]
    given = {
        "MODEL": "model.py:model",
        "LOG__LEVEL": "debug",
        "STREAM__URL": f"kafka://127.0.0.1:{ports['nobody']}",
        "STREAM__TOPIC": "clicks",
        "STREAM__KAFKA": json.dumps(
            {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN",
                "sasl.username": "ann",
                "sasl.password": PASSWORDS["kafka"],
                "debug": "all",
            }
        ),
        "STREAM__FORMAT": "avro",
        "STREAM__REGISTRY": f"http://127.0.0.1:{ports['nobody']}",
        "STREAM__REGISTRY_CONFIG": json.dumps({"basic.auth.user.info": f"ann:{user}"}),
        "PUBLISH__URL": redis,
        "CHECKPOINT__URL": f"ftp://ann:{PASSWORDS['store']}@127.0.0.1:{ports['nobody']}/checkpoints"
        f"?signature={PASSWORDS['signature']}",
        "PS__ADDRESSES": f"127.0.0.1:{ports['ps']}",
        "PS__METRICS": f"127.0.0.1:{ports['metrics']}",
        "SERVE__LISTEN": f"127.0.0.1:{ports['serve']}",
        "SECURITY__TOKEN": PASSWORDS["security.token"],
        "SERVE__ADMIN_TOKEN": PASSWORDS["serve.admin_token"],
        "SERVE__READ_TOKEN": PASSWORDS["serve.read_token"],
    } | more
    assert {"SECURITY__TOKEN", "SERVE__ADMIN_TOKEN", "SERVE__READ_TOKEN", "STREAM__KAFKA"} <= {*given}
    named = {f"STREAMTRAIN_{key}": value for key, value in given.items()}
    return {name: of for name, of in os.environ.items() if not name.startswith("STREAMTRAIN_")} | named


@pytest.fixture
def ports() -> dict[str, int]:
    names = ("nobody", "ps", "metrics", "serve", "coordinator")
    return dict(zip(names, free_ports(len(names)), strict=True))


@pytest.fixture
def redis() -> Iterator[str]:
    """A URL with a password, of a Redis that refuses it."""
    with Valkey(password="another") as server:
        yield f"redis://:{PASSWORDS['redis']}@127.0.0.1:{server.port}/0"


def test_every_secret_of_the_settings_is_tried() -> None:
    assert {key for key in KEYS if key.endswith(("url", "registry"))} == {*URLS}
    tried = {"security.token", "serve.admin_token", "serve.read_token", "stream.kafka", "stream.registry_config"}
    assert tried == SECRETS


def test_no_role_says_a_secret(tmp_path: Path, redis: str, ports: dict[str, int]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "samples.jsonl").write_text('{"ts": 1, "user": "u1", "label": 1}\n')
    environment = environment_of(tmp_path, redis, ports)
    local = environment | {"STREAMTRAIN_CHECKPOINT__URL": str(tmp_path / "checkpoints")}
    options = ["--log-format", "json"]
    coordinator = ["--set", f"coordinator.address=127.0.0.1:{ports['coordinator']}"]
    wrong = environment | {"STREAMTRAIN_SECURITY__TOKEN": "zq-wrong-token"}
    of_redis = {"STREAMTRAIN_STREAM__URL": redis.replace(PASSWORDS["redis"], PASSWORDS["stream"])}
    store = environment["STREAMTRAIN_CHECKPOINT__URL"]
    roles = [
        Role(tmp_path, local, "ps", "ps", "--index", "0", *options, failed="serves at"),
        Role(tmp_path, environment, "ps of no store", "ps", "--index", "0", "--listen", "127.0.0.1:0", failed="never"),
        Role(tmp_path, local, "coordinator", "coordinator", *coordinator, *options, failed="not published|away|serves"),
        Role(tmp_path, wrong, "stranger", "status", "--once", failed="never"),
        Role(tmp_path, local, "worker", "worker", *options, failed="away|[Rr]efuse"),
        Role(tmp_path, local, "serve", "serve", *options, failed="failed, retrying"),
        Role(tmp_path, local, "produce", "produce", "samples.jsonl", *options, failed="away|[Rr]efused"),
        Role(tmp_path, local, "status", "status", "--once", failed="never"),
        Role(tmp_path, local, "versions", "versions", failed="never"),
        Role(tmp_path, local | of_redis, "up", "up", *options, failed="never"),
        Role(tmp_path, local | of_redis, "worker of redis", "worker", *options, failed="away|[Rr]efuse"),
        Role(tmp_path, environment, "verify", "verify", failed="never"),
        Role(tmp_path, environment, "restore", "restore", failed="never"),
        Role(tmp_path, environment, "import", "publish", "--checkpoint", store, failed="never"),
    ]
    said = []
    try:
        for one in roles:
            until(one.has_failed, PATIENCE)
        said += told_over_http(ports)
    finally:
        for one in roles:
            one.end()
    for one in roles:
        text = one.log.read_bytes()
        assert text, one.name
        assert not LEFT.findall(text), f"{one.name}: {LEFT.findall(text)}"
    assert len(said) > 5
    assert not LEFT.findall("".join(said).encode())


def test_up_says_no_password_that_is_right(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    inherited = {name: of for name, of in os.environ.items() if not name.startswith("STREAMTRAIN_")}
    with Valkey(password=PASSWORDS["redis"]) as server:
        urls = {f"STREAMTRAIN_{key}__URL": server.url for key in ("STREAM", "PUBLISH")}
        words = ("up", "--model", "model.py:model", "--topic", "clicks", "--listen", f"127.0.0.1:{free_ports(1)[0]}")
        few = ("--set", "up.workers=1", "--set", "up.ps=1", "--set", "up.standby=false")
        one = Role(tmp_path, inherited | urls, "up", *words, *few, failed="partitions assigned")
        try:
            until(one.has_failed, PATIENCE)
        finally:
            one.end()
    text = one.log.read_bytes()
    assert b"stream redis://***@127.0.0.1" in text
    assert b"partitions assigned" in text, text.decode()
    assert not LEFT.findall(text)


def told_over_http(ports: dict[str, int]) -> list[str]:
    """What the endpoint and the metrics of a shard say, to whoever has a token and to whoever has none."""
    url, read = f"http://127.0.0.1:{ports['serve']}", {"authorization": f"Bearer {PASSWORDS['serve.read_token']}"}
    said = []
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        until(lambda: _answers(client, f"{url}/healthz/live"), PATIENCE)
        for path in (
            "/metrics",
            "/healthz/ready",
            "/v1/models/model/process",
            "/v1/models/model/cluster",
            "/openapi.json",
            "/",
            "/nowhere",
        ):
            for headers in (read, {}, {"authorization": "Bearer zq-guess"}):
                said.append(client.get(url + path, headers=headers).text)
        said.append(client.get(f"http://127.0.0.1:{ports['metrics']}/metrics").text)
    assert any("streamtrain_serving_ready" in one for one in said)
    assert "streamtrain_shard" in said[-1]
    return said


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False
