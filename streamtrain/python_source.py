"""Parts of model files, as a person would write them."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

_PLAIN = str.maketrans({'"': "'", "\\": "/", "\n": " ", "\r": " "})


def plain(text: str) -> str:
    """Text that can stand in a docstring or a comment."""
    return text.translate(_PLAIN)


def as_python(value: Any) -> str:
    """A value as Python that makes it anew; features and optimizers without the options that have their defaults.

    >>> as_python(st.Categorical("user", 16, optimizer=st.Adagrad(0.1)))  # doctest: +SKIP
    'st.Categorical("user", 16, optimizer=st.Adagrad(0.1))'
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(as_python, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(as_python, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{as_python(key)}: {as_python(held)}' for key, held in value.items())}}}"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    words, skipped = list[str](), False
    for one in fields(value):
        held = getattr(value, one.name)
        if not one.init or (one.default is not MISSING and held == one.default):
            skipped = True
        else:
            # A second number with a point says little by itself.
            named = one.kw_only or skipped or (isinstance(held, float) and len(words) > 0)
            words.append(f"{one.name}={as_python(held)}" if named else as_python(held))
    return f"st.{type(value).__name__}({', '.join(words)})"


def schema_source(schema: Any, comments: Mapping[str, str]) -> str:
    """Python that makes a schema.

    Args:
        schema: a `Schema`.
        comments: what to say of a feature, by its name.
    """
    labels = [one if as_python(one) != f"st.Label({as_python(one.name)})" else one.name for one in schema.labels]
    options = {one.name: (getattr(schema, one.name), one.default) for one in fields(schema) if one.init}
    options["label"] = (labels[0] if len(labels) == 1 else labels, "label")
    del options["features"]
    lines = [f"{name}={as_python(value)}," for name, (value, default) in options.items() if value != default]
    lines.append("features=[")
    for one in schema.features:
        comment = plain(comments.get(one.name, ""))
        lines.append(f"    {as_python(one)},{f'  # {comment}' if comment else ''}")
    return "".join(["schema = st.Schema(\n", *(f"    {line}\n" for line in [*lines, "],"]), ")\n"])
