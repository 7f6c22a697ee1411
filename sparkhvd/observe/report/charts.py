"""Draw charts as SVG in the colours of the page's style: `--c0`, `--c1`, ..."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

NUM_COLOURS = 8
_WIDTH, _HEIGHT = 440, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 34
_HALF_LETTER = 3.3
# Ratio of the largest to the smallest value above which an axis is logarithmic.
_LOGARITHMIC = 100.0
# Lines with more points than this have no markers, because markers would cover the line.
_MOST_MARKERS = 60


@dataclass(frozen=True)
class Series:
    """Line of a chart through the points (xs[i], ys[i]), with a gap at each non-finite value."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def format_number(value: float, digits: int = 4) -> str:
    """Format a number with about `digits` digits: "12,345", "0.1234", "1.2e-05", "nan"."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def format_seconds(value: float) -> str:
    """Format a duration: "250 us", "12 ms", "3.42 s", "2 min 5 s", "3 h 10 min"."""
    if not math.isfinite(value):
        return "not known"
    if value < 1:
        return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value * 1e3:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"
    )


def is_logarithmic(values: Iterable[float]) -> bool:
    """Whether the finite values are positive and span more than two orders of magnitude."""
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) / min(known) > _LOGARITHMIC


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Choose about `count` round numbers from `low` to `high`."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _frame(label: str, axis: str, content: str) -> str:
    """Build the SVG of a chart, with `label` for screen readers."""
    bottom = f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(axis)}</text>'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{content}{bottom}</svg>'


def _horizontal(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="axis" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def _below(x: float, text: str) -> str:
    x = min(x, _WIDTH - _HALF_LETTER * len(text))  # keep it inside the right edge
    return f'<text class="axis" x="{x:.1f}" y="{_HEIGHT - 19}" text-anchor="middle">{escape(text)}</text>'


def lines(
    label: str, series: Sequence[Series], *, from_zero: bool = False, axis: str = "epoch"
) -> str:
    """Draw lines over epochs or another `axis`, or return "" without a finite value.

    Several lines get a legend. The vertical axis is logarithmic if values are positive and span more than two orders of
    magnitude.

    Args:
        label: describes the chart.
        series: at most 8 lines.
        from_zero: begin the vertical axis at 0.
        axis: what the horizontal axis counts.
    """
    points = [(x, y) for s in series for x, y in zip(s.xs, s.ys, strict=True) if math.isfinite(y)]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    is_log = not from_zero and is_logarithmic([low, high])
    if is_log:
        low, high = math.log10(low), math.log10(high)
    low = min(low, 0.0) if from_zero else low
    if high == low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + width * ((x - left) / (right - left) if right > left else 0.5)

    def down(y: float) -> float:
        place = math.log10(y) if is_log else y
        return _TOP + height * (1 - (place - low) / (high - low))

    ticks = _ticks(low, high)
    if is_log:
        ticks = [10.0**tick for tick in ticks if tick == int(tick)]
    # Enough digits to distinguish two ticks.
    most = max((abs(tick) for tick in ticks), default=0.0)
    step = ticks[1] - ticks[0] if len(ticks) > 1 and not is_log else most
    digits = math.floor(math.log10(most)) - math.floor(math.log10(step)) + 1 if step else 1
    drawn = [_horizontal(down(tick), format_number(tick, max(4, digits))) for tick in ticks]
    epochs = _ticks(left, right, 8) if right > left else [left]
    drawn += [_below(across(tick), format_number(tick)) for tick in epochs if tick == int(tick)]
    has_markers = max(len(s.xs) for s in series) <= _MOST_MARKERS
    for colour, each in enumerate(series):
        pieces: list[list[str]] = [[]]
        for x, y in zip(each.xs, each.ys, strict=True):
            if not math.isfinite(y):
                pieces.append([])
                continue
            pieces[-1].append(f"{across(x):.1f},{down(y):.1f}")
            if has_markers:
                title = f"{each.name}, {axis} {format_number(x)}: {format_number(y)}"
                drawn.append(
                    f'<circle class="f{colour}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.5"><title>{escape(title)}</title></circle>'
                )
        drawn += [
            f'<polyline class="s{colour}" points="{" ".join(piece)}"/>'
            for piece in pieces
            if len(piece) > 1
        ]
    names = [each.name for each in series] if len(series) > 1 else []
    return legend(names) + _frame(
        label, f"{axis}; vertical axis logarithmic" if is_log else axis, "".join(drawn)
    )


def legend(names: Sequence[str]) -> str:
    """Build the legend: the names with their colours."""
    keys = (f'<span><i class="b{i}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{"".join(keys)}</div>' if names else ""


def histogram(label: str, counts: Sequence[float], edges: Sequence[float]) -> str:
    """Draw a histogram of seconds on a logarithmic axis, or return "" if all counts are 0.

    Args:
        label: describes the chart.
        counts: counts of the bins.
        edges: edges of the bins; one more than `counts`.
    """
    used = [i for i, count in enumerate(counts) if count]
    if not used:
        return ""
    first, last = used[0], used[-1] + 1
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    each, most = width / (last - first), max(counts)
    drawn = [
        _horizontal(_TOP + height * (1 - tick / most), format_number(tick))
        for tick in _ticks(0, most, 4)
    ]
    for i in range(first, last):
        tall = height * counts[i] / most
        title = f"{format_seconds(edges[i])} to {format_seconds(edges[i + 1])}: {format_number(counts[i])} steps"
        drawn.append(
            f'<rect class="f0" x="{_LEFT + each * (i - first) + 0.5:.1f}" y="{_TOP + height - tall:.1f}" '
            f'width="{max(1.0, each - 1):.1f}" height="{tall:.1f}"><title>{escape(title)}</title></rect>'
        )
    every = max(1, math.ceil((last - first) / 5))
    drawn += [
        _below(_LEFT + each * (i - first), format_seconds(edges[i]))
        for i in range(first, last + 1, every)
    ]
    return _frame(label, "duration of a step", "".join(drawn))


def bars(names: Sequence[str], parts: Sequence[str], rows: Sequence[Sequence[float]]) -> str:
    """Draw a bar per row with a legend of its parts in seconds, or return "" if all parts are 0.

    Args:
        names: names of the rows.
        parts: names of the parts.
        rows: (rows, parts) seconds.
    """
    longest = max((sum(row) for row in rows), default=0.0)
    if longest <= 0:
        return ""
    drawn = []
    for name, row in zip(names, rows, strict=True):
        cells = "".join(
            f'<i class="b{i % NUM_COLOURS}" style="width:{100 * value / longest:.2f}%" '
            f'title="{escape(f"{part}: {format_seconds(value)}, {value / max(sum(row), 1e-12):.0%}")}"></i>'
            for i, (part, value) in enumerate(zip(parts, row, strict=True))
            if value > 0
        )
        drawn.append(_row(name, cells, format_seconds(sum(row))))
    return legend(parts) + "".join(drawn)


def _row(name: str, cells: str, text: str) -> str:
    return f'<div class="row"><b>{escape(name)}</b><div class="bar">{cells}</div><span>{text}</span></div>'


def waterfall(parts: Sequence[tuple[str, float]]) -> str:
    """Draw consecutive parts in seconds, one row per part, or return "" if all parts are 0."""
    whole = sum(seconds for _, seconds in parts)
    if not whole > 0:
        return ""
    drawn, before = [], 0.0
    for name, seconds in parts:
        left, width = 100 * before / whole, 100 * seconds / whole
        cell = f'<i class="b0" style="margin-left:{left:.2f}%;width:{width:.2f}%"></i>'
        drawn.append(_row(name, cell, f"{format_seconds(seconds)}, {seconds / whole:.0%}"))
        before += seconds
    return "".join(drawn)
