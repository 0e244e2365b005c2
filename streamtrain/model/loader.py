"""Loads a model from the operator's own Python file."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from streamtrain.errors import ConfigError
from streamtrain.model.model import Model, describe_failure, own_frames


def locate_model(location: str) -> tuple[Path, str]:
    """File and name of "path/to/file.py:name"; the name defaults to "model".

    Raises:
        ConfigError: the file is missing.
    """
    path, _, name = location.partition(":")
    if not Path(path).is_file():
        raise ConfigError(f"model file {path!r} does not exist")
    return Path(path), name or "model"


def load_model(location: str) -> Model:
    """The model that `location` names.

    Args:
        location: as for `locate_model`. The file is executed, so it must be trusted.

    Raises:
        ConfigError: the file is missing, fails, or has no `Model` of that name; the message says which.
    """
    file, name = locate_model(location)
    path = str(file)
    if file.suffix != ".py":
        raise ConfigError(f"model file {path!r} is not a Python file")
    module_name = f"streamtrain_model_{file.stem}"
    loader = _Uncached(module_name, str(file.absolute()))
    spec = importlib.util.spec_from_file_location(module_name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        loader.exec_module(module)
    except ConfigError as exc:
        frames = [frame for frame in own_frames(exc) if Path(frame.filename) == file.absolute()]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise ConfigError(f"model file {path!r}{line}: {exc}") from exc
    except Exception as exc:
        raise ConfigError(describe_failure(f"model file {path!r}", exc)) from exc
    model = getattr(module, name, None)
    if not isinstance(model, Model):
        found = [key for key, value in vars(module).items() if isinstance(value, Model)]
        raise ConfigError(f"model file {path!r} has no Model named {name!r}; it has {found or 'none'}")
    return model


class _Uncached(SourceFileLoader):
    """Compiles the file whenever it is loaded.

    Python's own loader takes bytecode for that of the file if size and second of modification are the same, so a file
    that a program changes twice within a second could be another one than it says.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)
