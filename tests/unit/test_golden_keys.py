"""Cache keys of every recipe on every stack, recorded once. A change of a lower layer's key rebuilds it for everyone.

``python tests/unit/test_golden_keys.py`` writes the file again: for a change that means to change keys.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ekiben.core.paths import PROJECT_ROOT
from ekiben.resolve import resolve as resolver
from ekiben.resolve.graph import Layer, stages_of
from ekiben.spec.recipe import find_recipe, recipe_folders

GOLDEN = Path(__file__).with_name("golden_keys.json")
# Recipes whose top layer a stack has no lock for.
INCOMPLETE = {(recipe, stack) for recipe in ("lora-bench", "pretrain-gpt") for stack in ("cu124",)}


def cases() -> list[tuple[str, str]]:
    stacks = sorted(path.parent.name for path in (PROJECT_ROOT / "images/stacks").glob("*/stack.yaml"))
    assert len(stacks) > 1
    return [(name, stack) for name in recipe_folders() for stack in stacks if (name, stack) not in INCOMPLETE]


def keys_below_recipe(name: str, stack: str) -> dict[str, str]:
    """The key of every layer and build stage below a recipe's own last layer, by name."""
    keys: dict[str, str] = {}

    def collect(layers: Sequence[Layer]) -> None:
        for layer in layers:
            keys[f"{layer.name} ({layer.kind})"] = layer.cache_key
            for stage in stages_of(layer.copies):
                keys[f"{stage.name} (stage)"] = stage.cache_key
                collect(stage.layers)

    collect(resolver.resolve(find_recipe(name), stack=stack, arch="amd64").layers[:-1])
    return keys


@pytest.mark.parametrize(("name", "stack"), cases())
def test_keys_of_lower_layers_are_as_recorded(name: str, stack: str) -> None:
    assert keys_below_recipe(name, stack) == json.loads(GOLDEN.read_text())[f"{name} on {stack}"]


if __name__ == "__main__":
    golden = {f"{name} on {stack}": keys_below_recipe(name, stack) for name, stack in cases()}
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
