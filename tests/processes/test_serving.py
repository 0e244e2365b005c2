"""Several serving processes at one address: one is killed while requests go on, and they follow one label."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import keras
import pytest

import streamtrain as st
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError
from streamtrain.model.model import Model
from streamtrain.processes.serving import follow_all, serve_model, serve_processes
from streamtrain.settings.groups import Settings
from tests import commands
from tests.children import children
from tests.patience import PATIENCE, until
from tests.ports import free_ports
from tests.probes import is_ready
from tests.serve.in_redis import PREDICT, InRedis

MODEL = "from tests.serve.published import counted\nmodel = counted()\n"
BODY = {"instances": [{"user": "u1"}]}


class Server:
    """`streamtrain serve` with settings."""

    def __init__(self, folder: Path, **settings: object) -> None:
        (folder / "model.py").write_text(MODEL)
        self.log = folder / "serve.log"
        given = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
        with self.log.open("wb") as log:
            self.process = commands.start(
                [*commands.COMMAND, "serve", "--model", "model.py:model", *given],
                cwd=folder,
                env=os.environ,
                stdout=log,
                stderr=log,
            )

    def pids(self, index: int) -> list[int]:
        """Of the process of that index."""
        words = children(self.process.pid)
        return [pid for pid, of in words.items() if "--index" in of and of[of.index("--index") + 1] == str(index)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(**settings: object) -> Server:
        servers.append(Server(tmp_path, **settings))
        return servers[-1]

    yield begin
    for one in servers:
        one.process.kill()
        one.process.wait()


def client_of(url: str) -> httpx.Client:
    """One that connects anew for each request, so that any of the processes may answer."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False, verify=False, limits=limits)


def ask(client: httpx.Client, failed: list[str]) -> str:
    """The version that answers; tries again where a connection breaks, as it was with the process that is killed."""
    for _ in range(100):
        try:
            answer = client.post(PREDICT, json=BODY)
        except httpx.TransportError:
            continue
        if answer.status_code != 200:
            failed.append(answer.text)
        return str(answer.headers.get("x-model-version"))
    raise AssertionError("nobody answers")


def metrics_of(client: httpx.Client) -> str:
    try:
        return client.get("/metrics").text
    except httpx.TransportError:
        return ""


def test_one_is_killed_and_comes_back(start: Callable[..., Server]) -> None:
    (port,) = free_ports(1)
    metrics, _ = free_ports(2)
    failed: list[str] = []
    done = threading.Event()
    url = f"http://127.0.0.1:{port}"

    def keep_asking() -> None:
        with client_of(url) as client:
            while not done.wait(0.02):
                ask(client, failed)

    with Valkey() as valkey:
        published = InRedis(valkey.url)
        published.keep(1)
        published.publish(2)
        server = start(
            publish__url=valkey.url,
            publish__model=published.model.keys.model,
            publish__every="50ms",
            serve__listen=f"127.0.0.1:{port}",
            serve__processes=2,
            serve__metrics=f"127.0.0.1:{metrics}",
            serve__admin_token="secret",
        )
        scrapes = [client_of(f"http://127.0.0.1:{metrics + index}") for index in range(2)]

        def all_serve(version: str) -> bool:
            line = f'streamtrain_serving_info{{model="model",version="{version}"}} 1.0'
            assert server.process.poll() is None, server.log.read_text()
            return all(line in metrics_of(one) for one in scrapes)

        def users() -> list[str]:
            leases = published.server.call("ZRANGE", published.model.keys.holds, 0, -1)
            return [name.decode() for name in leases]

        until(lambda: all_serve("head") and len(users()) == 2, PATIENCE)
        asking = threading.Thread(target=keep_asking)
        asking.start()
        (killed,) = server.pids(0)
        os.kill(killed, signal.SIGKILL)
        until(lambda: server.pids(0) not in ([], [killed]) and all_serve("head"), PATIENCE)
        with client_of(url) as client:
            bearer = {"authorization": "Bearer secret"}
            answer = client.post("/v1/models/model:promote", json={"version": 1}, headers=bearer)
            assert answer.status_code == 200, answer.text
            until(lambda: all_serve("1"), PATIENCE)
            assert ask(client, failed) == "1"
        assert all(is_ready(metrics + index) for index in range(2))
        done.set()
        asking.join(PATIENCE)
        for one in scrapes:
            one.close()
        assert failed == []
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0, server.log.read_text()
        assert users() == [f"0:{socket.gethostname()}:{killed}"]  # until it expires
        published.server.close()


def test_one_takes_no_requests_before_it_can_answer(start: Callable[..., Server]) -> None:
    (port,) = free_ports(1)
    statuses: list[int] = []
    with Valkey() as valkey, client_of(f"http://127.0.0.1:{port}") as client:
        published = InRedis(valkey.url)
        server = start(
            publish__url=valkey.url,
            publish__model=published.model.keys.model,
            publish__every="50ms",
            serve__listen=f"127.0.0.1:{port}",
        )

        def is_answered() -> bool:
            try:
                statuses.append(client.post(PREDICT, json=BODY).status_code)
            except httpx.ConnectError:
                return False
            return True

        until(lambda: "waiting for the first publication" in server.log.read_text(), PATIENCE)
        assert not is_answered()
        published.publish(1)
        until(is_answered, PATIENCE)
        assert statuses == [200]
        published.server.close()


