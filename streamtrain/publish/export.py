"""Exports: a publication as files that need no streamtrain; schemas/README.md describes them."""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import safetensors.numpy

from streamtrain._core import Table
from streamtrain.errors import ConfigError, PublicationCorrupt, PublicationError
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.ps.shard import scan_rows
from streamtrain.publish.lookup_graph import Rows, write_lookup_graph
from streamtrain.store.checkpoint.parquet import write_embeddings
from streamtrain.store.files import Directory, FileFacts, Output
from streamtrain.store.publication import Origin, Publication, RowChange, Weights

logger = logging.getLogger(__name__)

SAVED_MODEL = "saved_model"
KERAS = "model.keras"
SERVING = "serving"
MAX_SERVING_BYTES = 1 << 30  # beyond it a graph loads too slowly, and each version once more in memory


@dataclass(frozen=True)
class Lookup:
    """What a SavedModel that looks rows up itself takes from a publication.

    Attributes:
        path: where in the export it is written: TensorFlow Serving reads it from a folder for each version.
        tables: of the spec.
        rows: reads all rows, by table.
    """

    path: str
    tables: Sequence[Mapping[str, Any]]
    rows: Callable[[], dict[str, Rows]]


def write_graph(model: Model, weights: Weights, folder: Path, lookup: Lookup | None = None) -> None:
    """Writes `saved_model/` and `model.keras` with the weights of a publication. TensorFlow is loaded.

    The SavedModel corrects its predictions for what was not learned from (`keep`), as serving does; the model of Keras,
    which is the graph as its user has made it, does not.

    Args:
        model: whose graph it is; its weights are as before afterwards.
        weights: of the publication.
        folder: where they are written.
        lookup: for the SavedModel that looks rows up itself; None: there is none.

    Raises:
        ConfigError: Keras cannot write the graph.
    """
    with _having(model, weights):
        try:
            model.keras.save(folder / KERAS)
            _write_saved_model(model, folder / SAVED_MODEL)
            if lookup is not None:
                write_lookup_graph(model, lookup.tables, lookup.rows(), partial(_predict, model), folder / lookup.path)
        except Exception as exc:  # of layers of users', which raise anything
            raise ConfigError(f"cannot write the graph: {type(exc).__name__}: {exc}") from exc


def _write_saved_model(model: Model, folder: Path) -> None:
    import keras
    import tensorflow as tf

    signature = {
        tensor.name: tf.TensorSpec(tensor.shape, tensor.dtype, name=tensor.name) for tensor in model.keras.inputs
    }
    archive = keras.export.ExportArchive()
    archive.track(model.keras)
    archive.add_endpoint("serve", lambda inputs: _predict(model, inputs), input_signature=[signature])
    archive.write_out(str(folder), verbose=False)


