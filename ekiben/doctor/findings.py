"""Findings of doctor with a level, sections of them, and the type of a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from ekiben.core.errors import IncompatibleHostError
from ekiben.doctor.image_requirements import ImageRequirements
from ekiben.run.site import SiteFile

LEVELS = ("ok", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one rule.

    ``level``: ok, info, warning or error; ``message`` names the facts it rests on; ``fix``: what helps.
    """

    level: str
    topic: str
    message: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """The image that rules check, and the option that names a stack for the site's GPUs. ``is_here``: the site is this
    machine, whose runtimes are known.
    """

    image: ImageRequirements
    better_stack: str | None = None
    is_here: bool = False


Rule = Callable[[SiteFile, CheckedImage], Iterable[Finding]]


def worst(findings: Iterable[Finding]) -> str:
    """Return the highest level among ``findings``."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def verdict(findings: Sequence[Finding], check: str = "run") -> str:
    """Return the conclusion: will run; will run, but …; will fail because …; what to do."""
    level = worst(findings)
    if level in ("ok", "info"):
        return f"will {check}"
    reasons = [finding for finding in findings if finding.level == level]
    message = "; ".join(finding.message for finding in reasons)
    if level == "warning":
        return f"will {check}, but {message}"
    return "; ".join(
        [f"will fail because {message}", *dict.fromkeys(finding.fix for finding in reasons if finding.fix)]
    )


@dataclass(frozen=True, slots=True)
class Section:
    """One question and its findings.

    ``check``: does an image ``run``, does a stack ``suit``, does one ``build`` here. ``is_decisive``: an error means
    that what was asked about fails.
    """

    check: str
    title: str
    findings: list[Finding]
    is_decisive: bool = True

    @property
    def verdict(self) -> str:
        """Return the section's verdict, of its worst finding."""
        return verdict(self.findings, self.check)


def text(sections: Sequence[Section]) -> str:
    """Return the sections as text of one screen."""
    width = max((len(finding.topic) for section in sections for finding in section.findings), default=0)
    lines: list[str] = []
    for section in sections:
        lines += [section.title]
        for finding in section.findings:
            lines.append(f"  {finding.level:<7}  {finding.topic:<{width}}  {finding.message}")
            if finding.fix and finding.level != "ok":
                lines.append(f"           {'':<{width}}  → {finding.fix}")
        lines += [f"→ {section.verdict}", ""]
    return "\n".join(lines[:-1])


def refuse(findings: Sequence[Finding]) -> None:
    """Raise IncompatibleHostError when a finding is an error."""
    if worst(findings) == "error":
        failing = [finding for finding in findings if finding.level == "error"]
        raise IncompatibleHostError(verdict(failing), hint="--force runs it anyway")


class SectionReport(TypedDict):
    """A section in `--json`."""

    check: str
    title: str
    level: str
    verdict: str
    findings: list[FindingReport]


class FindingReport(TypedDict):
    """A finding in `--json`."""

    level: str
    topic: str
    message: str
    fix: str | None


def report(sections: Sequence[Section]) -> list[SectionReport]:
    """Return the sections as `--json` prints them."""
    return [
        SectionReport(
            check=section.check,
            title=section.title,
            level=worst(section.findings),
            verdict=section.verdict,
            findings=[
                FindingReport(level=finding.level, topic=finding.topic, message=finding.message, fix=finding.fix)
                for finding in section.findings
            ],
        )
        for section in sections
    ]
