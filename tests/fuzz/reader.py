"""One of the readers under atheris: python -m tests.fuzz.reader NAME [--core=FILE] [options of libFuzzer…].

With --core the native core is another build, such as one with sanitizers, whose runtime is to be preloaded.
"""

import hashlib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import atheris

from tests.conftest import use_core

_FOUND = 77  # as libFuzzer ends


def main() -> None:
    """Runs until libFuzzer's options say otherwise, or something is found."""
    name, *options = sys.argv[1:]
    logging.disable()
    for option in [one for one in options if one.startswith("--core=")]:
        options.remove(option)
        use_core(Path(option.partition("=")[2]))
    # The loader of an editable install has code that atheris cannot instrument: let others find the sources first.
    sys.meta_path.sort(key=lambda finder: "editable" in type(finder).__module__)
    kept = next((Path(one.partition("=")[2]) for one in options if one.startswith("-artifact_prefix=")), Path())
    with atheris.instrument_imports(include=["streamtrain", "tests"]):
        target = importlib.import_module(f"tests.fuzz.readers.{name}")
    atheris.Setup([sys.argv[0], *options], lambda data: run(target.run, data, kept))
    atheris.Fuzz()


def run(one: Callable[[bytes], None], data: bytes, kept: Path) -> None:
    """Runs one input, and keeps it if that raises: on the way out of an interpreter with threads libFuzzer may not."""
    try:
        one(data)
    except BaseException:
        traceback.print_exc()
        path = kept / f"error-{hashlib.sha256(data).hexdigest()[:16]}"
        path.write_bytes(data)
        print(f"the input is in {path}", file=sys.stderr, flush=True)
        os._exit(_FOUND)


if __name__ == "__main__":
    main()
