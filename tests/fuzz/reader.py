"""One of the readers under atheris: python -m tests.fuzz.reader NAME [--core=FILE] [options of libFuzzer…].

With --core the native core is another build, such as one with sanitizers, whose runtime is to be preloaded.
"""

import importlib
import logging
import sys
from pathlib import Path

import atheris

from tests.conftest import use_core


def main() -> None:
    """Runs until libFuzzer's options say otherwise, or something is found."""
    name, *options = sys.argv[1:]
    logging.disable()
    for option in [one for one in options if one.startswith("--core=")]:
        options.remove(option)
        use_core(Path(option.partition("=")[2]))
    # The loader of an editable install has code that atheris cannot instrument: let others find the sources first.
    sys.meta_path.sort(key=lambda finder: "editable" in type(finder).__module__)
    with atheris.instrument_imports(include=["streamtrain", "tests"]):
        target = importlib.import_module(f"tests.fuzz.readers.{name}")
    atheris.Setup([sys.argv[0], *options], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
