"""Exports: a publication as files that need no streamtrain; schemas/README.md describes them."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import safetensors.numpy

from streamtrain._core import Table
from streamtrain.cluster.export_graph import write_graph
from streamtrain.errors import ConfigError, PublicationCorrupt, PublicationError
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.store.files import Directory, FileFacts, Output
from streamtrain.store.origin import Floats, Origin, Publication, RowChange, Weights
from streamtrain.store.rows import write_embeddings

FORMAT = 1
MANIFEST = "manifest.json"
_SCANNED_IDS = 1 << 16


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
            raise PublicationError(f"{self.url} is not empty: choose another folder")
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
                    write_embeddings(output, table.dim, _rows(table))
            with self._create("weights.safetensors") as output:
                output.write(safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in weights._asdict().items()}))
            if model is not None:
                self._write_graph(model, weights)
            self._write_manifest(publication, tables)
        return publication

    def _write_graph(self, model: Model, weights: Weights) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_graph(model, weights, Path(folder))
            for file in sorted(one for one in Path(folder).rglob("*") if one.is_file()):
                with self._create(str(file.relative_to(folder))) as output, file.open("rb") as stream:
                    shutil.copyfileobj(stream, output)

    def _write_manifest(self, publication: Publication, tables: Mapping[str, Table]) -> None:
        about: dict[str, Any] = {
            "format": FORMAT,
            "publication": publication.as_json(),
            "tables": {name: {"dim": table.dim, "rows": len(table)} for name, table in tables.items()},
            "files": self._files,
        }
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
            for name in self._files:  # not the folder: somebody may have put something else there meanwhile
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


def _take(tables: Mapping[str, Table], change: RowChange) -> None:
    if change.table not in tables:
        raise PublicationCorrupt(f"there are rows of a table {change.table!r}, which the model has not")
    table, none = tables[change.table], np.zeros(len(change.keys), np.uint32)
    if len(change.keys):
        if change.rows.shape[1] != table.dim or not np.isfinite(change.rows).all():
            raise PublicationCorrupt(
                f"table {change.table!r} has rows that are not finite, or not of {table.dim} floats"
            )
        table.load(change.keys, change.rows, np.empty((len(change.keys), 0), np.float32), none, none)
    table.remove(change.gone)


def _rows(table: Table) -> Iterator[tuple[Any, Floats]]:
    cursor: int | None = 0
    while cursor is not None:
        cursor, rows = table.scan(cursor, _SCANNED_IDS)
        yield rows.keys, rows.embeddings
