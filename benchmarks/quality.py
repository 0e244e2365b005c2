"""How good are predictions at which speed, compared with peers on real streams? make bench-quality.

    python benchmarks/quality.py run
    python benchmarks/quality.py run --streams tweets stops --only Vowpal --again --rounds 2
    python benchmarks/quality.py run --streams options
    python benchmarks/quality.py run --streams rare
    python benchmarks/quality.py run --streams large
    python benchmarks/quality.py list
    python benchmarks/quality.py page

run: every learner on every stream that the file of results lacks, one process after another; it can be interrupted at
any time and continues where it was. Peers are looked for in the environment `quality` in the folder $PEERS_ENVS (or
--peer-environments), then in this one, and left out if they are not installed:
`pip install vowpalwabbit river lightgbm scikit-learn`. Then it generates the pages.
list: lists the streams and how long each took.
page: generates the tables of docs/quality.md and its picture from the file of results.
Exits with 1 if a learner failed.

options: what each default is worth on each stream, one changed at a time, and other shapes of models; airlines only in
their first 400,000. Their AUC and log loss are medians of three seeds.

rare: streams of random numbers, of which few are positive, ten each; figures are their medians.

large: a large graph whose weights step more or less often than its rows.

How learners learn and are timed is in harness/learners.py; the streams are those of streams.py. Airlines, three million
samples, are run if they are named: --streams "airlines: defaults".
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from harness import charts
from harness.charts import Panel, Point, Series
from harness.figures import number, table
from harness.learners import MARKS, RARE_IDS, SHAPES
from harness.pages import about, between
from harness.processes import BENCHMARKS
from harness.runner import Contestant, Figure, Part, Suite, python
from streams import CATEGORICAL, NUMERIC, STREAMS

FILE = BENCHMARKS / "results" / "quality.json"
SCRIPT = "harness/learners.py"
LISTS = ("words", "genres")
ONE_PASS = 900.0  # seconds that a learner may take, with all that is not timed
LIMITS = {"airlines": 3600.0}
FIGURES: dict[str, Figure] = {
    **{"samples/s": ("samples_per_s",), "samples": ("samples",), "CPU s": ("spent_s",)},
    **{"AUC": ("auc",), "log loss": ("log_loss",)},
    **{"AUC later": ("auc_later",), "log loss later": ("log_loss_later",)},
    **{f"AUC at {mark}": ("auc_at", str(mark)) for mark in MARKS},
    **{f"log loss at {mark}": ("log_loss_at", str(mark)) for mark in MARKS},
}
OF_OPTIONS: dict[str, Figure] = {"AUC": ("auc",), "log loss": ("log_loss",)}
OF_RARE: dict[str, Figure] = OF_OPTIONS | {"of mean": ("of_mean",), "calibration": ("calibration",)}

PANELS = {  # streams that all learners learn, with the question
    "flights": "15 minutes late?",
    "ratings": "a movie rated 4 or 5?",
    "stops": "for traffic?",
    "tweets": "from an Android phone?",
}
NAMES = {  # of streams, with the share of positive labels
    "flights": ("flights", "24%"),
    "ratings": ("ratings (MovieLens 100K)", "55%"),
    "movies": ("movies (MovieLens latest small)", "52%"),
    "strikes": ("bird strikes", "10%"),
    "stops": ("police stops", "50%"),
    "pets": ("pet licences", "33%"),
    "tweets": ("tweets, by their words", "22%"),
    "airlines": ("airlines", "20%"),
    "impressions": ("ad impressions", "0.5%"),
}

ONE_LAYER, NO_GRAPH, LIGHTGBM = "one layer of 64", "without a graph", "LightGBM, trained anew"
VW_LINEAR, VW_PAIRS = "Vowpal Wabbit, linear", "Vowpal Wabbit, all pairs"
RIVER_SGD, RIVER_ADAGRAD = "River, SGD", "River, AdaGrad"
KERAS = {8: 1e-3, 64: 3e-3, 1024: 1e-2}  # learning rate by size of a batch
MICRO = (1, 2, 4, 8, 16, 64, None)
AT_DEFAULTS, PLAIN = "the defaults", "numbers without a transform"
CHANGES = {  # of the defaults, as arguments of `Model`
    "steps of 64 samples instead of 8": "micro_batch_size=64",
    "steps of 1,024": "micro_batch_size=None",
    "gradients of rows averaged over a step instead of summed; steps of 8": 'reduction="mean"',
    "the same, steps of 64": 'reduction="mean", micro_batch_size=64',
    "the same, steps of 1,024": 'reduction="mean", micro_batch_size=None',
    PLAIN: "",  # an option of its own
    "weights with `Adam(1e-3)` and its momentum": "dense_optimizer=Adam(1e-3)",
    "weights with `Adagrad(0.05)`": "dense_optimizer=Adagrad(0.05)",
    "rows with `Adagrad(0.05, initial_accumulator=0.1)`": "embedding_optimizer=Adagrad(0.05, initial_accumulator=0.1)",
    **{
        f"rows with a rate of {rate} instead of 0.2": (
            f"embedding_optimizer=Adagrad({rate}, initial_accumulator=0.01, decay=0.9995)"
        )
        for rate in ("0.1", "0.3")
    },
    "rows with `RowWiseAdagrad`": "embedding_optimizer=RowWiseAdagrad(0.2, initial_accumulator=0.01, decay=0.9995)",
    "rows with `FTRL(0.3)`": "embedding_optimizer=FTRL(0.3)",
    "rows with `Adam(0.003)`": "embedding_optimizer=Adam(0.003)",
}
LARGE_SHAPE = "two layers of 256 and 128"
OF_LARGE = {  # steps of rows and of weights, as arguments of `Model`
    "8 and 8": "dense_accumulation_steps=1",
    "**8 and 32**": "",
    "64 and 64": "micro_batch_size=64",
}
DECAYS = ("1", "0.9995", "0.998", "0.99")  # and that of the defaults, 0.999
SIZES = (1, 2, 4, 16, 32)  # of micro-batches, beside those of CHANGES and the defaults
WITH_SIGNAL = tuple(name for name in STREAMS if name != "impressions")
SEEDS, FIRST = 3, 400_000  # of parts that show options; samples of airlines there
RARE, RARE_SEEDS = (100, 600, 5_000), 10
BEFORE = (8, 64, 1024)
DEFAULT = 8


def micro(size: int | None) -> str:
    """The name of ours with micro-batches of a size."""
    return f"micro-batches of {size}" if size else "no micro-batches"


def as_it_was(batch: int) -> str:
    """The name of ours at its defaults before there were micro-batches."""
    return f"as it was, batches of {batch:,}"


def keras(batch: int) -> str:
    """The name of plain Keras."""
    return f"Keras, batches of {batch:,}"


def learners(stream: str, environments: Path | None, seconds: float) -> list[Contestant]:
    """All that learn a stream of the picture."""
    of = Makers(stream, environments, seconds)
    made = [of.ours(micro(size), "--micro-batch", size or 0) for size in MICRO]
    made += [of.ours(as_it_was(size), "--as-it-was", "--batch", size) for size in BEFORE]
    made.append(of.peer(VW_LINEAR, "vowpalwabbit", "vw"))
    made.append(of.peer(VW_PAIRS, "vowpalwabbit", "vw", "--pairs"))
    made.append(of.peer(RIVER_SGD, "river", "river", "--optimizer", "sgd"))
    made.append(of.peer(RIVER_ADAGRAD, "river", "river", "--optimizer", "adagrad"))
    for batch, rate in KERAS.items():
        command = python(SCRIPT, "keras", *of.fields, "--batch", batch, "--rate", rate)
        made.append(Contestant(keras(batch), command, FIGURES, of.timeout))
    return made


def at_defaults(stream: str, environments: Path | None) -> list[Contestant]:
    """Those that are compared with ours at the defaults, on whole streams."""
    of = Makers(stream, environments, LIMITS.get(stream, ONE_PASS))
    return [
        of.ours(ONE_LAYER),
        of.ours(NO_GRAPH, "--shape", NO_GRAPH),
        of.peer(VW_LINEAR, "vowpalwabbit", "vw"),
        of.peer(VW_PAIRS, "vowpalwabbit", "vw", "--pairs"),
        of.peer(LIGHTGBM, "lightgbm", "lightgbm"),
    ]


class Makers:
    """Makes the contestants of a stream.

    Args:
        stream: its name.
        environments: folder of the peers' environments.
        seconds: of CPU, after which a learner is stopped.
    """

    def __init__(self, stream: str, environments: Path | None, seconds: float) -> None:
        self.fields = [*fields_of(stream), "--seconds", seconds]
        self.timeout = LIMITS.get(stream, ONE_PASS)
        self._environments = environments

    def ours(self, name: str, *options: object) -> Contestant:
        """A model of streamtrain."""
        return Contestant(name, python(SCRIPT, "streamtrain", *self.fields, *options), FIGURES, self.timeout)

    def peer(self, name: str, module: str, *options: object) -> Contestant:
        """A learner of a module that may not be installed."""
        program = program_of(module, self._environments)
        command = (program or "", *python(SCRIPT, *options, *self.fields)[1:])
        return Contestant(name, command, FIGURES, self.timeout, "" if program else f"{module}: not installed")


def fields_of(stream: str) -> list[Any]:
    """The arguments that name the fields of a stream."""
    fields: list[Any] = ["--stream", "{input}", "--categorical", *CATEGORICAL[stream]]
    return [*fields, "--lists", *(name for name in LISTS if name in CATEGORICAL[stream]), "--numeric", *NUMERIC[stream]]


def of_comparison(stream: str) -> str:
    """The name of the part that compares the defaults on a stream."""
    return f"{stream}: defaults"


def of_options(stream: str) -> str:
    """The name of the part that shows options on a stream."""
    return f"{stream}: options"


def with_decay(decay: str) -> str:
    """The name of the defaults with another decay."""
    return f"decay {decay}"


def options_of(stream: str) -> list[Contestant]:
    """The defaults, with one thing changed at a time, and other shapes of models."""

    def ours(name: str, *words: object) -> Contestant:
        command = python(SCRIPT, "streamtrain", *fields_of(stream), "--seconds", ONE_PASS, "--seeds", SEEDS, *words)
        return Contestant(name, command, OF_OPTIONS, 2 * SEEDS * ONE_PASS)

    made = [ours(AT_DEFAULTS)]
    for name, code in CHANGES.items():
        if name != PLAIN:
            made.append(ours(name, "--replace", code))
        elif NUMERIC[stream]:
            made.append(ours(name, "--plain-numbers"))
    for decay in DECAYS:
        rows = f"Adagrad(0.2, initial_accumulator=0.01, decay={decay})"
        made.append(ours(with_decay(decay), "--replace", f"embedding_optimizer={rows}"))
    made += [ours(micro(size), "--replace", f"micro_batch_size={size}") for size in SIZES]
    return made + [ours(shape, "--shape", shape) for shape in [*SHAPES][1:]]


def of_large(stream: str) -> str:
    """The name of the part that compares steps of a large graph on a stream."""
    return f"{stream}: large graph"


def large(stream: str) -> list[Contestant]:
    """A large graph in steps of different sizes."""
    words = ["--seconds", 2 * ONE_PASS, "--shape", LARGE_SHAPE]
    return [
        Contestant(
            name,
            python(SCRIPT, "streamtrain", *fields_of(stream), *words, "--replace", code),
            OF_OPTIONS,
            2 * ONE_PASS,
        )
        for name, code in OF_LARGE.items()
    ]


def of_rare(every: int, says: str) -> str:
    """The name of the part of a stream of rare labels."""
    return f"rare 1:{every}, {says}"


def rare(every: int, says: str, environments: Path | None) -> list[Contestant]:
    """Those that learn rare labels."""
    fields = ["--stream", f"rare:{every}:{says}", "--categorical", *RARE_IDS, "--seeds", RARE_SEEDS]
    fields += ["--seconds", ONE_PASS]
    ours = python(SCRIPT, "streamtrain", *fields, "--shape", NO_GRAPH)
    program = program_of("vowpalwabbit", environments)
    vw = (program or "", *python(SCRIPT, "vw", *fields)[1:])
    absent = "" if program else "vowpalwabbit: not installed"
    return [
        Contestant(AT_DEFAULTS, ours, OF_RARE, RARE_SEEDS * ONE_PASS),
        Contestant(VW_LINEAR, vw, OF_RARE, RARE_SEEDS * ONE_PASS, absent),
    ]


def program_of(module: str, environments: Path | None) -> str | None:
    """The Python that has a module; None if none has it."""
    own = [environments / "quality" / "bin" / "python"] if environments else []
    for program in [*map(str, own), sys.executable]:
        try:
            found = subprocess.run([program, "-c", f"import {module}"], stderr=subprocess.DEVNULL, check=False)
        except OSError:
            continue
        if not found.returncode:
            return program
    return None


@contextmanager
def written(stream: str, samples: int | None) -> Iterator[str]:
    """The path of a temporary file with a stream as JSON lines."""
    with tempfile.NamedTemporaryFile("w", prefix="streamtrain-bench-", suffix=".jsonl") as file:
        for sample in islice(STREAMS[stream](), samples):
            file.write(json.dumps(sample, separators=(",", ":"), ensure_ascii=False) + "\n")
        file.flush()
        yield file.name


def groups(args: argparse.Namespace) -> dict[str, list[Part]]:
    """Parts for each stream: the defaults beside peers; quality by speed; options."""
    if args.samples and args.out == FILE:
        raise SystemExit("--samples needs --out: the default file of results has whole streams")
    environments = args.peer_environments and args.peer_environments.absolute()
    return {
        "defaults": [
            Part(
                of_comparison(name),
                f"defaults on {name}",
                at_defaults(name, environments),
                input=partial(written, name, args.samples),
            )
            for name in STREAMS
        ],
        "speed": [
            Part(name, name, learners(name, environments, args.seconds), input=partial(written, name, args.samples))
            for name in PANELS
        ],
        "rare": [
            Part(of_rare(every, says), f"rare labels, 1 in {every:,}, {says}", rare(every, says, environments))
            for says in ("something", "nothing")
            for every in RARE
        ],
        "large": [
            Part(of_large(name), f"a large graph on {name}", large(name), input=partial(written, name, args.samples))
            for name in WITH_SIGNAL
            if name != "airlines"
        ],
        "options": [
            Part(of_options(name), f"options on {name}", options_of(name), input=partial(written, name, most))
            for name in WITH_SIGNAL
            for most in [args.samples or (FIRST if name == "airlines" else None)]
        ],
    }


# The documentation.

Medians = Mapping[str, Mapping[str, float]]  # figures by learner


def of_defaults(found: Mapping[str, Any]) -> str:
    """The table of the defaults and Vowpal Wabbit, on whole streams; the best AUC is bold."""
    return compared(
        found, {VW_LINEAR: "VW, linear", VW_PAIRS: "VW, all pairs", ONE_LAYER: ONE_LAYER, NO_GRAPH: NO_GRAPH}
    )


def of_later(found: Mapping[str, Any]) -> str:
    """The same with LightGBM, after the first twentieth of the streams."""
    return compared(found, {VW_PAIRS: "VW, all pairs", LIGHTGBM: LIGHTGBM, NO_GRAPH: NO_GRAPH}, " later")


def compared(found: Mapping[str, Any], names: Mapping[str, str], at: str = "") -> str:
    """A table of some learners by stream."""
    rows = []
    for stream, (name, positive) in NAMES.items():
        medians: Medians = found["medians"].get(of_comparison(stream), {})
        found_of = [medians.get(one, {}) for one in names]
        known = [one[f"AUC{at}"] for one in found_of if f"AUC{at}" in one]
        if not known:
            continue
        texts = [quality(one, at) for one in found_of]
        cells = [f"**{t}**" if one.get(f"AUC{at}") == max(known) else t for t, one in zip(texts, found_of, strict=True)]
        count = next(one["samples"] for one in found_of if one)
        rows.append((name, f"{count:,.0f}, {positive}", *cells))
    return table(("stream", "samples, positive", *names.values()), rows)


def quality(figures: Mapping[str, float], at: str = "") -> str:
    """AUC / log loss of the whole stream or its beginning; empty if the learner did not get there."""
    if f"AUC{at}" not in figures:
        return ""
    auc, loss = figures[f"AUC{at}"], figures[f"log loss{at}"]
    return f"{auc:.4f}".removeprefix("0") + " / " + f"{loss:.3f}".removeprefix("0")


def rate(value: float) -> str:
    """Samples/s in thousands."""
    return f"{value / 1000:.2g}k" if value < 99_500 else f"{value / 1000:,.0f}k"


def of_changes(found: Mapping[str, Any]) -> str:
    """The table of what the defaults lose if one of them is changed: means over the streams with a signal."""
    rows = []
    for name in CHANGES:
        of_streams = pairs(found, name)
        if not of_streams:
            continue
        auc = {stream: now["AUC"] - then["AUC"] for stream, (then, now) in of_streams.items()}
        loss = [now["log loss"] / then["log loss"] - 1 for then, now in of_streams.values()]
        # Where a change does not apply, nothing changes.
        count = sum(1 for stream in WITH_SIGNAL if found["medians"].get(of_options(stream)))
        most = sorted(auc, key=lambda stream: -abs(auc[stream]))[:2]
        effects = ", ".join(f"{stream} {signed(auc[stream])}" for stream in most)
        rows.append((name, signed(sum(auc.values()) / count), minus(f"{sum(loss) / count:+.1%}"), effects))
    return table(("change", "AUC", "log loss", "largest effects on AUC"), rows)


def pairs(found: Mapping[str, Any], name: str) -> dict[str, tuple[Mapping[str, float], Mapping[str, float]]]:
    """By stream the figures of the defaults and of a change."""
    parts = {stream: found["medians"].get(of_options(stream), {}) for stream in WITH_SIGNAL}
    return {
        stream: (medians[AT_DEFAULTS], medians[name])
        for stream, medians in parts.items()
        if name in medians and AT_DEFAULTS in medians
    }


def signed(value: float) -> str:
    """A difference of AUC."""
    return minus(f"{value:+.4f}".replace("0.", "."))


def minus(text: str) -> str:
    """A number with the typographic sign."""
    return text.replace("-", "\N{MINUS SIGN}")


def by_stream(
    found: Mapping[str, Any], head: str, names: Mapping[str, str], part: Callable[[str], str] = of_options
) -> str:
    """A table of AUC by stream; `names` are contestants by their text in the first column."""
    parts = {one: found["medians"].get(part(one), {}) for one in WITH_SIGNAL}
    streams = [stream for stream, medians in parts.items() if medians]
    rows = []
    for text, name in names.items():
        cells = [f"{parts[one][name]['AUC']:.4f}".removeprefix("0") if name in parts[one] else "" for one in streams]
        if any(cells):
            rows.append((text, *cells))
    return table((head, *streams), rows)


def of_sizes(found: Mapping[str, Any]) -> str:
    """The table of sizes of micro-batches."""
    names = {str(size): micro(size) for size in SIZES}
    names |= {"64": "steps of 64 samples instead of 8", "1,024": "steps of 1,024", f"**{DEFAULT}**": AT_DEFAULTS}
    ordered = sorted(names, key=lambda text: int(text.strip("*").replace(",", "")))
    return by_stream(found, "micro-batches of", {text: names[text] for text in ordered})


def of_decays(found: Mapping[str, Any]) -> str:
    """The table of decays."""
    names = {decay: with_decay(decay) for decay in DECAYS} | {"**0.999**": AT_DEFAULTS}
    ordered = sorted(names, key=lambda text: -float(text.strip("*")))
    return by_stream(found, "`decay`", {text: names[text] for text in ordered})


def of_shapes(found: Mapping[str, Any]) -> str:
    """The table of shapes of models."""
    return by_stream(found, "shape", {"one layer of 64": AT_DEFAULTS} | {shape: shape for shape in [*SHAPES][1:]})


def of_steps(found: Mapping[str, Any]) -> str:
    """The table of a large graph."""
    names = {name: name for name in OF_LARGE}
    return by_stream(found, "samples of a step of rows and of weights", names, of_large)


def of_rare_labels(found: Mapping[str, Any]) -> str:
    """The table of rare labels: AUC, log loss as a multiple of the label's mean's, and calibration."""
    rows = []
    for says in ("something", "nothing"):
        for every in RARE:
            medians: Medians = found["medians"].get(of_rare(every, says), {})
            if not medians:
                continue
            cells = []
            for name in (AT_DEFAULTS, VW_LINEAR):
                one = medians.get(name)
                shown = one and f"{one['AUC']:.3f}, {one['of mean']:.4f}, {one['calibration']:.2f}"
                cells.append(shown.removeprefix("0") if shown else "")
            rows.append((f"1 : {every:,}", f"say {says}", *cells))
    return table(("positive", "features", "Model(schema)", "VW, linear"), rows)


def learners_of(found: Mapping[str, Any]) -> list[str]:
    """Those that have learned a stream of the picture, ours first."""
    order = [
        *map(micro, MICRO),
        *map(as_it_was, BEFORE),
        *(VW_LINEAR, VW_PAIRS, RIVER_SGD, RIVER_ADAGRAD),
        *map(keras, KERAS),
    ]
    return [name for name in order if any(name in found["medians"].get(stream, {}) for stream in PANELS)]


def of_frontier(found: Mapping[str, Any]) -> str:
    """The tables of all learners on the streams of the picture."""
    streams = [one for one in PANELS if found["medians"].get(one)]
    rows = []
    for name in learners_of(found):
        cells = []
        for stream in streams:
            figures = found["medians"][stream].get(name)
            text = quality(figures) or f"stopped after {figures['samples']:,.0f}" if figures else ""
            cells.append(f"{text}; {rate(figures['samples/s'])}" if figures else "")
        rows.append((f"**{name}**" if name == micro(DEFAULT) else name, *cells))
    made = [table(("learner", *streams), rows)]
    for stream in streams:
        made += of_beginning(stream, found["medians"][stream], learners_of(found))
    return "\n\n".join([*made, left_out(found, streams)]).strip()


def of_beginning(stream: str, medians: Medians, learners: Sequence[str]) -> list[str]:
    """If a learner was stopped, the table of all of them on what it has learned."""
    stopped = [one for one in medians.values() if "AUC" not in one]
    if not stopped:
        return []
    marks = [int(name.removeprefix("AUC at ")) for name in stopped[0] if name.startswith("AUC at ")]
    both = [mark for mark in marks if all(f"AUC at {mark}" in one for one in stopped)]
    if not both:
        return []
    at = f" at {max(both)}"
    rows = [(name, quality(medians[name], at)) for name in learners if name in medians]
    return [f"The first {max(both):,} {stream}, as some learners were stopped:", table(("learner", stream), rows)]


def left_out(found: Mapping[str, Any], streams: Sequence[str]) -> str:
    """What was left out, and what failed."""
    lines = []
    for stream in streams:
        part = found["parts"][stream]
        lines += [f"* {stream}: {who} was left out: {why}" for who, why in part["absent"].items()]
        lines += [f"* {stream}: {who} failed: {' '.join(why.split())[:200]}" for who, why in part["failed"].items()]
    return "\n".join(lines)


def compiling(found: Mapping[str, Any]) -> str:
    """How long a pass at the defaults takes, and how much of it is compiling."""
    made = []
    for stream in PANELS:
        figures = found["medians"].get(stream, {}).get(micro(DEFAULT))
        if figures:
            learning = figures["samples"] / figures["samples/s"]
            compiled = max(figures["CPU s"] - learning, 0.0)
            made.append(f"{stream} {number(figures['CPU s'])}, {number(compiled)}")
    return f"CPU seconds of a pass at the defaults, and how many of them were spent compiling: {'; '.join(made)}."


def disturbed(found: Mapping[str, Any]) -> str:
    """The share of the machine that other processes used."""
    parts = {stream: found["parts"][stream].get("others", []) for stream in PANELS if stream in found["parts"]}
    made = [f"{stream} {statistics.median(shares):.0%}" for stream, shares in parts.items() if shares]
    return f"Share of the machine used by other processes, which slows learners down: {', '.join(made)}."


def series(medians: Medians, figure: str) -> list[Series]:
    """The series of a panel."""

    def points(names: Mapping[str, str]) -> list[Point]:
        there = {name: medians[name] for name in names if name in medians and figure in medians[name]}
        return [Point(names[name], one["samples/s"], one[figure]) for name, one in there.items()]

    made = [
        Series("streamtrain", "ours", points({micro(size): str(size or "none") for size in MICRO}), bold=str(DEFAULT)),
        Series("as it was", "before", points({as_it_was(batch): f"{batch:,}" for batch in BEFORE})),
        Series("Keras", "keras", points({keras(batch): f"{batch:,}" for batch in KERAS})),
        Series("", "vw", points({VW_LINEAR: "VW linear", VW_PAIRS: "VW pairs"}), line=False),
        Series("", "river", points({RIVER_SGD: "River SGD", RIVER_ADAGRAD: "River AdaGrad"}), line=False),
    ]
    return [one for one in made if one.points]


def picture(found: Mapping[str, Any]) -> str:
    """The picture."""
    columns = []
    for stream, question in PANELS.items():
        medians = found["medians"].get(stream)
        if medians:
            title = f"{stream}: {question}"
            columns.append(
                (
                    Panel(title, "AUC", series(medians, "AUC"), reach=0.1),
                    Panel(title, "log loss", series(medians, "log loss"), reach=0.14, less=True),
                )
            )
    return charts.frontier(columns)


def documents(found: Mapping[str, Any], docs: Path) -> dict[str, str]:
    """The generated files of the documentation, by name."""
    text = between((docs / "quality.md").read_text(), "defaults", of_defaults(found))
    text = between(text, "later", of_later(found))
    shown = "![AUC and log loss by samples per second, for each stream](quality.svg)"
    whole = [about(found), shown, of_frontier(found), disturbed(found), compiling(found)]
    text = between(text, "frontier", "\n\n".join(whole))
    tables = {"changes": of_changes, "sizes": of_sizes, "decays": of_decays, "shapes": of_shapes, "large": of_steps}
    for name, made in (tables | {"rare": of_rare_labels}).items():
        text = between(text, name, made(found))
    return {"quality.md": text, "quality.svg": picture(found)}


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `run`."""
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--samples", type=int, help="only the first ones of each stream; needs --out")
    parser.add_argument("--seconds", type=float, default=65.0, help="CPU seconds after which a learner is stopped")


SUITE = Suite(
    about=__doc__ or "",
    file=FILE,
    groups=groups,
    default=[*(of_comparison(name) for name in STREAMS if name != "airlines"), "speed"],
    names="streams",
    documents=documents,
    options=options,
)

if __name__ == "__main__":
    SUITE.main()
