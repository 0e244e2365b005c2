"""Health check of a container: the exit code is 0 if the process answers.

python services/healthy.py http://127.0.0.1:9100/metrics
python services/healthy.py tcp://127.0.0.1:2220
"""

import socket
import sys
import urllib.request
from urllib.parse import urlsplit

SECONDS = 5.0


def main(url: str) -> None:
    """Requests an http:// URL once, without a proxy; only connects to a tcp:// one."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    parts = urlsplit(url)
    try:
        if parts.scheme == "tcp":
            socket.create_connection((parts.hostname, parts.port), SECONDS).close()
        else:
            direct.open(url, timeout=SECONDS).close()
    except OSError as exc:  # includes urllib's errors, such as a status of 400 or more
        sys.exit(f"{url}: {exc}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: healthy.py URL")
    main(sys.argv[1])
