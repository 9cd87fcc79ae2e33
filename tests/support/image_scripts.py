"""The scripts of images/scripts/, for their tests."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "images/scripts"


def load(name: str) -> ModuleType:
    """Import images/scripts/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"images_{name}", SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(site: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> None:
    """Write an installed distribution whose RECORD is correct."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    with (info / "RECORD").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([path, "sha256=x", len(data)] for path, data in files.items())


def record(site: Path, name: str) -> dict[str, tuple[str, str]]:
    lines = csv.reader((site / f"{name}-1.0.dist-info" / "RECORD").read_text().splitlines())
    return {path: (digest, size) for path, digest, size in lines}


def strip_packages(site: Path, **environment: str) -> str:
    script = [sys.executable, str(SCRIPTS / "strip_packages.py"), str(site)]
    settings = {**os.environ, **environment}
    return subprocess.run(script, check=True, capture_output=True, text=True, env=settings).stdout
