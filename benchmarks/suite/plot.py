"""The picture of who trains how fast: a panel of bars for each workload, as SVG."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from realtime_plot import COLOURS, STYLE

WIDTH, ROW, TOP, BOTTOM = 760, 30, 64, 20
LABEL, LONGEST = 270, 400  # where bars begin, and how long the longest is
OURS, PEER = COLOURS

Panel = tuple[str, Mapping[str, tuple[float, bool]]]  # title; by name samples/s, and whether it is ours


def _panel(title: str, rates: Mapping[str, tuple[float, bool]]) -> list[str]:
    most = max(rate for rate, _ in rates.values())
    made = [f'<text x="24" y="34" class="t">{escape(title)}: samples/s</text>']
    for i, (name, (rate, ours)) in enumerate(rates.items()):
        y, width = TOP + i * ROW, LONGEST * rate / most
        made.append(f'<text x="{LABEL - 10}" y="{y + 14}" class="p" text-anchor="end">{escape(name)}</text>')
        colour = OURS if ours else PEER
        made.append(f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="19" rx="3" fill="{colour}"/>')
        made.append(f'<text x="{LABEL + width + 8:.1f}" y="{y + 14}" class="v">{rate:,.0f}</text>')
    return made


def height(rates: Mapping[str, tuple[float, bool]]) -> int:
    """Of a panel."""
    return TOP + ROW * len(rates) + BOTTOM


def draw(panels: Sequence[Panel]) -> str:
    """An SVG of panels, one below another."""
    whole = sum(height(rates) for _, rates in panels)
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}" role="img" '
        'aria-label="Samples per second of streamtrain and of its peers, by workload.">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{whole}" rx="12" fill="#ffffff"/>',
    ]
    y = 0
    for title, rates in panels:
        made += [f'<g transform="translate(0 {y})">', *_panel(title, rates), "</g>"]
        y += height(rates)
    return "\n".join([*made, "</svg>", ""])
