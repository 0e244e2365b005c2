"""The pictures of the documentation, as SVG: bars, lines, and quality against speed."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

OURS, PEER = "#3b6fc4", "#c4703b"
STYLE = (
    'text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1c2430}'
    ".t{font-size:17px;font-weight:600}.p{font-size:13px;fill:#4a5565}"
    ".v{font-size:12px;font-weight:600;paint-order:stroke;stroke:#ffffff;stroke-width:4px}"
    ".g{stroke:#e3e7ee}.l{fill:none;stroke-width:2.5;stroke-linejoin:round}"
)
MOST_TICKS = 7


def _svg(width: int, height: int, label: str, body: Iterable[str]) -> str:
    """A whole picture; `label` describes it to those who do not see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="12" fill="#ffffff"/>',
            *body,
            *("</svg>", ""),
        ]
    )


def _at(x: float, y: float, body: Iterable[str]) -> list[str]:
    return [f'<g transform="translate({x} {y})">', *body, "</g>"]


def _tick(ticks: Sequence[float], span: float) -> float:
    """The smallest distance of lines that are not too many; else the largest."""
    return next((one for one in ticks if span / one < MOST_TICKS), ticks[-1])


# Bars: who trains how fast, a panel for each workload, one below another.

BAR_WIDTH, BAR_ROW, BAR_TOP, BAR_BOTTOM = 760, 30, 64, 20
BAR_LEFT, LONGEST = 270, 400  # where bars begin, and the length of the longest

Rates = Mapping[str, tuple[float, bool]]  # samples/s by name, and whether they are ours


def bars(panels: Sequence[tuple[str, Rates]]) -> str:
    """Samples per second by title of a panel."""
    made: list[str] = []
    y = 0
    for title, rates in panels:
        made += _at(0, y, _bar_panel(title, rates))
        y += BAR_TOP + BAR_ROW * len(rates) + BAR_BOTTOM
    return _svg(BAR_WIDTH, y, "Samples per second of streamtrain and of its peers, by workload.", made)


def _bar_panel(title: str, rates: Rates) -> list[str]:
    most = max(rate for rate, _ in rates.values())
    made = [f'<text x="24" y="34" class="t">{escape(title)}: samples/s</text>']
    for i, (name, (rate, ours)) in enumerate(rates.items()):
        y, width = BAR_TOP + i * BAR_ROW, LONGEST * rate / most
        made.append(f'<text x="{BAR_LEFT - 10}" y="{y + 14}" class="p" text-anchor="end">{escape(name)}</text>')
        colour = OURS if ours else PEER
        made.append(f'<rect x="{BAR_LEFT}" y="{y}" width="{width:.1f}" height="19" rx="3" fill="{colour}"/>')
        made.append(f'<text x="{BAR_LEFT + width + 8:.1f}" y="{y + 14}" class="v">{rate:,.0f}</text>')
    return made


# Lines: AUC by the interval of publications, a panel for each stream, side by side.

LINE_WIDTH, LINE_HEIGHT = 540, 400  # of a panel
LINE_LEFT, LINE_RIGHT, LINE_TOP, LINE_BOTTOM = 62, 24, 92, 64
LINE_TICKS = (0.02, 0.05)
TITLES = {
    "flights": ("Flights", "will it arrive more than 15 minutes late?"),
    "movielens": ("MovieLens 100K", "will a user rate a movie 4 or 5?"),
}


def lines(results: Sequence[dict[str, Any]]) -> str:
    """Results of realtime.py in their order; those of a stream share a panel."""
    streams = list(dict.fromkeys(one["stream"] for one in results))
    made: list[str] = []
    for i, stream in enumerate(streams):
        made += _at(LINE_WIDTH * i, 0, _line_panel([one for one in results if one["stream"] == stream]))
    width = LINE_WIDTH * len(streams)
    return _svg(width, LINE_HEIGHT, "AUC of predictions, by how often the model is published.", made)


