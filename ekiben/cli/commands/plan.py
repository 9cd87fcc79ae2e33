"""Show what would be built or reused, and why.

Builds and writes nothing; a registry of layers is asked what it has.

\b
Examples:
  ekiben plan lora-opencalm
  ekiben plan mine --gpu-arch 8.0,9.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ekiben.builder.plan import Action, plan
from ekiben.cli.context import Context
from ekiben.cli.options import Command, RecipeOptions, RecipeType, json_option, recipe_options
from ekiben.resolve.graph import files_of


@dataclass(frozen=True, slots=True)
class PlanResult:
    """``included`` are files outside the recipe's folder; ``savings`` says what fewer GPU architectures save, where
    they were asked for.
    """

    actions: Sequence[Action]
    included: Sequence[Path] = ()
    savings: str | None = None

    def to_json(self) -> list[dict[str, Any]]:
        """Return the object that --json prints."""
        return [
            {
                "layer": action.layer.name,
                "kind": action.layer.kind,
                "cache_key": action.layer.cache_key,
                "stored": action.stored is not None,
                "in_registry": action.in_registry,
                "reason": action.reason,
                "inputs": action.layer.inputs,
                **self._included_by(action),
                **({"stage_deps": _stages(action)} if action.stage_deps else {}),
            }
            for action in self.actions
        ]

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        lines = [line for action in self.actions for line in _lines(action)]
        width = max(len(name) for _, name, _, _ in lines)
        for verb, name, key, reason in lines:
            yield f"{verb:<6}  {name:<{width}}  {key[:12]}  {reason}"
        if any(action.stage_deps for action in self.actions):
            yield "* a build stage: only its outputs are in the image"
        yield from (f"included  {path}" for path in self.included)
        if self.savings:
            yield self.savings

    def _included_by(self, action: Action) -> dict[str, list[str]]:
        """Return the files of a layer that come from outside the recipe's folder."""
        files = {file.real for file in files_of([action.layer]) if file.real in self.included}
        return {"included": sorted(map(str, files))} if files else {}


def _stages(action: Action) -> list[dict[str, Any]]:
    return [
        {
            "step": stage.step.name,
            "cache_key": stage.step.cache_key,
            "stored": stage.is_stored,
            "in_registry": stage.in_registry,
            "reason": stage.reason,
            "inputs": stage.step.inputs,
        }
        for stage in action.stage_deps
    ]


def _lines(action: Action) -> Iterator[tuple[str, str, str, str]]:
    def verb(is_stored: bool, in_registry: bool) -> str:
        return "CACHED" if is_stored else "PULL" if in_registry else "BUILD"

    for stage in action.stage_deps:
        yield verb(stage.is_stored, stage.in_registry), f"{stage.step.name} *", stage.step.cache_key, stage.reason
    yield verb(action.stored is not None, action.in_registry), action.layer.name, action.layer.cache_key, action.reason


@click.command("plan", cls=Command, help=__doc__)
@click.argument("recipe", type=RecipeType())
@recipe_options
@json_option
@click.pass_obj
def command(context: Context, /, recipe: str, recipe_options: RecipeOptions) -> None:
    """Plan, and ask the registry about what is missing."""
    resolved = recipe_options.resolve(recipe)
    actions = plan(resolved, context.store, registry=context.settings.registry, progress=context.progress)
    savings = None
    if recipe_options.gpu_arch:
        from ekiben.builder.wheels import format_savings

        savings = format_savings(resolved, context.store)
    context.print(PlanResult(actions, resolved.included_files, savings))
