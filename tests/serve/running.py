"""The real server on a real port, in a thread of the test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from streamtrain.serve.app import configure, make_app
from streamtrain.serve.follower import Follower
from streamtrain.serve.registry import Registry

LONG = 30.0  # seconds that nothing takes, unless it hangs
TOKEN = "secret"


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The URL of a running application."""
    server = uvicorn.Server(configure(app, "127.0.0.1:0"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + LONG
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)  # uvicorn has nothing to wait on
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(LONG)
        assert not thread.is_alive()


@contextmanager
def serving(registry: Registry, follower: Follower | None = None, **options: Any) -> Iterator[httpx.Client]:
    """A client of a running server."""
    with running(make_app(registry, follower, admin_token=TOKEN, **options)) as url, client_of(url) as client:
        yield client


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=LONG, trust_env=False)
