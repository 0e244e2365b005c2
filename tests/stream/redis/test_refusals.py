"""What a Redis refuses, and how that is told."""

import re
import time
from contextlib import closing
from pathlib import Path

import pytest
import redis
import trustme

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError, SourceRefused, WriteFailed
from streamtrain.stream.redis.stream import RedisStream
from streamtrain.stream.source import Writer
from tests.ports import free_ports
from tests.stream.recorded import Recorder
from tests.stream.redis_fixtures import recorder, redis_binary, server_binary, write

__all__ = ["recorder", "redis_binary"]


def fill(writer: Writer) -> None:
    for _ in range(200):
        writer.write(b"x" * 100_000)
        writer.flush(120)


def test_credentials_are_refused_and_never_shown(redis_binary: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with Valkey(password="open sesame", binary=redis_binary) as server:
        stream = RedisStream(server.url, "samples")
        stream.create(1)
        assert stream.name == f"topic samples of Redis at 127.0.0.1:{server.port}"
        recorder = Recorder()
        with closing(stream.source("group", "job", recorder)) as source, closing(stream.writer()) as writer:
            recorder.take(source)
            for url in (f"redis://127.0.0.1:{server.port}", f"redis://:sesame@127.0.0.1:{server.port}"):
                with pytest.raises(SourceRefused, match="refuses the credentials") as refused:
                    RedisStream(url, "samples").bounds()
                assert "sesame" not in str(refused.value)
            with redis.Redis.from_url(server.url) as client:
                client.config_set("requirepass", "another")
                client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(SourceRefused, match="refuses the credentials"):
                recorder.take_until(source, lambda r: False)
            writer.write(b"a")
            with pytest.raises(WriteFailed, match="refuses the credentials"):
                writer.flush(120)
    assert "sesame" not in caplog.text


def test_a_user_without_rights_is_told(redis_binary: str | None, recorder: Recorder) -> None:
    with Valkey(binary=redis_binary) as server, redis.Redis.from_url(server.url) as client:
        RedisStream(server.url, "samples").create(1)
        client.acl_setuser("reader", enabled=True, passwords=["+pw"], categories=["+@all"], keys=["other:*"])
        with pytest.raises(SourceRefused, match=r"~streamtrain:\*"):
            RedisStream(f"redis://reader:pw@127.0.0.1:{server.port}", "samples").bounds()
        commands = ["+@connection", "+get", "+eval", "+exists", "+xinfo"]
        client.acl_setuser("viewer", enabled=True, passwords=["+pw"], commands=commands, keys=["streamtrain:*"])
        viewer = RedisStream(f"redis://viewer:pw@127.0.0.1:{server.port}", "samples")
        assert viewer.bounds() == {0: (0, 0)}
        with pytest.raises(SourceRefused, match="the user may not do this"):
            viewer.source("group", "job", recorder)
        with closing(viewer.writer()) as writer:
            writer.write(b"a")
            with pytest.raises(WriteFailed, match="the user may not do this"):
                writer.flush(120)


def test_the_documented_rights_are_enough(redis_binary: str | None, recorder: Recorder) -> None:
    text = (Path(__file__).parents[3] / "schemas" / "README.md").read_text()
    keys, *commands = re.findall(r"[~+][@\w:*]+", text.partition("user needs `")[2].partition("`.")[0])
    with Valkey(binary=redis_binary) as server, redis.Redis.from_url(server.url) as client:
        client.acl_setuser("worker", enabled=True, passwords=["+pw"], commands=commands, keys=[keys.removeprefix("~")])
        stream = RedisStream(f"redis://worker:pw@127.0.0.1:{server.port}", "samples", maxlen=10)
        stream.create(1)
        with closing(stream.writer("samples.dead")) as dead, closing(stream.writer()) as writer:
            dead.write(b"a")
            writer.write(b"a")
            assert writer.flush(120) == dead.flush(120) == 0
        stream.at(time.time())
        with closing(stream.source("group", "job", recorder)) as source:
            recorder.take_until(source, lambda r: r.count == 1)
            source.commit(source.positions())
            with closing(stream.source("group", "job", Recorder())):
                recorder.take(source)
        assert stream.committed("group") == {0: 1}


def test_a_full_server_refuses_writers_and_keeps_readers(redis_binary: str | None, recorder: Recorder) -> None:
    with Valkey(maxmemory=8 << 20, binary=redis_binary) as server:
        stream = RedisStream(server.url, "samples", lease=1.5)
        stream.create(1)
        with closing(stream.writer()) as writer:
            with pytest.raises(WriteFailed, match=r"maxmemory.*maxlen"):
                fill(writer)
            with pytest.raises(WriteFailed, match="maxmemory"):
                writer.flush(1)
        written = stream.bounds()[0].high
        with closing(stream.source("group", "job", recorder)) as source:
            recorder.take_until(source, lambda r: r.count == written)
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                recorder.take(source)
            with closing(stream.source("group", "job", Recorder())):
                recorder.take(source)
        assert [event for event, _ in recorder.events] == ["assigned", "revoked"]


def test_a_replica_refuses_writers(redis_binary: str | None) -> None:
    with Valkey(binary=redis_binary) as server, redis.Redis.from_url(server.url) as client:
        stream = RedisStream(server.url, "samples")
        stream.create(1)
        with closing(stream.writer()) as writer:
            client.replicaof("127.0.0.1", 1)
            writer.write(b"a")
            with pytest.raises(WriteFailed, match="use the address of the primary"):
                writer.flush(120)
        assert stream.bounds() == {0: (0, 0)}


def test_tls_is_spoken(tmp_path: Path) -> None:
    server = Valkey(binary=server_binary("redis"))  # the embedded one is built without
    [port] = free_ports(1)
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = ca.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    files = [f"tls-{kind}-file {tmp_path}/{kind}.pem" for kind in ("cert", "key")]
    with server as plain, redis.Redis.from_url(plain.url) as client:
        settings = dict(line.split(maxsplit=1) for line in [*files, "tls-auth-clients no"])
        client.execute_command("CONFIG", "SET", *(text for pair in settings.items() for text in pair))
        client.execute_command("CONFIG", "SET", "tls-port", port)
        url = f"rediss://127.0.0.1:{port}"
        stream = RedisStream(f"{url}?ssl_ca_certs={tmp_path}/ca.pem", "samples")
        stream.create(1)
        write(stream, 0, b"a", b"b" * 1_000_000)
        with closing(stream.source("group", "job", recorder := Recorder())) as source:
            recorder.take_until(source, lambda r: r.count == 2)
        with pytest.raises(SourceRefused, match="a certificate that is not trusted"):
            RedisStream(url, "samples").bounds()


@pytest.mark.parametrize(
    "url", ["http://a", "redis://:pa/ss#word@host:1", "redis://a:99999", "redis://a?socket_timeout=x", "redis://a?so=1"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="the URL of a Redis must be") as wrong:
        RedisStream(url, "samples")
    assert "pa" not in str(wrong.value).replace("password", "").replace("path", "")


@pytest.mark.parametrize("topic", ["", "a{b", "a}", "a\nb"])
def test_topics_that_are_none(topic: str) -> None:
    with pytest.raises(ConfigError, match="a topic of Redis must be"):
        RedisStream("redis://localhost", topic)
