"""What a process answers to probes."""

import urllib.request
from urllib.error import HTTPError, URLError


def probe(port: int, path: str = "/healthz/ready") -> tuple[int, str]:
    """Status and body of an answer; 0 and why: nothing listens there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, answer.read().decode()
    except HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()
    except URLError as exc:
        return 0, str(exc.reason)


def is_ready(port: int) -> bool:
    """Whether it is ready."""
    return probe(port)[0] == 200