def _predict(model: Model, inputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs of the graph, corrected for down-sampling."""
    outputs = model.keras(inputs, training=False)
    return {
        name: output if model.sampling is None else model.sampling.correct(output) for name, output in outputs.items()
    }


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


FORMAT = 1
MANIFEST = "manifest.json"


class Export:
    """A folder to which a publication is exported, all of it or nothing.

    Args:
        url: a local path or any URL of fsspec; there may be nothing in it.

    Raises:
        CheckpointError: it cannot be used.
        PublicationError: there is something in it.
    """

    def __init__(self, url: str | Path) -> None:
        self._directory = Directory(url)
        self.url = self._directory.url
        if self._directory.sizes():
            raise PublicationError(f"{self.url} is not empty: choose another directory")
        self._files: dict[str, FileFacts] = {}

    def write(self, origin: Origin, publication: Publication, model: Model | None = None) -> Publication:
        """Writes a publication; all of its rows are in memory meanwhile.

        Args:
            origin: that has it.
            publication: what is exported; of the head what comes later may be instead.
            model: whose graph is written too; None: none. TensorFlow is loaded for it.

        Returns:
            What was exported.

        Raises:
            OriginUnavailable: the origin does not answer.
            PublicationCorrupt: what it has is damaged or gone.
            CheckpointError: the files cannot be written.
            ConfigError: the model is another one, or Keras cannot write its graph.
        """
        spec = _spec(publication)
        if model is not None:
            _check_model(publication, spec, model)
        tables = {one["name"]: Table(one["dim"], optimizer="sgd", rate=1.0) for one in spec.tables}
        publication, weights = origin.load(publication, lambda change: _take(tables, change))
        for what, size, values in zip(Weights._fields, (spec.dense_size, spec.statistics_size), weights, strict=True):
            if values.shape != (size,):
                raise PublicationCorrupt(f"publication {publication.number} has {what} {values.shape}, not [{size}]")
        with self._complete_or_gone():
            for name, table in tables.items():
                with self._create(f"tables/{quote(name, safe='').replace('.', '%2E')}.parquet") as output:
                    write_embeddings(output, table.dim, ((rows.keys, rows.embeddings) for rows in scan_rows(table)))
            with self._create("weights.safetensors") as output:
                output.write(safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in weights._asdict().items()}))
            absent = None
            if model is not None:
                absent = _lookup_hindered(model, tables)
                path = f"{SERVING}/{publication.version or publication.number}"
                lookup = Lookup(path, spec.tables, lambda: {name: _all_rows(table) for name, table in tables.items()})
                self._write_graph(model, weights, None if absent else lookup)
            self._write_manifest(publication, tables, absent)
        return publication

    def _write_graph(self, model: Model, weights: Weights, lookup: Lookup | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_graph(model, weights, Path(folder), lookup)
            for file in sorted(one for one in Path(folder).rglob("*") if one.is_file()):
                with self._create(str(file.relative_to(folder))) as output, file.open("rb") as stream:
                    shutil.copyfileobj(stream, output)

    def _write_manifest(self, publication: Publication, tables: Mapping[str, Table], absent: str | None) -> None:
        about: dict[str, Any] = {
            "format": FORMAT,
            "publication": publication.to_json(),
            "tables": {name: {"dim": table.dim, "rows": len(table)} for name, table in tables.items()},
            "files": self._files,
        }
        if absent:
            about["without_serving"] = absent
            logger.warning("the export has no SavedModel for TensorFlow Serving: %s", absent)
        with self._create(MANIFEST) as output:
            output.write(json.dumps(about, indent=1).encode())

    @contextmanager
    def _create(self, name: str) -> Iterator[Output]:
        with self._directory.create(name) as output:
            yield output
        self._files[name] = output.facts()

    @contextmanager
    def _complete_or_gone(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for name in self._files:  # not the folder, which may contain other files by now
                self._directory.delete(name)
            raise


def _spec(publication: Publication) -> Spec:
    try:
        return Spec.from_json(publication.spec)
    except ConfigError as exc:
        raise PublicationCorrupt(f"publication {publication.number} of {publication.model}: {exc}") from exc


def _check_model(publication: Publication, spec: Spec, model: Model) -> None:
    theirs, mine = spec.meaning(), Spec.of(model).meaning()
    for what, value in mine.items():
        if theirs[what] != value:
            raise ConfigError(
                f"publication {publication.number} of {publication.model} has {what} {theirs[what]!r}, but the model "
                f"has {value!r}"
            )


def _lookup_hindered(model: Model, tables: Mapping[str, Table]) -> str | None:
    """Why there can be no SavedModel that looks rows up itself; None: there can."""
    size = sum(len(table) * (8 + 4 * table.dim) for table in tables.values())
    if size > MAX_SERVING_BYTES:
        return f"its rows would take {size >> 20} MiB of memory, and {MAX_SERVING_BYTES >> 20} MiB are the limit"
    return None


def _all_rows(table: Table) -> Rows:
    parts = [*scan_rows(table)]
    keys = np.concatenate([np.empty(0, np.uint64), *(part.keys for part in parts)])
    return keys, np.concatenate([np.empty((0, table.dim), np.float32), *(part.embeddings for part in parts)])


def _take(tables: Mapping[str, Table], change: RowChange) -> None:
    if change.table not in tables:
        raise PublicationCorrupt(f"unknown table {change.table!r}")
    table, none = tables[change.table], np.zeros(len(change.keys), np.uint32)
    if len(change.keys):
        if change.rows.shape[1] != table.dim or not np.isfinite(change.rows).all():
            raise PublicationCorrupt(
                f"table {change.table!r} has rows that are not finite, or not {table.dim} floats wide"
            )
        table.load(change.keys, change.rows, np.empty((len(change.keys), 0), np.float32), none, none)
    table.remove(change.gone)
