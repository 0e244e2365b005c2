"""Plot: lines over time, in panels, as SVG."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

Line = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 900, 260  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 200, 44, 36
_COLOURS = (
    "#3b6fc4",
    "#c4703b",
    "#3f9a5c",
    "#8a55b5",
    "#b5a03b",
    "#c43b6f",
    "#4aa5a5",
    "#6b7280",
    "#a0522d",
    "#111827",
)
_STYLE = (
    'text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-size:12px;fill:#4a5565}'
    ".t{font-size:15px;font-weight:600;fill:#1c2430}.g{stroke:#e3e7ee}.l{fill:none;stroke-width:1.5}"
)


def draw(panels: Mapping[str, Mapping[str, Line]], about: str) -> str:
    """Panels below each other, lines by name, over minutes.

    Args:
        panels: by title, which has the unit; points are (seconds, value).
        about: what is shown, for those who cannot see it.
    """
    height = _HEIGHT * len(panels)
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f"aria-label={quoteattr(about)}>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" rx="12" fill="#ffffff"/>',
    ]
    for i, (title, lines) in enumerate(panels.items()):
        made += [f'<g transform="translate(0 {_HEIGHT * i})">', *_panel(title, lines), "</g>"]
    return "\n".join([*made, "</svg>", ""])


def _panel(title: str, lines: Mapping[str, Line]) -> list[str]:
    points = [point for line in lines.values() for point in line]
    end = max((at for at, _ in points), default=1.0) or 1.0
    most = max((value for _, value in points), default=1.0) or 1.0

    def x(at: float) -> float:
        return _LEFT + at / end * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / most * (_HEIGHT - _TOP - _BOTTOM)

    made = [f'<text x="{_LEFT}" y="26" class="t">{escape(title)}</text>']
    for part in (0, 0.5, 1):
        at = y(part * most)
        made.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" class="g"/>')
        made.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{part * most:,.4g}</text>')
        made.append(
            f'<text x="{x(part * end):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{part * end / 60:.1f} min</text>'
        )
    for i, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        text = " ".join(f"{at},{value}" for at, value in _bends([(f"{x(at):.1f}", f"{y(v):.1f}") for at, v in line]))
        made.append(f'<polyline points="{text}" class="l" stroke="{colour}"/>')
        made.append(
            f'<text x="{_WIDTH - _RIGHT + 12}" y="{_TOP + 14 * i + 6}" style="fill:{colour}">{escape(name)}</text>'
        )
    return made


def _bends(line: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """A line without points between two that are as high."""
    return [
        one for i, one in enumerate(line) if i in (0, len(line) - 1) or not line[i - 1][1] == one[1] == line[i + 1][1]
    ]
