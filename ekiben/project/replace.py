"""Packages of the layers below that a recipe's layer installs in another version, over the one below.

The list of requirements says which, in a comment that `add --replace` writes: ``# replace: NAME``. The definition file
gets two lines: one takes the pin out of the lock file of the layer below, whose test compares it with what is
installed, and one imports the package in the finished image.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ekiben.core.command_name import command_name
from ekiben.core.errors import DefinitionError, UsageError
from ekiben.core.files import format_size
from ekiben.core.process import ProcessError
from ekiben.packages.requirements import RequirementsFile, python_options, run_uv
from ekiben.spec.definition import Definition
from ekiben.spec.stack import Stack, read_pins, without_packages

# What torch is built with: wheels and the compiled layers load these libraries by their version.
_OF_TORCH = re.compile(r"torch|torchvision|torchaudio|triton|nvidia-.+|cuda-.+")
_MARK = "  # replaces {name} of a layer below"
_IMPORTS = (
    "import importlib, importlib.metadata, sys; [importlib.import_module(module) for module, names in"
    " importlib.metadata.packages_distributions().items() if sys.argv[1] in"
    ' [name.lower().replace("_", "-").replace(".", "-") for name in names]'
    ' and module.isidentifier() and not module.startswith("_")]'
)


@dataclass(frozen=True, slots=True)
class Replaceable:
    """A package of a layer below. ``locks`` are the lock files in the image that pin it."""

    name: str
    version: str
    layer: str
    locks: tuple[str, ...]


def find_replaceable(
    name: str, definitions: Sequence[Definition], by_layer: Mapping[str, str], compiled: Collection[str], where: str
) -> Replaceable:
    """Return a package of the layers below that may be replaced. ``where`` names what asks for it.

    Raises UsageError for one that no layer has, or that a layer is compiled for.
    """
    if name in compiled:
        raise UsageError(f"{where}: {name} is compiled by a layer below, for the torch there; no index has that wheel")
    for definition in definitions:
        versions: dict[str, str] = {
            canonicalize_name(pin): version for pin, version, _ in read_pins(by_layer[definition.name])
        }
        if name not in versions:
            continue
        if _OF_TORCH.fullmatch(name):
            compiled_for = f", and {', '.join(sorted(compiled))} is compiled for it" if compiled else ""
            raise UsageError(
                f"{where}: {name} {versions[name]} of the layer '{definition.name}' is not replaced: torch and its"
                f" libraries load each other by their versions{compiled_for}",
                hint="another stack has another torch: `stack:` in recipe.yaml",
            )
        locks = [
            copy.destination for copy in definition.final.files if copy.stage is None and copy.source.endswith(".lock")
        ]
        if not locks:
            raise UsageError(
                f"{where}: {name} {versions[name]} is the base's own, which no lock file pins, and is not replaced",
                hint="another base, or a version that goes with this one",
            )
        return Replaceable(name, versions[name], definition.name, tuple(locks))
    raise UsageError(f"{where}: no layer below has {name}", hint=f"without --replace: {command_name()} add {name}")


def free(checked: RequirementsFile, pins: str, names: Collection[str]) -> tuple[RequirementsFile, str]:
    """Return the requirements, and the pins of the layers below, with which uv chooses other versions of ``names``.

    All that the layers have is required then, so that a version fits what depends on it there.
    """
    kept = without_packages(pins, names)
    asked = {canonicalize_name(item.name) for item in checked.requirements}
    below = [Requirement(f"{name}=={version}") for name, version, _ in read_pins(kept)]
    named = [Requirement(name) for name in names if name not in asked]
    return replace(checked, requirements=(*checked.requirements, *named, *below)), kept


# -- the definition file
# -----------------------------------------------------------------------------------------------------


def write_lines(text: str, packages: Sequence[Replaceable], lock: str, path: Path) -> str:
    """Return a definition's text with the lines of each package; ``lock`` is the layer's lock file.

    Raises DefinitionError where %post does not install that.
    """
    for item in packages:
        mark = _MARK.format(name=item.name)
        if mark + "\n" in text:
            continue
        files = " ".join(item.locks)
        remove = f"sed -i '/^{item.name}==/,/[^\\\\]$/d' {files}{mark}"
        text = _after(text, ("install.py", lock), remove, path)
        text = _after(text, ("check.py", lock), f"python -c '{_IMPORTS}' {item.name}{mark}", path)
    return text


def _after(text: str, terms: tuple[str, str], new: str, path: Path) -> str:
    """Return the text with a line after the last one that has these terms. Raises DefinitionError."""
    lines = text.splitlines(keepends=True)
    matches = [at for at, line in enumerate(lines) if all(term in line for term in terms) and "#" not in line]
    if not matches:
        raise DefinitionError(
            f"{path}: no line has {' … '.join(terms)}, after which --replace writes another",
            hint=f"`{command_name()} init NAME` writes a layer that has one in %post and one in %test: copy these",
        )
    indent = lines[matches[-1]][: -len(lines[matches[-1]].lstrip())]
    end = "" if lines[matches[-1]].endswith("\n") else "\n"
    lines.insert(matches[-1] + 1, f"{end}{indent}{new}\n")
    return "".join(lines)


def remove_lines_of(text: str, name: str) -> str:
    """Return a definition's text without the lines of a package."""
    mark = _MARK.format(name=name) + "\n"
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith(mark))


def has_lines(text: str, name: str) -> bool:
    """Return whether a definition replaces a package."""
    return _MARK.format(name=name) + "\n" in text


# -- its size
# ------------------------------------------------------------------------------------------------------


def cost_lines(packages: Sequence[Replaceable], lock: str, checked: RequirementsFile, stack: Stack) -> Iterator[str]:
    """Yield a line for each package in ``lock`` that another version replaces, with the bytes that it adds."""
    versions: dict[str, str] = {canonicalize_name(name): version for name, version, _ in read_pins(lock)}
    for item in packages:
        new = versions.get(item.name, "")
        text = f"{item.name} {new} replaces {item.version} of the layer '{item.layer}'"
        yield f"{text}: {_size(item.name, new, checked, stack)}"


def _size(name: str, version: str, checked: RequirementsFile, stack: Stack) -> str:
    with tempfile.TemporaryDirectory(prefix="ekiben-size-") as folder:
        site, options = Path(folder) / "site", list(checked.options)
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join([*options, f"{name}=={version}", ""]), encoding="utf-8")
        project = Path(folder) / "project"
        project.mkdir()
        arguments: list[str | Path] = ["install", "--quiet", "--target", site, "--no-deps", "--only-binary", ":all:"]
        try:
            run_uv([*arguments, *python_options(stack), "--requirements", requirements], project)
        except ProcessError:
            return "its size is known when it is built; the version below stays in its layer"
        size = sum(path.lstat().st_size for path in site.rglob("*") if path.is_file())
        return f"{format_size(size)} more, as the version below stays in its layer"


def refuse_missing_lines(checked: RequirementsFile, definition: str, path: Path) -> None:
    """Raise DefinitionError where the list replaces a package, and the layer's definition file does not."""
    for name in checked.replaced:
        if not has_lines(definition, name):
            raise DefinitionError(
                f"{checked.files[0]}: # replace: {name}, and {path} has no line for it",
                hint=f"`{command_name()} add --replace {name}` writes both",
            )
