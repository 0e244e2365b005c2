"""What the benchmarks of serving ask with: HTTP over sockets that stay open."""

import asyncio
import http.client
import json
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """An answer.

    Attributes:
        status: its code.
        headers: with names in lower case.
        body: as it came.
    """

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def publication(self) -> int:
        """Number of the publication that it is of; 0: it does not say."""
        return int(self.headers.get("x-publication", 0))

    @property
    def predictions(self) -> Any:
        """What was predicted."""
        return json.loads(self.body)["predictions"]


class Connection:
    """One connection of an event loop, which asks one after another. It opens when it is first needed.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():  # servers close those that are idle
            self.close()
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self._streams

    async def post(self, path: str, body: bytes, **headers: str) -> Answer:
        """Asks; an underscore in a header's name stands for a dash."""
        reader, writer = await self._open()
        writer.write(request(path, body, **headers))
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        data = await reader.readexactly(int(found.get("content-length", 0)))
        return Answer(int(lines[0].split()[1]), found, data)

    def close(self) -> None:
        """Ends it."""
        if self._streams is not None:
            self._streams[1].close()


def request(path: str, body: bytes, **headers: str) -> bytes:
    """A whole request."""
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{more}\r\n".encode() + body


def status_of(port: int, path: str) -> int:
    """Status code of a page; 0: nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()