def _line_panel(results: Sequence[dict[str, Any]]) -> list[str]:
    title, question = TITLES[results[0]["stream"]]
    names = [one for one in results[0]["published"] if one != "progressive"]
    drawn: list[list[float]] = [[one["published"][name]["auc"] for name in names] for one in results]
    bottom, top = min(map(min, drawn)), max(map(max, drawn))
    tick = _tick(LINE_TICKS, top - bottom)
    low: float = math.floor(bottom / tick) * tick
    high: float = math.ceil(top / tick + 0.2) * tick

    def x(i: int) -> float:
        return LINE_LEFT + 16 + i * (LINE_WIDTH - LINE_LEFT - LINE_RIGHT - 32) / (len(names) - 1)

    def y(auc: float) -> float:
        return LINE_TOP + (high - auc) / (high - low) * (LINE_HEIGHT - LINE_TOP - LINE_BOTTOM)

    made = [f'<text x="{LINE_LEFT}" y="34" class="t">{title}</text>']
    made.append(f'<text x="{LINE_LEFT}" y="55" class="p">{question}</text>')
    made.append(f'<text x="{LINE_LEFT - 8}" y="{LINE_TOP - 16}" class="p" text-anchor="end">AUC</text>')
    for i in range(round((high - low) / tick) + 1):
        at, value = y(low + i * tick), low + i * tick
        made.append(f'<path d="M{LINE_LEFT} {at:.1f}H{LINE_WIDTH - LINE_RIGHT}" class="g"/>')
        made.append(f'<text x="{LINE_LEFT - 8}" y="{at + 4:.1f}" class="p" text-anchor="end">{value:.2f}</text>')
    for i, name in enumerate(names):
        made.append(f'<text x="{x(i):.1f}" y="{LINE_HEIGHT - 40}" class="p" text-anchor="middle">{escape(name)}</text>')
    middle = (LINE_LEFT + LINE_WIDTH - LINE_RIGHT) / 2
    made.append(f'<text x="{middle}" y="{LINE_HEIGHT - 14}" class="p" text-anchor="middle">published every</text>')
    highest = [max(values) for values in zip(*drawn, strict=True)]
    for values, colour in zip(drawn, (OURS, PEER), strict=False):
        made += _line([(x(i), y(auc)) for i, auc in enumerate(values)], values, colour, highest)
    if len(results) > 1:
        made += _legend(results)
    return made


def _line(points: list[tuple[float, float]], values: list[float], colour: str, highest: list[float]) -> list[str]:
    """Points, joined, with their values: above the highest line, below others."""
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    made = [f'<polyline points="{text}" class="l" stroke="{colour}"/>']
    for (x, y), value, most in zip(points, values, highest, strict=True):
        right, down = (8, -10) if value == most else (0, 20)
        made.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        place = f'x="{x + right:.1f}" y="{y + down:.1f}"'
        made.append(f'<text {place} class="v" style="fill:{colour}" text-anchor="middle">{value:.3f}</text>')
    return made


def _legend(results: Sequence[dict[str, Any]]) -> list[str]:
    made = []
    for i, (one, colour) in enumerate(zip(results, (OURS, PEER), strict=False)):
        hours = one["label_delay_s"] / 3600
        name = f"labels known {hours:g} h later" if hours else "labels known at once"
        made.append(f'<circle cx="{LINE_LEFT + 17 + 170 * i}" cy="73" r="4" fill="{colour}"/>')
        made.append(f'<text x="{LINE_LEFT + 28 + 170 * i}" y="77" class="p">{name}</text>')
    return made


# Quality against speed: for each stream AUC above log loss, two streams side by side. Up and to the right is better in
# both rows: the axis of log loss is inverted. What is far worse than the best is at the lower edge, with its value.

WIDTH, HEIGHT = 400, 330  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 50, 40
HEAD, FOOT = 44, 40  # above two streams, and below all
BESIDE = 2  # streams
NOTES = (
    "samples per second of CPU, one thread; up and to the right is better",
    "numbers: samples per step; none: no micro-batches, steps of 1,024; ↓: below the panel",
)
SIZE = 13  # of a label
LETTER = 0.56  # of its size, about, a letter is wide
TICKS = (0.01, 0.02, 0.05, 0.1)
# Those of Okabe and Ito, a little darker: colours that most kinds of colour blindness tell apart. Shapes differ, too.
COLOURS = {"ours": "#0072b2", "before": "#6b7280", "vw": "#c75000", "river": "#00805e", "keras": "#a8437f"}
SHAPES = {"ours": "circle", "before": "ring", "vw": "diamond", "river": "square", "keras": "triangle"}

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Point:
    """A learner: its label, samples per second of CPU, and the figure of the panel."""

    label: str
    rate: float
    value: float


@dataclass(frozen=True)
class Series:
    """Learners of a kind.

    Attributes:
        name: next to one of its points; empty: the labels of the points are enough.
        kind: a key of COLOURS.
        points: in their order.
        line: whether they are joined.
        bold: the label of the point that stands out.
    """

    name: str
    kind: str
    points: Sequence[Point]
    line: bool = True
    bold: str = ""


@dataclass(frozen=True)
class Panel:
    """One figure on one stream.

    Attributes:
        title: of the column.
        figure: name of the figure.
        series: that are drawn.
        reach: how much worse than the best a value may be to be drawn in its place.
        less: whether less is better.
    """

    title: str
    figure: str
    series: Sequence[Series]
    reach: float
    less: bool = False


