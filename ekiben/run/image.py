"""An image that may be run, as a command line named it (ekiben/images finds it), and its SIF's metadata."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ekiben.core.checked import MAX_JSON
from ekiben.core.command_name import command_name
from ekiben.core.errors import StoreError, UsageError, VerifyError, nearest
from ekiben.core.files import digest_of, open_regular
from ekiben.core.inner_path import AnyPath
from ekiben.core.printable import single_line
from ekiben.formats.sif import read_runnable_sif, read_sif
from ekiben.spec.recipe import Recipe, ShippedRecipe

RECIPE_FOLDER = "opt/ekiben/recipe"  # in an image
_HEADER = 1 << 15  # bytes, in which a SIF has its header and its table of partitions


@dataclass(frozen=True, slots=True)
class RequiredSignature:
    """The signature without which an image is not run.

    ``reason``: the setting that asks for it; ``check``: returns the state of a SIF whose signature was found good, and
    raises VerifyError for one without.
    """

    reason: str
    check: Callable[[Path], SifState]

    def refuse_engine(self, name: str, program: str, fix: str | None) -> VerifyError:
        """Return the error for an image that an engine keeps."""
        return VerifyError(
            f"{name} is not run with {program}, whose images have no signature: {self.reason}",
            hint=f"{fix} --format sif, then {command_name()} sign {name}" if fix else None,
        )


@dataclass(frozen=True, slots=True)
class PulledImage:
    """An image of a registry.

    ``sif``: its file in the user's cache, which is not there where only an engine can take the image; ``sha256``: of
    it; ``engine``: the reference by digest by which engines pull it, "" where they cannot; ``note``: a line for the
    user.
    """

    sif: Path
    sha256: str
    engine: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedImage:
    """An image that may be run.

    ``name``: in engines, jobs and messages; ``sif``: its file, which may not be there; ``tasks``: task → how it is
    launched, None where the image does not say (of another builder); ``recipe``: of which it is built, None where the
    image came without; ``build_args``: the arguments of `ekiben build` that make it; ``sha256``: of ``sif`` where a
    record has it, else ""; ``is_published``: it is a version in a shared folder; ``pulled``: the reference by digest
    of a registry's Docker image, which an engine can pull, else ""; ``may_pull``: whether it is pulled where the engine
    does not have it; ``note``: a line for the user; ``signature``: what it needs to be run, None: nothing.
    """

    name: str
    sif: Path
    tasks: Mapping[str, str] | None
    recipe: Recipe | None = None
    build_args: str = ""
    sha256: str = ""
    is_published: bool = False
    pulled: str = ""
    may_pull: bool = True
    note: str = ""
    signature: RequiredSignature | None = None

    @property
    def tag(self) -> str:
        """Return the name that engines keep it under."""
        return f"ekiben/{self.name}:latest"

    @property
    def build_hint(self) -> str | None:
        """Return the command that builds it, None without a recipe."""
        return f"{command_name()} build {self.build_args}" if self.build_args else None

    @property
    def broken_hint(self) -> str:
        """Return a hint for a file that no runtime can start."""
        if self.build_hint:
            return f"{self.build_hint} writes it again"
        return f"{command_name()} run --force starts it all the same"

    def refuse_option(self, option: str) -> UsageError:
        """Return the error for an option that needs the recipe of an image that has none here."""
        kind = "is published" if self.is_published else "is a file"
        shown = self.name if self.is_published else self.sif
        return UsageError(f"{option} is for a recipe's image, and {shown} {kind}")

    def check_file(self) -> None:
        """Check that the file is a complete SIF, which a runtime can start: its header is read, not all of it.

        Raises StoreError.
        """
        try:
            read_runnable_sif(self.sif)
        except StoreError as error:
            raise StoreError(str(error), hint=self.broken_hint) from error

    def launch_of(self, task: str) -> str:
        """Return how a task is launched: per-gpu, single or cpu. Raises UsageError when the image has no such task."""
        if self.tasks is None:
            return "single"
        if task not in self.tasks:
            owner = f"recipe '{self.recipe.name}'" if self.recipe else str(self.sif)
            raise UsageError(f"{owner} has no task '{single_line(task)}'." + nearest(task, self.tasks))
        return self.tasks[task]


# ------------------------------------------------------------------------------------------------------- of a file

PULLED = "pulled"  # the folder of registries' images in a store's downloads


def is_published_file(sif: Path) -> bool:
    """Return whether a SIF is a version in a shared folder, which is not changed."""
    return sif.with_suffix(".json").exists() and sif.with_name(f"{sif.name}.sha256").exists()


@dataclass(frozen=True, slots=True)
class SifState:
    """Attributes that show whether a SIF was changed, without reading all of it.

    ``stat``: size, mtime, ctime and inode, as `stat --format '%s %.9Y %.9Z %i'` prints them; ``header``: SHA-256 of its
    first 32 KiB; ``sha256``: of all of it, "" where nobody knows it: a file whose other values differ is then another.
    """

    stat: str = ""
    header: str = ""
    sha256: str = ""

    def is_same(self, path: Path) -> bool:
        """Return whether ``path`` is that file; reads all of it only where times or inode differ. Raises OSError."""
        now = sif_state(path)
        if (now.stat, now.header) == (self.stat, self.header):
            return True
        return bool(self.sha256) and digest_of(path) == f"sha256:{self.sha256}"


def sif_state(path: Path, sha256: str = "") -> SifState:
    """Return the state of a SIF. Raises OSError."""
    with open_regular(path) as stream:
        return state_of(stream, sha256)


def state_of(stream: BinaryIO, sha256: str = "") -> SifState:
    """Return the state of an open SIF. Raises OSError."""
    status = os.fstat(stream.fileno())
    stream.seek(0)
    header = hashlib.sha256(stream.read(_HEADER)).hexdigest()
    times = (f"{ns // 10**9}.{ns % 10**9:09d}" for ns in (status.st_mtime_ns, status.st_ctime_ns))
    return SifState(" ".join([str(status.st_size), *times, str(status.st_ino)]), header, sha256)


def shipped_recipe(sif: AnyPath) -> ShippedRecipe | None:
    """Return the recipe in an image, None for one not built by Ekiben. Raises ValueError when recipe.yaml is broken."""
    text = read_in_sif(sif, f"{RECIPE_FOLDER}/recipe.yaml")
    return None if text is None else ShippedRecipe.parse(text)


def read_in_sif(sif: AnyPath, path: str) -> bytes | None:
    """Return a file of an image; None when it has none, it is larger than 16 MiB, or only runtimes read the image."""
    from ekiben.formats.squashfs import SquashfsReader  # imported here: its compressors

    try:
        layers = read_sif(sif).layers
        with open_regular(sif) as stream:
            for layer in reversed(layers):
                reader = SquashfsReader(stream, layer.offset)
                if (entry := reader.lookup(path)) is not None:
                    return reader.read_file(path, MAX_JSON) if entry.kind == "file" else None
    except (StoreError, OSError):
        return None
    return None
