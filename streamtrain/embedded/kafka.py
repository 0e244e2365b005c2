"""Apache Kafka itself as one broker on this machine, for tests and local runs. Needs Java, and Maven once.

`python -m streamtrain.embedded.kafka` runs one at localhost:9092 until Ctrl-C.
"""

import argparse
import atexit
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from streamtrain.address import check_free, free_port
from streamtrain.child_process import start_child
from streamtrain.embedded.jars import VERSION, cache_folder, class_archive, find_java, jars_folder, last_lines, resolve
from streamtrain.embedded.server import make_password
from streamtrain.errors import ConfigError, SourceUnavailable

# Tuned for one broker on one machine: little memory, few threads, quick to start.
_JVM = ["-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true"]
_LOGGING = [
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
]
_TERMINATED = 128 + signal.SIGTERM  # exit code of a JVM that has shut down
_USER = "streamtrain"
_CLUSTER = "c3RyZWFtdHJhaW4ta2Fma2"  # any 16 bytes in URL-safe base64 without padding

logger = logging.getLogger(__name__)


class Broker:
    """One broker, which is its own controller, on 127.0.0.1. It does not outlive this process.

    Args:
        jars: what `resolve` returned.
        data: folder of its topics, settings and log; None: one that is deleted at `close`.
        port: of the listener without credentials; 0: a free one.
        users: passwords by name; if there are any, a second listener asks for them by SASL PLAIN, at `secured`.
        password: of the user "streamtrain", that the first listener asks for as well, and the controller's, by SASL
            PLAIN; "": no authentication.
        properties: more of the broker's settings, or others.
        memory: heap of its JVM, as Java writes sizes.

    Attributes:
        servers: its address for clients, "127.0.0.1:port".
        secured: address of the listener that asks for users.
        log: its log file.

    Raises:
        ConfigError: Java is missing or too old.
    """

    def __init__(
        self,
        jars: Path,
        *,
        data: Path | None = None,
        port: int = 0,
        users: Mapping[str, str] = {},
        password: str = "",
        properties: Mapping[str, str] = {},
        memory: str = "512m",
    ) -> None:
        self._java = [find_java(), f"-Xmx{memory}", *_JVM, *_LOGGING]
        self._jars = jars
        self._classes = class_archive(self._java[0], jars)
        self._temporary = None
        if data is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="streamtrain-kafka-")
            data = Path(self._temporary.name)
        self._data = data
        self._ports = [port or free_port(), free_port(), free_port()]
        self._users = users
        self._password = password
        self._properties = properties
        self._process: subprocess.Popen[bytes] | None = None
        self.servers = f"127.0.0.1:{self._ports[0]}"
        self.secured = f"127.0.0.1:{self._ports[2]}"
        self.log = self._data / "broker.log"

    def __enter__(self) -> "Broker":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Id of its process; None: it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self, seconds: float = 120) -> None:
        """Starts it, with the same ports and data every time, and waits until it answers.

        Args:
            seconds: how long to wait; it takes four on an idle machine, fewer once its classes are parsed.

        Raises:
            ConfigError: its port is taken, or its folder cannot be written.
            SourceUnavailable: it does not answer, or has ended; the message has the end of its log.
        """
        check_free("127.0.0.1", self._ports[0], "Kafka")  # another server there might answer in the broker's place
        deadline = time.monotonic() + seconds
        topics, settings = self._data / "topics", self._data / "server.properties"
        try:
            self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
            settings.touch()
            settings.chmod(0o600)  # there may be passwords in it
            settings.write_text("".join(f"{name}={value}\n" for name, value in self._settings(topics).items()))
        except OSError as exc:
            raise ConfigError(f"Kafka cannot store its data in {self._data}: {exc}") from exc
        if not (topics / "meta.properties").exists():
            self._launch([], ["kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(settings)])
            self._wait(deadline)
            if self._process is None or self._process.returncode != 0:
                raise SourceUnavailable(f"Kafka cannot use {topics}: {self._log_end()}")
        self._launch(self._class_options(), ["kafka.Kafka", str(settings)])
        atexit.register(self.close)
        try:
            self._wait_until_it_answers(deadline)
        except BaseException:
            self.kill()
            raise

    def _settings(self, topics: Path) -> dict[str, str]:
        plain, control, secured = (f"127.0.0.1:{port}" for port in self._ports)
        open_to_all, asking = f"PLAINTEXT://{plain}", f",SASL_PLAINTEXT://{secured}" if self._users else ""
        accounts = " ".join(f'user_{name}="{password}"' for name, password in self._users.items())
        login = f"org.apache.kafka.common.security.plain.PlainLoginModule required {accounts};"
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{control}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT",
            "listeners": f"{open_to_all},CONTROLLER://{control}{asking}",
            "advertised.listeners": f"{open_to_all}{asking}",
            "log.dirs": str(topics),
            # A broker that was killed may come back once its session is over.
            "broker.heartbeat.interval.ms": "500",
            "broker.session.timeout.ms": "3000",
            "auto.create.topics.enable": "false",
            "group.initial.rebalance.delay.ms": "0",
            "offsets.topic.num.partitions": "4",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.replication.factor": "1",
            **({"sasl.enabled.mechanisms": "PLAIN"} if self._users or self._password else {}),
            **({"listener.name.sasl_plaintext.plain.sasl.jaas.config": login} if self._users else {}),
            **(self._require_password(control) if self._password else {}),
            **self._properties,
        }

    def _require_password(self, control: str) -> dict[str, str]:
        """Settings by which every listener requires the password."""
        module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
        login = f'{module} username="{_USER}" password="{self._password}" user_{_USER}="{self._password}";'
        return {
            "listener.security.protocol.map": "CLIENT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT",
            "listeners": f"CLIENT://{self.servers},CONTROLLER://{control}",
            "advertised.listeners": f"CLIENT://{self.servers}",
            "inter.broker.listener.name": "CLIENT",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.mechanism.controller.protocol": "PLAIN",
            "listener.name.client.plain.sasl.jaas.config": login,
            "listener.name.controller.plain.sasl.jaas.config": login,
        }

    def _class_options(self) -> list[str]:
        """With its classes parsed ahead, a broker starts in little more than half the CPU time."""
        if self._classes.exists():
            return [f"-XX:SharedArchiveFile={self._classes}"]
        with suppress(OSError):
            self._classes.parent.mkdir(parents=True, exist_ok=True)
        return [f"-XX:ArchiveClassesAtExit={self._new_classes}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]

    @property
    def _new_classes(self) -> Path:
        return self._classes.with_suffix(f".{os.getpid()}")

    def _launch(self, options: Sequence[str], arguments: Sequence[str]) -> None:
        """Starts a JVM, which does not outlive this process."""
        with self.log.open("ab") as log:
            try:
                self._process = start_child(
                    [*self._java, *options, "-cp", f"{self._jars}/*", *arguments],
                    signal.SIGKILL,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as exc:
                raise ConfigError(f"setpriv of util-linux cannot be run: {exc}") from exc

    def _wait_until_it_answers(self, deadline: float) -> None:
        quiet = logging.getLogger(f"{__name__}.client")
        quiet.propagate = False
        given: dict[str, str | int | float | bool] = {
            "bootstrap.servers": self.servers,
            "reconnect.backoff.max.ms": 200,
        }
        if self._password:
            given |= {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
            given |= {"sasl.username": _USER, "sasl.password": self._password}
        client = AdminClient(given, logger=quiet)
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise SourceUnavailable(f"Kafka at {self.servers} exited: {self._log_end()}")
            with suppress(KafkaException):  # which is the answer "not yet"
                client.list_topics(timeout=0.5)
                return
        raise SourceUnavailable(f"Kafka at {self.servers} did not answer in time: {self._log_end()}")

    def _log_end(self) -> str:
        return f"last lines of {self.log}: {last_lines(self.log.read_text(errors='replace'), 15)}"

    def _wait(self, deadline: float) -> None:
        if self._process:
            try:
                self._process.wait(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process:
            self._process.send_signal(number)

    def stop(self, seconds: float = 30) -> None:
        """Shuts it down, or kills it after `seconds`. `start` continues with the same data."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        self._wait(time.monotonic() + seconds)
        with suppress(OSError):
            if self._process is not None and self._process.returncode == _TERMINATED:
                self._new_classes.rename(self._classes)
            else:  # it did not start, or was killed while it wrote
                self._new_classes.unlink()

    def kill(self) -> None:
        """Kills it, as a crash does."""
        self._signal(signal.SIGKILL)
        if self._process:
            self._process.wait()

    def pause(self) -> None:
        """Suspends it; its connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends a pause."""
        self._signal(signal.SIGCONT)

    def wait(self) -> None:
        """Waits until it ends."""
        if self._process:
            self._process.wait()

    def close(self) -> None:
        """Stops it, and deletes its data if they are temporary."""
        atexit.unregister(self.close)
        self.stop()
        if self._temporary:
            self._temporary.cleanup()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a broker in the foreground until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description=f"Runs Apache Kafka {VERSION} on this machine until Ctrl-C.")
    parser.add_argument("--port", type=int, default=9092, help="of 127.0.0.1 (default %(default)s)")
    parser.add_argument("--data", type=Path, default=cache_folder() / "kafka", help="folder (default %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=jars_folder(), help="folder of Kafka's jars (default %(default)s)"
    )
    parser.add_argument("--password-file", type=Path, help="file with the password of all clients (default none)")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        password = make_password(given.password_file)
        one = Broker(resolve(given.cache), data=given.data, port=given.port, password=password)
        with suppress(KeyboardInterrupt), one as broker:
            print(
                f"Kafka is running at localhost:{given.port}; data and log: {given.data}; press Ctrl-C to stop it",
                flush=True,
            )
            broker.wait()
            sys.exit(f"Kafka exited; see {broker.log}")
    except (ConfigError, SourceUnavailable) as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
