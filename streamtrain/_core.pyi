"""The native core: hash, decoder, plan, embedding table, commands of Redis.

See the headers in `_native/` for the contracts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final, overload

import numpy as np
from numpy.typing import NDArray

ARCH: str
"""What this build is for: "x86-64-v2" or "x86-64-v3", as the processor is; elsewhere the machine's name."""

# hash
def hash_bytes(text: bytes) -> int: ...
def hash_integers(ids: NDArray[np.int64] | NDArray[np.uint64], /) -> NDArray[np.uint64]: ...
def hash_strings(data: NDArray[np.uint8], offsets: NDArray[np.int32] | NDArray[np.int64], /) -> NDArray[np.uint64]: ...
def cross_ragged(
    keys: Sequence[NDArray[np.uint64]], offsets: Sequence[NDArray[np.int32]], max_length: int, /
) -> tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.uint8]]:
    """Cross ragged columns sample by sample: keys, offsets [n + 1], and which samples have too many combinations."""

def hash_cells(numbers: NDArray[np.float32], bits: Sequence[int], /) -> NDArray[np.uint64]:
    """Keys of the cells of numbers, by number, then by bits; NaN is a missing one, which has one key as often."""

def shards_of(keys: NDArray[np.uint64], shards: int, /) -> NDArray[np.uint32]: ...
def keys_at(places: NDArray[np.uint64], /) -> NDArray[np.uint64]:
    """Keys at some places of hash tables, which differ from process to process: for tests of keys that collide."""

# decoder

DECODE_REASONS: tuple[str, ...]
TIME_RANGE: tuple[float, float]
"""Event times lie in this range, its end excluded: years 1 to 9999."""

class TimeFormat:
    """How a field says the event time: units of a number per second, and the form of a text, "" for ISO 8601.

    Raises ValueError for a form that is not one.
    """

    def __init__(self, per_second: float = 1.0, pattern: str = "") -> None: ...

def parse_times(data: NDArray[np.uint8], offsets: NDArray[np.int64], format: TimeFormat = ...) -> NDArray[np.float64]:
    """Seconds since the epoch of texts; NaN where one is no time."""

class LabelSpec:
    def __init__(
        self,
        field: str,
        *,
        kind: Literal["binary", "real", "count"] = "binary",
        optional: bool = False,
        positive: str | None = None,
    ) -> None: ...

class CategoricalSpec:
    def __init__(self, field: str, *, max_length: int = 0, default: Sequence[str] | None = None) -> None: ...

class CrossSpec:
    def __init__(self, name: str, categoricals: Sequence[int], *, max_length: int = 0) -> None: ...

class NumericSpec:
    def __init__(
        self,
        field: str,
        *,
        default: float | None = None,
        transform: Literal["none", "log1p", "standardize"] = "none",
        mean: float = 0.0,
        stddev: float = 1.0,
        cells: Sequence[int] = (),
    ) -> None: ...

class Columns:
    """Decoded samples: n samples, F features (categoricals, crosses, cells of numerics), D numerics, L labels."""

    @property
    def size(self) -> int:
        """The number of samples, n."""
    @property
    def kept(self) -> NDArray[np.int32]:
        """`[n]`: the index of each sample among those given."""
    @property
    def keys(self) -> NDArray[np.uint64]:
        """All keys of feature 0, then of feature 1, and so on."""
    @property
    def starts(self) -> NDArray[np.int64]:
        """`[F + 1]`: feature f's keys are `keys[starts[f]:starts[f + 1]]`."""
    @property
    def offsets(self) -> NDArray[np.int32]:
        """`[F, n + 1]`: where among its feature's keys each sample's begin."""
    @property
    def single(self) -> NDArray[np.bool_]:
        """`[F]`: whether every sample has exactly one key."""
    @property
    def numeric(self) -> NDArray[np.float32]:
        """`[n, D]`, transformed."""
    @property
    def labels(self) -> NDArray[np.float32]:
        """`[n, L]`: NaN where an optional label is missing; `[n, 0]` when decoded without labels."""
    @property
    def weights(self) -> NDArray[np.float32]:
        """`[n]`."""
    @property
    def times(self) -> NDArray[np.float64]:
        """`[n]`: seconds since the epoch."""
    @property
    def errors(self) -> list[tuple[int, str, str, int]]:
        """Of each refused sample: its index, the reason, the field or cross or "", the byte position or -1."""

