"""bases.lock: which image the tag of a base named when it was locked, by its digest for each platform.

One file beside recipe.yaml for the definitions of a recipe, one in each stack's folder for those of images/. It holds
the digest of a platform's own manifest, not that of an index: what is added for another platform changes no key, and a
mirror that has one platform alone has the same digest. SHA256SUMS does not name it: a digest is compared with the bytes
that come anyway.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ekiben.core.checked import Fields, is_digest, parse_json
from ekiben.core.command_name import command_name
from ekiben.core.errors import OR_SYNC, DefinitionError, NotLockedError
from ekiben.core.files import read_source
from ekiben.spec.definition import Definition, Stage, load_agent
from ekiben.spec.source_folders import SourceFolders
from ekiben.spec.stack import Stack

BASES_LOCK = "bases.lock"
_PREFIXES = ("registry", "namespace")  # headers that are part of a reference

Digests = Mapping[str, Mapping[str, str]]  # reference as written → platform → digest


def lock_file(definition: Definition, recipe_folder: Path | None, stack: Stack) -> Path:
    """Return the bases.lock for a definition: of the recipe where it is the recipe's own, else of the stack."""
    folder = recipe_folder if recipe_folder and definition.root == recipe_folder else stack.folder
    return folder / BASES_LOCK


def read_bases_lock(path: Path, name: str) -> Digests:
    """Return the digests of a bases.lock, of which there need not be any. Raises DefinitionError for a damaged one.

    ``name``: of its recipe or stack on a command line.
    """
    text = read_source(path, default="")
    try:
        fields = Fields.of(parse_json(text)) if text else Fields({})
        digests = {
            reference: {platform: fields.object(reference).digest(platform) for platform in fields.mapping(reference)}
            for reference in fields.data
        }
    except ValueError as error:
        hint = f"delete it, and lock again: {command_name()} lock {shlex.quote(name)}"
        raise DefinitionError(f"{path}: {error}", hint=hint) from error
    return digests


def format_bases_lock(digests: Digests) -> str:
    """Return the text of a bases.lock."""
    return json.dumps(digests, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def base_reference(stage: Stage) -> str | None:
    """Return which image of a registry a stage begins with, as its header writes it; None where it is none."""
    if stage.parent is not None:
        return None
    combine = getattr(load_agent(stage.bootstrap), "image_reference", None)
    return str(combine(stage.header)) if combine else None


def bound_base(stage: Stage) -> dict[str, str]:
    """Return which image a stage with a digest begins with: its agent, reference and digest; nothing for others.

    A file has no reference: its path is that of one machine.
    """
    header = stage.header
    reference, _, digest = header["from"].rpartition("@")
    digest = header.get("digest", digest)
    if stage.parent is not None or not is_digest(digest):
        return {}
    base = {"agent": stage.bootstrap, "digest": digest}
    return base if "file" in header else {**base, "reference": reference.removeprefix(f"{stage.bootstrap}://")}


def agent_of(reference: str, definition: Definition) -> Any:
    """Return the agent of the stage that names ``reference``."""
    return next(load_agent(stage.bootstrap) for stage in definition.stages if base_reference(stage) == reference)


def tags_of(definitions: Iterable[Definition]) -> dict[str, Definition]:
    """Return the references that a lock pins, each with a definition that names it."""
    tags: dict[str, Definition] = {}
    for definition in definitions:
        for stage in definition.stages:
            if (reference := base_reference(stage)) and "@" not in reference:
                tags.setdefault(reference, definition)
    return tags


def bind_bases(definition: Definition, recipe_folder: Path, stack: Stack, sources: SourceFolders) -> Definition:
    """Return the definition with the digest in each From: that names an image by a tag, for the stack's platform, and
    with the digest of each file.

    Raises DefinitionError where bases.lock has none, and for a file that is not a base, or may not be read.
    """
    stages = tuple(_bind(stage, definition, recipe_folder, stack, sources) for stage in definition.stages)
    return replace(definition, stages=stages) if stages != definition.stages else definition


def _bind(stage: Stage, definition: Definition, recipe_folder: Path, stack: Stack, sources: SourceFolders) -> Stage:
    agent: Any = load_agent(stage.bootstrap)  # of these functions an agent has those that it needs
    if stage.parent is None and hasattr(agent, "image_file"):
        path = sources.check(
            definition.root / agent.image_file(stage.header),
            f"{definition.path}:{_line_of('From', definition.text)}: From",
        )
        digest = agent.file_digest(path, stage.header, stack.arch)
        return replace(stage, header={**stage.header, "file": str(path), "digest": digest})
    if not (reference := base_reference(stage)):
        return stage
    if "@" not in reference:
        path = lock_file(definition, recipe_folder, stack)
        sources.check(path)
        digests = read_bases_lock(path, _name_of(path, stack)).get(reference, {})
        if stack.platform not in digests:
            key = "From" if stage.header["from"] else "MirrorURL"
            raise _unlocked(f"{key}: {reference}", definition, path, digests, stack)
        reference = f"{reference}@{digests[stack.platform]}"
    header = {name: value for name, value in stage.header.items() if name not in _PREFIXES}
    return replace(stage, header={**header, "from": reference})


def _name_of(path: Path, stack: Stack) -> str:
    """Return how a command line names the recipe or the stack that a bases.lock is for."""
    return stack.name if path.parent == stack.folder else str(path.parent)


def _unlocked(
    named: str, definition: Definition, path: Path, digests: Mapping[str, str], stack: Stack
) -> DefinitionError:
    where = f"{definition.path}:{_line_of(named.partition(':')[0], definition.text)}: {named}"
    name = shlex.quote(_name_of(path, stack))
    if digests:
        return DefinitionError(
            f"{where} is locked for {', '.join(sorted(digests))}, and not for {stack.platform}",
            hint=f"where the image is published for it, too: {command_name()} lock {name} --arch {stack.arch}",
        )
    more = "" if path.parent == stack.folder else OR_SYNC
    return NotLockedError(
        f"{where} is not locked: no digest of it is in {path}, and a tag can move",
        hint=f"{command_name()} lock {name}{more}",
    )


def _line_of(key: str, text: str) -> int:
    lines = enumerate(text.split("\n"), 1)
    return next((number for number, line in lines if re.match(rf"[ \t]*{key}[ \t]*:", line, re.IGNORECASE)), 1)
