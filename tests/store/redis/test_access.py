"""Redis behind passwords, ACLs and TLS, and as a cluster."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import trustme

from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError, OriginUnavailable, PublicationError
from streamtrain.store.redis.server import RedisServer
from tests.chaos.rights import of_redis
from tests.patience import until
from tests.ports import free_ports
from tests.store.published import Published, loaded
from tests.stream.redis_fixtures import server_binary


def everything(published: Published) -> None:
    """Does all that there is to do."""
    first = published.full(1)
    second = published.publish(2)
    assert loaded(published, first) == (second, published.rows)
    assert [step.publication for step in published.origin.follow(first, 5)] == [second]
    version = published.versions.make("ann")
    published.publish(3)
    assert loaded(published, version) == (version, published.by_number[2])
    keys = published.keys("item", 500)
    rows, found = published.looked_up(version, "item", keys)
    expected = published.by_number[2]["item"]
    assert found.tolist() == [key in expected for key in keys.tolist()]
    assert rows[found].tolist() == [list(expected[key]) for key in keys[found].tolist()]
    published.versions.promote(1, "ann")
    published.versions.promote(None, "ann")
    published.versions.make("ann")
    published.versions.acquire(2, "server", 60)
    assert published.versions.holders() == {2: ["server"]}
    assert published.versions.rollback("ann") == 1
    published.versions.release(2, "server")
    assert published.versions.retain(0, "ann") == [2]
    assert len(published.versions.history()) == 6
    published.full(4)
    assert not published.dictionaries.look()  # it was not looked at before
    published.dictionaries.vouch()
    published.publish(5)
    assert published.dictionaries.look()
    assert published.dictionaries.counts() == {table: len(rows) for table, rows in published.rows.items()}
    published.close()


def test_a_user_with_the_documented_rights_may_do_all(redis_binary: str | None) -> None:
    with Valkey(binary=redis_binary, password="adm/in#1") as server, redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "ann", "on", ">s3cret/#", *of_redis())
        client.execute_command("ACL", "SETUSER", "bob", "on", ">s3cret", "~other:*", "+@all")
        everything(Published(server.url.replace("//:adm%2Fin%231@", "//ann:s3cret%2F%23@")))
        bob = Published(server.url.replace("//:adm%2Fin%231@", "//bob:s3cret@"))
        with pytest.raises(PublicationError, match="the user may not do this") as refused:
            bob.full(1)
        wrong = Published(server.url.replace("//:adm%2Fin%231@", "//ann:s3cret@"))
        with pytest.raises(PublicationError, match="refuses the credentials") as denied:
            wrong.full(1)
        for error in (refused, denied):
            assert "s3cret" not in str(error.value)
        assert "s3cret" not in wrong.server.name + wrong.model.name
        bob.close()
        wrong.close()


@pytest.mark.parametrize(
    "url", ["http://ann:s3cret@host", "redis://ann:s3/cret@host:port", "redis://ann:s3cret@host:x"]
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="the URL of a Redis must be") as error:
        RedisServer(url)
    assert "cret" not in str(error.value)
    assert error.value.__cause__ is None


def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    files = [f"tls-{name}-file {tmp_path}/{name}.pem" for name in ("cert", "key")]
    (port,) = free_ports(1)
    binary = server_binary("redis")  # the embedded one is built without
    with Valkey(binary=binary, config=[*files, "tls-auth-clients no", f"tls-port {port}"]):
        everything(Published(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path}/ca.pem"))
        untrusted = Published(f"rediss://127.0.0.1:{port}/0")
        with pytest.raises(PublicationError, match="certificate that is not trusted"):
            untrusted.full(1)
        untrusted.close()


@pytest.fixture(scope="module")
def cluster(redis_binary: str | None) -> Iterator[list[Valkey]]:
    """Three masters on loopback."""
    with ExitStack() as stack:
        buses = free_ports(3)
        servers = [
            stack.enter_context(Valkey(binary=redis_binary, config=["cluster-enabled yes", f"cluster-port {bus}"]))
            for bus in buses
        ]
        clients = [stack.enter_context(redis.Redis.from_url(server.url)) for server in servers]
        for i, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", i * 16384 // 3, (i + 1) * 16384 // 3 - 1)
        for server, bus in zip(servers[1:], buses[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        until(lambda: all(_is_ready(client) for client in clients))
        yield servers


def _is_ready(client: Any) -> bool:
    info = client.execute_command("CLUSTER", "INFO").decode()
    return "cluster_state:ok" in info and "cluster_known_nodes:3" in info


def test_a_cluster(cluster: list[Valkey]) -> None:
    everything(Published(cluster[1].url, cluster=True))
    for server in cluster:
        with redis.Redis.from_url(server.url) as client:
            assert len(list(client.scan_iter("streamtrain:rows:*"))) > 2


def test_a_cluster_that_is_taken_for_a_server_says_so(cluster: list[Valkey]) -> None:
    published = Published(cluster[0].url)
    with pytest.raises(PublicationError, match="it is a node of a cluster: connect with cluster=True"):
        published.full(1)
    published.close()


def test_slots_that_move(cluster: list[Valkey]) -> None:
    """A slot that is empty moves: who has it is asked anew."""
    published = Published(cluster[0].url, cluster=True)
    assert published.origin.find(None) is None  # connects
    slot = int(published.model.keys.slots(np.array([0]))[0])
    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(server.url)) for server in cluster]
        owner = next(i for i in range(3) if slot < (i + 1) * 16384 // 3)
        source, target = clients[owner], clients[(owner + 1) % 3]
        ids = [one.execute_command("CLUSTER", "MYID").decode() for one in (source, target)]
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        for client in (target, source, clients[(owner + 2) % 3]):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
    with pytest.raises(OriginUnavailable, match="is moving slots"):
        published.full(1)
    published.full(1)
    published.publish(2)
    head = published.origin.find(None)
    assert head is not None
    assert loaded(published, head) == (head, published.rows)
    published.close()
