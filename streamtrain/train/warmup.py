"""Compiles the graph of a model's micro-batches before its worker joins the consumer group, or waits as a standby."""

import json
import logging
import threading
import time
from collections.abc import Sequence

from streamtrain.errors import StreamtrainError
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.model.spec import Spec
from streamtrain.stream.formats.factory import Format, JsonFormat
from streamtrain.stream.source import Bounds, Stream
from streamtrain.train.micro import GraphCache, MicroStep
from streamtrain.train.step import Step
from streamtrain.train.trainer import plan

_PARTITIONS = 8  # read one after another, so only some of many
_BYTES = 16 << 20  # of messages, after which the rest is not read

logger = logging.getLogger(__name__)


class Warmup:
    """Compiles in a thread, for batches like the last messages of the topic; learns nothing. It begins at once.

    Where there are none yet, it is for full batches of samples with one id for each feature.

    Args:
        model: the model; nothing is compiled if it has no micro-batches.
        step: its training function.
        stream: the topic.
        format: decodes the messages; used by this thread alone.
        batch_size: maximum number of samples of a batch.
    """

    def __init__(self, model: Model, step: Step, stream: Stream, format: Format, batch_size: int) -> None:
        self._graphs = GraphCache()
        self._model, self._step, self._stream, self._format = model, step, stream, format
        self._batch_size = batch_size
        self._lock = threading.Lock()  # held while TensorFlow compiles
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="warmup", daemon=True)
        if model.micro_batch_size:
            self._thread.start()

    def graphs(self) -> GraphCache:
        """Waits until they are compiled."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._graphs

    def close(self) -> None:
        """Waits for a compilation in progress, as the process must not end meanwhile; begins none after that."""
        with self._lock:
            self._closed = True

    def _run(self) -> None:
        batch = self._batch()
        with self._lock:
            if self._closed:
                return
            micro = MicroStep(self._model, self._step, self._batch_size, Spec.of(self._model), graphs=self._graphs)
            if micro.takes(batch):
                micro.compile(plan(self._model.planner(1), batch))

    def _batch(self) -> Batch:
        assert self._model.micro_batch_size
        try:
            batch, _ = self._format.decode(self._latest())
        except StreamtrainError as exc:  # the loop reports it
            logger.debug("compiling for samples that are made up: %s", exc)
        else:
            if len(batch) > self._model.micro_batch_size:
                return batch
        batch, bad = JsonFormat(self._model).decode(_made_up(self._model, self._batch_size))
        if bad:
            logger.warning(
                "the first batch will take longer, as the schema refuses samples to compile for: %s", bad[0].describe()
            )
        return batch

    def _latest(self) -> Sequence[bytes]:
        """The last messages of the longest partitions, as many as a batch has."""
        bounds = self._stream.bounds()
        longest = sorted(bounds, key=lambda p: bounds[p].high - bounds[p].low, reverse=True)[:_PARTITIONS]
        share = -(-self._batch_size // max(len(longest), 1))
        wanted = {p: Bounds(max(bounds[p].low, bounds[p].high - share), bounds[p].high) for p in longest}
        values, nbytes = [], 0
        for record in self._stream.records(wanted):
            values.append(record.value)
            nbytes += len(record.value)
            if nbytes > _BYTES:
                break
        return values


def _made_up(model: Model, count: int) -> list[bytes]:
    """As many samples, each with ids of its own."""
    schema, now = model.schema, time.time()
    fields: dict[str, object] = {label.name: 1 for label in model.labels}
    fields |= {one.field_name: 1.0 for one in schema.numerics} | ({schema.time: now} if schema.time else {})
    names = [one.field_name for one in schema.categoricals]
    return [json.dumps(fields | {name: f"{name}{i}" for name in names}).encode() for i in range(count)]
