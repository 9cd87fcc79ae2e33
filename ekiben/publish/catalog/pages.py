"""Render the pages from the result of gather.py. Every value is untrusted text: the templates escape
it, and the pages' Content-Security-Policy lets nothing run or load but the style and the script they hold."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from ekiben.core.files import format_size
from ekiben.inspect.diff import Changes
from ekiben.publish.catalog._types import Catalog, CatalogImage, CatalogLayer, CatalogVersion, Plot, ShownRun
from ekiben.store.shared import IMAGES

HERE = Path(__file__).parent
_LEVELS = {"ok": ("yes", "yes"), "info": ("yes", "yes"), "warning": ("yes, but", "partly"), "error": ("no", "no")}
_MAIN = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "deepspeed",
    "flash-attn",
    "flash-attn-4",
    "apex",
    "megatron-core",
    "bitsandbytes",
    "triton",
)
_MAX_ROWS = 12  # of a plot


def render(catalog: Catalog, images: str | None) -> dict[str, bytes]:
    """Return path → content of every file of the catalog.

    ``images``: the shared folder's images/ relative to the catalog; None when a link would not lead there.
    """
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "sort.js"))
    environment = _environment()
    common = {
        "catalog": catalog,
        "style": Markup(style),
        "script": Markup(script),
        "policy": (
            f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; base-uri"
            " 'none'; form-action 'none'"
        ),
    }
    servers = [image["name"] for image in catalog["images"] if "serve" in _shown(image)["tasks"]]
    versions = sum(len(image["versions"]) for image in catalog["images"])
    files = {"index.html": environment.get_template("index.html").render(common, top="", versions=versions)}
    for image in catalog["images"]:

        def link(name: str, image: CatalogImage = image) -> Markup:
            text = Markup("<code>{}</code>").format(name)
            if images is None:
                return text
            return Markup('<a href="{}">{}</a>').format(f"../{images}/{quote(image['name'])}/{quote(name)}", text)

        runs: list[ShownRun] = [
            {**run, "stem": one["stem"], "version": one["version"]} for one in image["versions"] for run in one["runs"]
        ]
        runs.sort(key=lambda run: (run["started"], run["id"]), reverse=True)
        files[f"{IMAGES}/{image['name']}.html"] = environment.get_template("image.html").render(
            common, top="../", image=image, link=link, runs=runs, plots=plots(runs), servers=servers
        )
    pages = {name: text.encode(errors="replace") for name, text in files.items()}
    return pages | {"catalog.json": json.dumps(catalog, indent=1, ensure_ascii=False).encode(errors="replace") + b"\n"}


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "shown": _shown,
        "page": lambda name: f"{IMAGES}/{quote(name)}.html",
        "day": lambda time: time[:10],
        "bytes": format_size,
        "holds": _holds,
        "generations": _generations,
        "runs_count": lambda image: sum(len(one["runs"]) for one in image["versions"]),
        "main_packages": _main_packages,
        "share": _share,
        "level_word": lambda level: _LEVELS[level][0],
        "level_class": lambda level: _LEVELS[level][1],
        "difference": _difference,
        "any_change": _any_change,
        "device": _device,
        "count": _count,
        "plain": lambda value: "" if value is None else value,
        "grouped": _grouped,
        "percent": _percent,
        "duration": _duration,
        "answers": _answers,
        "loss": _loss,
        "score": _score,
        "curve": _curve,
        "evaluations": _evaluations,
        "gib": lambda value: _or_dash(value and value / 2**30, "{:.1f} GiB"),
    }
    return environment


# ----------------------------------------------------------------------------------------------------- words for values


def _shown(image: CatalogImage) -> CatalogVersion:
    return next(one for one in image["versions"] if one["stem"] == image["shown"])


def _difference(sizes: Sequence[int]) -> str:
    change = sizes[1] - sizes[0]
    return f"{'+' if change >= 0 else '−'}{format_size(abs(change))}"


def _main_packages(version: CatalogVersion) -> list[tuple[str, str]]:
    debian = version["debian"].get("base-files", "")
    versions = [
        ("CUDA", version["cuda"]),
        *((name, version["python"].get(name)) for name in _MAIN),
        ("Python", _python(version["debian"])),
        ("glibc", version["glibc"]),
        ("Debian", debian.partition(".")[0]),
    ]
    return [(name, value) for name, value in versions if value]


def _python(debian: Mapping[str, str]) -> str | None:
    names = sorted(name for name in debian if name.startswith("python3.") and name.removeprefix("python3.").isdigit())
    return debian[names[-1]].partition("-")[0] if names else None


def _holds(version: CatalogVersion) -> str:
    """Return the two or three versions by which users choose."""
    chosen = [
        (name, value) for name, value in _main_packages(version) if name in ("CUDA", "torch", "transformers", "Python")
    ]
    return ", ".join(f"{name} {value}" for name, value in chosen[:3])


def _generations(version: CatalogVersion) -> str:
    families = list(
        dict.fromkeys(gpu["family"] for gpu in version["gpus"] if gpu["level"] in ("ok", "info", "warning"))
    )
    return " – ".join(dict.fromkeys([families[0], families[-1]])) if families else ""


def _share(size: int, layers: Sequence[CatalogLayer]) -> str:
    return f"{100 * size / max(sum(layer['size'] for layer in layers), 1):.2f}"


def _any_change(changes: Changes) -> bool:
    return bool(changes["added"] or changes["removed"] or changes["changed"])


def _device(run: ShownRun) -> str:
    name, count = run["device"]["name"] or "–", run["device"]["count"]
    return f"{count:g} × {name}" if count and count > 1 else name


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _grouped(value: float | None) -> str:
    return _or_dash(value, "{:,.0f}" if value is None or abs(value) >= 100 else "{:.3g}")


def _loss(value: float | None) -> str:
    return _or_dash(value, "{:.4f}" if value is None or abs(value) >= 0.001 else "{:.3g}")


def _percent(value: float | None) -> str:
    return _or_dash(value and 100 * value, "{:.1f} %")


def _count(value: float | None) -> str:
    if value is None:
        return ""
    for unit in ("", "k", "M", "B"):
        if value < 1000 or unit == "B":
            return f"{value:.3g}{unit}"
        value /= 1000
    raise AssertionError


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.3g} s"


def _answers(run: ShownRun) -> str:
    """Return how many answers a run of generate wrote, and how long it took; of other runs nothing."""
    count = run.get("answers")
    return "" if count is None else f"{count:,.0f} answers in {_duration(run.get('seconds'))}"


def _evaluations(runs: Sequence[ShownRun]) -> list[tuple[ShownRun, str, str, float]]:
    """Return (run, task, metric, value) of each score."""
    return [
        (run, task, metric, value)
        for run in runs
        for task, metrics in run.get("scores", {}).items()
        for metric, value in metrics.items()
    ]


def _score(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


# ---------------------------------------------------------------------------------------------------------------- plots

_WIDTH, _HEIGHT = 100, 24  # of a curve


def _curve(run: ShownRun) -> list[str]:
    """Return the points of the lines of a run's losses, training's first, as SVG has them."""
    curve = run["curve"]
    if not curve:
        return []
    values = [value for line in (curve["loss"], curve["eval_loss"]) for _, value in line]
    last = max((step for line in (curve["loss"], curve["eval_loss"]) for step, _ in line), default=0)
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return [
        " ".join(
            f"{round(_WIDTH * step / (last or 1), 1):g},{round(_HEIGHT * (high - value) / span, 1):g}"
            for step, value in line
        )
        for line in (curve["loss"], curve["eval_loss"])
        if len(line) > 1
    ]


def plots(runs: Sequence[ShownRun]) -> list[Plot]:
    """Return the plots of tokens per second and of model FLOPs utilization: a row for each model on each device."""
    drawn = [
        _plot("Tokens per second", lambda run: None if "answers" in run else run["tokens_per_s"], _grouped, runs),
        _plot(
            "Tokens per second, generate", lambda run: run["tokens_per_s"] if "answers" in run else None, _grouped, runs
        ),
        _plot("Model FLOPs utilization", lambda run: run["mfu"], _percent, runs),
    ]
    return [plot for plot in drawn if plot]


def _plot(
    title: str,
    value_of: Callable[[ShownRun], float | None],
    format_value: Callable[[float], str],
    runs: Sequence[ShownRun],
) -> Plot | None:
    groups: dict[str, list[tuple[float, ShownRun]]] = {}
    for run in runs:
        if (value := value_of(run)) is not None and value > 0:
            groups.setdefault(f"{run['model']['name'] or '–'} · {_device(run)}", []).append((value, run))
    rows = sorted(groups.items(), key=lambda row: (-max(value for value, _ in row[1]), row[0]))[:_MAX_ROWS]
    if not rows:
        return None
    values = [value for _, values_of in rows for value, _ in values_of]
    position, ticks = _axis(min(values), max(values))
    return {
        "title": title,
        "rows": [
            {
                "label": label,
                "best": format_value(max(value for value, _ in values_of)),
                "dots": [
                    {
                        "x": position(value),
                        "tooltip": f"{format_value(value)}, {run['started'][:10]}, version {run['version']}",
                    }
                    for value, run in values_of
                ],
            }
            for label, values_of in rows
        ],
        "ticks": [
            {
                "x": position(tick),
                "label": format_value(tick) if tick else "0",
                "anchor": "start" if at == 0 else "end" if at == len(ticks) - 1 else "middle",
            }
            for at, tick in enumerate(ticks)
        ],
    }


def _axis(lowest: float, highest: float) -> tuple[Callable[[float], float], list[float]]:
    """value → per cent of the width, and the values to write below.

    From 0, or by powers of ten when they are far apart.
    """
    if highest > 50 * lowest:
        low, high = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
        powers = [10.0**power for power in range(low, high + 1, max(1, (high - low) // 4))]
        return lambda value: round(1 + 98 * (math.log10(value) - low) / max(high - low, 1), 2), powers
    unit = 10.0 ** math.floor(math.log10(highest))
    top = next(step * unit for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * unit >= highest)
    return lambda value: round(1 + 98 * value / top, 2), [0.0, top / 2, top]


def relative(images: Path, out: Path) -> str:
    """Return the folder of images as pages in ``out`` refer to it, quoted for a URL."""
    return quote(os.path.relpath(images, out))
