"""The curve of a training run: what metrics.jsonl, beside its run.json, has of the losses, as few points."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ekiben.core.checked import parse_json, read_regular
from ekiben.core.inner_path import AnyPath, InnerPath
from ekiben.publish.catalog._types import Curve

METRICS = "metrics.jsonl"
SUFFIX = ".curve"  # of the file beside a run's record
_POINTS = 60  # of a line, at most
_MAX_METRICS = 256 << 20  # bytes
_MAX_KEPT = 100_000  # bytes
_NAMES = ("loss", "eval_loss")


def read_metrics(path: AnyPath) -> Curve | None:
    """Return the curve of a metrics.jsonl; None where there is none, or no line has a loss.

    Raises ValueError for a file that cannot be read. A damaged line, as a crash leaves it, is skipped.
    """
    try:
        data = (
            path.read(max_size=_MAX_METRICS)
            if isinstance(path, InnerPath)
            else read_regular(path, max_size=_MAX_METRICS, follow=True)
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in _NAMES}
    for line in data.splitlines():
        try:
            values = parse_json(line, nan=True)
        except ValueError:
            continue
        for name in _NAMES:
            if isinstance(values, dict) and (point := _point([values.get("step"), values.get(name)])):
                points[name].append(point)
    curve: Curve = {"loss": _thin(points["loss"]), "eval_loss": _thin(points["eval_loss"])}
    return curve if any(points.values()) else None


def format_curve(curve: Curve) -> bytes:
    """Return the content of the file that is kept."""
    return json.dumps(curve, sort_keys=True).encode() + b"\n"


def parse_curve(path: InnerPath) -> Curve | None:
    """Return the curve of a kept file, None where there is none. Raises ValueError: others may write to the folder."""
    try:
        data = parse_json(path.read(max_size=_MAX_KEPT))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if not isinstance(data, dict):
        raise ValueError("is not a curve")
    lines = {name: data.get(name) for name in _NAMES}
    kept = {
        name: [point for pair in line[:_POINTS] if (point := _point(pair))] if isinstance(line, list) else []
        for name, line in lines.items()
    }
    return {"loss": kept["loss"], "eval_loss": kept["eval_loss"]}


def _point(pair: Any) -> tuple[float, float] | None:
    """Return (step, value), None where they are no finite numbers."""
    if not isinstance(pair, list) or len(pair) != 2:
        return None
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in pair):
        return None
    step, value = pair
    return (step, value) if math.isfinite(step) and math.isfinite(value) and step >= 0 else None


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most _POINTS points, evenly, the last one among them. Their values have six digits."""
    count = len(points)
    chosen = points if count <= _POINTS else [points[(at + 1) * count // _POINTS - 1] for at in range(_POINTS)]
    return [(step, float(f"{value:.6g}")) for step, value in chosen]
