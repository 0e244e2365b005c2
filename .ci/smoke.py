"""Installs the wheel in dist/ as a user would and uses it: on a PATH without a compiler, without extras.

Learns from a file, checks what `demo` and `up` say where something is missing, then runs the whole service on the
redis-server of this machine, produces samples, predicts over HTTP and stops it. Prints sizes and times, and ends with
exit code 1 where something is not as it should be. Needs python3, redis-server and a package index.
"""

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("sh", "env", "setpriv")  # what an installed streamtrain runs, beside its servers
LONG = 240.0

MODEL = """
import keras
import streamtrain as st

schema = st.Schema(
    label="label",
    time="ts",
    features=[st.Categorical("user", dim=8), st.Categorical("item", dim=8), st.Numeric("price", default=0.0)],
)


def graph(inputs):
    x = keras.layers.Concatenate()(list(inputs.values()))
    return keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(16, "relu")(x))


model = st.Model(schema, graph)
"""


def main() -> None:
    """Runs all steps."""
    wheel = find_wheel()
    with tempfile.TemporaryDirectory(prefix="streamtrain-smoke-") as name:
        folder = Path(name)
        plain, with_redis = make_path(folder / "plain"), make_path(folder / "with-redis", "redis-server")
        streamtrain = install(folder, wheel, plain)
        write_samples(folder)
        learn(streamtrain, folder, plain)
        check_what_is_missing(streamtrain, folder, plain)
        serve(streamtrain, folder, with_redis)
    print("the wheel works")


def find_wheel() -> Path:
    """The wheel for this Python."""
    tag = "cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3"
    wheels = list((ROOT / "dist").glob(f"streamtrain-*-{tag}-*{platform.machine()}.whl"))
    if len(wheels) != 1:
        sys.exit(f"there must be one wheel for {tag} in dist/, not {len(wheels)}: make wheels")
    return wheels[0]


