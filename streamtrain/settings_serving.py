"""Settings of publishing and serving."""

from typing import Annotated, Literal

from pydantic import Field

from streamtrain.setting_types import Count, Flag, Group, Listen, Margin, Ratio, Seconds, Secret, Text


class PublishSettings(Group):
    """Where the model is published for serving.

    Attributes:
        url: of Redis or Valkey; None: it is not published. Credentials in it are masked.
        cluster: whether it is a node of a Redis Cluster.
        model: the name under which it is published.
        every: seconds between two publications.
        dtype: of rows as they are published.
        log_bytes: of changes that are kept for servers that follow.
        version_every: seconds between two versions; None: no version is made by itself.
        keep: versions that are kept, beside those that labels and servers use.
    """

    url: Text | None = None
    cluster: Flag = False
    model: Text = "model"
    every: Seconds = 1.0
    dtype: Literal["float32", "float16", "int8"] = "float32"
    log_bytes: Annotated[Count, Field(ge=1 << 20)] = 256 << 20
    version_every: Seconds | None = None
    keep: Annotated[Count, Field(ge=1)] = 10


class GateSettings(Group):
    """What a publication must fulfil: `Gate(**dict(settings.gate))` of streamtrain/store/gate.py.

    Attributes:
        non_finite: whether predictions that are not finite hold it back.
        auc_drop: of the AUC; None: it is not looked at.
        loss_rise: of the loss, as a share of it; None: it is not looked at.
        calibration: of the calibration's distance from 1; None: it is not looked at.
        min_samples: of windows that are compared.
    """

    non_finite: Flag = True
    auc_drop: Margin | None = None
    loss_rise: Margin | None = None
    calibration: Margin | None = None
    min_samples: Annotated[Count, Field(ge=0)] = 10_000


class ServeSettings(Group):
    """How predictions are served.

    Attributes:
        listen: address of the HTTP endpoint.
        version: "prod": what has this label, else the head; a number or "head": that version, whatever is promoted.
        resident: versions that are loaded at the same time, beside the head.
        admin_token: that promote and rollback need; None: they are refused.
        read_token: that all else needs, but health and the console's page; None: nothing.
        max_batch: instances that are predicted together at most.
        max_queue: instances that may wait; more are refused.
        max_wait: seconds for which a request may wait to be predicted; then it is refused.
        max_requests: for predictions, under way at once; more are refused.
        max_connections: open at once; more are refused.
        receive_timeout: seconds in which a request must have come, and an answer been read.
        lookup: where rows are: all in the process (replica), or those asked for lately (cache).
        cache_bytes: of a cache's rows, of the head and of each version.
        processes: that serve at the same address.
        threads: of TensorFlow in each; 0: as many as there are cores.
        metrics: address of the first process's Prometheus metrics, the next ones' ports follow; None: all share the
            endpoint's.
    """

    listen: Listen = "127.0.0.1:8501"
    version: Annotated[Text, Field(pattern=r"^(prod|head|[1-9][0-9]{0,17})$")] = "prod"
    resident: Annotated[Count, Field(ge=1)] = 2
    admin_token: Secret | None = None
    read_token: Secret | None = None
    max_batch: Annotated[Count, Field(ge=1, le=1 << 16)] = 512
    max_queue: Annotated[Count, Field(ge=1)] = 8192
    max_wait: Annotated[Seconds, Field(gt=0)] = 1.0
    max_requests: Annotated[Count, Field(ge=1)] = 1024
    max_connections: Annotated[Count, Field(ge=1)] = 4096
    receive_timeout: Annotated[Seconds, Field(gt=0)] = 30.0
    lookup: Literal["replica", "cache"] = "replica"
    cache_bytes: Annotated[Count, Field(ge=1 << 20)] = 1 << 30
    processes: Annotated[Count, Field(ge=1, le=1024)] = 1
    threads: Annotated[Count, Field(ge=0, le=1024)] = 1
    metrics: Listen | None = None


class WatchdogSettings(Group):
    """When a server rolls back by itself: `Watch(**dict(settings.watchdog))` of streamtrain/serve/watchdog.py.

    Attributes:
        non_finite: share of predictions that are not finite, above which; 1: never.
        mean_factor: by which the mean prediction may change; None: it is not looked at.
        predictions: over so many both are taken.
        window: seconds after a change for which a version is watched.
    """

    non_finite: Ratio = 0.5
    mean_factor: Annotated[Margin, Field(gt=1)] | None = None
    predictions: Annotated[Count, Field(ge=1)] = 1000
    window: Seconds = 600.0
