"""A catalogue made by hand, as ekiben/publish/catalog/gather.py would gather it, with the names of a person's
choice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from ekiben.core.inner_path import InnerPath
from ekiben.publish.catalog.gather import commands
from ekiben.publish.catalog.pages import render
from ekiben.publish.catalog.runs import reduced

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}&lt;"
PLACE = Path("/groups/the lab/ekiben")
SPEEDS = (
    ("cyberagent/open-calm-3b", "NVIDIA H200", 1, 19500, 0.45),
    ("cyberagent/open-calm-7b", "NVIDIA H200", 4, 9200, 0.41),
    ("cyberagent/open-calm-small", "NVIDIA L4", 1, 141000, 0.22),
    ("gpt2", "Tesla V100S-PCIE-32GB", 1, 410, None),
)


CURVE = {"loss": [(1, 4.0), (600, 2.5), (1200, 1.75)], "eval_loss": [(600, 2.0), (1200, 1.8125)]}


def run_record(
    model: str, device: str, count: int, speed: float | None, mfu: float | None, day: int = 1
) -> dict[str, Any]:
    """As ekiben_tasks/training/run_summary.py writes it."""
    return {
        "status": "finished",
        "settings": {"model": model, "method": "lora", "data": "/home/me/secret.jsonl", "lora": {"r": 4}},
        "model": {"name": model, "parameters": 2_700_000_000, "trainable": 3_000_000},
        "data": {"sha256": "ab" * 32, "sources": {"/home/me/secret.jsonl": 9}, "rows": 9, "tokens": 900},
        "device": {
            "name": device,
            "count": count,
            "parallel": "ddp",
            "dtype": "bfloat16",
            "attention": "flash",
            "compiled": True,
        },
        "site": {"host": "login1.secret", "job": "77", "nodes": "node[1-2].secret", "cluster": "secret"},
        "started": f"2026-11-{day:02}T10:00:00Z",
        "steps": 1200,
        "time_to_train_s": 4321.5,
        "tokens_per_s": speed,
        "mfu": mfu,
        "peak_memory_bytes": 30 * 2**30,
        "final_loss": 1.75,
        "final_eval_loss": 1.8125,
        "final_eval_perplexity": 6.1,
        "seed": 42,
        "versions": {"torch": "2.11.0", "python": "3.11.2"},
        "image": {"recipe": "own", "stack": "tiny", "layers": []},
    }


def version(image: str, number: str, text: str, **more: Any) -> dict[str, Any]:
    """``text`` stands wherever a record may hold a stranger's words."""
    stem = f"{image}-{number}-{number[0] * 12}"
    layer = {
        "cache_key": "c" * 64,
        "diff_id": "sha256:" + "d" * 64,
        "digest": "sha256:" + "e" * 64,
        "size": 2_490_000_000,
        "tar_size": 4_160_000_000,
    }
    gpu = {"family": "Hopper", "models": "H100, H200", "capability": "9.0", "level": "ok", "message": text}
    return {
        "stem": stem,
        "version": number,
        "stack": text or "cu130",
        "description": text or "LoRA fine-tuning",
        "file": f"{stem}.sif",
        "sha256": "f" * 64,
        "size": 2_700_000_000,
        "sif": "u",
        "image": "sha256:" + "a" * 64,
        "environment": {"X": text},
        "tasks": {text or "train": text or "LoRA fine-tuning of a model", "chat": "ask it"},
        "checks": [{"runtime": text or "apptainer", "seconds": 31.25}],
        "published": f"2026-11-0{number[0]}T09:00:00.000+00:00",
        "by": text or "tanaka",
        "tags": [],
        "pinned": False,
        "signature": None,
        "sbom": None,
        "layers": [{"name": text or "pytorch", **layer}, {"name": "top", **layer, "size": 1000, "tar_size": 4000}],
        "drift": [text] if text else [],
        "read_error": None,
        "python": {"torch": "2.11.0", "transformers": text or "5.23.0"},
        "debian": {"libc6": "2.36-9", "python3.11": "3.11.2-6", "base-files": "12.4+deb12u5"},
        "glibc": "2.36",
        "torch": "2.11.0",
        "cuda": "13.0",
        "device_code": ["sm_90", "compute_90"],
        "gpus": [gpu, {**gpu, "level": "warning"}, {**gpu, "level": "error"}],
        "driver": {"minimum": "580.65.06", "toolkit": "580.65.06"},
        "changes": None,
        "runs": [],
        **more,
    }


def changed(before: dict[str, Any], text: str) -> dict[str, Any]:
    one = {
        "added": {text or "xxhash": text or "3.6"},
        "removed": {"old": "1"},
        "changed": {"torch": ["2.10.0", "2.11.0"]},
        "same": 7,
    }
    return {
        "before": before["stem"],
        "size": [before["size"], before["size"] + 10_000_000],
        "environment": one,
        "layers": [{"name": text or "top", "before": 1000, "after": 1010, "same": False}],
        "packages": {"python": one, "debian": one},
        "files": {text or "top": [f"{text or 'opt/train.py'}: content"]},
    }


def image(name: str, text: str = "") -> dict[str, Any]:
    runs: list[dict[str, Any]] = [
        {"id": f"{at:012}", "curve": CURVE, **reduced(run_record(*row, day=at + 1))} for at, row in enumerate(SPEEDS)
    ]
    if text:
        runs[0]["model"]["name"] = runs[0]["device"]["name"] = runs[0]["method"] = text
    first = version(name, "1.0", text, pinned=True, tags=["paper"])
    second = version(
        name,
        "2.0",
        text,
        tags=sorted(["current", text or "stable"]),
        runs=runs,
        changes=changed(first, text),
        signature={"fingerprint": text or "9F3A"},
        sbom=f"{name}-2.0-{'2' * 12}.cdx.json",
    )
    return {
        "name": name,
        "description": second["description"],
        "recipe": name,
        "current": second["stem"],
        "shown": second["stem"],
        "commands": commands(PLACE, InnerPath.below(PLACE) / "images" / name, cast(Any, second), name, True),
        "versions": [second, first],
    }


def catalog(text: str = "") -> dict[str, Any]:
    names = ["lora-opencalm", "hello", *(["x<b>\"y'&z"] if text else [])]
    skipped = [{"file": f"images/{text}.json", "reason": text}] if text else []
    return {
        "format": 2,
        "shared_dir": text or str(PLACE),
        "images": [image(name, text) for name in names],
        "skipped": skipped,
    }


def write(folder: Path, text: str = "") -> Path:
    for name, data in render(cast(Any, catalog(text)), "../images").items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
