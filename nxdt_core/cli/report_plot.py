"""Elements of the page of ``nxdt report``: escaped HTML with its style and policy, and plots as SVG."""

from __future__ import annotations

import hashlib
import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias, final

from nxdt_core.run.metric_rows import fits_axes
from nxdt_core.system.visible_text import visible

Content: TypeAlias = "Markup | str | int | Iterable[Content] | None"
"""Text is escaped, markup stays, None is nothing."""
COLOURS = 6
"""Number of line classes ``s0``, ``s1``, …; further lines repeat them."""
_WIDTH, _HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 24, 10, 26
_MOST_POINTS = 500
_MOST_DECADES = 12
"""Labels of a logarithmic axis."""
_Point = tuple[int, float]
_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#5c6670;--line:#dfe3e8;--card:#f6f8fa;--mark:#fff3c4;
--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#6e5d00}
@media (prefers-color-scheme:dark){:root{--bg:#0f1419;--fg:#e6e9ec;--dim:#9aa5b1;--line:#2d343c;--card:#171d24;
--mark:#3d3413;--c0:#58a6ff;--c1:#f0883e;--c2:#3fb950;--c3:#bc8cff;--c4:#f778ba;--c5:#d2b53a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1200px;padding:16px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:24px;margin:8px 0}h2{font-size:19px;margin:32px 0 8px}h3{font-size:15px;margin:0 0 4px}
.dim{color:var(--dim)}.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0;padding:0;list-style:none}
.legend span{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.grid-of-plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:12px}
figure{margin:0;padding:10px;background:var(--card);border:1px solid var(--line);border-radius:8px;min-width:0}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:12px}
svg .grid{stroke:var(--line)}svg polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:5px 10px;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;background:var(--card)}td.key{white-space:nowrap}td{overflow-wrap:anywhere;min-width:90px}
tr.differs td{background:var(--mark)}code,pre{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);padding:10px;border-radius:8px;margin:4px 0 12px}
summary{cursor:pointer;padding:6px 0}.warning{color:var(--c1)}.error,.critical{color:var(--c4)}
""" + "".join(
    f"svg .s{n} polyline{{stroke:var(--c{n})}}svg .s{n} circle{{fill:var(--c{n})}}.b{n}{{background:var(--c{n})}}"
    for n in range(COLOURS)
)
_DIGEST = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'"
"""Content-Security-Policy of a page: its own style, no scripts, no requests, no forms."""


@final
@dataclass(frozen=True, slots=True)
class Markup:
    """Finished markup. It is not a ``str``, and only :func:`element` makes it: what is formatted is escaped again."""

    html: str


def element(tag: str, *content: Content, **attributes: object) -> Markup:
    """Return an element, with all text escaped and control characters visible.

    Args:
        tag: name of the element, such as ``table``.
        content: markup, and text that is escaped.
        attributes: by name, with ``_`` for ``-`` and ``class_`` for ``class``; None leaves one out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(visible(str(value)))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{written}>" + ("" if tag == "meta" else f"{_inside(content)}</{tag}>"))


