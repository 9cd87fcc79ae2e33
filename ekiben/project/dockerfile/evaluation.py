"""The state of a conversion: the stages so far, the variables, and notes about the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ekiben.core.errors import DefinitionError, nearest
from ekiben.project.dockerfile.base_config import BaseConfig
from ekiben.project.dockerfile.context import BuildContext
from ekiben.project.dockerfile.expansion import expand_word
from ekiben.project.dockerfile.model import Stage
from ekiben.project.dockerfile.reader import Dockerfile, Instruction
from ekiben.project.dockerfile.shell import END, UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``arguments`` are --build-arg's; ``target`` is the last stage, by name or number; "" is the file's last.

    ``base_config`` returns what a registry says of an image.
    """

    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    arch: str = "amd64"
    base_config: Callable[[str], BaseConfig]


@dataclass(slots=True)
class Evaluation:
    """The stages of a Dockerfile, and notes about it."""

    dockerfile: Dockerfile
    context: BuildContext
    settings: Settings
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    global_arguments: dict[str, str | None] = field(default_factory=dict)
    used_arguments: set[str] = field(default_factory=set)
    configs: dict[str, BaseConfig] = field(default_factory=dict)

    @property
    def final(self) -> Stage:
        """Return the stage that becomes the image."""
        return self.stages[self.target]

    @property
    def target(self) -> int:
        """Return the number of the last stage. Raises DefinitionError when there is none of that name."""
        named = [stage.number for stage in self.stages if not stage.name.startswith(" ")]
        if not self.settings.target:
            return named[-1]
        number = self.find_stage(self.settings.target, len(self.stages))
        if number is None:
            names = [stage.name for stage in self.stages if stage.name]
            raise DefinitionError(
                f"{self.dockerfile.path}: --target {self.settings.target}: there is no such stage."
                + nearest(self.settings.target, names)
            )
        return number

    @property
    def stage(self) -> Stage:
        """Return the stage that instructions add to."""
        return next(stage for stage in reversed(self.stages) if not stage.name.startswith(" "))

    def find_stage(self, name: str, before: int) -> int | None:
        """Return the number of a stage by name or number."""
        for stage in self.stages[:before][::-1]:
            if stage.name and stage.name == name.lower():
                return stage.number
        numbered = [stage.number for stage in self.stages[:before] if not stage.name.startswith(" ")]
        return numbered[int(name)] if name.isdigit() and int(name) < len(numbered) else None

    def image_stage(self, reference: str, where: str) -> int:
        """Return the number of a stage that is an image, for COPY --from=IMAGE."""
        for stage in self.stages:
            if stage.name == f" {reference}":
                return stage.number
        self.stages.append(Stage(number=len(self.stages), name=f" {reference}", where=where, base=reference))
        return len(self.stages) - 1

    def problem(self, instruction: Instruction, message: str) -> None:
        """Report an instruction that cannot be converted."""
        self.problems.append(f"{instruction.where}: {instruction.name}: {message}")

    def note(self, instruction: Instruction, message: str) -> None:
        """Report an instruction that is not used."""
        self.notes.append(f"{instruction.where}: {instruction.name}: {message}")

    # -- variables ---------------------------------------------------------------------------------------------------

    def look(self, name: str) -> str | None:
        """Return the value of a variable in the current stage."""
        stage = self.stage
        if name in stage.visible:
            return stage.visible[name]
        if name in stage.config.environment:
            return stage.config.environment[name]
        return None if stage.config.is_known else f"{UNKNOWN}{name}{END}"

    def expand(self, word: str) -> str:
        """Expand a word in the current stage. Raises ValueError."""
        return expand_word(word, self.look, self.dockerfile.escape)

    def expand_path(self, word: str) -> str:
        """Expand a word that names a path. Raises ValueError, also where only the base knows it."""
        value = self.expand(word)
        if UNKNOWN in value:
            raise ValueError(f"{word}: the base's registry did not answer, so its variables are not known here")
        return value
