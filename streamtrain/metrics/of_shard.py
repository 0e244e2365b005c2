"""The metrics of a shard."""

from streamtrain.metrics.definition import Definition

INFO = Definition(
    "streamtrain_shard_info", "gauge", ("shard", "shards", "run"), "", "1, with which shard it is and of which run."
)
READY = Definition(
    "streamtrain_shard_ready", "gauge", (), "", "1 if the shard has rows to serve; 0 while it is restored or is empty."
)
ROWS = Definition("streamtrain_shard_table_rows", "gauge", ("table",), "rows", "Rows of a table on the shard.")
BYTES = Definition(
    "streamtrain_shard_table_bytes", "gauge", ("table",), "bytes", "Memory of a table on the shard, its index included."
)
DENSE = Definition(
    "streamtrain_shard_dense_bytes",
    "gauge",
    (),
    "bytes",
    "Memory of the shard's dense slice, optimizer state included.",
)
CLOCK = Definition(
    "streamtrain_shard_clock_offset",
    "gauge",
    ("partition",),
    "offset",
    "Offset of the first sample of a partition that the shard has not learned.",
)
SAMPLES = Definition(
    "streamtrain_shard_samples",
    "gauge",
    (),
    "samples",
    "Samples that the shard's state has learned from; goes back when an older state is restored.",
)
WATERMARK = Definition(
    "streamtrain_shard_watermark_timestamp_seconds",
    "gauge",
    (),
    "seconds",
    "Latest event time that the shard has learned from, in seconds since the epoch; missing before the first.",
)
BACKUP = Definition(
    "streamtrain_shard_backup_in_step",
    "gauge",
    (),
    "",
    "1 if the shard's backup has all that is acknowledged, 0 if it has not; missing where there is no backup.",
)
PUSHES = Definition(
    "streamtrain_shard_pushes_total",
    "counter",
    ("outcome",),
    "pushes",
    "Pushes of workers: applied, duplicate (acknowledged, learned before) or rejected (the worker goes back).",
)
ROW_GRADIENTS = Definition(
    "streamtrain_shard_row_gradients_total",
    "counter",
    ("outcome",),
    "gradients",
    "Gradients of rows on the shard: applied, unadmitted or non_finite, as for workers.",
)
DENSE_GRADIENTS = Definition(
    "streamtrain_shard_non_finite_dense_gradients_total",
    "counter",
    (),
    "gradients",
    "Gradients of the shard's dense slice that were dropped because they were not finite.",
)
DROPPED_ROWS = Definition(
    "streamtrain_shard_dropped_rows_total",
    "counter",
    ("reason",),
    "rows",
    "Rows that the shard dropped: expired (expire_after) or evicted (capacity).",
)
WORKERS = Definition("streamtrain_shard_workers", "gauge", (), "workers", "Workers with an open session to the shard.")
EPOCH = Definition(
    "streamtrain_shard_checkpoint_epoch",
    "gauge",
    (),
    "epoch",
    "Epoch of the newest checkpoint that the shard wrote or was restored from; missing without one and while one is "
    "being written.",
)
CHECKPOINTS = Definition(
    "streamtrain_shard_checkpoints_total",
    "counter",
    ("outcome",),
    "checkpoints",
    "Checkpoints of all shards that shard 0, or the coordinator, was to take: taken or failed.",
)
CHECKPOINT_TIME = Definition(
    "streamtrain_shard_checkpoint_timestamp_seconds",
    "gauge",
    (),
    "seconds",
    "When the newest checkpoint was complete, in seconds since the epoch; of shard 0, or the coordinator.",
)
CHECKPOINT_FAILURES = Definition(
    "streamtrain_shard_checkpoint_failures_total",
    "counter",
    (),
    "failures",
    "Checkpoints whose part of the shard could not be written.",
)
PUBLICATIONS = Definition(
    "streamtrain_shard_publications_total",
    "counter",
    ("outcome",),
    "publications",
    "Publications that shard 0, or the coordinator, tried: published, held (back, by the quality gate) or failed.",
)
HELD = Definition(
    "streamtrain_shard_publication_held",
    "gauge",
    (),
    "",
    "1 while publications are held back by the quality gate, else 0; of shard 0, or the coordinator.",
)
PUBLICATION_TIME = Definition(
    "streamtrain_shard_publication_timestamp_seconds",
    "gauge",
    (),
    "seconds",
    "When the newest publication was made, in seconds since the epoch; of shard 0, or the coordinator.",
)
VERSIONS = Definition(
    "streamtrain_shard_versions_total",
    "counter",
    ("outcome",),
    "versions",
    "Versions that shard 0, or the coordinator, was to make by schedule: made or failed.",
)
EVENTS = Definition(
    "streamtrain_shard_events_total",
    "counter",
    ("event",),
    "events",
    "Whatever else went wrong: refused_… (requests, by reason), failed_… (by error), broken_sessions, silent_sessions, "
    "backup_lost, backup_took_over, damaged_checkpoints (passed by as it was restored).",
)