def document(title: str, *content: Content, refresh_s: int | None = None) -> str:
    """Return a whole page, whose policy lets a browser load nothing and run nothing.

    ``title`` is its heading, too. A browser loads it again after ``refresh_s`` seconds; None for never.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        None if refresh_s is None else element("meta", http_equiv="refresh", content=refresh_s),
        element("title", f"{title}: nxdt"),
        element("style", _STYLE),
    )
    body = element("body", element("h1", title), content)
    return f"<!doctype html>\n{element('html', head, body, lang='en').html}\n"


def _inside(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content.html
    if isinstance(content, str | int):
        return escape(visible(str(content)), quote=False)
    return "".join(map(_inside, content))


def _place(value: float, low: float, high: float, start: float, end: float) -> str:
    """Map ``low`` to ``start`` and ``high`` to ``end``."""
    share = (value - low) / (high - low) if high > low else 0.5
    return f"{start + share * (end - start):.1f}"


def plot(lines: Sequence[tuple[int, str, dict[int, float]]], *, label: str, log: bool = False) -> Markup | None:
    """Return an SVG of curves over the steps; None where there is nothing to see.

    Values that no axis can hold, such as infinities, are left out.

    Args:
        lines: class of the colour, name, and value by step of each.
        label: what a screen reader says.
        log: whether the value axis is logarithmic.
    """
    drawn = [(colour, name, points) for colour, name, curve in lines if (points := _scaled(curve, log))]
    steps = [step for _, _, points in drawn for step, _ in points]
    values = [value for _, _, points in drawn for _, value in points]
    if not steps or not any(values if not log else steps):  # a counter that stays at 0 has no picture
        return None
    x_ticks = [tick for tick in _ticks(min(steps), max(steps)) if min(steps) <= tick <= max(steps)]
    low, high = min(values), max(values)
    if log:  # logarithms of 1, 2, 5, 10, … that enclose the values; of many, powers of ten alone
        factors = (1, 2, 5) if high - low < 3 else (1,)
        size = math.ceil((high - low) / _MOST_DECADES) or 1
        decades = range(math.floor(low) - size, math.ceil(high) + size + 1, size)
        candidates = [decade + math.log10(factor) for decade in decades for factor in factors]
        first = max(index for index, tick in enumerate(candidates) if tick <= low)
        last = min(index for index, tick in enumerate(candidates) if tick >= high)
        y_ticks = candidates[first : last + 1]
    else:  # values that differ by less than 1 % show as nearly equal, with short labels
        more = max(0.0, 0.01 * max(abs(low), abs(high)) - (high - low)) / 2
        y_ticks = _ticks(low - more, high + more)
    ends = min(*values, y_ticks[0]), max(*values, y_ticks[-1])

    def x_of(step: float) -> str:
        return _place(step, min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)

    def y_of(value: float) -> str:
        return _place(value, *ends, _HEIGHT - _BOTTOM, _TOP)

    content: list[Markup] = []
    for tick, text in zip(y_ticks, _labels([10**tick if log else tick for tick in y_ticks]), strict=True):
        content.append(element("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y_of(tick), y2=y_of(tick)))
        content.append(element("text", text, x=_LEFT - 6, y=y_of(tick), dy=4, text_anchor="end"))
    for tick, text in zip(x_ticks, _labels(x_ticks), strict=True):
        content.append(element("text", text, x=x_of(tick), y=_HEIGHT - 8, text_anchor="middle"))
    for colour, name, points in drawn:
        places = [(x_of(step), y_of(value)) for step, value in points]
        dots = [element("circle", cx=x, cy=y, r=2.5) for x, y in places] if len(places) <= 30 else None
        line = element("polyline", points=" ".join(map(",".join, places)))
        content.append(element("g", element("title", name), line, dots, class_=f"s{colour % COLOURS}"))
    return element("svg", content, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=label)


def _scaled(points: dict[int, float], log: bool) -> list[_Point]:
    """Points that can be drawn, thinned to the smallest and largest of each stretch of steps."""
    drawn = [(step, value) for step, value in sorted(points.items()) if fits_axes(value) and (value > 0 or not log)]
    scaled = [(step, math.log10(value) if log else value) for step, value in drawn]
    if len(scaled) <= _MOST_POINTS:
        return scaled
    size = math.ceil(2 * len(scaled) / _MOST_POINTS)
    stretches = (scaled[start : start + size] for start in range(0, len(scaled), size))
    ends = ({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])} for part in stretches)
    return [point for pair in ends for point in sorted(pair)]


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that enclose a range."""
    span = high - low or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / 4))
    step = next((size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= 4), size * 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _labels(values: Sequence[float]) -> list[str]:
    """Values as text, with as many digits as tell them apart."""
    labels: list[str] = []
    for digits in range(3, 10):
        labels = [_number(value, digits) for value in values]
        if len(set(labels)) == len(values):
            break
    return labels


def _number(value: float, digits: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+", "e")
