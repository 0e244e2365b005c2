"""The password of an embedded server comes from a file: every user of the machine can read command lines."""

from pathlib import Path

from streamtrain.errors import ConfigError


def make_password(file: Path | None) -> str:
    """The password in a file; "" without a file.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if file is None:
        return ""
    try:
        password = file.read_text().strip()
    except OSError as exc:
        raise ConfigError(f"cannot read the password file: {exc}") from exc
    if not password:
        raise ConfigError(f"the password file {file} is empty")
    return password