class Decoder:
    """Decodes samples, as JSON or tensors. Concurrent calls on one decoder take turns; give each thread its own."""

    def __init__(
        self,
        *,
        labels: Sequence[LabelSpec],
        categoricals: Sequence[CategoricalSpec],
        crosses: Sequence[CrossSpec],
        numerics: Sequence[NumericSpec],
        time: str | None,
        weight: str | None,
        time_format: TimeFormat = ...,
        max_message_bytes: int = 1 << 20,
        max_id_bytes: int = 256,
        max_ids: int = 10_000,
        max_depth: int = 32,
    ) -> None: ...
    def decode(self, messages: Sequence[bytes | TensorSamples], with_labels: bool = True) -> Columns: ...

# tensors
@final
class InputTensor:
    """A tensor of a request. Texts are not copied: it keeps the bytes that it was read from.

    What is wrong with one raises ValueError, or OverflowError where it is too large, in words for its sender.
    """

    @staticmethod
    def of_tensorflow(name: str, message: bytes) -> InputTensor:
        """Of a serialized `TensorProto`."""
    @staticmethod
    def of_inference(message: bytes, raw: bytes | None) -> InputTensor:
        """Of a serialized `InferInputTensor`; `raw` are its values, where they are not in its contents."""
    @staticmethod
    def of_binary(name: str, shape: Sequence[int], datatype: str, data: bytes) -> InputTensor:
        """Of the binary extension of the Open Inference Protocol."""
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    def tolist(self) -> list[Any]:
        """The values, flat."""

@final
class TensorSamples(Sequence[bytes]):
    """Samples whose columns are tensors; an item is a sample as JSON, made when it is asked for.

    `fields` says of each field of a sample whether it holds ids; tensors of other names are ignored. Raises ValueError
    where tensors do not match each other or the fields, OverflowError where samples are too large; in words for their
    sender.
    """

    def __init__(self, tensors: Sequence[InputTensor], fields: Mapping[str, bool]) -> None: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

# plan
@final
class Planner:
    """Makes plans. Thread-safe, but threads that share one take turns.

    `features` are (table, combiner "sum", "mean", "sqrtn" or "none", max_length) and `dims` the row width by table.
    """

    def __init__(self, features: Sequence[tuple[int, str, int]], dims: Sequence[int], shards: int) -> None: ...
    @property
    def width(self) -> int: ...
    @property
    def columns(self) -> list[int]:
        """First column of each feature in the matrix, and at the end its width."""

    def plan(
        self,
        keys: NDArray[np.uint64],
        starts: NDArray[np.int64],
        offsets: NDArray[np.int32],
        times: NDArray[np.float64],
    ) -> Plan: ...