class Axes:
    """Maps values to places of a panel.

    Args:
        panel: its values set the scale.
        rates: the least and the most of all panels.
    """

    def __init__(self, panel: Panel, rates: tuple[float, float]) -> None:
        values = [point.value for one in panel.series for point in one.points]
        sign = -1 if panel.less else 1
        best = max(sign * value for value in values)
        worst = max(min(sign * value for value in values), best - panel.reach)
        self.tick = _tick(TICKS, best - worst)
        self._sign = sign
        self.low = math.floor(worst / self.tick - 0.3) * self.tick
        self.high = math.ceil(best / self.tick + 0.15) * self.tick
        self._rates = math.log10(rates[0] / 1.6), math.log10(rates[1] * 3)

    def x(self, rate: float) -> float:
        """Place of a rate."""
        low, high = self._rates
        return LEFT + (math.log10(rate) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Place of a value; the lower edge if it is below that."""
        share = max((self._sign * value - self.low) / (self.high - self.low), 0.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def is_beyond(self, value: float) -> bool:
        """Whether a value is below the lower edge."""
        return self._sign * value < self.low

    def ticks(self) -> list[float]:
        """Values with a grid line."""
        return [self._sign * (self.low + i * self.tick) for i in range(round((self.high - self.low) / self.tick) + 1)]

    def decades(self) -> list[int]:
        """Powers of ten with a grid line."""
        low, high = self._rates
        return list(range(math.ceil(low), math.floor(high) + 1))


class Place(NamedTuple):
    """Of a text: its base line, its anchor, and the end of a line to it if it is away from its point."""

    x: float
    y: float
    anchor: str
    leader: tuple[float, float] | None


class Labels:
    """Places labels where they cover least."""

    def __init__(self) -> None:
        self._taken: list[tuple[Box, float]] = []

    def keep(self, box: Box, weight: float = 1.0) -> None:
        """Marks a box as used."""
        self._taken.append((box, weight))

    def place(self, x: float, y: float, text: str, gap: float = 8.0, width: float = LETTER) -> Place:
        """Place for the text of a point."""
        wide = width * SIZE * len(text)
        found = min(self._places(x, y, wide, gap), key=lambda one: self._cost(one[0]) + one[4])
        self.keep(found[0], 20.0)
        (left, top, right, bottom), at_x, at_y, anchor, _ = found
        nearest = min(max(x, left), right), min(max(y, top), bottom)
        return Place(at_x, at_y, anchor, nearest if math.dist((x, y), nearest) > gap + 4 else None)

    @staticmethod
    def _places(x: float, y: float, wide: float, gap: float) -> Iterator[tuple[Box, float, float, str, float]]:
        """Box, x, y, anchor, and what it costs to be off the first choices."""
        for i, further in enumerate((0.0, 8.0, 16.0, 24.0, 32.0, 44.0, 56.0)):
            off = gap + further
            for dx, dy, anchor in (
                *((0.0, -off, "middle"), (0.0, off + 9, "middle"), (off, 4.0, "start"), (-off, 4.0, "end")),
                *((off, -off / 2, "start"), (-off, -off / 2, "end"), (off, off / 2 + 9, "start")),
                (-off, off / 2 + 9, "end"),
            ):
                left = x + dx - {"middle": wide / 2, "start": 0.0, "end": wide}[anchor]
                box = (left - 1, y + dy - SIZE + 2, left + wide + 1, y + dy + 3)
                yield box, x + dx, y + dy, anchor, 40.0 * i

    def _cost(self, box: Box) -> float:
        left, top, right, bottom = box
        outside = max(LEFT - left, 0) + max(right - WIDTH + 4, 0) + max(TOP - 14 - top, 0)
        outside += max(bottom - HEIGHT + BOTTOM, 0)
        covered = 0.0
        for (a, b, c, d), weight in self._taken:
            covered += weight * max(min(right, c) - max(left, a), 0) * max(min(bottom, d) - max(top, b), 0)
        return covered + 200 * outside


def _marker(kind: str, x: float, y: float, size: float) -> str:
    """A point."""
    colour, shape, around = COLOURS[kind], SHAPES[kind], 'stroke="#ffffff"'
    if shape == "ring":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size - 0.5}" fill="#ffffff" stroke="{colour}" stroke-width="2"/>'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}" {around}/>'
    if shape == "square":
        box = f'x="{x - size + 0.5:.1f}" y="{y - size + 0.5:.1f}" width="{2 * size - 1}" height="{2 * size - 1}"'
        return f'<rect {box} fill="{colour}" {around}/>'
    far = size + 1.5
    path = f"M{x:.1f} {y - far:.1f}l{far} {far}l{-far} {far}l{-far} {-far}z"
    if shape == "triangle":
        path = f"M{x:.1f} {y - far:.1f}l{far} {2 * far - 1.5}h{-2 * far}z"
    return f'<path d="{path}" fill="{colour}" {around}/>'


def _grid(panel: Panel, axes: Axes) -> list[str]:
    made = [f'<text x="{LEFT}" y="26" class="p" style="font-weight:600">{escape(panel.figure)}</text>']
    for value in axes.ticks():
        at = axes.y(value)
        made.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" class="g"/>')
        made.append(f'<text x="{LEFT - 7}" y="{at + 4:.1f}" class="p" text-anchor="end">{value:.2f}</text>')
    for power in axes.decades():
        at = axes.x(10.0**power)
        name = {3: "1k", 4: "10k", 5: "100k", 6: "1M"}.get(power, f"{10**power:,}")
        made.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" class="g"/>')
        made.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 19}" class="p" text-anchor="middle">{name}</text>')
    return made


def _panel(panel: Panel, rates: tuple[float, float]) -> list[str]:
    axes, labels = Axes(panel, rates), Labels()
    made, texts = _grid(panel, axes), []
    placed = [[(axes.x(one.rate), axes.y(one.value)) for one in series.points] for series in panel.series]
    for series, points in zip(panel.series, placed, strict=True):
        for x, y in points:
            labels.keep((x - 6, y - 6, x + 6, y + 6), 8.0)
        if series.line:
            for (a, b), (c, d) in pairwise(points):
                if b == d == HEIGHT - BOTTOM:  # both beyond what is drawn
                    continue
                path = f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}"
                made.append(f'<path d="{path}" class="l" stroke="{COLOURS[series.kind]}" stroke-opacity="0.75"/>')
                for i in range(1, 12):
                    x, y = a + (c - a) * i / 12, b + (d - b) * i / 12
                    labels.keep((x - 3, y - 3, x + 3, y + 3), 1.0)
    for series, points in zip(panel.series, placed, strict=True):
        colour = COLOURS[series.kind]
        for one, (x, y) in zip(series.points, points, strict=True):
            bold = one.label == series.bold
            made.append(_marker(series.kind, x, y, 6.5 if bold else 4.5))
            text = f"{one.label} ↓ {one.value:.2f}" if axes.is_beyond(one.value) else one.label
            place = labels.place(x, y, text, gap=9.0 if bold else 7.0)
            if place.leader:
                path = f"M{x:.1f} {y:.1f}L{place.leader[0]:.1f} {place.leader[1]:.1f}"
                made.append(f'<path d="{path}" stroke="{colour}" stroke-opacity="0.6"/>')
            style = f"fill:{colour};font-size:{SIZE}px" + (";font-weight:700" if bold else ";font-weight:500")
            texts.append(_text(place, style, text))
    for series, points in zip(panel.series, placed, strict=True):
        if series.name:
            middle = points[len(points) // 2]
            place = labels.place(*middle, series.name, gap=14.0, width=0.62)
            style = f"fill:{COLOURS[series.kind]};font-size:{SIZE + 1}px;font-weight:700"
            texts.append(_text(place, style, series.name))
    return [*made, *texts]


def _text(place: Place, style: str, text: str) -> str:
    where = f'x="{place.x:.1f}" y="{place.y:.1f}" text-anchor="{place.anchor}"'
    return f'<text {where} class="v" style="{style}">{escape(text)}</text>'


def frontier(columns: Sequence[tuple[Panel, ...]]) -> str:
    """Columns of panels, two of them side by side."""
    bands = [columns[i : i + BESIDE] for i in range(0, len(columns), BESIDE)]
    band = HEAD + HEIGHT * max(map(len, columns))
    width, height = WIDTH * min(len(columns), BESIDE), band * len(bands) + FOOT
    every = [point.rate for column in columns for panel in column for one in panel.series for point in one.points]
    rates, made = (min(every), max(every)), []
    for b, shown in enumerate(bands):
        for i, column in enumerate(shown):
            made.append(f'<text x="{WIDTH * i + LEFT}" y="{band * b + 40}" class="t">{escape(column[0].title)}</text>')
            for j, panel in enumerate(column):
                made += _at(WIDTH * i, band * b + HEAD + HEIGHT * j, _panel(panel, rates))
    for i, note in enumerate(NOTES):
        y = height - FOOT + 4 + 19 * i
        made.append(f'<text x="{width / 2:g}" y="{y}" class="p" text-anchor="middle">{note}</text>')
    label = "AUC and log loss of learners by the samples that they learn per second of one core."
    return _svg(width, height, label, made)
