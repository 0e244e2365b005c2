"""A proxy that breaks all connections after so many bytes to the server."""

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class Cutter:
    """Forwards connections to a server until it has seen so many bytes; then it breaks them, and refuses others.

    Args:
        url: of the server.
        limit: bytes.

    Attributes:
        left: bytes until it breaks them.
    """

    def __init__(self, url: str, limit: int) -> None:
        at = urlsplit(url)
        self._server = (str(at.hostname), int(at.port or 0))
        self.left = limit
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        for one in (self._listener, *self._sockets):
            with suppress(OSError):  # of one that is not connected any more
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    with self._lock:
                        allowed = data[: max(0, self.left)]
                        self.left -= len(data)
                    target.sendall(allowed)
                    if len(allowed) < len(data):
                        break
                else:
                    target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
