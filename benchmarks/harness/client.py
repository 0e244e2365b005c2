"""The HTTP client of the benchmarks of serving: raw sockets and keep-alive, so that it costs little."""

import asyncio
import http.client
import json
import urllib.request
from typing import Any, NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class Response(NamedTuple):
    """A response, which is parsed when something of it is needed.

    Attributes:
        head: status line and headers.
        body: as received.
    """

    head: bytes
    body: bytes

    @property
    def status(self) -> int:
        """The status code."""
        return int(self.head[9:12])

    @property
    def headers(self) -> dict[str, str]:
        """The headers, by lower-case name."""
        lines = (line.partition(": ") for line in self.head.decode().splitlines()[1:] if line)
        return {name.lower(): value for name, _, value in lines}

    @property
    def publication(self) -> int:
        """Number of the publication that predicted; 0 if there is no such header."""
        return int(self.headers.get("x-publication", 0))

    @property
    def predictions(self) -> Any:
        """What was predicted."""
        return json.loads(self.body)["predictions"]


class Connection:
    """One keep-alive connection, which has one request in flight at a time. It is opened by the first request."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():  # servers close idle connections
            self.close()
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self._streams

    async def send(self, request: bytes) -> Response:
        """Sends a whole request, see `post_request`."""
        reader, writer = await self._open()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        size = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        return Response(head, await reader.readexactly(int(size or 0)))

    async def post(self, path: str, body: bytes, **headers: str) -> Response:
        """Posts JSON; an underscore in a header's name stands for a dash."""
        return await self.send(post_request(path, body, **headers))

    def close(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            self._streams[1].close()


def post_request(path: str, body: bytes, **headers: str) -> bytes:
    """The bytes of a request that posts JSON."""
    named = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(body))}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in (named | headers).items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def get_status(port: int, path: str) -> int:
    """Status code of a GET; 0 if nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def is_ready(port: int) -> bool:
    """Whether a serving process is ready."""
    return get_status(port, "/healthz/ready") == 200


def learned_samples(port: int) -> float:
    """How many samples a worker has learned, as its metrics say; 0 if it does not listen yet."""
    if get_status(port, "/metrics") != 200:
        return 0.0
    name = "streamtrain_worker_samples_total"
    return sum(one.value for family in scrape(port) for one in family.samples if one.name == name)


def scrape(port: int) -> list[Metric]:
    """The metrics of a process."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return [*text_string_to_metric_families(response.read().decode())]
