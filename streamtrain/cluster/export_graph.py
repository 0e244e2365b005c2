"""The inference graph of a publication as files: a SavedModel of TensorFlow, and a model of Keras.

Either takes what the graph takes, which never holds a table: by feature the rows of an id, or of a bag of ids pooled
(float32 [n, dim]), of a sequence float32 [n, max_length, dim] with `{feature}_mask` bool [n, max_length], and of a
number float32 [n, 1], as the schema makes it of a sample's field.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamtrain.errors import ConfigError
from streamtrain.model.model import Model
from streamtrain.store.origin import Weights

SAVED_MODEL = "saved_model"
KERAS = "model.keras"


def write_graph(model: Model, weights: Weights, folder: Path) -> None:
    """Writes `saved_model/` and `model.keras` with the weights of a publication. TensorFlow is loaded.

    The SavedModel corrects its predictions for what was not learned from (`keep`), as serving does; the model of Keras,
    which is the graph as its user has made it, does not.

    Args:
        model: whose graph it is; its weights are as before afterwards.
        weights: of the publication.
        folder: where they are written.

    Raises:
        ConfigError: Keras cannot write the graph.
    """
    with _having(model, weights):
        try:
            model.keras.save(folder / KERAS)
            _write_saved_model(model, folder / SAVED_MODEL)
        except Exception as exc:  # of layers of users', which raise anything
            raise ConfigError(f"graph cannot be written: {type(exc).__name__}: {exc}") from exc


def _write_saved_model(model: Model, folder: Path) -> None:
    import keras
    import tensorflow as tf

    def predict(inputs: dict[str, Any]) -> dict[str, Any]:
        outputs = model.keras(inputs, training=False)
        return {
            name: output if model.sampling is None else model.sampling.correct(output)
            for name, output in outputs.items()
        }

    signature = {
        tensor.name: tf.TensorSpec(tensor.shape, tensor.dtype, name=tensor.name) for tensor in model.keras.inputs
    }
    archive = keras.export.ExportArchive()
    archive.track(model.keras)
    archive.add_endpoint("serve", predict, input_signature=[signature])
    archive.write_out(str(folder), verbose=False)


@contextmanager
def _having(model: Model, weights: Weights) -> Iterator[None]:
    """The Keras model has the weights of a publication within the block."""
    variables = [*model.keras.trainable_variables, *model.statistics_variables]
    values = [*model.dense.split(weights.dense), *model.statistics.split(weights.statistics)]
    before = [variable.numpy() for variable in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