def make_path(folder: Path, *more: str) -> dict[str, str]:
    """An environment whose PATH has nothing but a few programs."""
    folder.mkdir()
    for name in (*NEEDED, *more):
        if (path := shutil.which(name)) is None:
            sys.exit(f"{name} is missing on this machine; install it and try again")
        (folder / name).symlink_to(path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STREAMTRAIN_", "PYTHON"))}
    return kept | {"PATH": str(folder), "HOME": str(folder), "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}


def install(folder: Path, wheel: Path, environment: Mapping[str, str]) -> Path:
    """Installs the wheel into a fresh environment, and returns the path of its command."""
    began = time.monotonic()
    venv = folder / "venv"
    # What pip is set up to use stays, as there may be an index of one's own.
    home = dict(environment) | {"HOME": os.environ.get("HOME", "/")}
    run([sys.executable, "-m", "venv", str(venv)], home)
    run([str(venv / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", str(wheel)], home)
    seconds = time.monotonic() - began
    streamtrain = venv / "bin" / "streamtrain"
    version = run([str(streamtrain), "--version"], environment).stdout.strip()
    expect(re.fullmatch(r"streamtrain \d+\.\d+\.\d+\S*", version) is not None, f"--version prints {version!r}")
    ask_core = [str(venv / "bin" / "python"), "-c", "from streamtrain import _core; print(_core.ARCH)"]
    arch = run(ask_core, environment, folder)
    size = sum(file.stat().st_size for file in venv.rglob("*") if file.is_file() and not file.is_symlink())
    print(
        f"{version} for {arch.stdout.strip()}: wheel {wheel.stat().st_size / 1e6:.1f} MB, "
        f"environment {size / 1e9:.2f} GB, installed in {seconds:.0f} s"
    )
    return streamtrain


def write_samples(folder: Path) -> None:
    """The model, and samples whose label follows from the user."""
    (folder / "model.py").write_text(MODEL)
    with (folder / "samples.jsonl").open("w") as file:
        for i in range(20_000):
            user = i * 7919 % 100
            sample = {"ts": 1_700_000_000 + i, "label": int(user % 3 == 0), "user": user, "item": i % 50, "price": 1.5}
            file.write(json.dumps(sample) + "\n")


def learn(streamtrain: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """`learn` on the file: the last line says how well."""
    began = time.monotonic()
    done = run([str(streamtrain), "learn", "samples.jsonl", "--model", "model.py:model"], environment, folder)
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    expect(figures["samples"] == 20_000, f"learned {figures['samples']} samples")
    text = json.dumps(figures)
    found = re.search(r'"auc": ([0-9.]+)', text)
    expect(found is not None and float(found[1]) > 0.9, f"learned badly: {text}")
    print(f"learned 20,000 samples in {time.monotonic() - began:.0f} s")


def check_what_is_missing(streamtrain: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Without a server and without the flights, one line and exit code 2, before anything is started."""
    up = [str(streamtrain), "up", "--model", "model.py:model", "--topic", "clicks"]
    for command, words in ((up, "up.redis"), ([str(streamtrain), "demo"], "pip install 'streamtrain[demo]'")):
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LONG, check=False
        )
        lines = (done.stdout + done.stderr).strip().splitlines()
        expect(
            done.returncode == 2 and len(lines) == 1 and words in lines[0], f"{command[1]}: {done.returncode}, {lines}"
        )
        print(lines[0])


def serve(streamtrain: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """The whole service, until it has predicted from what was produced."""
    listen = f"127.0.0.1:{free_port()}"
    command = [str(streamtrain), "up", "--model", "model.py:model", "--topic", "clicks", "--listen", listen]
    command += ["--set", "up.workers=1", "--set", "up.ps=1", "--set", "up.standby=false"]
    began = time.monotonic()
    log = folder / "up.log"
    with log.open("w") as file:
        up = subprocess.Popen(command, env=environment, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: ask(f"http://{listen}/v1/models/model"), up, log)
        print(f"up serves after {time.monotonic() - began:.0f} s")
        produce = ["produce", "samples.jsonl", "--config", ".streamtrain/service.toml"]
        run([str(streamtrain), *produce], environment, folder)
        body = json.dumps({"instances": [{"user": 0, "item": 1, "price": 1.5}, {"user": 1, "item": 1, "price": 1.5}]})

        def has_learned() -> bool:
            answer = ask(f"http://{listen}/v1/models/model:predict", body)
            low_and_high = sorted(number for row in flat(answer) for number in row)
            return len(low_and_high) == 2 and low_and_high[0] < 0.3 and low_and_high[1] > 0.7

        wait_for(has_learned, up, log)
        print(f"predictions have learned the samples after {time.monotonic() - began:.0f} s")
    finally:
        up.send_signal(signal.SIGINT)
        code = up.wait(LONG)
    expect(code == 0, f"up ended with exit code {code}:\n{log.read_text()[-3000:]}")


def flat(answer: object) -> list[list[float]]:
    """The predictions of a response, by instance."""
    rows = answer.get("predictions", []) if isinstance(answer, dict) else []
    return [row if isinstance(row, list) else [row] for row in rows]


def ask(url: str, body: str | None = None) -> object:
    """The response, or None while there is none."""
    request = urllib.request.Request(url, body.encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def wait_for(condition: Callable[[], object], up: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until a condition holds."""
    deadline = time.monotonic() + LONG
    while not condition():
        expect(up.poll() is None and time.monotonic() < deadline, f"up does not serve:\n{log.read_text()[-3000:]}")
        time.sleep(0.5)


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def run(
    command: list[str], environment: Mapping[str, str], folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs a command, which must succeed; by default where no clone of streamtrain hides the installed one."""
    done = subprocess.run(command, env=environment, cwd=folder or "/", capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def expect(holds: bool, otherwise: str) -> None:
    """Ends with a message unless something holds."""
    if not holds:
        sys.exit(otherwise)


if __name__ == "__main__":
    main()
