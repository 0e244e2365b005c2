"""Whether a process answers, for the health checks of containers: exit code 0 if it does.

python services/healthy.py http://127.0.0.1:9100/metrics
"""

import sys
import urllib.error
import urllib.request

SECONDS = 5.0


def main(url: str) -> None:
    """Asks once, and around any proxy: what is asked is of this machine."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=SECONDS):
            return
    except (urllib.error.URLError, TimeoutError, ConnectionError) as exc:
        sys.exit(f"{url}: {exc}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: healthy.py URL")
    main(sys.argv[1])
