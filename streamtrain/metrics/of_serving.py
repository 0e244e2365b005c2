"""The metrics of a serving process."""

from streamtrain.metrics.definition import Definition

# Upper bounds: of requests from 250 µs, and of instances in a batch.
SECONDS = (2.5e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
INSTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

# Requests.
REQUESTS = Definition(
    "streamtrain_serving_requests_total",
    "counter",
    ("protocol", "code"),
    "requests",
    "Requests for predictions, by protocol (tensorflow or openinference) and status code.",
)
LATENCY = Definition(
    "streamtrain_serving_request_seconds",
    "histogram",
    ("model", "version"),
    "seconds",
    "Time from a request's first byte to its answer, of those that were predicted, by what predicted.",
)
BATCH = Definition(
    "streamtrain_serving_batch_instances", "histogram", (), "instances", "Instances that were predicted together."
)
WAITING = Definition(
    "streamtrain_serving_waiting_instances", "gauge", (), "instances", "Instances that wait to be predicted."
)
UNDER_WAY = Definition(
    "streamtrain_serving_under_way_requests",
    "gauge",
    (),
    "requests",
    "Requests for predictions that are not answered yet.",
)
SHED = Definition(
    "streamtrain_serving_shed_requests_total",
    "counter",
    ("reason",),
    "requests",
    "Requests refused with 503 for too many requests under way, bytes of bodies, waiting instances, or a long wait.",
)
CONNECTIONS = Definition(
    "streamtrain_serving_refused_connections_total",
    "counter",
    ("reason",),
    "connections",
    "Connections closed because there were too many, a client was slow, sent too large headers or left answers unread.",
)
TOKENS = Definition(
    "streamtrain_serving_unauthorized_requests_total",
    "counter",
    ("token",),
    "requests",
    "Requests without the token that they need, or with a wrong one: the admin token or the read token.",
)
IDS = Definition(
    "streamtrain_serving_ids_total",
    "counter",
    ("version", "table", "outcome"),
    "ids",
    "Different ids of one batch in 16: found (they have a row) or born (never learned: they read their birth value).",
)
LOOKUPS = Definition(
    "streamtrain_serving_lookups_total",
    "counter",
    ("version", "table", "outcome"),
    "lookups",
    "Lookups of ids in a cache: hit (known there), miss (the origin was asked) or failed (it did not answer).",
)

# What is served.
READY = Definition("streamtrain_serving_ready", "gauge", (), "", "1 if a publication is served; 0 before the first.")
INFO = Definition(
    "streamtrain_serving_info", "gauge", ("model", "version"), "", "1, with the version that is served, or head."
)
AS_WANTED = Definition(
    "streamtrain_serving_as_wanted",
    "gauge",
    (),
    "",
    "1 if what should be served is; 0 if it cannot be loaded, or not yet: /healthz/ready and the log say why.",
)
PUBLICATION = Definition(
    "streamtrain_serving_publication", "gauge", ("version",), "", "Number of the publication, by version loaded."
)
WATERMARK = Definition(
    "streamtrain_serving_watermark_timestamp_seconds",
    "gauge",
    ("version",),
    "seconds",
    "Latest event time that it has learned from, in seconds since the epoch; missing if none, by version loaded.",
)
FRESHNESS = Definition(
    "streamtrain_serving_freshness_seconds",
    "gauge",
    (),
    "seconds",
    "Time between that event, of what is served, and the scrape; missing if there is none.",
)
ROWS = Definition(
    "streamtrain_serving_table_rows", "gauge", ("version", "table"), "rows", "Rows of a table, by version loaded."
)
BYTES = Definition(
    "streamtrain_serving_version_bytes", "gauge", ("version",), "bytes", "Memory of all rows and indexes of a version."
)

# How it changes.
SWAPS = Definition(
    "streamtrain_serving_swaps_total",
    "counter",
    ("kind",),
    "swaps",
    "Changes of what answers: step (of the head), reload (of the head, whole), promote or rollback.",
)
ROLLBACKS = Definition(
    "streamtrain_serving_watchdog_rollbacks_total",
    "counter",
    ("reason",),
    "rollbacks",
    "Times that the watchdog had something else served: non_finite predictions, or their mean has moved.",
)
REFUSED = Definition(
    "streamtrain_serving_refused_publications_total",
    "counter",
    (),
    "publications",
    "Publications that were damaged or of another model, each time that one was tried.",
)
STALE = Definition(
    "streamtrain_serving_stale_seconds",
    "gauge",
    (),
    "seconds",
    "Time for which what keeps published models has not answered; 0 while it does.",
)
