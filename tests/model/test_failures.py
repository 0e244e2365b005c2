"""Mistakes in a model file: what is said names the lines of that file, and the way out."""

import os
from pathlib import Path
from typing import Any

import keras
import pytest

import streamtrain as st
from streamtrain.errors import ConfigError
from tests.models import logistic, make

USER = st.Categorical("user", dim=2)


def loaded(tmp_path: Path, text: str) -> str:
    """What is said of a model file that cannot be loaded."""
    file = tmp_path / "m.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        st.load_model(str(file))
    return str(caught.value).replace(str(tmp_path), ".")


def test_errors_in_the_file_show_its_lines(tmp_path: Path) -> None:
    lines = loaded(tmp_path, "def f():\n    return 1 / 0\n\nf()\n").splitlines()
    assert [line for line in lines if line.strip(" ~^")] == [  # marks differ between versions of Python
        "model file './m.py' fails with ZeroDivisionError: division by zero",
        '  File "./m.py", line 4, in <module>',
        "    f()",
        '  File "./m.py", line 2, in f',
        "    return 1 / 0",
    ]
    assert lines[-1] == "           ~~^~~"
    said = loaded(tmp_path, "import json\njson.loads('{')\n")
    assert said.count("  File ") == 1
    assert '  File "./m.py", line 2, in <module>' in said


def test_a_file_that_changes_twice_in_a_second_is_loaded_as_it_is(tmp_path: Path) -> None:
    """Bytecode of the file before, of the same size and time, is not taken for it."""
    file = tmp_path / "m.py"
    for name in ("one", "two"):
        file.write_text(
            f'import streamtrain as st\nschema = st.Schema(features=[st.Categorical("{name}", dim=2)])\n'
            f"model = st.Model(schema, lambda inputs: inputs['{name}'])\n"
        )
        os.utime(file, (1.7e9, 1.7e9))
        assert [one.name for one in st.load_model(str(file)).schema.features] == [name]
    assert [*tmp_path.iterdir()] == [file]


def test_errors_of_syntax_show_the_place(tmp_path: Path) -> None:
    said = loaded(tmp_path, "x = 1\ny = (2\n")
    assert said.startswith("model file './m.py' fails with SyntaxError: '(' was never closed\n")
    assert '  File "./m.py", line 2\n    y = (2\n' in said


def test_wrong_options_name_the_line(tmp_path: Path) -> None:
    said = loaded(tmp_path, 'import streamtrain as st\n\nst.Categorical(\n    "user",\n    dim=0,\n)\n')
    assert said == "model file './m.py', line 3: feature 'user': dim must be 1 to 4096, not 0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (keras.optimizers.Adagrad(0.05), "not Keras's Adagrad: use st.Adagrad(0.05)"),
        (keras.optimizers.AdamW(0.001), "not Keras's AdamW: use st.Adam(0.001)"),
        (keras.optimizers.RMSprop(0.01), "not Keras's RMSprop: use st.Adagrad(0.01)"),
        ("adam", "not the name 'adam': use st.Adam()"),
        (st.Adam, "not the class Adam: write st.Adam()"),
        (0.1, "not 0.1"),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_optimizers_of_keras_name_ours(given: Any, message: str) -> None:
    for options in ({"embedding_optimizer": given}, {"dense_optimizer": given}):
        with pytest.raises(ConfigError, match=r"optimizer must be st\.SGD, st.Adagrad") as caught:
            make([USER], logistic, **options)
        assert str(caught.value).endswith(message)
    with pytest.raises(ConfigError, match=r"optimizer must be None or st\.SGD") as caught:
        st.Categorical("user", dim=2, optimizer=given)
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize("name", ["my head", "_head", "über", "a:b"])
def test_names_of_layers_that_tensorflow_refuses(name: str) -> None:
    made = make([st.Categorical("user", dim=2)], lambda inputs: keras.layers.Dense(1, name=name)(inputs["user"]))
    with pytest.raises(ConfigError, match=f"^graph: a layer is named '{name}', but TensorFlow takes letters"):
        made.keras  # noqa: B018
