"""docker-compose.yml and services/Dockerfile are well-formed, complete, and say only what is there."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtrain.embedded import jars
from streamtrain.settings.load import load_settings
from tests.compose.composed import APP, FILE, ROOT, TOKEN, WORKING, Composed, Missing
from tests.patience import PATIENCE

DOCKERFILE = (ROOT / "services" / "Dockerfile").read_text()
PAGE = (ROOT / "docs" / "docker.md").read_text()
VARIABLES = {TOKEN: "a-token"}
COMPOSED = Composed(VARIABLES)
each_service = pytest.mark.parametrize("name", COMPOSED.services)
each_of_ours = pytest.mark.parametrize("name", [*COMPOSED.ours, *COMPOSED.demo])


def config(variables: dict[str, str], *files: Path) -> subprocess.CompletedProcess[str]:
    """`docker compose config`: of the plugin, or of Debian's docker-compose."""
    command = ["docker", "compose"]
    if not shutil.which("docker") or subprocess.run([*command, "version"], capture_output=True, check=False).returncode:
        command = ["docker-compose"]
    if not shutil.which(command[0]):
        if "compose" in os.environ.get("STREAMTRAIN_REQUIRE", "").split(","):
            pytest.fail("docker compose is required, and is not there", pytrace=False)
        pytest.skip("NOT TESTED, as there is no docker compose")
    options = [part for file in (FILE, *files) for part in ("-f", str(file))]
    environment = {key: of for key, of in os.environ.items() if not key.startswith("STREAMTRAIN_")} | variables
    with tempfile.NamedTemporaryFile() as empty:  # in place of the .env of whoever runs this
        command += ["--env-file", empty.name, "--profile", "demo", "--project-directory", str(ROOT), *options, "config"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)


def test_compose_reads_it_as_these_tests_do() -> None:
    done = config(VARIABLES)
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)["services"]
    assert read.keys() == COMPOSED.services.keys()
    for name, one in read.items():
        there = {key: str(value) for key, value in (one.get("environment") or {}).items() if value is not None}
        assert there == COMPOSED.services[name]["environment"], name
        assert one.get("command") == COMPOSED.services[name].get("command"), name


def test_a_missing_token_is_said() -> None:
    done = config({})
    assert done.returncode != 0
    assert f"put {TOKEN}=… into .env" in done.stderr
    with pytest.raises(Missing, match=f"put {TOKEN}"):
        Composed({})


def test_tls_as_the_page_has_it_goes_on_top(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "tls.yml").write_text(block)
    done = config(VARIABLES, tmp_path / "tls.yml")
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)["services"]
    for name in COMPOSED.ours:
        security = settings_of(read[name]["environment"]).security
        assert (security.certificate, security.key, security.ca) == ("/tls/node.crt", "/tls/node.key", "/tls/ca.crt")
        assert not security.insecure


def settings_of(environment: dict[str, Any]) -> Any:
    """The settings of a container."""
    return load_settings(None, {key: str(of) for key, of in environment.items()})


@each_of_ours
def test_variables_are_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = settings_of(COMPOSED.services[name]["environment"])
    assert settings.security.token.get_secret_value() == "a-token"
    hosts = {address.partition(":")[0] for address in settings.ps.addresses}
    assert hosts == {one for one in COMPOSED.services if one.startswith("ps-")}


def test_the_admin_token_is_passed_on_if_it_is_there() -> None:
    key = "STREAMTRAIN_SERVE__ADMIN_TOKEN"
    assert key not in COMPOSED.services["serving"]["environment"]
    assert Composed(VARIABLES | {key: "secret"}).services["serving"]["environment"][key] == "secret"


@each_of_ours
def test_entry_files_and_models_are_there(name: str) -> None:
    service = COMPOSED.services[name]
    for file in re.findall(rf"{APP}/(\S+\.py)", " ".join([*service["command"], *service.get("healthcheck", {})])):
        assert (ROOT / file).is_file()
    file = service["environment"]["STREAMTRAIN_MODEL"].partition(":")[0]
    assert (ROOT / COMPOSED.folders(name)[WORKING] / file).is_file()


@each_service
def test_ports_are_this_machines_alone(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in COMPOSED.services[name].get("ports", []))


@each_service
def test_health_is_checked_of_what_stays(name: str) -> None:
    assert "healthcheck" in COMPOSED.services[name] or name in COMPOSED.demo


@each_of_ours
def test_containers_may_do_little(name: str) -> None:
    service = COMPOSED.services[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


@each_service
def test_nobody_gains_privileges(name: str) -> None:
    assert COMPOSED.services[name]["security_opt"] == ["no-new-privileges:true"]


def test_what_is_named_of_the_file_is_in_it() -> None:
    whole = yaml.safe_load(FILE.read_text())
    for name, one in COMPOSED.services.items():
        assert {*one.get("depends_on", [])} <= {*COMPOSED.services}, name
        for source in COMPOSED.folders(name).values():
            assert (ROOT / source).exists() if source[0] in "./" else source in whole["volumes"], f"{name}: {source}"


def test_workers_end_first_and_shards_last() -> None:
    first, *_, last = COMPOSED.ends()
    assert "worker" in first
    assert last == {"ps-0", "ps-1"}


def health_of(url: str) -> str:
    """What the check of a container says; "" if all is well."""
    command = [sys.executable, str(ROOT / "services" / "healthy.py"), url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert bool(done.returncode) == bool(done.stderr)
    return done.stderr


def test_what_does_not_answer_is_not_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        assert health_of(f"tcp://{place}") == ""
        threading.Thread(target=_answer, args=(server, b"503 Service Unavailable"), daemon=True).start()
        assert "503" in health_of(f"http://{place}/healthz/live")
    assert "refused" in health_of(f"tcp://{place}")
    assert "refused" in health_of(f"http://{place}/healthz/live")


def _answer(server: socket.socket, status: bytes) -> None:
    """Until somebody asks: the one who only knocked is still in the queue."""
    for _ in range(2):
        connection, _ = server.accept()
        with connection:
            if connection.recv(1 << 16):
                connection.sendall(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")


def test_kafka_is_the_version_that_tests_talk_to() -> None:
    assert COMPOSED.services["kafka"]["image"] == f"apache/kafka:{jars.VERSION}"


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), str(ROOT / "services" / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_image_copies_is_let_in() -> None:
    copied = [words.split() for words in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)]
    let_in = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    sources = {source.partition("/")[0] for *found, _ in copied for source in found}
    assert sources == {*let_in}
    assert all((ROOT / source).exists() for source in sources)


def test_the_image_is_of_a_user_without_tools() -> None:
    last = DOCKERFILE.partition(" AS bare\n")[2]  # both images begin with it
    assert re.search(r"^USER (\d+):\1$", last, re.MULTILINE)
    assert not re.search(r"apt-get|pip install|g\+\+", last)
    assert f"\nWORKDIR {WORKING}\n" in last
    assert f"COPY services/*.py {APP}/services/" in last
