"""A recipe's folder outside the repository, with layers, files and a stack of its own; and how tests start build.py."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Done = subprocess.CompletedProcess[str]
RunCli = Callable[..., Done]

STACK: dict[str, Any] = {
    "name": "tiny", "description": "for tests", "suite": "bookworm", "python": "3.11", "cuda": "13.0", "torch": "2.11.0",
    "driver": ">=580", "compute_capabilities": ["9.0"], "epoch": 1_700_000_000, "arguments": {"word": "hello"},
}  # fmt: skip
RECIPE: dict[str, Any] = {
    "name": "own", "description": "a recipe outside the repository", "stack": "tiny", "layer": "roof",
    "tasks": {"greet": {"entrypoint": "greet.py", "config": "configs/greet.yaml", "help": "say hello"}}, "test": "greet\n",
}  # fmt: skip
GROUND = (
    "Bootstrap: debootstrap\nOSVersion: bookworm\nInclude: b a\nMirrorURL: {{ mirror }}\n\n%arguments\n    mirror=\n"
)
WALLS = """\
Bootstrap: localimage
From: ground.sif

%arguments
    word=bye

%files
    files/tool.sh /opt/tool.sh

%post
    echo {{ word }} > /word

%environment
    export GREETING={{ word }}
    export PATH=/opt:$PATH

%labels
    walls.label one

%test
    test -e /word
"""
ROOF = """\
Bootstrap: localimage
From: walls.sif

%files
    files/data.txt /opt/data/
    files/tree /opt/tree
"""


@dataclass(frozen=True)
class Own:
    """A recipe's folder with layers, files and a stack of its own. Its layers: ground, walls (%post), roof (files)."""

    path: Path

    def write(self, file: str, text: str, mode: int = 0o644) -> Path:
        path = self.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def replace(self, file: str, old: str, new: str) -> None:
        text = (self.path / file).read_text()
        assert old in text
        (self.path / file).write_text(text.replace(old, new))

    def recipe(self, **changes: Any) -> None:
        self.write("recipe.yaml", json.dumps({**RECIPE, **changes}, indent=1))

    def stack(self, **changes: Any) -> None:
        self.write("images/stacks/tiny/stack.yaml", json.dumps({**STACK, **changes}, indent=1))
