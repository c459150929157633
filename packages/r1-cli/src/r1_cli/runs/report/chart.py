"""A line chart as inline SVG, with extremes and intervals."""

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP = 440, 150, 58, 8  # of the drawing, and the plot's left and upper edge in it
RIGHT, LOWER = WIDTH - 8, HEIGHT - 20
MOST_POINTS = 400  # further ones are averaged: a run of a million steps is a page, too


def draw(
    title: str, points: Sequence[tuple[float, float]], intervals: Sequence[tuple[float, float, float]] = ()
) -> str:
    """Return a figure of (step, value) points and (step, low, high) intervals. Nonfinite values are ignored."""
    known = thin([(x, y) for x, y in points if math.isfinite(y)])
    if not known:
        return ""
    bars = [one for one in intervals if all(map(math.isfinite, one))]
    heights = [y for _, y in known] + [y for _, *ends in bars for y in ends]
    first, last, low, high = known[0][0], known[-1][0], min(heights), max(heights)

    def across(x: float) -> float:
        return LEFT + (RIGHT - LEFT) * ((x - first) / (last - first) if last > first else 0.5)

    def up(y: float) -> float:
        return LOWER - (LOWER - TOP) * ((y / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5)

    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in known)
    marks = "".join(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.5"/>' for x, y in known) if bars else ""
    marks += "".join(
        f'<line class="bar" x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{up(a):.1f}" y2="{up(b):.1f}"/>'
        for x, a, b in bars
    )
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{number(value)}</text>'
        for x, y, anchor, value in (
            (LEFT - 4, TOP + 8, "end", high), (LEFT - 4, LOWER, "end", low),
            (LEFT, HEIGHT - 5, "start", first), (RIGHT, HEIGHT - 5, "end", last),
        )
    )  # fmt: skip
    return (
        f'<figure><figcaption>{escape(title)} <b>{number(known[-1][1])}</b></figcaption><svg viewBox="0 0 {WIDTH} '
        f'{HEIGHT}" role="img" aria-label="{escape(title)}"><path class="axis" d="M{LEFT} {TOP}V{LOWER}H{RIGHT}"/>'
        f'<polyline points="{path}"/>{marks}{labels}</svg></figure>'
    )


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    size = -(-len(points) // most)
    parts = [points[at : at + size] for at in range(0, len(points), max(size, 1))]
    return [(sum(x for x, _ in part) / len(part), sum(y / len(part) for _, y in part)) for part in parts]


def number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"
