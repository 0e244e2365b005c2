"""The picture of the benchmark of real time: AUC by interval, a panel for each stream, as SVG."""

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 540, 400  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 92, 64
TITLES = {
    "flights": ("Flights", "will it arrive more than 15 minutes late?"),
    "movielens": ("MovieLens 100K", "will a user rate a movie 4 or 5?"),
}
COLOURS = ("#3b6fc4", "#c4703b")
STYLE = (
    'text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1c2430}'
    ".t{font-size:17px;font-weight:600}.p{font-size:13px;fill:#4a5565}"
    ".v{font-size:12px;font-weight:600;paint-order:stroke;stroke:#ffffff;stroke-width:4px}"
    ".g{stroke:#e3e7ee}.l{fill:none;stroke-width:2.5;stroke-linejoin:round}"
)
TICKS = (0.02, 0.05)
MOST_TICKS = 7


def _panel(results: Sequence[dict[str, Any]]) -> list[str]:
    """One stream: a line for each of its results."""
    title, question = TITLES[results[0]["stream"]]
    names = [one for one in results[0]["published"] if one != "progressive"]
    lines: list[list[float]] = [[one["published"][name]["auc"] for name in names] for one in results]
    bottom, top = min(map(min, lines)), max(map(max, lines))
    tick = next((one for one in TICKS if (top - bottom) / one < MOST_TICKS), TICKS[-1])
    low: float = math.floor(bottom / tick) * tick
    high: float = math.ceil(top / tick + 0.2) * tick

    def x(i: int) -> float:
        return LEFT + 16 + i * (WIDTH - LEFT - RIGHT - 32) / (len(names) - 1)

    def y(auc: float) -> float:
        return TOP + (high - auc) / (high - low) * (HEIGHT - TOP - BOTTOM)

    made = [f'<text x="{LEFT}" y="34" class="t">{title}</text>']
    made.append(f'<text x="{LEFT}" y="55" class="p">{question}</text>')
    made.append(f'<text x="{LEFT - 8}" y="{TOP - 16}" class="p" text-anchor="end">AUC</text>')
    for i in range(round((high - low) / tick) + 1):
        at = y(low + i * tick)
        made.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" class="g"/>')
        made.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" class="p" text-anchor="end">{low + i * tick:.2f}</text>')
    for i, name in enumerate(names):
        made.append(f'<text x="{x(i):.1f}" y="{HEIGHT - 40}" class="p" text-anchor="middle">{escape(name)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    made.append(f'<text x="{middle}" y="{HEIGHT - 14}" class="p" text-anchor="middle">published every</text>')
    highest = [max(values) for values in zip(*lines, strict=True)]
    for line, colour in zip(lines, COLOURS, strict=False):
        made += _line([(x(i), y(auc)) for i, auc in enumerate(line)], line, colour, highest)
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
    for i, (one, colour) in enumerate(zip(results, COLOURS, strict=False)):
        hours = one["label_delay_s"] / 3600
        name = f"labels known {hours:g} h later" if hours else "labels known at once"
        made.append(f'<circle cx="{LEFT + 17 + 170 * i}" cy="73" r="4" fill="{colour}"/>')
        made.append(f'<text x="{LEFT + 28 + 170 * i}" y="77" class="p">{name}</text>')
    return made


def draw(results: Sequence[dict[str, Any]]) -> str:
    """An SVG of results as `realtime.py` prints them, in their order; those of one stream share a panel."""
    streams = list(dict.fromkeys(one["stream"] for one in results))
    width = WIDTH * len(streams)
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img" '
        'aria-label="AUC of predictions, by how often the model is published.">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{HEIGHT}" rx="12" fill="#ffffff"/>',
    ]
    for i, stream in enumerate(streams):
        made.append(f'<g transform="translate({WIDTH * i} 0)">')
        made += [*_panel([one for one in results if one["stream"] == stream]), "</g>"]
    return "\n".join([*made, "</svg>", ""])
