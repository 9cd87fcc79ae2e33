"""Draw bar charts as plain SVG that is readable on a phone, on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bench.clock import Timing
from bench.report import TITLES, Result, format_seconds, seconds

WIDTH, MARGIN, ROW, BAR, GAP = 520, 16, 30, 7, 24
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
# Colour on a light page → on a dark page. The second is used where the page, or else the system, asks for dark colours.
INK, GREY, PAPER, TRACK = "#1f2328", "#57606a", "#ffffff", "#e4e8ec"
FIRST, OTHER, COPY = "#c2410c", "#7d8590", "#0969da"
DARK = {
    INK: "#e6edf3",
    GREY: "#a9b4c0",
    PAPER: "#1e2129",
    TRACK: "#343a46",
    FIRST: "#f0883e",
    OTHER: "#8b95a1",
    COPY: "#58a6ff",
}
BUILDING = ("nothing", "docker", "sif", "middle", "second", "scratch")
SHARING = ("publish", "publish-edit", "push", "pull", "push-edit")
LEAST, MOST = 0.05, 1000.0  # seconds at the ends of the logarithmic scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """``length``: from 0 to 1. ``colour``: one of FIRST, OTHER and COPY; a bar of FIRST has its name in bold, too."""

    name: str
    label: str
    length: float
    colour: str = OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """``notes``: lines below the title. ``groups``: their titles and bars."""

    title: str
    notes: Sequence[str]
    groups: Sequence[tuple[str, Sequence[Bar]]]

    @property
    def description(self) -> str:
        """Return every number of the chart as text, for readers who do not see it."""
        groups = (f"{title}: {', '.join(f'{bar.name} {bar.label}' for bar in bars)}" for title, bars in self.groups)
        return f"{self.title}. {'; '.join(groups)}."


def dark_style(colours: dict[str, str]) -> str:
    """Return the style that replaces each fill and stroke of ``colours`` on a dark page."""
    rules = [f"[fill='{light}']{{fill:{dark}}}[stroke='{light}']{{stroke:{dark}}}" for light, dark in colours.items()]
    return f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"


def draw_chart(chart: Chart) -> str:
    """Return the chart as an SVG file: a title, notes, and for each bar its name, its value and the bar below them."""
    parts, y = [_text(MARGIN, 30, chart.title, size=17, bold=True)], 30
    for note in chart.notes:
        y += 18
        parts.append(_text(MARGIN, y, note, size=12.5, fill=GREY))
    for title, bars in chart.groups:
        y += GAP + 16
        parts.append(_text(MARGIN, y, title, size=15, bold=True))
        for bar in bars:
            parts += _draw_bar(y + 6, bar)
            y += ROW
    height = y + 20
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
                f' height="{height}" font-family="{FONT}" role="img">'
            ),
            f"<title>{escape(chart.title)}</title>",
            f"<desc>{escape(chart.description)}</desc>",
            dark_style(DARK),
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def timings_chart(result: Result, cases: Sequence[str], title: str) -> Chart:
    """Return the chart of the median seconds of ``cases``, on a logarithmic scale."""
    groups = []
    for case in cases:
        timings = sorted((item for item in result.timings if item.case == case), key=seconds)
        if timings:
            groups.append((TITLES[case], [_timing_bar(timing) for timing in timings]))
    machine, unpacked = result.machine, result.facts.get("unpacked bytes")
    size = f", {unpacked / 1e9:.1f} GB unpacked" if unpacked else ""
    notes = [
        f"{result.recipe}{size}; medians; bars on a logarithmic scale",
        f"{machine['cores']} cores, {machine['memory bytes'] / 2**30:.0f} GiB, {machine['system']}, {result.date[:10]}",
    ]
    return Chart(title=title, notes=notes, groups=groups)


def draw(result: Result) -> str:
    """Draw the seconds of every case of building."""
    return draw_chart(timings_chart(result, BUILDING, "Seconds to build: Ekiben and other tools"))


def _timing_bar(timing: Timing) -> Bar:
    inside = min(max(seconds(timing), LEAST), MOST)
    colour = FIRST if timing.who.startswith("ekiben") else COPY if timing.who.startswith("cp ") else OTHER
    return Bar(
        name=timing.who.replace("ekiben", "Ekiben"),
        label=format_seconds(seconds(timing)),
        colour=colour,
        length=math.log(inside / LEAST) / math.log(MOST / LEAST),
    )


def _draw_bar(y: float, bar: Bar) -> list[str]:
    bold, width = bar.colour == FIRST, WIDTH - 2 * MARGIN
    filled = (
        f'<rect x="{MARGIN}" y="{y + 19}" width="{max(bar.length * width, 2):.1f}" height="{BAR}" rx="2"'
        f' fill="{bar.colour}"/>'
    )
    return [
        _text(MARGIN, y + 14, bar.name, size=14, bold=bold),
        _text(WIDTH - MARGIN, y + 14, bar.label, size=14, bold=bold, anchor="end"),
        f'<rect x="{MARGIN}" y="{y + 19}" width="{width}" height="{BAR}" rx="2" fill="{TRACK}"/>',
        *([filled] if bar.length else []),
    ]


def _text(
    x: float, y: float, text: str, *, size: float, bold: bool = False, fill: str = INK, anchor: str = "start"
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"'
        f' text-anchor="{anchor}"{weight}>{escape(text)}</text>'
    )
