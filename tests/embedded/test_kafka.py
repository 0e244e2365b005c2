"""The embedded broker: it starts, comes back with its data, ends with its process, and says what is amiss."""

import os
import pwd
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from streamtrain.embedded import jars
from streamtrain.embedded.jars import resolve
from streamtrain.embedded.kafka import Broker
from streamtrain.errors import ConfigError, SourceUnavailable
from streamtrain.service.local import credentials
from tests.patience import PATIENCE, until

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
    client.create_topics([NewTopic("kept", 3, 1)])["kept"].result(PATIENCE)
    producer = Producer({"bootstrap.servers": own_kafka.servers})
    producer.produce("kept", b"a message", partition=1)
    assert producer.flush(30) == 0
    own_kafka.kill()
    own_kafka.start()
    until(lambda: partitions_of(client, "kept") == 3)


def test_once_stopped_a_broker_starts_with_its_classes_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve()
    monkeypatch.setattr(jars, "cache_folder", lambda: tmp_path / "cache")
    broker = Broker(found, data=tmp_path / "data")
    try:
        broker.start()
        assert "-XX:SharedArchiveFile" not in command_of(broker)
        broker.stop()
        (archive,) = (tmp_path / "cache").iterdir()
        assert archive.suffix == ".jsa"
        for _ in range(2):
            broker.start()
            assert f"-XX:SharedArchiveFile={archive}" in command_of(broker)
            assert "jsa" in Path(f"/proc/{broker.pid}/maps").read_text()
            broker.kill()
    finally:
        broker.close()
    assert [*(tmp_path / "cache").iterdir()] == [archive]


def command_of(broker: Broker) -> str:
    return Path(f"/proc/{broker.pid}/cmdline").read_text().replace("\0", " ")


def partitions_of(client: AdminClient, topic: str) -> int:
    return len(client.list_topics(topic, timeout=PATIENCE).topics[topic].partitions)


def test_with_a_password_nobody_else_gets_in(tmp_path: Path, kafka: Broker) -> None:
    for password in ("first-password", "second-password"):
        with Broker(resolve(), data=tmp_path / "data", password=password) as broker:
            plain: dict[str, str | int | float | bool] = {"bootstrap.servers": broker.servers}
            for options in ({}, credentials("guess")):
                with pytest.raises(KafkaException):
                    AdminClient(plain | options).list_topics(timeout=3)
            client = AdminClient(plain | credentials(password))
            if password == "first-password":
                client.create_topics([NewTopic("kept", 3, 1)])["kept"].result(PATIENCE)
            until(lambda client=client: partitions_of(client, "kept") == 3)  # type: ignore[misc]
            settings = tmp_path / "data" / "server.properties"
            assert settings.stat().st_mode & 0o777 == 0o600
            assert settings.parent.stat().st_mode & 0o777 == 0o700
            assert "PLAINTEXT:PLAINTEXT" not in settings.read_text()


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


@pytest.mark.parametrize("home", ["none", "another's", "own"])
def test_without_a_home_downloads_are_kept_beside_temporary_files(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a user id that has no entry in passwd: nothing at import asks for a home."""
    temporary, other = tmp_path / "tmp", tmp_path / "other"
    temporary.mkdir()
    other.write_text("")  # where no folder can be made
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if home == "none":
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    else:
        monkeypatch.setenv("HOME", str(other if home == "another's" else tmp_path))
    found = jars.cache_folder()
    if home == "own":
        assert found == tmp_path / ".cache" / "streamtrain"
        return
    assert found == temporary / f"streamtrain-{os.getuid()}"
    assert found.stat().st_mode & 0o777 == 0o700
    found.rmdir()
    found.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="set HOME"):
        jars.cache_folder()


def test_a_taken_port_is_refused(tmp_path: Path, kafka: Broker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f":{port} .*choose another"):
            Broker(jars.jars_folder(), data=tmp_path, port=port).start()


def test_a_bad_setting_shows_the_end_of_the_log(tmp_path: Path, kafka: Broker) -> None:
    with pytest.raises(SourceUnavailable, match=r"Invalid value many for configuration num\.io\.threads"):
        Broker(jars.jars_folder(), data=tmp_path, properties={"num.io.threads": "many"}).start()


def test_missing_and_old_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Java, which is not on the PATH; install Java 17"):
        Broker(tmp_path)
    script(tmp_path, "java", "echo 'openjdk version \"1.8.0_402\"' >&2")
    with pytest.raises(ConfigError, match=r"does not run on .*1\.8\.0_402.*install Java 17"):
        Broker(tmp_path)


def test_given_jars_must_be_kafkas_and_have_a_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"up\.kafka: {tmp_path} has no kafka_\*\.jar"):
        jars.find_jars(str(tmp_path))
    (tmp_path / "kafka_2.13-4.2.0.jar").touch()
    assert jars.find_jars(str(tmp_path)) == tmp_path
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install Java 17"):
        jars.find_jars(str(tmp_path))
    assert jars.find_jars() is None


def test_maven_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache" / "jars"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match="apt install maven"):
        jars.resolve(cache)
    script(tmp_path / "bin", "mvn", "echo no such host; exit 1")
    with pytest.raises(ConfigError, match=r"set a mirror(?s:.*)no such host"):
        jars.resolve(cache)
    assert not cache.exists()
    assert [file.name for file in cache.parent.iterdir()] == [".jars.lock"]
