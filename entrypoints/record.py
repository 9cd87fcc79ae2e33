"""What a run leaves behind: metrics.jsonl, loss.svg and run.json; and the arithmetic of speed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLOURS = ("#1f6fb4", "#d1491b", "#3b8f3b")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def image() -> Any:
    """What the builder wrote about this image, or None outside one."""
    try:
        return json.loads(Path("/opt/ekiben/image.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def site() -> dict[str, str]:
    """Where this runs, as far as the scheduler says so."""
    names = {
        "cluster": ("SLURM_CLUSTER_NAME", "SGE_CLUSTER_NAME", "PBS_SERVER"),
        "job": ("SLURM_JOB_ID", "JOB_ID", "PBS_JOBID"),
        "nodes": ("SLURM_JOB_NODELIST", "SGE_JOB_HOSTLIST", "PBS_NODEFILE"),
    }
    found = {"host": socket.gethostname()}
    for name, variables in names.items():
        value = next((os.environ[variable] for variable in variables if os.environ.get(variable)), None)
        if value:
            found[name] = value
    return found


def write_json(file: Path, content: Any) -> None:
    staged = file.with_name(f".{file.name}.staged-{os.getpid()}")
    staged.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    staged.replace(file)


class Metrics:
    """metrics.jsonl, one line per event; a resumed run first forgets what came after its checkpoint."""

    def __init__(self, file: Path, resume_step: int) -> None:
        self.file = file
        self.lines = [line for line in _read_lines(file) if line["step"] <= resume_step] if resume_step else []
        staged = file.with_name(f".{file.name}.staged-{os.getpid()}")
        staged.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
        staged.replace(file)

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        self.lines += lines
        with self.file.open("a", encoding="utf-8") as out:
            out.write("".join(json.dumps(line) + "\n" for line in lines))

    def series(self, key: str) -> list[tuple[float, float]]:
        return [(line["step"], line[key]) for line in self.lines if key in line]


def _read_lines(file: Path) -> list[dict[str, Any]]:
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # a line cut short by a crash is the last one
    return lines


def plot(file: Path, title: str, series: dict[str, list[tuple[float, float]]]) -> None:
    """Lines over steps as an SVG, which every browser shows: a plotting library would be a tenth of the image."""
    points = [point for line in series.values() for point in line]
    if not points:
        return
    left, top, width, height = 60, 40, 680, 320
    x_high = max(x for x, _ in points) or 1
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    y_high = y_high if y_high > y_low else y_low + 1
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 420" font-family="sans-serif" font-size="12">',
        f'<rect width="800" height="420" fill="white"/><text x="{left}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for tick in range(5):
        y, value = top + height - height * tick / 4, y_low + (y_high - y_low) * tick / 4
        x, step = left + width * tick / 4, x_high * tick / 4
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#ddd"/><text x="8" y="{y + 4:.1f}">{value:.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{step:.0f}</text>')
    for line, colour in zip(series.values(), COLOURS, strict=False):
        spots = [(left + width * x / x_high, top + height - height * (y - y_low) / (y_high - y_low)) for x, y in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>' if spots else "")
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in spots if len(spots) < 30]
    for index, (name, colour) in enumerate(zip(series, COLOURS, strict=False)):
        parts.append(f'<text x="{left + 620}" y="{top + 14 + 16 * index}" fill="{colour}">{escape(name)}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">step</text></svg>')
    file.write_text("\n".join(parts) + "\n", encoding="utf-8")
