"""Cache keys.

Equal keys promise equal content. Every input that can change a layer is in its key; labels, help, the layer's own
environment, the executor, mirrors, proxies and parallelism are not.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY_FORMAT = 1  # raised when the files that the builder adds to layers change


def hash_inputs(inputs: Mapping[str, Any]) -> str:
    """Return the cache key of ``inputs``."""
    normalize = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(normalize.encode()).hexdigest()


def parent_name(parent: object) -> str:
    """Return one name of a key's parent, which may be several keys."""
    return parent if isinstance(parent, str) else hash_inputs({"parent": parent})


def mode_of(path: Path) -> int:
    """Return the mode as an input of a key. Only the executable bit counts, not a clone's umask."""
    return 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
