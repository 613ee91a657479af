"""Line plots as SVG, which a page holds inline: colours are those of the page, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

__all__ = ["COLOURS", "plot"]

COLOURS = 6
"""Number of line classes ``s0``, ``s1``, …; further lines repeat them."""

_WIDTH, _HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 24, 10, 26
_MOST_POINTS = 500


def plot(lines: Sequence[tuple[int, str, dict[int, float]]], *, label: str, log: bool = False) -> str:
    """Return an SVG of curves over the steps.

    Args:
        lines: class of the colour, name, and value by step of each.
        label: what a screen reader says.
        log: whether the value axis is logarithmic.
    """
    scaled = [(colour, name, _scaled(points, log)) for colour, name, points in lines]
    drawn = [(colour, name, points) for colour, name, points in scaled if points]
    steps = [step for _, _, points in drawn for step, _ in points]
    values = [value for _, _, points in drawn for _, value in points]
    if not steps or not any(values if not log else steps):  # a counter that stays at 0 has no picture
        return ""
    x_ticks = [each for each in _ticks(min(steps), max(steps), 4) if min(steps) <= each <= max(steps)]
    y_ticks = _decades(min(values), max(values)) if log else _ticks(*_widened(min(values), max(values)), 4)
    x_low, x_high = min(steps), max(steps)
    y_low, y_high = min(*values, y_ticks[0]), max(*values, y_ticks[-1])

    def x(step: float) -> float:
        share = (step - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (value - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">']
    for tick, text in zip(y_ticks, _labels([10**tick if log else tick for tick in y_ticks]), strict=True):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, text in zip(x_ticks, _labels(x_ticks), strict=True):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{text}</text>')
    for colour, name, points in drawn:
        places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<g class="s{colour % COLOURS}"><title>{escape(name)}</title><polyline points="{places}"/>')
        if len(points) <= 30:
            parts += [f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5"/>' for step, value in points]
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def _scaled(points: dict[int, float], log: bool) -> list[tuple[int, float]]:
    """Finite points, thinned to the smallest and largest of each stretch of steps."""
    finite = [
        (step, value) for step, value in sorted(points.items()) if math.isfinite(value) and (value > 0 or not log)
    ]
    found = [(step, math.log10(value) if log else value) for step, value in finite]
    if len(found) <= _MOST_POINTS:
        return found
    size = math.ceil(2 * len(found) / _MOST_POINTS)
    stretches = (found[start : start + size] for start in range(0, len(found), size))
    ends = ({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])} for part in stretches)
    return [point for pair in ends for point in sorted(pair)]


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return a range that shows values which differ by less than 1 % as nearly equal, with short labels."""
    least = 0.01 * max(abs(low), abs(high))
    more = max(0.0, least - (high - low)) / 2
    return low - more, high + more


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers that enclose a range."""
    span = high - low or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / count))
    step = next((size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= count), size * 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Logarithms of 1, 2, 5, 10, … that enclose a range of logarithms; of many, powers of ten alone."""
    factors = (1, 2, 5) if high - low < 3 else (1,)
    found = [
        decade + math.log10(factor) for decade in range(math.floor(low) - 1, math.ceil(high) + 2) for factor in factors
    ]
    first = max(index for index, tick in enumerate(found) if tick <= low)
    last = min(index for index, tick in enumerate(found) if tick >= high)
    return found[first : last + 1]


def _labels(values: Sequence[float]) -> list[str]:
    """Values as text, with as many digits as tell them apart."""
    found: list[str] = []
    for digits in range(3, 10):
        found = [_number(value, digits) for value in values]
        if len(set(found)) == len(values):
            break
    return found


def _number(value: float, digits: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}".replace("e-0", "e-")
