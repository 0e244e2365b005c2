"""Loads a model from the operator's own Python file."""

import importlib.util
import sys
from pathlib import Path

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
    spec = importlib.util.spec_from_file_location(f"streamtrain_model_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"model file {path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
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
