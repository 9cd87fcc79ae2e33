"""Explain why requirements conflict with the layers below, or resolve to an old version only, and suggest fixes: each
suggestion is resolved by uv before it is printed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ekiben.core.process import ProcessError
from ekiben.packages.requirements import compile_lock
from ekiben.project.sources import Resolution
from ekiben.spec.base_packages import BasePackages
from ekiben.spec.sources import Source
from ekiben.spec.stack import read_pins

_MAX_TRIES = 12  # suggestions that are resolved, each of which takes about a second


@dataclass(frozen=True, slots=True)
class Alternative:
    """Other layers below: what to write where, and their pins; "" and a text that installs nothing below."""

    change: str
    below: str
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A package that a layer below pins, and the requirement of another version."""

    name: str
    version: str
    layer: str
    asked: str = ""

    def __str__(self) -> str:
        request = f", and {self.asked}" if self.asked else ""
        return f"the layer '{self.layer}' has {self.name} {self.version}{request}"


def find_constraints(message: str, by_layer: Mapping[str, str]) -> list[Constraint]:
    """Return the pins of the layers below that uv's message names, with what it says is asked for instead."""
    text = " ".join(message.split())
    constraints = []
    for layer, pins in by_layer.items():
        for name, version, _ in read_pins(pins):
            exact = re.escape(f"{name}=={version}")
            if not re.search(rf"(?<![\w.-]){exact}(?![\w.-]*\d)", text):
                continue
            requests = re.findall(rf"(\S+) depends? on ({re.escape(name)}[<>=!~][^\s,]*(?:,[<>=!~][^\s,]*)*)", text)
            requests = [(who, what) for who, what in requests if what != f"{name}=={version}"]
            direct = re.findall(rf"you require ({re.escape(name)}[<>=!~][^\s]*)", text)
            asked = f"{requests[0][0]} depends on {requests[0][1]}" if requests else ""
            if not asked and (other := next((item for item in direct if item.strip(",") != f"{name}=={version}"), "")):
                asked = f"you ask for {other.strip(',')}"
            constraints.append(Constraint(name, version, layer, asked))
    return sorted(constraints, key=lambda item: not item.asked)


def find_limits(message: str, base: BasePackages | None) -> list[str]:
    """Return the lines of a base's files of constraints that uv's message names, a sentence each."""
    text = " ".join(message.split())
    return [
        f"{item.file} of the base has {item.line}"
        for item in (base.limits if base else ())
        if re.search(rf"(?<![\w.-]){re.escape(Requirement(item.line).name)}\s?[<>=!~]", text)
    ]


def find_ways_out(resolution: Resolution, alternatives: Callable[[], Iterator[Alternative]]) -> list[str]:
    """Return what would resolve the conflict, a sentence each; each was tried."""
    ways = []
    for at, asked in enumerate(resolution.checked.requirements):
        if asked.specifier and at < _MAX_TRIES:
            free = Requirement(_without_specifier(asked))
            remaining = (*resolution.checked.requirements[:at], free, *resolution.checked.requirements[at + 1 :])
            tried = replace(resolution, checked=replace(resolution.checked, requirements=remaining))
            if (text := _try(tried)) and (version := _version(text, asked.name)):
                ways.append(f"{asked.name}=={version} goes with these layers; you ask for {asked}")
    for alternative in itertools.islice(alternatives(), _MAX_TRIES):
        if len(ways) < 4 and _try(replace(resolution, below=alternative.below, absent=alternative.absent, old="")):
            ways.append(alternative.change)
    return ways


def find_held_back(resolution: Resolution, text: str, by_layer: Mapping[str, str]) -> list[str]:
    """Return a warning for each requirement that the layers below hold at a version far below the newest."""
    brought = {item.name for item in resolution.checked.installed}  # a base's own version is what one asked for
    requirements = [
        item
        for item in resolution.checked.requirements
        if not _is_exact(item) and canonicalize_name(item.name) not in brought
    ]
    if not requirements or not resolution.below:
        return []
    checked = replace(resolution.checked, requirements=tuple(requirements), git=())
    try:
        newest = compile_lock(checked, resolution.stack, below="", absent=[], old="", wheels_only=False)
    except ProcessError:
        return []
    warnings = []
    for asked in requirements:
        has, best = _version(text, asked.name), _version(newest, asked.name)
        if has and best and _is_far(Version(has), Version(best)):
            exact = Requirement(f"{asked.name}=={best}")
            tried = replace(resolution, checked=replace(resolution.checked, requirements=(exact,), git=()), old="")
            try:
                tried.compile(())
                reason = "another of your requirements holds it back"
            except ProcessError as error:
                constraints = find_constraints(error.stderr, by_layer)
                reason = str(constraints[0]) if constraints else "no index has it in a form that fits the stack"
            warnings.append(f"warning: {asked.name} {has} is far below {best}, the newest: {reason}")
    return warnings


def _is_far(has: Version, best: Version) -> bool:
    """Return whether the first number that is not 0 of the newest release is larger: a step that may break."""
    at = next((at for at, number in enumerate(best.release) if number), 0)
    return has.release[: at + 1] < best.release[: at + 1]


def _is_exact(asked: Requirement) -> bool:
    return any(item.operator in ("==", "===") for item in asked.specifier)


def _without_specifier(asked: Requirement) -> str:
    extras = f"[{','.join(sorted(asked.extras))}]" if asked.extras else ""
    return f"{asked.name}{extras}" + (f" ; {asked.marker}" if asked.marker else "")


def _version(text: str, name: str) -> str:
    versions = {canonicalize_name(pin): version for pin, version, _ in read_pins(text)}
    return versions.get(canonicalize_name(name), "")


def resolved_version(resolution: Resolution, name: str) -> str:
    """Return the version of a package that uv chooses, "" where there is no solution."""
    return _version(_try(resolution), name)


def _try(resolution: Resolution) -> str:
    """Return the lock, "" where there is none."""
    sources: list[Source] = [item for item in resolution.known if not item.commit]
    try:
        return replace(resolution, checked=replace(resolution.checked, git=())).compile(sources)
    except ProcessError:
        return ""
