"""A bill of materials, held against the image itself: the official schema, and what dpkg and Python say inside."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from ekiben.packages.installed import plain_name

_DEBIAN = ("dpkg-query", "--show", "--showformat", "${db:Status-Abbrev} ${Package} ${Version} ${Architecture}\n")
_PYTHON = """
import importlib.metadata, json
print(json.dumps([[item.metadata["Name"], item.version] for item in importlib.metadata.distributions()]))
"""


def check_sbom(text: str, sif: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Nothing is missing and nothing is made up. Returns the bill's versions by name, Debian's and Python's."""
    assert (problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is None, problem
    sbom: dict[str, Any] = json.loads(text)
    components = sbom["components"]
    debian = {line for line in _inside(sif, *_DEBIAN).splitlines() if line.startswith("ii ")}
    assert len(debian) > 80
    assert {
        f"ii  {item['name']} {item['version']} {_arch(item['purl'])}"
        for item in components
        if item.get("purl", "").startswith("pkg:deb/debian/")
    } == debian
    python = {tuple(item) for item in json.loads(_inside(sif, "python", "-c", _PYTHON))}
    assert {"pip", "uv"} <= {name for name, _ in python}
    assert {
        (item["name"], item["version"]) for item in components if item.get("purl", "").startswith("pkg:pypi/")
    } == python
    assert len(components) == len(debian) + len(python) + 1  # and the distribution
    refs = {"image", *(item["bom-ref"] for item in components)}
    dependencies = {item["ref"]: item.get("dependsOn", []) for item in sbom["dependencies"]}
    reached, waiting = set[str](), ["image"]
    while waiting:
        if (ref := waiting.pop()) not in reached:
            reached.add(ref)
            waiting += dependencies[ref]
    assert reached == refs
    deb, pypi = (
        [item for item in components if item.get("purl", "").startswith(f"pkg:{kind}/")] for kind in ("deb", "pypi")
    )
    return {item["name"]: item["version"] for item in deb}, {plain_name(item["name"]): item["version"] for item in pypi}


def _arch(purl: str) -> str:
    return dict(pair.split("=", 1) for pair in purl.partition("?")[2].split("&"))["arch"]


def _inside(sif: Path, *command: str) -> str:
    return subprocess.check_output(
        ["apptainer", "--silent", "exec", "--cleanenv", "--contain", sif, *command], text=True
    )
