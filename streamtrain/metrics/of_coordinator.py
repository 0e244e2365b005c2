"""The metrics of the coordinator; those of publications and versions are in of_shard.py, whoever leads."""

from streamtrain.metrics.definition import Definition

MEMBERS = Definition(
    "streamtrain_coordinator_members",
    "gauge",
    ("kind",),
    "",
    "Processes that have said within their lease that they are there: worker or server.",
)
LOST = Definition(
    "streamtrain_coordinator_lost_members_total",
    "counter",
    ("kind",),
    "members",
    "Processes whose lease ended, without a word that they end: worker or server.",
)
SHARDS = Definition(
    "streamtrain_coordinator_shards",
    "gauge",
    ("state",),
    "",
    "Shards that are ready, empty (wait for a worker) or away (do not answer).",
)
SLOT_EPOCH = Definition(
    "streamtrain_coordinator_slot_epoch",
    "gauge",
    (),
    "epoch",
    "Epoch of the slot map; grows when the shards are others.",
)
LAG = Definition(
    "streamtrain_coordinator_lag_messages",
    "gauge",
    (),
    "messages",
    "Messages of the stream that not all shards have learned; missing while nothing is known of it.",
)
EVENTS = Definition(
    "streamtrain_coordinator_events_total",
    "counter",
    ("event",),
    "events",
    "Whatever went wrong: refused_… (requests, by reason), failed_… (by error).",
)
