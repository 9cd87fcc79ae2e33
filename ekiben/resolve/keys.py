"""Cache keys.

Equal keys promise equal content. Every input that can change a layer is in its key; labels, help, the layer's own
environment, the executor, mirrors, proxies and parallelism are not.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ekiben.formats.layer import File
from ekiben.resolve.graph import Layer, StageCopy
from ekiben.spec.definition import Stage

KEY_FORMAT = 1  # a change in what the builder itself puts into layers gets a new number


def copy_inputs(copies: Sequence[StageCopy]) -> dict[str, Any]:
    """Return the inputs of a key that come from build stages; nothing where there are none."""
    return {"from": [[item.stage.cache_key, item.source, item.destination] for item in copies]} if copies else {}


def hash_inputs(inputs: Mapping[str, Any]) -> str:
    """Return the cache key of ``inputs``."""
    normalize = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(normalize.encode()).hexdigest()


def make_layer(
    name: str,
    kind: Literal["bootstrap", "post", "files"],
    stage: Stage | None,
    files: tuple[File, ...],
    environment: Mapping[str, str],
    epoch: int,
    inputs: dict[str, Any],
    below: Sequence[Layer],
    copies: tuple[StageCopy, ...] = (),
) -> Layer:
    """Return a layer with the cache key of its inputs."""
    inputs = {"format": KEY_FORMAT, "parent": below[-1].cache_key if below else None, **inputs}
    return Layer(
        name=name,
        kind=kind,
        stage=stage,
        files=files,
        environment=dict(environment),
        epoch=epoch,
        inputs=inputs,
        cache_key=hash_inputs(inputs),
        copies=copies,
    )


def mode_of(path: Path) -> int:
    """Return the mode as an input of a key. Only the executable bit counts: a clone's umask is not."""
    return 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
