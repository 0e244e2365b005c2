"""Inspector: single rows of what is loaded, and which rows a sample reads."""

import json
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamtrain._core import Plan, Planner, hash_bytes
from streamtrain.errors import SampleError
from streamtrain.model.features import BLANKS, MAX_CELL_BITS, Categorical, Cells
from streamtrain.model.model import Model
from streamtrain.model.samples import SampleReader
from streamtrain.serve.errors import TooManyIds
from streamtrain.serve.predictor import Predictor
from streamtrain.store.publication import Floats, Publication

MAX_IDS = 1024


class RowRead(NamedTuple):
    """What an id reads.

    Attributes:
        key: of the id.
        found: whether it has a row; else `values` are its birth value.
        values: float32 [dim].
    """

    key: int
    found: bool
    values: Floats


class Hit(NamedTuple):
    """What one id of a sample reads.

    Attributes:
        feature: name of the feature.
        table: that it reads.
        id: as it stands in the sample; None: of a cross, whose ids are combinations, or of a cell.
        cell: the numbers of a cell, such as "3 to 3.25", or "missing"; None: it is none.
        row: of the id.
    """

    feature: str
    table: str
    id: str | None
    cell: str | None
    row: RowRead


class Inspector:
    """Looks rows up one by one: not for what is asked often. Thread-safe; calls take turns.

    Args:
        model: whose tables and samples these are.
    """

    def __init__(self, model: Model) -> None:
        self._schema = model.schema
        self._tables = {table.name: i for i, table in enumerate(model.schema.tables)}
        self._reader = SampleReader(model, with_labels=False)
        dims = [table.dim for table in model.schema.tables]
        self._planner = Planner([(t, "sum", 0) for t in range(len(dims))], dims, 1)
        self._turn = threading.Lock()

    def key_of(self, id: str) -> int:
        """The key of an id, as in training. An integer has that of its decimal text."""
        return hash_bytes(id.encode("utf-8", "surrogatepass"))

    def row(self, predictor: Predictor, table: str, key: int) -> RowRead:
        """What a key reads in a table of a loaded publication.

        Raises:
            KeyError: there is no such table.
            OriginUnavailable, PublicationCorrupt: the row is not held here and cannot be had.
        """
        with self._turn:
            return self._rows(predictor, [(table, key)])[0][0]

    def explain(self, predictor: Predictor, message: bytes) -> tuple[list[Hit], Publication]:
        """What each id of a JSON sample reads, feature by feature; all of one publication.

        Raises:
            SampleError: the sample cannot be used.
            TooManyIds: it has more than `MAX_IDS` ids.
            OriginUnavailable, PublicationCorrupt: as for `row`.
        """
        with self._turn:
            batch, bad = self._reader.decode([message])
            if bad:
                raise SampleError(bad)
            if len(batch.keys) > MAX_IDS:
                raise TooManyIds(f"a sample to be explained may have at most {MAX_IDS} ids, not {len(batch.keys)}")
            features = [
                (one, i, int(key))
                for one, start, end in zip(self._schema.embedded, batch.starts, batch.starts[1:], strict=False)
                for i, key in enumerate(batch.keys[start:end])
            ]
            rows, publication = self._rows(predictor, [(one.table_name, key) for one, _, key in features])
        sample = json.loads(message.decode("utf-8", "surrogatepass"), parse_int=str, parse_float=str)
        texts = {self.key_of(text): text for text in self._ids(sample)}
        cells = {one.name: self._cells(one, sample) for one in self._schema.cells}
        hits = [
            Hit(
                one.name,
                one.table_name,
                texts.get(key) if isinstance(one, Categorical) else None,
                cells[one.name][i] if isinstance(one, Cells) else None,
                row,
            )
            for (one, i, key), row in zip(features, rows, strict=True)
        ]
        return hits, publication

    def _cells(self, cells: Cells, sample: Mapping[str, Any]) -> list[str]:
        """The numbers of each cell that a sample reads, in order."""
        [number] = (one for one in self._schema.numerics if one.name == cells.of)
        value = sample.get(number.field_name)
        if value is None or value in BLANKS:
            return ["missing"]
        return [describe_cell(float(value), bits) for bits in cells.bits]

    def _ids(self, sample: Mapping[str, Any]) -> list[str]:
        """All that may be an id of a sample that has been accepted."""
        ids: list[Any] = [id for one in self._schema.categoricals for id in one.default_ids or ()]
        for one in self._schema.categoricals:
            value = sample.get(one.field_name)
            ids += value if isinstance(value, list) else [value]
        return [str(one) for one in ids if one is not None]

    def _rows(self, predictor: Predictor, keys: list[tuple[str, int]]) -> tuple[list[RowRead], Publication]:
        plans = [self._plan(self._tables[table], key) for table, key in keys]
        view = predictor.loaded.read(plans)
        rows = []
        for (table, key), plan, values in zip(keys, plans, view.rows, strict=True):
            found, _ = predictor.loaded.found(plan)[table]
            rows.append(RowRead(key, found == 1, values))
        return rows, view.publication

    def _plan(self, table: int, key: int) -> Plan:
        """A batch of one sample with one id, of the feature that is put for each table."""
        count: NDArray[np.int32] = np.zeros((len(self._tables), 2), np.int32)
        count[table, 1] = 1
        starts = np.concatenate([[0], np.cumsum(count[:, 1])]).astype(np.int64)
        return self._planner.plan(np.array([key], np.uint64), starts, count, np.zeros(1))


def describe_cell(number: float, bits: int) -> str:
    """The numbers of the cell of a size (`Grid`) in which a number lies, from the one closest to zero on.

    >>> describe_cell(3.1, 4)
    '3 to 3.125'
    """
    cut = MAX_CELL_BITS - bits
    raw = int(np.float32(number + 0.0).view(np.uint32)) >> cut
    near, far = np.array([raw << cut, (raw + 1) << cut], np.uint32).view(np.float32).tolist()
    return f"{near:.7g} to {far:.7g}"
