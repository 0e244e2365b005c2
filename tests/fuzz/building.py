"""What the fuzzers need, built below build/fuzz: harnesses, the core with sanitizers, and atheris."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
NATIVE = ROOT / "tests" / "fuzz" / "native"
CORE = ROOT / "streamtrain" / "_native"
CLANG = "clang++"

_ATHERIS = "atheris>=3.0"
_SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
# As the core is built, but for what makes it fast; see its CMakeLists.txt.
_FLAGS = ["-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off", "-Wall", "-Wextra"]
_ARCH = ["-march=x86-64-v3"] if platform.machine() in ("x86_64", "AMD64") else []


class Missing(Exception):
    """Something is not there that only a package of the system, or a network, brings."""


def harness(name: str) -> Path:
    """A harness of libFuzzer, built anew if its sources have changed.

    Raises:
        Missing: there is no Clang.
    """
    if shutil.which(CLANG) is None:
        raise Missing(f"{CLANG} is not there: python3 .ci/system.py fuzzers")
    binary, source = BUILD / name / "harness", NATIVE / f"{name}.cc"
    sources = [source, *NATIVE.glob("*.h"), *CORE.glob("*.h")]
    if binary.exists() and binary.stat().st_mtime > max(one.stat().st_mtime for one in sources):
        return binary
    binary.parent.mkdir(parents=True, exist_ok=True)
    with_fuzzer = ["-fsanitize=fuzzer,float-cast-overflow", "-fno-sanitize-recover=float-cast-overflow"]
    _run([CLANG, *_FLAGS, *_ARCH, *_SANITIZE, *with_fuzzer, f"-I{CORE}", str(source), "-o", str(binary)])
    return binary


def sanitized_core() -> Path:
    """The native core with sanitizers and coverage, for the readers; about two minutes if it has changed.

    Raises:
        Missing: there is no Clang.
    """
    if shutil.which(CLANG) is None:
        raise Missing(f"{CLANG} is not there: python3 .ci/system.py fuzzers")
    # Two checks of the older Clang are told in a way that the runtime of atheris, of a newer one, does not know.
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=fuzzer-no-link,address,undefined"]
    flags += ["-fno-sanitize-recover=undefined", "-fno-sanitize=vptr,function"]
    build = BUILD / "core"
    options = [f"-DCMAKE_CXX_COMPILER={CLANG}", f"-DCMAKE_CXX_FLAGS={' '.join(flags)}", "-DCMAKE_BUILD_TYPE=Debug"]
    python = f"-DPython_EXECUTABLE={sys.executable}"
    _run(["cmake", "-S", str(CORE), "-B", str(build), "-G", "Ninja", *options, python])
    _run(["cmake", "--build", str(build), "--target", "_core"])
    return next(build.glob("_core*.so"))


def atheris() -> Path:
    """The folder that has atheris, to be put on the path of Python.

    Raises:
        Missing: there is none for this Python or machine, or no network.
    """
    folder = BUILD / "python"
    if not (folder / "atheris").is_dir():
        options = [
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--target",
            str(folder),
        ]
        try:
            _run([sys.executable, "-m", "pip", "install", *options, _ATHERIS])
        except subprocess.CalledProcessError as exc:
            raise Missing(f"{_ATHERIS} cannot be installed: {exc.stdout[-500:]}") from exc
    return folder


def _run(command: list[str]) -> None:
    """Runs a command with the programs of this Python's environment; what it says is shown only if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
