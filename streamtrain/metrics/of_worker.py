"""The metrics of a worker."""

from streamtrain.metrics.definition import Definition

STAGES = ("poll", "decode", "plan", "pull", "step", "push", "settle")
# Upper bounds of times. Stages take from 100 µs, for a batch of tens, to seconds, when a shard is restored.
SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# What it has learned.
SAMPLES = Definition(
    "streamtrain_worker_samples_total", "counter", (), "samples", "Samples learned from, each time that they were."
)
BATCHES = Definition("streamtrain_worker_batches_total", "counter", (), "batches", "Batches learned from.")
REPEATED = Definition(
    "streamtrain_worker_repeated_samples_total",
    "counter",
    (),
    "samples",
    "Those of the samples that some shard had learned before a rewind, and so passed over.",
)
REWINDS = Definition(
    "streamtrain_worker_rewinds_total",
    "counter",
    (),
    "rewinds",
    "Times that the worker dropped what was under way and went to where the shards stand.",
)
STAGE = Definition(
    "streamtrain_worker_stage_seconds",
    "histogram",
    ("stage",),
    "seconds",
    f"Time that a batch took in a stage of the loop: {', '.join(STAGES)}.",
)

# What it has not learned.
BAD = Definition(
    "streamtrain_worker_bad_samples_total",
    "counter",
    ("reason",),
    "samples",
    "Messages that cannot be decoded or break the schema, by the reasons of docs/samples.md.",
)
DEAD_LETTERS = Definition(
    "streamtrain_worker_dead_letters_total",
    "counter",
    ("reason",),
    "letters",
    "Messages handed to the topic of dead letters.",
)
LATE = Definition(
    "streamtrain_worker_late_samples_total",
    "counter",
    (),
    "samples",
    "Samples further behind the watermark of their partition than stream.late_after.",
)
SKIPPED = Definition(
    "streamtrain_worker_skipped_samples_total",
    "counter",
    (),
    "samples",
    "Samples that were deleted from the stream before they were learned, counted by offsets.",
)
SAMPLED_OUT = Definition(
    "streamtrain_worker_sampled_out_samples_total",
    "counter",
    (),
    "samples",
    "Samples left out by down-sampling of negatives.",
)

# Where it is.
LAG = Definition(
    "streamtrain_worker_lag_messages",
    "gauge",
    ("partition",),
    "messages",
    "Messages between the worker's position and the end, of the partitions that it has.",
)
POSITION = Definition(
    "streamtrain_worker_position_offset",
    "gauge",
    ("partition",),
    "offset",
    "Offset of the worker's next message, of the partitions that it has.",
)
WATERMARK = Definition(
    "streamtrain_worker_watermark_timestamp_seconds",
    "gauge",
    (),
    "seconds",
    "Latest event time learned from, in seconds since the epoch; missing before the first.",
)
DELAY = Definition(
    "streamtrain_worker_watermark_delay_seconds",
    "gauge",
    (),
    "seconds",
    "Time between that event and the scrape; below 0 if event times are ahead of the clock.",
)
BUFFERED = Definition(
    "streamtrain_worker_buffered_bytes", "gauge", (), "bytes", "Messages fetched and not yet learned from."
)
RECONNECTS = Definition(
    "streamtrain_worker_reconnects_total", "counter", (), "reconnects", "Sessions with shards that were opened again."
)
STREAM_AWAY = Definition(
    "streamtrain_worker_stream_away",
    "gauge",
    (),
    "",
    "1 while the stream's service is known not to answer, else 0.",
)
SHARDS_AWAY = Definition(
    "streamtrain_worker_shards_away",
    "gauge",
    (),
    "",
    "Shards that the worker had reached and cannot reach at the moment; it waits for them.",
)
REPORT_FAILURES = Definition(
    "streamtrain_worker_report_failures_total",
    "counter",
    (),
    "failures",
    "Windows of predictions that shard 0 was to be told of, about once a second, and did not take.",
)

# What became of its gradients, on all shards.
ROW_GRADIENTS = Definition(
    "streamtrain_worker_row_gradients_total",
    "counter",
    ("outcome",),
    "gradients",
    "Gradients of rows: applied, unadmitted (their id was seen fewer than min_count times) or non_finite (dropped).",
)
DENSE_GRADIENTS = Definition(
    "streamtrain_worker_non_finite_dense_gradients_total",
    "counter",
    (),
    "gradients",
    "Gradients of dense slices that were dropped because they were not finite.",
)
DROPPED_ROWS = Definition(
    "streamtrain_worker_dropped_rows_total",
    "counter",
    ("reason",),
    "rows",
    "Rows that shards dropped upon the worker's pushes: expired (expire_after) or evicted (capacity).",
)

# How good its predictions were, each made before its sample was learned, over the latest worker.window.
WINDOW_SAMPLES = Definition(
    "streamtrain_worker_window_samples", "gauge", ("label",), "samples", "Samples of the window that have the label."
)
AUC = Definition(
    "streamtrain_worker_window_auc_ratio",
    "gauge",
    ("label",),
    "ratio",
    "Area under the ROC curve over the window, of binary labels.",
)
LOG_LOSS = Definition(
    "streamtrain_worker_window_log_loss_nats",
    "gauge",
    ("label",),
    "nats",
    "Mean cross-entropy over the window, of binary labels.",
)
ENTROPY = Definition(
    "streamtrain_worker_window_normalized_entropy_ratio",
    "gauge",
    ("label",),
    "ratio",
    "Log loss over that of always predicting the mean label; below 1 is better than that.",
)
CALIBRATION = Definition(
    "streamtrain_worker_window_calibration_ratio",
    "gauge",
    ("label",),
    "ratio",
    "Mean prediction over mean label over the window; 1 is calibrated.",
)
SQUARED_ERROR = Definition(
    "streamtrain_worker_window_mean_squared_error",
    "gauge",
    ("label",),
    "",
    "Mean squared error over the window, of labels that are not binary, in the label's unit squared.",
)
ABSOLUTE_ERROR = Definition(
    "streamtrain_worker_window_mean_absolute_error",
    "gauge",
    ("label",),
    "",
    "Mean absolute error over the window, of labels that are not binary, in the label's unit.",
)
NON_FINITE = Definition(
    "streamtrain_worker_window_non_finite_predictions",
    "gauge",
    ("label",),
    "predictions",
    "Predictions of the window that were NaN or infinite; they count in nothing else.",
)
