"""Draw a bar for everything that was measured, case by case, seconds on a logarithmic axis, as plain SVG."""

from __future__ import annotations

import math
from html import escape

from bench.clock import Timing
from bench.report import TITLES, Result, format_seconds, seconds

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 960, 270, 110, 20, 46, 96
INK, PALE, OURS, THEIRS, COPY = "#1f2328", "#d0d7de", "#c2410c", "#8c959f", "#0969da"
DRAWN = ("nothing", "docker", "sif", "middle", "scratch")
LEAST, MOST = 0.05, 1000.0  # seconds at the ends of the axis


def draw(result: Result) -> str:
    parts, at = list[str](), TOP
    for case in DRAWN:
        rows = sorted((item for item in result.timings if item.case == case), key=seconds)
        if rows:
            parts.append(_text(20, at, TITLES[case], size=15, bold=True))
            parts += [_bar(at + 10 + number * BAR, row) for number, row in enumerate(rows)]
            at += len(rows) * BAR + GAP
    height = at + 10
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
        f"<title>{escape(_title(result))}</title>", f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(20, 30, _title(result), size=19, bold=True), _text(20, 54, _subtitle(result), size=13, fill="#57606a"),
        *_axis(height), *parts, "</svg>", "",
    ])  # fmt: skip


def _title(result: Result) -> str:
    return f"Seconds for {result.recipe}: Ekiben beside its peers"


def _subtitle(result: Result) -> str:
    machine, unpacked = result.machine, result.facts.get("unpacked bytes")
    size = f"{unpacked / 1e9:.1f} GB unpacked · " if unpacked else ""
    return (f"{size}{machine['cores']} cores, {machine['memory bytes'] / 2**30:.0f} GiB · {machine['system']} · "
            f"median · logarithmic · {result.date[:10]}")  # fmt: skip


def _x(count: float) -> float:
    inside = min(max(count, LEAST), MOST)
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(inside / LEAST) / math.log(MOST / LEAST)


def _axis(height: int) -> list[str]:
    parts = []
    for tick in (0.1, 1, 10, 100, 1000):
        x = _x(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 10}" x2="{x:.1f}" y2="{height - 20}" stroke="{PALE}"/>')
        parts.append(_text(x, TOP - 16, f"{tick:g} s", size=12, fill="#57606a", anchor="middle"))
    return parts


def _bar(y: float, timing: Timing) -> str:
    ours = timing.who.startswith("ekiben")
    color = OURS if ours else COPY if timing.who.startswith("cp ") else THEIRS
    end = _x(seconds(timing))
    middle = y + BAR * 0.72
    return "".join([
        _text(LEFT - 8, middle, timing.who, size=12.5, bold=ours, anchor="end"),
        f'<rect x="{LEFT}" y="{y + 3}" width="{max(end - LEFT, 2):.1f}" height="{BAR - 5}" rx="2" fill="{color}"/>',
        _text(end + 6, middle, format_seconds(seconds(timing)), size=12.5, bold=ours),
    ])  # fmt: skip


def _text(
    x: float, y: float, text: str, *, size: float, bold: bool = False, fill: str = INK, anchor: str = "start"
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
