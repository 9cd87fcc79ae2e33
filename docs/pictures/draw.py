"""Draw the documents' pictures: layers and what comes out of them, the packages by floor, a recorded terminal.

python docs/pictures/draw.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.picture import dark_style

HERE = Path(__file__).resolve().parent

SANS = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
MONO = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace'"
INK, GREY, LINE, PAPER = "#1f2933", "#5b6670", "#8895a0", "#ffffff"
BLUE, GREEN, ORANGE = "#dcebf7", "#dff2e1", "#fbe7cf"
DARK = {
    INK: "#e6edf3",
    GREY: "#b4bec8",
    LINE: "#76838f",
    PAPER: "#1e2129",
    BLUE: "#1d3a52",
    GREEN: "#1f4028",
    ORANGE: "#5a3a17",
}


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return a complete SVG file of ``parts``, with other colours for a dark page."""
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
        " role='img'>"
    )
    arrow = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
        f"<path d='M0 0L8 4L0 8z' fill='{LINE}'/></marker></defs>"
    )
    paper = f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", dark_style(DARK), arrow, paper, *parts, "</svg>", ""])


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 14,
    colour: str = INK,
    anchor: str = "start",
    bold: bool = False,
    font: str = SANS,
) -> str:
    """Return one line of text with its baseline at ``y``."""
    weight = " font-weight='600'" if bold else ""
    return (
        f"<text x='{x}' y='{y}' {font} font-size='{size}' fill='{colour}'"
        f" text-anchor='{anchor}'{weight}>{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, title: str, about: str = "") -> str:
    """Return a box with a title and a line below it."""
    middle = y + height / 2
    lines = [
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{LINE}'/>",
        text(x + 12, middle + (-2 if about else 5), title, bold=True),
    ]
    return "\n".join([*lines, *([text(x + 12, middle + 15, about, size=12, colour=GREY)] if about else [])])


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through ``points`` with a tip."""
    path = "L".join(f"{x} {y}" for x, y in points)
    return f"<path d='M{path}' fill='none' stroke='{LINE}' stroke-width='1.6' marker-end='url(#tip)'/>"


def draw_layers() -> str:
    """Draw the layers of a recipe, the store, and the two images made of it."""
    layers = [
        ("lora-opencalm", "the recipe: tasks, settings, entrypoints", ORANGE),
        ("huggingface", "huggingface.def + huggingface.lock", BLUE),
        ("pytorch", "pytorch.def + pytorch.lock", BLUE),
        ("compiler", "compiler.def + apt.lock", BLUE),
        ("python", "python.def + python.lock", BLUE),
        ("base", "base.def + apt.lock (Debian)", BLUE),
    ]
    parts = [
        text(24, 34, "Definition files, one per layer", bold=True),
        text(356, 34, "Store", bold=True),
        text(610, 34, "What you run", bold=True),
    ]
    for at, (name, about, fill) in enumerate(layers):
        y = 52 + at * 56
        parts += [
            box(24, y, 270, 46, fill, name, about),
            arrow((294, y + 23), (352, y + 23)),
            box(356, y, 160, 46, GREEN if fill == BLUE else ORANGE, "squashfs blob", "by cache key, digest"),
        ]
    parts += [
        box(610, 70, 260, 62, GREEN, "lora-opencalm.sif", "one partition per layer, for Apptainer"),
        box(610, 162, 260, 62, GREEN, "ekiben/lora-opencalm", "the same layers as tar, for Docker"),
        box(610, 254, 260, 62, PAPER, "shared folder, registry", "run and build on by others"),
        arrow((516, 187), (560, 187), (560, 101), (606, 101)),
        arrow((560, 187), (606, 187)),
        arrow((560, 187), (560, 285), (606, 285)),
        text(
            24,
            412,
            "An edit of one definition file rebuilds its layer and the layers above it; everything below is reused.",
            size=13,
            colour=GREY,
        ),
    ]
    return svg(894, 432, "Layers of a recipe become a SIF and a Docker image", parts)


def draw_packages() -> str:
    """Draw the packages of ekiben/ by the floor that their imports put them on."""
    floors = [
        ("7", "start", ["build.py", "python -m ekiben"]),
        ("6", "commands", ["cli", "api"]),
        ("5", "hand over", ["artifacts", "bundle", "publish"]),
        ("4", "make and check", ["builder", "inspect", "signing", "doctor", "images"]),
        ("3", "resolve, store, run", ["resolve", "project", "store", "executors", "packages", "run"]),
        ("2", "formats and inputs", ["spec", "formats", "registry", "gpu"]),
        ("1", "foundation", ["core"]),
    ]
    parts = [text(24, 32, "Packages of ekiben/: imports go downwards only", bold=True)]
    for at, (number, about, names) in enumerate(floors):
        y = 48 + at * 52
        parts += [
            f"<rect x='24' y='{y}' width='846' height='44' rx='6' fill='{BLUE if at % 2 else GREEN}' stroke='{LINE}'/>",
            text(36, y + 27, f"{number}  {about}", size=13, colour=GREY),
        ]
        for column, name in enumerate(names):
            parts.append(text(226 + column * 108, y + 27, name, bold=True))
    return svg(894, 426, "Packages of ekiben by floor", parts)


def draw_terminal(transcript: Path) -> str:
    """Draw a terminal from its transcript: lines that begin with ``$`` are what was typed."""
    lines = transcript.read_text(encoding="utf-8").rstrip("\n").splitlines()
    width, height = round(max(map(len, lines)) * 7.25) + 48, len(lines) * 18 + 64
    parts = [f"<rect width='{width}' height='{height}' rx='8' fill='#17202a'/>"]
    parts += [
        f"<circle cx='{24 + at * 20}' cy='22' r='6' fill='{colour}'/>"
        for at, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    ]
    for at, line in enumerate(lines):
        colour = "#8fd3ff" if line.startswith("$") else "#dfe6ec"
        content = escape(line).replace("  ", "\u00a0\u00a0")
        parts.append(
            f"<text x='24' y='{58 + at * 18}' {MONO} font-size='12' fill='{colour}'"
            f" xml:space='preserve'>{content}</text>"
        )
    return svg(width, height, "Recorded terminal: " + next(line for line in lines if line.startswith("$"))[2:], parts)


PICTURES: dict[str, Callable[[], str]] = {
    "layers.svg": draw_layers,
    "packages.svg": draw_packages,
    "first-image.svg": lambda: draw_terminal(HERE / "first-image.txt"),
}


def main() -> None:
    """Write all pictures beside this file."""
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
