"""Makes a new recipe's folder on a base of others: an image of a registry, or one in a file."""

from __future__ import annotations

import contextlib
import itertools
import os
import posixpath
import re
import shlex
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from ekiben.core.atomic import is_vacant, new_folder
from ekiben.core.environment import host_arch
from ekiben.core.errors import FetchError, UsageError
from ekiben.core.files import open_regular, read_source
from ekiben.core.paths import PROJECT_ROOT
from ekiben.project.base import ReadBase
from ekiben.project.create import TEMPLATE, TemplateText, check_name
from ekiben.project.shipped import ShippedTasks
from ekiben.spec.base_packages import BasePackages, format_base_packages
from ekiben.spec.bases_lock import BASES_LOCK, base_reference, format_bases_lock
from ekiben.spec.definition import Stage, load_agent
from ekiben.spec.recipe import read_recipe
from ekiben.spec.stack import StackFile, find_stack

_TEMPLATE = Path(__file__).with_name("template_base")
_SCHEME = re.compile(r"([a-z][a-z-]*)://(.+)")
_MAX_NAMES = 10_000  # entries of an archive that are looked at
_CODE = re.compile(r"(?:sm|compute)_(\d+)(\d)[af]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRequest:
    """A base as it was asked for, its ``Bootstrap:`` agent and what stands after ``From:``. ``stack`` is the one whose
    times and processors the new recipe's takes; ``is_dry``: write nothing. ``tasks`` are those of a recipe of
    Ekiben's, None for an example.
    """

    asked: str
    bootstrap: str
    location: str
    stack: str = "cu130"
    is_dry: bool = False
    tasks: ShippedTasks | None = None

    @property
    def file(self) -> Path | None:
        """Return the file or folder that the base is in, None for an image of a registry."""
        path = Path(self.location)
        return path if path.is_absolute() else None

    @property
    def include_option(self) -> str:
        """Return the option by which commands may read the file that the base is in."""
        return f"--include {shlex.quote(self.location)}" if self.file else ""


@dataclass(frozen=True, slots=True)
class CreatedRecipe:
    """The files of a new recipe, by their paths, and what is to be known of its base, a line each."""

    texts: Mapping[Path, str]
    notes: tuple[str, ...]


def find_base_request(source: str, stack: str) -> BaseRequest | None:
    """Return the base that ``--from`` names: SCHEME://NAME, or the path of a SIF, an OCI folder or archive; None for
    what is none of them.

    Raises UsageError for a kind of base that no agent here reads.
    """
    if match := _SCHEME.fullmatch(source):
        bootstrap, location = match[1], match[2]
    elif agent := _file_agent(Path(source)):
        bootstrap, location = agent, os.path.abspath(source)
    else:
        if source.endswith("://"):
            raise UsageError(f"--from {source}: names no image", hint="write docker://HOST/NAME:TAG")
        if source.endswith(".sif"):
            raise UsageError(f"--from {source}: there is no such file")
        return None
    problems = load_agent(bootstrap).header_problems({"bootstrap": bootstrap, "from": location})
    if problems:
        raise UsageError(f"--from {source}: {problems[0].removeprefix('From: ')}")
    return BaseRequest(asked=source, bootstrap=bootstrap, location=location, stack=stack)


def _file_agent(path: Path) -> str:
    """Return the agent for a file or a folder, "" where it looks like no image."""
    if path.is_dir():
        return "oci" if (path / "oci-layout").is_file() else ""
    if path.suffix == ".sif":
        return "localimage" if path.is_file() else ""
    names = _archive_names(path) if path.suffix == ".tar" and path.is_file() else set()
    known = {"manifest.json": "docker-archive", "oci-layout": "oci-archive"}
    return next((agent for name, agent in known.items() if name in names), "")


def _archive_names(path: Path) -> set[str]:
    """Return the names in the top folder of a tar, as far as it can be read."""
    names = set[str]()
    with (
        contextlib.suppress(tarfile.TarError, OSError, ValueError),
        open_regular(path) as stream,
        tarfile.open(fileobj=stream, mode="r:") as archive,
    ):
        names.update(info.name.removeprefix("./") for info in itertools.islice(archive, _MAX_NAMES))
    return names


def create_on_base(folder: Path, request: BaseRequest, read: ReadBase) -> CreatedRecipe:
    """Create ``folder``, a recipe of the same name with a layer on the base, whose files ``read`` reads.

    Raises UsageError: ``folder`` has something in it or cannot be written, its name is none for a recipe, or this is no
    amd64;
    FetchError: the registry has no such image for this machine; what ``read`` raises.
    """
    name = folder.absolute().name
    check_name(name)
    if host_arch() != "amd64":
        raise UsageError(f"--from {request.asked}: images of others are read on amd64 only; this is {host_arch()}")
    stack = find_stack(request.stack, [PROJECT_ROOT / "images"], asked_by="--stack").file
    if not is_vacant(folder):
        raise UsageError(f"{folder} exists and is not empty", hint="name a new folder")
    digests = _digests(request, stack)
    with _folder_for(folder, request.is_dry) as fresh:
        # What the base has is not known yet, and its layer's key does not depend on it.
        placeholder = BasePackages(digest="", python="/usr/bin/python3", version="3", libc="", packages=())
        _write(fresh, _texts(name, request, placeholder, digests, _stack_file(name, request, placeholder, stack)))
        included = [request.file] if request.file else []
        recipe = read_recipe(fresh, included)
        packages = read(recipe, find_stack(name, recipe.image_folders))
        notes = request.tasks.check(packages) if request.tasks else []
        texts = _texts(name, request, packages, digests, _stack_file(name, request, packages, stack))
        texts[f"images/{name}-base.packages.json"] = format_base_packages({f"linux/{host_arch()}": packages})
        _write(fresh, texts)
    files = {folder / inside: texts[inside] for inside in sorted(texts)}
    return CreatedRecipe(files, (*_description_lines(packages), *notes))


@contextlib.contextmanager
def _folder_for(folder: Path, is_dry: bool) -> Iterator[Path]:
    if is_dry:
        with tempfile.TemporaryDirectory(prefix="ekiben-init-") as temporary:
            yield Path(temporary)
    else:
        with new_folder(folder) as fresh:
            yield fresh


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    for inside, text in texts.items():
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        (folder / inside).write_text(text, encoding="utf-8")


def _digests(request: BaseRequest, stack: StackFile) -> dict[str, dict[str, str]]:
    """Return what bases.lock says of the base; nothing for one that is named by its digest, or is a file."""
    from ekiben.registry.client import Registry
    from ekiben.registry.reference import Reference

    if request.file or "@" in request.location:
        return {}
    reference = base_reference(
        Stage(name=None, header={"bootstrap": request.bootstrap, "from": request.location}, arguments={})
    )
    if reference is None:
        return {}
    available = Registry(Reference.parse(reference)).platform_digests()
    platforms = [f"linux/{arch}" for arch in stack.architectures]
    digests = {platform: digest for platform in platforms if (digest := available.get(platform, available.get("", "")))}
    if f"linux/{host_arch()}" not in digests:
        raise FetchError(
            f"--from {request.asked}: has no image for linux/{host_arch()}; it has {', '.join(sorted(available))}"
        )
    return {reference: digests}


def _stack_file(name: str, request: BaseRequest, packages: BasePackages, stack: StackFile) -> StackFile:
    """Return the recipe's own stack: the versions of the base."""
    codes = [match for item in packages.device_code if (match := _CODE.fullmatch(item)) and item.startswith("sm_")]
    return replace(
        stack,
        name=name,
        description=f"The versions of {request.asked}",
        suite="",
        python=packages.minor,
        cuda=packages.cuda,
        torch=packages.torch,
        driver="",
        compute_capabilities=tuple(dict.fromkeys(f"{int(match[1])}.{match[2]}" for match in codes)),
        architectures=(host_arch(),),
        arguments={},
        interpreter=packages.python,
        libc=packages.libc,
    )


def _texts(
    name: str, request: BaseRequest, packages: BasePackages, digests: Mapping[str, Mapping[str, str]], stack: StackFile
) -> dict[str, str]:
    folder = posixpath.dirname(packages.python)
    values = {
        "name": name,
        "layer": f"{name}-base",
        "stack": name,
        "source": request.asked,
        "bootstrap": request.bootstrap,
        "location": request.location,
        "python": packages.python,
        "path": f"    export PATH={folder}:$PATH\n" if folder not in ("/usr/bin", "/usr/local/bin") else "",
        "description": "".join(f"- {line}\n" for line in _description_lines(packages)).rstrip(),
        "bases": "| `bases.lock` | which image the tag named when it was locked |\n" if digests else "",
    }
    tasks = request.tasks
    values |= _task_values(tasks)
    sources = {"recipe.schema.json": TEMPLATE / "recipe.schema.json"}
    if tasks is None:
        sources |= {inside: TEMPLATE / inside for inside in ("recipe.yaml", "requirements.txt")}
        sources["entrypoints/train.py"] = TEMPLATE / "entrypoints/train.py.txt"
    sources["README.md"] = _TEMPLATE / "README.md"
    sources[f"images/{name}-base.def"] = _TEMPLATE / "images/base.def"
    sources[f"images/{name}-packages.def"] = _TEMPLATE / "images/packages.def"
    sources["images/install.py"] = _TEMPLATE / "images/install.py.txt"
    texts = {inside: TemplateText(read_source(path)).substitute(values) for inside, path in sources.items()}
    if tasks is not None:
        texts |= {**tasks.texts, "recipe.yaml": tasks.recipe_text(name, f"{name}-packages")}
    content = {**asdict(stack), "compute_capabilities": [*stack.compute_capabilities]}
    content["architectures"] = [*stack.architectures]
    texts[f"images/stacks/{name}/stack.yaml"] = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    if digests:
        texts[BASES_LOCK] = format_bases_lock(digests)
    return texts


def _task_values(tasks: ShippedTasks | None) -> dict[str, str]:
    """Return what the README says of the tasks."""
    if tasks is not None:
        line = f"| `configs/`, `data/` | of the recipe `{tasks.name}` of Ekiben, whose scripts run |\n"
        scripts = line if any(inside.startswith("configs/") for inside in tasks.texts) else ""
        purpose = tasks.description
        return {"purpose": purpose, "remark": "", "task": tasks.task, "result": "", "scripts": scripts}
    return {
        "purpose": "Fits a line to noisy points",
        "remark": ": an example to replace",
        "task": "train",
        "result": "                     # results/metrics.jsonl and results/model.json, in this folder",
        "scripts": "| `entrypoints/` | the scripts behind those commands |\n",
    }


def _description_lines(packages: BasePackages) -> Iterator[str]:
    """Yield what was found of a base, a line each."""
    count = _count(len(packages.packages), "package")
    yield f"Python {packages.version} in {packages.python}, {packages.libc}, {count}"
    if packages.torch:
        code = f", with code for {' '.join(packages.device_code)}" if packages.device_code else ""
        cuda = f"CUDA {packages.cuda}" if packages.cuda else "no CUDA"
        yield f"torch {packages.torch} for {cuda}{code}"
    for file in dict.fromkeys(item.file for item in packages.constraints):
        yield f"{_count(sum(item.file == file for item in packages.constraints), 'constraint')} in {file}"
    if not any(item.name == "pip" for item in packages.packages):
        yield "no pip, which the layer of the packages needs: install it in the base's %post, as with apt-get"
    yield from packages.unused


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