def test_a_standby_serves_once_it_is_told_whose_place_it_takes(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    metrics, _ = free_ports(2)
    with Valkey() as valkey, socket.create_server(("127.0.0.1", 0)) as listener:
        published = InRedis(valkey.url)
        published.keep(1)
        given = {
            "publish.url": valkey.url,
            "publish.model": published.model.keys.model,
            "serve.metrics": f"127.0.0.1:{metrics}",
            "log.format": "json",
            "log.process": "serve:0",
        }
        words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        fd = listener.fileno()
        command = [*commands.COMMAND, "serve", "--model", "model.py:model", "--fd", str(fd), *words]
        with commands.start(
            [*command, "--index", "0", "--standby"],
            cwd=tmp_path,
            env=os.environ,
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as standby:
            try:
                with client_of(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
                    with pytest.raises(httpx.ReadTimeout):
                        client.post(PREDICT, json=BODY, timeout=0.5)
                    assert standby.stdin is not None
                    standby.stdin.write("serve1\n")
                    standby.stdin.flush()
                    assert client.post(PREDICT, json=BODY).status_code == 200
                with client_of(f"http://127.0.0.1:{metrics + 1}") as client:
                    assert "streamtrain_serving_info" in metrics_of(client)
            finally:
                standby.terminate()
                log = standby.communicate(timeout=PATIENCE)[1]
        assert '"process": "serve:1"' in log
        assert standby.returncode == 0, log
        published.server.close()


def test_a_standby_that_is_not_needed_ends(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = ["serve", "--model", "model.py:model", "--fd", str(listener.fileno()), "--standby"]
        done = commands.run(
            [*commands.COMMAND, *command, "--set", "publish.url=redis://localhost:1"],
            cwd=tmp_path,
            env=os.environ,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 0, done


def test_what_is_set_wrongly(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(publish__url="redis://localhost:1", serve__processes=2, serve__listen="127.0.0.1:0")
    (tmp_path / "model.py").unlink()
    assert server.process.wait(PATIENCE) == 2
    assert server.log.read_text().splitlines()[-1].startswith("streamtrain: ")
    assert "model.py" in server.log.read_text()


def test_a_run_of_the_defaults_of_an_earlier_release_is_served(tmp_path: Path) -> None:
    schema = st.Schema(features=[st.Categorical("user", dim=4)])
    model = st.Model(schema, lambda inputs: keras.layers.Dense(1, "sigmoid")(inputs["user"]))
    earlier = model.replace(embedding_optimizer=st.Adagrad(decay=0.999), dense_optimizer=st.Adam(beta1=0.0))
    begun = st.Learner(earlier)
    begun.learn([{"user": i % 7, "label": i % 2} for i in range(100)])
    begun.save(tmp_path / "saved")
    settings = Settings.model_validate({"checkpoint": {"url": str(tmp_path / "saved")}})
    [updater], failed = follow_all(lambda file: model, settings)
    updater.registry.prepare("head")
    assert updater.registry.model.dense_optimizer == earlier.dense_optimizer
    assert failed == {}


def never(file: str | None) -> Model:
    raise AssertionError("nothing is to be loaded")


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ({"processes": 2, "admin_token": "x"}, "a promotion would reach one process only"),
        ({"processes": 2, "metrics": "127.0.0.1:65535"}, "must leave a port for each"),
        ({"processes": 2, "listen": "unix:/tmp/x"}, "over TCP only"),
        ({"processes": 2, "listen": "192.0.2.1:80"}, "cannot bind 192.0.2.1:80"),
    ],
)
def test_settings_that_do_not_go_together(serve: dict[str, object], message: str, tmp_path: Path) -> None:
    settings = Settings.model_validate({"checkpoint": {"url": str(tmp_path)}, "serve": serve})
    with pytest.raises(ConfigError, match=message):
        serve_processes(settings, ["false"], {}, threading.Event())
    with pytest.raises(ConfigError, match="there is nothing to serve from"):
        serve_model(never, Settings.model_validate({"serve": serve}))


def test_what_is_inherited_must_be_a_socket_that_listens(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    command = [*commands.COMMAND, "serve", "--model", "model.py:model", "--fd"]
    with socket.socket() as deaf, (tmp_path / "model.py").open() as file:
        for fd, message in ((file.fileno(), "is not a socket: "), (deaf.fileno(), "is not a listening socket")):
            done = commands.run(
                [*command, str(fd)],
                cwd=tmp_path,
                pass_fds=[fd],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            assert done.returncode == 2
            assert f"streamtrain: --fd {fd} {message}" in done.stderr


@pytest.mark.parametrize(
    ("serve", "warned"),
    [
        ({"listen": "0.0.0.0:8501"}, True),
        ({"listen": "0.0.0.0:8501", "read_token": "secret"}, False),
        ({"listen": "127.0.0.1:8501"}, False),
        ({"listen": "[::1]:8501"}, False),
    ],
)
def test_who_is_open_to_the_network_says_so(
    caplog: pytest.LogCaptureFixture, serve: dict[str, str], warned: bool
) -> None:
    def load(file: str | None) -> Model:
        raise ConfigError("no model")

    settings = Settings.model_validate({"serve": serve, "publish": {"url": "redis://127.0.0.1:1"}})
    with pytest.raises(ConfigError, match="no model"):
        serve_model(load, settings)
    assert ("anyone who reaches 0.0.0.0:8501 may request predictions" in caplog.text) == warned