@final
class Plan:
    """The plan of one batch; its arrays are read-only views."""

    @property
    def samples(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def row_starts(self) -> NDArray[np.int64]:
        """First float of each table in the flat row buffer, and at the end the buffer's size."""

    def keys(self, table: int, /) -> NDArray[np.uint64]:
        """Unique keys of a table, grouped by shard."""

    def counts(self, table: int, /) -> NDArray[np.uint32]: ...
    def times(self, table: int, /) -> NDArray[np.uint32]: ...
    def shard_starts(self, table: int, /) -> NDArray[np.int64]: ...
    def common(self, other: Plan, table: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of a table that stand for the same keys: in this plan, and in another one."""

    def pool(self, rows: NDArray[np.float32], extra_columns: int = 0) -> NDArray[np.float32]:
        """Matrix [samples, width + extra_columns] of flat rows; the extra columns, on the right, are not set."""

    def unpool(self, gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        """Flat gradients of the unique rows from that of the matrix [samples, width or more].

        Columns beyond the width are of no concern, as `extra_columns` are.
        """

@final
class MicroPlan:
    """The steps of a batch that is learned in micro-batches; see `_native/micro.h`.

    `groups` are the tables whose rows lie in one matrix; each table is in one. Widths must be at least `width(group)`.
    """

    def __init__(self, plan: Plan, size: int, groups: Sequence[Sequence[int]]) -> None: ...
    @property
    def steps(self) -> int: ...
    @property
    def lengths(self) -> list[tuple[bool, int]]:
        """By feature: whether every sample has exactly one id, and the most ids of a step."""
    def rows(self, group: int) -> int: ...
    def width(self, group: int) -> int:
        """Most different rows of a step."""
    def index(self, group: int, steps: int, width: int, none: int) -> NDArray[np.int32]:
        """[steps, width]: the rows of each step; `none` where there are no more."""
    def live(self, group: int, steps: int, width: int, awaited: NDArray[np.uint8] | None) -> NDArray[np.float32]:
        """[steps, width]: 1 where there is a row whose gradient will be applied.

        `awaited`: by row, how many occurrences it takes until then, as of `Table.pull_state`; None: none.
        """
    def occurrences(
        self, group: int, steps: int, kinds: Sequence[tuple[Literal["single", "list", "sequence"], int]], none: int
    ) -> NDArray[np.int32]:
        """[steps, sum of slots]: positions of ids among a step's rows, feature by feature; `none` for the rest.

        `kinds`: of each feature of the group, and its slots: how many positions it has in a step.
        """
    def segments(self, feature: int, steps: int, slots: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Of a pooled list: the sample of each position [steps, slots], and factors of the samples' sums [steps, size].

        Positions that there are no ids for have the size in place of a sample.
        """
    def order(self, group: int, width: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
        """What puts entries in the order of the rows, and those of a row in the order of the steps.

        Returns:
            positions [e] of entries in [steps * width]; how many there are of each row [rows]; by position the
            occurrences of the row in the step [e].
        """

def merge_rows(
    keys: Sequence[NDArray[np.uint64]],
    gradients: Sequence[NDArray[np.float32]],
    counts: Sequence[NDArray[np.uint32]],
    times: Sequence[NDArray[np.uint32]],
    scales: Sequence[float],
) -> tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.uint32], NDArray[np.uint32]]:
    """One batch of row gradients from several, as when those of several workers are averaged.

    Args:
        keys: of each part, [n_i], unique within it.
        gradients: of each part, [n_i, dim].
        counts: of each part, [n_i].
        times: of each part, [n_i], seconds.
        scales: of each part, finite; what its gradients are multiplied with.

    Returns:
        keys [n], the union in the order in which they first occur; gradients [n, dim], the sums of the scaled ones in
        the order of the parts, in float32; counts [n], summed, at most 2^32 - 1; times [n], the latest.

    Raises:
        ValueError: there are no parts, they do not fit together, or a scale is not finite.
    """

# 16-bit floats
def narrow(
    values: NDArray[np.float32], dtype: Literal["float16", "bfloat16"], out: NDArray[np.uint16] | None = None
) -> NDArray[np.uint16]:
    """The bits [n] of values [n] as 16-bit floats, rounded to nearest (even), into `out` if given.

    NaN stays NaN and infinity infinite; finite values that are too large become the largest finite one.
    """

def widen(
    values: NDArray[np.uint16], dtype: Literal["float16", "bfloat16"], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """The values [n] of the bits [n] of 16-bit floats, into `out` if given."""

# lane

@final
class Lane:
    """Messages to and from another process of this machine, through memory that both have mapped.

    Each side may read in one thread and write in several. Who waits looks for signals now and then. A message
    that is given up in the middle, in time or for a signal, closes the lane.
    """

    @staticmethod
    def make() -> Lane:
        """A new lane; raises OSError if there can be none."""
    @staticmethod
    def take(fd: int, nonce: bytes) -> Lane:
        """The other side of the lane with a file descriptor and nonce; raises ValueError if they are none."""
    @property
    def fd(self) -> int: ...
    @property
    def nonce(self) -> bytes:
        """16 bytes that nobody else can know."""
    def write(self, data: bytes, seconds: float = ...) -> bool:
        """Writes a message, once there is room; False: the lane is closed.

        Args:
            data: the message.
            seconds: in which the other side may do nothing at all; infinite if not given.

        Raises:
            TimeoutError: it has done nothing for so long.
            ValueError: it has damaged the lane.
        """
    def try_write(self, data: bytes) -> bool:
        """Writes a message if that takes no waiting; False: it does, or the lane is closed. Errors as of `write`."""
    def read(self, limit: int, seconds: float = ...) -> bytes | None:
        """Waits for the next message; None: the lane is closed.

        Args:
            limit: bytes of a message.
            seconds: as of `write`.

        Raises:
            TimeoutError: the other side has done nothing for so long.
            ValueError: the message has more than `limit` bytes, or the other side has damaged the lane.
            RuntimeError: another thread is reading.
        """
    def close(self) -> None:
        """Ends what this side waits for. The other side does not notice."""

# commands of Redis
def group_by_bucket(
    buckets: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Groups things by the bucket of each, [n], below 2^24.

    Returns:
        indices of the things [n], bucket by bucket, within one as they were; the buckets that there are [b], ascending;
        where the indices of each begin, and the last end [b + 1].

    Raises:
        ValueError: there can be no such bucket.
    """

def last_of_each(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Indices of keys [n] that no later one is equal to, ascending."""

def pack_fields(
    verb: bytes,
    before: bytes,
    after: bytes,
    *,
    order: NDArray[np.int64],
    buckets: NDArray[np.int64],
    starts: NDArray[np.int64],
    keys: NDArray[np.uint64],
    rows: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Commands "verb bucket key…", or with rows "verb bucket key row…", one for each bucket; see `_native/commands.h`.

    Args:
        verb: of the commands.
        before: of the names of buckets, what stands before their six hexadecimal digits.
        after: what stands after them.
        order: indices of keys.
        buckets: [b], below 2^24.
        starts: [b + 1], where in `order` those of each bucket begin, and the last end.
        keys: [n].
        rows: [n, width].

    Raises:
        ValueError: these do not fit together.
    """

# dense parameters
def aligned_floats(size: int) -> NDArray[np.float32]:
    """A new array [size], not set, on a cache line of its own: TensorFlow takes it without a copy."""

@final
class DenseVector:
    """A slice of the dense parameters and its optimizer; any thread may call anything."""

    def __init__(
        self,
        values: NDArray[np.float32],
        *,
        optimizer: Literal["sgd", "adagrad", "adam"],
        rate: float,
        initial_accumulator: float = 0.1,
        epsilon: float = 1e-7,
        decay: float = 1.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def pull(self, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """A copy [size] of the values, into `out` if given; no update is seen in part."""

    @property
    def slots(self) -> NDArray[np.float32]:
        """A copy of the optimizer state by element, [number of slots, size]."""

    @property
    def steps(self) -> float:
        """Adam's number of updates; 0 of other optimizers."""

    def pull_state(self, values: NDArray[np.float32], slots: NDArray[np.float32]) -> float:
        """Copies the values [size] and the slots [number of slots, size] as of one moment; gives the steps."""

    def change(
        self, by: NDArray[np.float32], added: NDArray[np.float32], decay: NDArray[np.float32], steps: float
    ) -> bool:
        """What several updates made elsewhere come to: values += by, slots = decay * slots + added.

        One that is not finite changes nothing and gives False.

        Args:
            by: [size].
            added: [number of slots, size].
            decay: [number of slots], 0 to 1.
            steps: number of updates.
        """

    def apply(self, gradient: NDArray[np.float32], rate: float | None = None) -> bool:
        """Update once; a gradient that is not finite changes nothing and gives False."""

    def load(self, values: NDArray[np.float32], slots: NDArray[np.float32], steps: float) -> None: ...

# embedding table
OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
Dtype = Literal["float32", "bfloat16", "float16"]
Init = Literal["uniform", "constant"]

def state_size(optimizer: OptimizerName, dim: int) -> int:
    """Floats of optimizer state that a row of a width carries."""

def birth(
    keys: NDArray[np.uint64],
    dim: int,
    *,
    seed: int,
    init: Init = "uniform",
    init_scale: float = 0.01,
    dtype: Dtype = "float32",
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """First values [n, dim] of keys, without a table; `init_scale` is the value itself when `init` is constant."""

class Rows:
    """A part of a table, column by column; the arrays are read-only views."""

    @property
    def keys(self) -> NDArray[np.uint64]: ...
    @property
    def embeddings(self) -> NDArray[np.float32]: ...
    @property
    def state(self) -> NDArray[np.float32]: ...
    @property
    def counts(self) -> NDArray[np.uint32]: ...
    @property
    def last_seen(self) -> NDArray[np.uint32]: ...
    def __len__(self) -> int: ...

class Drained:
    """Changes taken out of a channel: rows as they are now (as of the seal, if sealed), and keys that are gone."""

    @property
    def rows(self) -> Rows: ...
    @property
    def tombstones(self) -> NDArray[np.uint64]: ...

class PushResult:
    @property
    def applied(self) -> int: ...
    @property
    def inserted(self) -> int: ...
    @property
    def unadmitted(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def non_finite(self) -> NDArray[np.uint32]:
        """Positions in the call of the gradients that were dropped because they were not finite."""

class Table:
    """An embedding table; any thread may call anything, at any time.

    Readers (pull, lookup, scan, stats, len, nbytes, pending, admission) run together, all others alone. A call has the
    table to itself for at most 4096 rows at a time, and whoever waits goes in between: other threads' changes may come
    between the parts of a longer call, but no row is ever seen half changed.

    With `memory`, about so many bytes of a table are in memory, index and changes included, and its other rows in files
    of `segment_bytes` in `folder`, which have no names and go with the process. No result is different. Not together
    with a capacity. A call that needs rows which cannot be read raises RuntimeError; rows that cannot be
    written stay in memory (`disk_error`).
    """

    def __init__(
        self,
        dim: int,
        *,
        optimizer: OptimizerName,
        rate: float,
        initial_accumulator: float = 0.1,
        epsilon: float = 1e-7,
        decay: float = 1.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        seed: int = 0,
        init: Init = "uniform",
        init_scale: float = 0.01,
        dtype: Dtype = "float32",
        min_count: int = 1,
        sketch_width: int = 1 << 20,
        expire_after: int = 0,
        capacity: int = 0,
        memory: int = 0,
        folder: str = "",
        segment_bytes: int = 1 << 26,
    ) -> None: ...
    @property
    def dim(self) -> int: ...
    @property
    def state_size(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Memory in use: touched rows, index, channels, admission sketch and open snapshot."""
    @property
    def disk_error(self) -> str:
        """Why rows could not be written to disk the last time that they could not, and stayed in memory; or empty."""
    def __len__(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def pull(self, keys: NDArray[np.uint64], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]: ...
    def pull_state(
        self, keys: NDArray[np.uint64], out: NDArray[np.float32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Rows with their optimizer state [n, dim + state_size], as a gradient would find them; what keys await [n].

        That is how many occurrences a key needs until its gradients are applied (`min_count`); 0: none.
        """

    def push(
        self,
        keys: NDArray[np.uint64],
        gradients: NDArray[np.float32],
        counts: NDArray[np.uint32],
        times: NDArray[np.uint32],
        rate: float | None = None,
        repeats: NDArray[np.uint32] | None = None,
    ) -> PushResult:
        """Applies gradients to rows.

        Args:
            keys: [n], unique.
            gradients: [n, dim]; with `repeats` [sum of these, dim], those of a key one after another in their order.
            counts: by gradient, the occurrences it stands for.
            times: [n], seconds.
            rate: replaces the table's own.
            repeats: [n], number of gradients of each key; None: one.
        """
    def load(
        self,
        keys: NDArray[np.uint64],
        embeddings: NDArray[np.float32],
        state: NDArray[np.float32],
        counts: NDArray[np.uint32],
        last_seen: NDArray[np.uint32],
        *,
        cold: bool = False,
        only_new: bool = False,
    ) -> int:
        """Write whole rows, as from a checkpoint; return how many were new.

        New ones that are `cold` go straight to disk once memory is full, while no channel or snapshot is open; with
        `only_new`, those that there are stay as they are.
        """
    def expect(self, rows: int) -> None:
        """Make room for so many rows in the index of those on disk, as far as the budget allows."""
    def remove(self, keys: NDArray[np.uint64]) -> int: ...
    def lookup(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.uint32], NDArray[np.uint32]]:
        """Whether each key has a row, its count and its last_seen, which is 0 where it is not kept."""
    def expire(self, now: int, max_rows: int) -> int:
        """Visit the next max_rows row ids and remove what was last seen more than expire_after seconds before now."""
    def set_slots(self, begin: int, end: int) -> None:
        """Have the table be of hash slots begin to end - 1 only; rows of others are foreign.

        Foreign rows can be loaded, pulled and removed, but they are in no channel, snapshot, scan or count, neither
        expire nor are evicted. Those that there are now have to be swept, before others may be loaded.

        Raises:
            ValueError: they are not within 0 to 65536, or there is none.
            RuntimeError: they are others than before, and a snapshot is open, or a channel is sealed.
        """
    def sweep(self, max_rows: int) -> bool:
        """Visit max_rows ids to remove foreign rows, and let their memory go; whether there is more to do.

        It moves rows to other ids: what is scanned meanwhile may miss some.
        """
    def scan(self, cursor: int, max_rows: int) -> tuple[int | None, Rows]:
        """Rows among the max_rows places from `cursor` (0 at first), and the next cursor, None at the end.

        For tables at rest, or with all rows in memory.
        """
    def rows(self, max_rows: int) -> Iterator[Rows]:
        """All rows, about max_rows at a time, while the table changes.

        With rows on disk, a row can come twice. Sweep before: rows that get other ids may be missed.
        """
    def open_channel(self) -> int:
        """Open one of three channels; it holds what changes from now on."""
    def seal(self, channel: int) -> None:
        """End what the channel takes; from now on drain gives what it holds as of this moment, whatever is written.

        For a checkpoint of what changed since the last one, first open the channel that goes on: a change that comes
        between the two calls is then in both, and none is lost. Rows that change before they have been drained are kept
        aside in memory until they are. Close the channel when it is empty.

        Raises:
            ValueError: no such open channel, or it is sealed already.
        """
    def close_channel(self, channel: int) -> None: ...
    def pending(self, channel: int) -> int:
        """At most how many rows and tombstones the channel still holds."""
    def drain(self, channel: int, max_rows: int) -> Drained:
        """Take at most max_rows entries out of the channel, fewer if others write meanwhile; loop while `pending`.

        A key is at most once in what one call returns.
        """
    def mark_dirty(self, channel: int, keys: NDArray[np.uint64]) -> None:
        """Put drained keys back: as changed if they have a row, else as tombstones.

        Raises:
            ValueError: no such open channel, or it is sealed; put them into another one then.
        """
    def begin_snapshot(self) -> None: ...
    def read_snapshot(self, max_rows: int) -> Rows | None:
        """Return the next part of the table as of begin_snapshot, maybe empty; None when all has been read."""
    def end_snapshot(self) -> None: ...
    def admission(self) -> NDArray[np.uint8]:
        """Return the bytes of the admission sketch; empty if min_count is 1."""
    def merge_admission(self, state: NDArray[np.uint8]) -> None:
        """Add another sketch of the same width; exact if this one is still empty."""
    def reset_admission(self) -> None:
        """Forget how often keys without a row have been seen."""
    def set_capacity(self, capacity: int) -> None:
        """Change the number of rows; raises ValueError if last_seen is not kept."""
    def set_memory(self, memory: int) -> None:
        """Change the budget of memory, in bytes; raises ValueError if the table began without one."""
