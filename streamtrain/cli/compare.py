"""`compare`: how models that learn from the same topic differ."""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from streamtrain.cli.options import Config, Json, Setting, read_client_settings
from streamtrain.cli.terminal import format_count, format_time, new_table, print_json, show
from streamtrain.errors import ConfigError

if TYPE_CHECKING:
    from streamtrain.quality.comparison import Comparison
    from streamtrain.quality.progressive import Metrics


def compare(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a published model (publish.model).")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Name of the model to compare it with.")],
    label: Annotated[str | None, typer.Option(help="The only label to compare; default: all.")] = None,
    slice_of: Annotated[
        str | None, typer.Option("--slice", metavar="FEATURE", help="Compare the slices of this feature, too.")
    ] = None,
    last: Annotated[
        str | None, typer.Option(metavar="1h|N", help="Only the last hour of event time, or the last N blocks.")
    ] = None,
    json: Json = False,
    config: Config = None,
    setting: Setting = None,
) -> None:
    """Compare two models that learn from the same topic, such as a model and its fork.

    Both predict every sample before they learn it. Their figures are compared block by block of offsets, and may be
    checked as often as you like: the interval of the difference takes that into account. See docs/compare.md.

    As JSON: a, b, blocks, from and to (event time), dropped (whether older blocks are gone) and results.
    """
    from streamtrain.quality.comparison import compare_blocks, parse_last, read_blocks
    from streamtrain.store.redis.server import RedisServer

    if model == other:
        raise ConfigError(f"give the names of two models, not {model!r} twice")
    last_seconds, last_blocks = parse_last(last)
    settings = read_client_settings(config, setting, {})
    if settings.publish.url is None:
        raise ConfigError(
            "publish.url is not set, and `streamtrain up` does not run in this folder: "
            "give --set publish.url=redis://host:port"
        )
    server = RedisServer(settings.publish.url, cluster=settings.publish.cluster)
    try:
        ours, theirs = (read_blocks(server, name) for name in (model, other))
    finally:
        server.close()
    found = compare_blocks(
        ours, theirs, label=label, slice_of=slice_of, last_seconds=last_seconds, last_blocks=last_blocks
    )
    if json:
        print_json(found.to_json())
    else:
        _show(found)


def _show(found: "Comparison") -> None:
    names = found.ours.model, found.theirs.model
    first, last = found.times
    columns = ("label", "slice", "model", "samples", "loss", "AUC", "calibration", "non-finite")
    table = new_table(
        f"{len(found.places):,} blocks of {found.ours.log.size:,} offsets of topic {found.ours.log.topic}, "
        f"event time {format_time(first)} to {format_time(last)} UTC",
        columns,
        right=columns[3:],
    )
    for result in found.results:
        for name, metrics in zip(names, (result.ours, result.theirs), strict=True):
            table.add_row(result.label, result.slice or "all", name, *_cells(metrics))
    lines = [
        f"{result.label}{', ' + result.slice if result.slice else ''}: {result.sentence(*names)}"
        for result in found.results
    ]
    if found.is_windowed:
        lines.append(
            "older blocks are gone (compare.keep): the interval covers those that are kept; if you watch it while "
            "it moves, you may see a difference where there is none a little more often than once in twenty"
        )
    show(table, *lines)


def _cells(metrics: "Metrics") -> list[str]:
    loss = metrics.log_loss if math.isfinite(metrics.log_loss) else metrics.mean_squared_error
    figures = [f"{value:.4f}" if math.isfinite(value) else "-" for value in (loss, metrics.auc, metrics.calibration)]
    return [format_count(metrics.samples), *figures, format_count(metrics.non_finite)]
