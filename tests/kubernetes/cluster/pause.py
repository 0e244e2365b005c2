"""Makes the image of what holds a pod's namespaces, without a builder. Usage: pause.py OUT.tar (needs gcc)."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NAME = "localhost/pause:1"
SOURCE = """
#include <signal.h>
#include <unistd.h>
static void end(int s) { _exit(0); }
int main() { signal(SIGTERM, end); signal(SIGINT, end); for (;;) pause(); }
"""


def archive(files: dict[str, bytes]) -> bytes:
    """A tar file of executables."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.mode, info.size = 0o755, len(data)
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def main(out: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "pause.c", Path(folder) / "pause"
        source.write_text(SOURCE)
        subprocess.run(["gcc", "-static", "-O2", "-o", str(built), str(source)], check=True)
        layer = archive({"pause": built.read_bytes()})
    digest = hashlib.sha256(layer).hexdigest()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}
    config = json.dumps(
        {
            "architecture": machine[subprocess.check_output(["uname", "-m"], text=True).strip()],
            "os": "linux",
            "config": {"Cmd": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": name, "RepoTags": [NAME], "Layers": [f"{digest}/layer.tar"]}]
    Path(out).write_bytes(
        archive({name: config, f"{digest}/layer.tar": layer, "manifest.json": json.dumps(manifest).encode()})
    )


if __name__ == "__main__":
    main(sys.argv[1])
