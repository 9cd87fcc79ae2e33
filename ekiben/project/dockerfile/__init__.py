"""A Dockerfile and its build context become a recipe with definition files.

reader       instructions, with flags, heredocs and JSON
expansion    variables, quotes and blanks of instructions
ignore       .dockerignore
pattern      patterns of it, and of COPY
base_config  what the image of FROM sets
context      files that COPY and ADD name
evaluate     the instructions, one after the other
definitions  definition files of the stages
conversion   the recipe's folder
temporary    the same for the time of a build
locate       whether a command line names a Dockerfile

The conversion is loaded on first use: most builds are of recipes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ekiben.project.dockerfile.locate import dockerfile_of, find_dockerfile

if TYPE_CHECKING:
    from ekiben.project.dockerfile.conversion import Conversion, convert
    from ekiben.project.dockerfile.temporary import temporary_recipe

__all__ = ["Conversion", "convert", "dockerfile_of", "find_dockerfile", "temporary_recipe"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "temporary_recipe":
        from ekiben.project.dockerfile import temporary as module
    else:
        from ekiben.project.dockerfile import conversion as module  # type: ignore[no-redef]
    return getattr(module, name)
