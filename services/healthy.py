"""Whether a process answers, for the health checks of containers: exit code 0 if it does.

python services/healthy.py http://127.0.0.1:9100/metrics
python services/healthy.py tcp://127.0.0.1:2220
"""

import socket
import sys
import urllib.request
from urllib.parse import urlsplit

SECONDS = 5.0


def main(url: str) -> None:
    """Asks once, and around any proxy, as what is asked is of this machine; tcp:// is only knocked at."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    parts = urlsplit(url)
    try:
        if parts.scheme == "tcp":
            socket.create_connection((parts.hostname, parts.port), SECONDS).close()
        else:
            direct.open(url, timeout=SECONDS).close()
    except OSError as exc:  # urllib's errors are of it, a status of 400 or more among them
        sys.exit(f"{url}: {exc}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: healthy.py URL")
    main(sys.argv[1])
