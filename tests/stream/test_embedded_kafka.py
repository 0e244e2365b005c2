"""The embedded broker: it starts, comes back with its data, ends with its process, and says what is amiss."""

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from streamtrain.embedded import jars
from streamtrain.embedded.kafka import Broker
from streamtrain.errors import ConfigError, SourceUnavailable

PROGRAM = """
import sys
from pathlib import Path
from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
broker = Broker(resolve(), data=Path(sys.argv[1]))
broker.start()
print(broker._process.pid, flush=True)
sys.stdin.read()
"""


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_data_outlive_a_crash(own_kafka: Broker) -> None:
    client = AdminClient({"bootstrap.servers": own_kafka.servers})
    client.create_topics([NewTopic("kept", 3, 1)])["kept"].result(30)
    producer = Producer({"bootstrap.servers": own_kafka.servers})
    producer.produce("kept", b"a message", partition=1)
    assert producer.flush(30) == 0
    own_kafka.kill()
    own_kafka.start()
    assert len(client.list_topics("kept", timeout=30).topics["kept"].partitions) == 3


def test_a_broker_ends_with_its_process(tmp_path: Path, kafka: Broker) -> None:
    """Also where its process has no time to end it."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        broker = os.pidfd_open(int(process.stdout.readline()))
        assert not has_ended(broker, 0)
        process.kill()
    assert has_ended(broker, 30)
    os.close(broker)


def has_ended(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


def test_a_taken_port_is_refused(tmp_path: Path, kafka: Broker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .*choose another"):
            Broker(jars.CACHE, data=tmp_path, port=port).start()


def test_a_bad_setting_shows_the_end_of_the_log(tmp_path: Path, kafka: Broker) -> None:
    with pytest.raises(SourceUnavailable, match=r"Invalid value many for configuration num\.io\.threads"):
        Broker(jars.CACHE, data=tmp_path, properties={"num.io.threads": "many"}).start()


def test_missing_and_old_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Java, and none is on the PATH; install Java 17"):
        Broker(tmp_path)
    script(tmp_path, "java", "echo 'openjdk version \"1.8.0_402\"' >&2")
    with pytest.raises(ConfigError, match=r"does not run on .*1\.8\.0_402.*install Java 17"):
        Broker(tmp_path)


def test_maven_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache" / "jars"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match="install it"):
        jars.resolve(cache)
    script(tmp_path / "bin", "mvn", "echo no such host; exit 1")
    with pytest.raises(ConfigError, match=r"set a mirror(?s:.*)no such host"):
        jars.resolve(cache)
    assert not cache.exists()
    assert [file.name for file in cache.parent.iterdir()] == [".jars.lock"]
