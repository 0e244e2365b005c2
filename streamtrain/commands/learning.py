"""The command that learns in one process: `learn`."""

from typing import Annotated

import typer
from rich.console import Console

from streamtrain.console import load_tensorflow, opened, print_json


def learn(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    file: Annotated[str, typer.Argument(help="Samples, a JSON object a line; .gz is unpacked; - is standard input.")],
    model: Annotated[str, typer.Option(help="The model: path/to/file.py:name.")],
    batch_size: Annotated[int, typer.Option(help="Samples per step.")] = 1024,
    load: Annotated[str | None, typer.Option(help="Checkpoint to go on from: a path or URL.")] = None,
    save: Annotated[str | None, typer.Option(help="Where to write a checkpoint at the end: a path or URL.")] = None,
    max_bad_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Share of refused samples, over 10,000, above which it stops.")
    ] = 0.1,
    for_: Annotated[float | None, typer.Option("--for", metavar="SECONDS", help="End by itself after so long.")] = None,
) -> None:
    """Learn from a file of samples, with live metrics.

    Ends with a line of JSON: samples, samples_per_s, bad (refused samples by reason), rows, and metrics by label.
    """
    from streamtrain.learner import Learner
    from streamtrain.model.load import load_model, locate_model
    from streamtrain.replay import replay

    locate_model(model)
    with opened(file) as stream:
        load_tensorflow()
        made = load_model(model)
        learner = Learner.load(load, made, batch_size=batch_size) if load else Learner(made, batch_size=batch_size)
        lines = (line for line in stream if not line.isspace())
        console = Console(stderr=True)
        done = replay(learner, [lines], console, title=file, max_bad_ratio=max_bad_ratio, seconds=for_)
    if save:
        learner.save(save)
    print_json(
        {
            "samples": done.samples,
            "samples_per_s": round(done.samples_per_s),
            "bad": done.bad,
            "rows": learner.rows,
            "metrics": {
                label: {name: _rounded(value) for name, value in metrics.as_dict().items()}
                for label, metrics in learner.metrics().items()
            },
        }
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
