"""Schema registries: Apicurio, which speaks the API of Confluent's, and servers that answer nothing but a status."""

import os
import shutil
import subprocess
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.patience import until
from tests.ports import free_ports

VERSION = "3.0.9"
HOME = Path.home() / ".cache" / "streamtrain" / f"apicurio-registry-{VERSION}"


class RegistryServer:
    """A registry that keeps its schemas in a directory, over being killed."""

    def __init__(self, directory: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
        self._log = directory / "log"
        self._command = [
            "java",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            f"-Dquarkus.http.port={port}",
            "-Dquarkus.http.host=127.0.0.1",
            f"-Dapicurio.datasource.url=jdbc:h2:file:{directory}/schemas;WRITE_DELAY=0",
            "-jar",
            str(HOME / f"apicurio-registry-app-{VERSION}-runner.jar"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        running = self._process
        until(lambda: self._answers() or running.poll() is not None, told=self._said)
        assert running.poll() is None, self._said()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _said(self) -> str:
        return self._log.read_text()[-5000:]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def install() -> None:
    """Fetches the registry with Maven, unless it is there; skips the test where there is no Maven."""
    if HOME.exists():
        return
    if shutil.which("mvn") is None or shutil.which("java") is None:
        if "registry" in os.environ.get("STREAMTRAIN_REQUIRE", "").split(","):
            pytest.fail("Maven and Java are needed to run a schema registry")
        pytest.skip("there is no Maven or no Java to run a schema registry")
    artifact = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
    partial = HOME.with_name(f"{HOME.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    copy = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={partial}"]
    done = subprocess.run(copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (archive,) = partial.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(partial, filter="data")
    archive.unlink()
    partial.rename(HOME)


@contextmanager
def answering(status: int, body: bytes = b"{}") -> Iterator[str]:
    """The address of a server that answers everything alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
