"""The model that counts, as one file that needs nothing of these tests."""

import inspect

from tests.cluster import counted

_HEAD = """\
from typing import Any

from streamtrain import SGD, Categorical, Constant, Model, Schema

FEATURES = {features}

"""


def counting_file(name: str) -> str:
    """The text of a model file with `model`, under a name in URLs."""
    parts = [inspect.getsource(of) for of in (counted.counting, counted.model)]
    return _HEAD.format(features=counted.FEATURES) + "\n\n".join(parts) + f'\n\nmodel = model("{name}")\n'
