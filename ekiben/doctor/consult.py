"""Check whether an image will run: compare it with a machine or a site's compute nodes, rule by rule.

Each finding says what it rests on; a fact that nobody stated is reported as unknown and never assumed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ekiben.core.emulation import emulation_problem
from ekiben.core.environment import host_arch
from ekiben.core.errors import EngineError, StoreError, VerifyError
from ekiben.core.files import read_yaml
from ekiben.core.paths import PROJECT_ROOT
from ekiben.core.process import name_exit, run
from ekiben.doctor.findings import CheckedImage, Finding, Rule, Section
from ekiben.doctor.image_requirements import ImageRequirements, requirements_of_layers, requirements_of_sif
from ekiben.doctor.machine import build_host, node_here, runtime_of, runtimes_here
from ekiben.doctor.rules import building, device_code, nodes, runtimes
from ekiben.formats.squashfs.reader import UnknownCompression
from ekiben.gpu.device_code import DeviceCode
from ekiben.run.image import NamedImage
from ekiben.run.launch import RunRequest, Target, launch
from ekiben.run.site import SiteFile
from ekiben.spec.bases_lock import bound_base
from ekiben.spec.recipe import Recipe
from ekiben.spec.stack import StackFile
from ekiben.store import Store
from ekiben.store.shared import group_name

if TYPE_CHECKING:
    from ekiben.resolve.graph import ResolvedRecipe

_EXPECTED = re.compile(r"^memory\s+([\d.]+) GiB expected", re.MULTILINE)  # as the tasks print it

_ANOTHER_BASE = "stand on another image: this torch is of no stack here"
IMAGE_RULES: tuple[Rule, ...] = (nodes.architecture, *device_code.RULES, *runtimes.RULES, *nodes.RULES)
CPU_RULES: tuple[Rule, ...] = (nodes.architecture, *runtimes.RULES)
STACK_RULES = device_code.RULES


def check(rules: Iterable[Rule], site: SiteFile, checked: CheckedImage) -> list[Finding]:
    """Return the findings of ``rules``."""
    return [finding for rule in rules for finding in rule(site, checked)]


def check_image(
    site: SiteFile,
    image: ImageRequirements,
    stacks: Sequence[StackFile] = (),
    *,
    gpu: bool = True,
    is_here: bool = False,
) -> list[Finding]:
    """Check whether ``image`` runs on a node of ``site``. ``stacks``: alternatives; not ``gpu``: without GPUs;
    ``is_here``: see CheckedImage.
    """
    instead = device_code.better_stack(site.node, stacks) if _is_of(stacks, image) else _ANOTHER_BASE
    checked = CheckedImage(image, instead, is_here)
    return check(IMAGE_RULES if gpu else CPU_RULES, site, checked)


def _is_of(stacks: Sequence[StackFile], image: ImageRequirements) -> bool:
    """Return whether an image's torch is that of a stack, which --stack may change; a base's is not."""
    public = (image.torch or "").partition("+")[0]
    return not public or not stacks or public in [stack.torch.partition("+")[0] for stack in stacks]


def declared_requirements(stack: StackFile, arch: str, partitions: int, *, gpu: bool = True) -> ImageRequirements:
    """Return the requirements of an image that is not built yet, as its stack.yaml declares them."""
    declared = device_code.declared_code(stack)
    libraries = {f"{stack.name}/stack.yaml": DeviceCode({declared: 1})} if gpu and declared else {}
    return ImageRequirements(
        name=f"stack {stack.name}",
        size=0,
        partitions=partitions,
        arch=arch,
        cuda=(stack.cuda or None) if gpu else None,
        torch=(stack.torch or None) if gpu else None,
        glibc=None,
        compat=None,
        network=(),
        libraries=libraries,
        packages={},
        damaged={},
    )


def check_stack(site: SiteFile, stack: StackFile) -> list[Finding]:
    """Check whether images of a stack run on a site's GPUs."""
    return check(STACK_RULES, site, CheckedImage(declared_requirements(stack, site.node.architecture, 1)))


def ask_task(target: Target, argv: Sequence[str], environment: Mapping[str, str]) -> float | Finding:
    """Return the GiB that ``task --dry-run ARGS`` expects, run in the image here without a GPU."""
    task, *arguments = argv
    ready = launch(target, RunRequest(argv=[task, "--dry-run", *arguments], gpu=False), environment)
    done = run(ready.argv, env=ready.environment, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return Finding(
            "warning", "memory", f"{task} --dry-run ended with {name_exit(done.returncode)}: {''.join(last)}"
        )
    if not (match := _EXPECTED.search(done.stdout)):
        return Finding("info", "memory", f"{task} --dry-run does not print the memory")
    return float(match[1])


def check_here(
    store: Store, program: str, image: NamedImage, *, gpu: bool, log: Callable[[str], None]
) -> list[Finding]:
    """Check whether ``program`` will run the image here; quick once its layers were read.

    Raises StoreError for a SIF that is damaged.
    """
    runtime = runtime_of(Path(program).name)
    if runtime is None:
        return []  # its own message is the better one
    try:
        requirements = (
            _requirements_in_store(image.name, store, log)
            if runtime.kind == "docker"
            else requirements_of_sif(image.sif, store, log, gpu=gpu)
        )
    except StoreError as error:
        if runtime.kind == "docker" or isinstance(
            error, UnknownCompression
        ):  # the starting command may have read the image already
            return [Finding("warning", "image", f"its content could not be read: {error}")]
        raise StoreError(str(error), hint=image.broken_hint) from error
    if requirements is None:
        return []
    site = SiteFile(name="this machine", description="", node=node_here(), runtimes=(runtime,))
    if requirements.arch != site.node.architecture:  # reported before all other findings
        return [_foreign(requirements.arch)]
    return [finding for finding in check_image(site, requirements, known_stacks(), gpu=gpu) if finding.level != "ok"]


def _foreign(arch: str) -> Finding:
    """Report whether programs of another architecture run here, and how."""
    message = f"the image is for {arch}, this machine is {host_arch()}"
    if problem := emulation_problem(arch):
        return Finding("error", "machine", f"{message}: {problem[0]}", problem[1])
    return Finding("warning", "machine", f"{message}: it is emulated, some ten times slower, and sees no GPU")


@dataclass(frozen=True, slots=True)
class Subject:
    """An image to check, called ``title``.

    ``resolve``: resolves its recipe; ``choose``: returns what runs it here, as `run` chooses it; ``task``: whose memory
    is checked, too; ``ask``: returns what it expects.
    """

    image: NamedImage
    title: str
    resolve: Callable[[Recipe], ResolvedRecipe]
    choose: Callable[[], Target]
    task: str = ""
    ask: Callable[[Target], float | Finding] | None = None


def consult(
    store: Store, subject: Subject | None, site: SiteFile | None, output: Path, log: Callable[[str], None]
) -> list[Section]:
    """Return all findings about an image, on a site's nodes or here, and about building here.

    Raises UsageError, DefinitionError, StoreError, EngineError.
    """
    where = site or SiteFile(name="this machine", description="", node=node_here(), runtimes=runtimes_here())
    sections = []
    needed = building.TORCH_BUILD
    if subject is not None:
        if subject.image.recipe is None:  # Docker runs no SIF
            runtimes_of_sif = tuple(runtime for runtime in where.runtimes if runtime.kind != "docker")
            where = replace(where, runtimes=runtimes_of_sif)
        gpu = site is not None or bool(where.node.gpus)
        requirements, missing = _requirements_of(subject, store, log, gpu=gpu)
        title = f"{subject.title} on {described(where)}"
        notes = (
            [Finding("info", "image", f"not built yet: checked by the declarations of {requirements.name}")]
            if missing
            else []
        )
        refused = _refusals(subject, is_here=site is None)
        findings = [
            *notes,
            *_base(subject),
            *refused,
            *check_image(where, requirements, known_stacks(), gpu=gpu, is_here=site is None),
        ]
        if subject.ask and not refused:
            findings += _memory(subject, subject.ask, where, log)
        sections.append(Section("run", title, findings))
        needed = building.TORCH_BUILD if missing else requirements.size
    else:
        for known_stack in known_stacks() if where.node.gpus else ():
            title = f"stack {known_stack.name} ({known_stack.description}) on {described(where)}"
            sections.append(Section("suit", title, check_stack(where, known_stack)))
    if site is None and (subject is None or subject.image.recipe):
        title = f"building on {described(where)}"
        built = building.check_build(build_host(store.root, output), needed, group_name)
        has_image = subject is not None and subject.image.sif.is_file()  # problems of building do not prevent a run
        sections.append(Section("build", title, built, is_decisive=not has_image))
    return sections or [Section("run", described(where), check(runtimes.RULES, where, CheckedImage(_NOTHING)))]


def _base(subject: Subject) -> list[Finding]:
    """Return which image of others a recipe's image stands on."""
    if subject.image.recipe is None:
        return []
    base = bound_base(subject.resolve(subject.image.recipe).definitions[0].final)
    named = " ".join(base[name] for name in ("agent", "reference", "digest") if name in base)
    return [Finding("info", "base", f"it stands on {named}")] if named else []


def _refusals(subject: Subject, *, is_here: bool) -> list[Finding]:
    """Return why `run` and `submit` refuse the image's file: an incomplete SIF, or a missing signature."""
    image = subject.image
    try:
        if image.sif.is_file():
            image.check_file()
            if image.signature:
                image.signature.check(image.sif)
        elif image.signature and is_here:
            with contextlib.suppress(EngineError):  # nothing runs it here: a rule's finding, or it is not built yet
                subject.choose()  # an engine's image has no signature
    except (StoreError, VerifyError, EngineError) as error:
        return [Finding("error", "image", str(error), error.hint)]
    return []


def _memory(
    subject: Subject, ask: Callable[[Target], float | Finding], where: SiteFile, log: Callable[[str], None]
) -> list[Finding]:
    """Return whether the memory that the task expects is there."""
    try:
        target = subject.choose()
    except EngineError as error:
        return [Finding("warning", "memory", f"{subject.task} --dry-run cannot be asked: {error}", error.hint)]
    log(f"asking {subject.task} --dry-run for the memory it expects")
    asked = ask(target)
    return [asked] if isinstance(asked, Finding) else nodes.check_memory(where, subject.task, asked)


_NOTHING = ImageRequirements(
    name="",
    size=0,
    partitions=1,
    arch="",
    cuda=None,
    torch=None,
    glibc=None,
    compat=None,
    network=(),
    libraries={},
    packages={},
    damaged={},
)


def _requirements_of(
    subject: Subject, store: Store, log: Callable[[str], None], *, gpu: bool
) -> tuple[ImageRequirements, bool]:
    """Return an image's requirements, and whether they are only declared because it is not built."""
    if subject.image.recipe is None:
        subject.image.check_file()
        return requirements_of_sif(subject.image.sif, store, log, gpu=gpu), False
    recipe = subject.resolve(subject.image.recipe)
    stored = [layer for step in recipe.layers if (layer := store.layer(step.cache_key))]
    if len(stored) == len(recipe.layers):
        return requirements_of_layers(subject.title, stored, store, recipe.stack.arch, log), False
    # Only the layer of this name brings the stack's torch and CUDA.
    gpu = any(step.name == "pytorch" for step in recipe.layers)
    return declared_requirements(recipe.stack.file, recipe.stack.arch, len(recipe.layers), gpu=gpu), True


def _requirements_in_store(name: str, store: Store, log: Callable[[str], None]) -> ImageRequirements | None:
    ref = store.image(name)
    layers = [layer for key in ref["keys"] if (layer := store.layer(key))] if ref else []
    if not ref or len(layers) < len(ref["keys"]):
        return None
    return requirements_of_layers(name, layers, store, host_arch(), log)


def known_stacks() -> list[StackFile]:
    """Return every stack of images/stacks."""
    return [read_yaml(path, StackFile) for path in sorted((PROJECT_ROOT / "images" / "stacks").glob("*/stack.yaml"))]


def described(site: SiteFile) -> str:
    """Return a site's node in one line."""
    node = site.node
    gpus = ", ".join(f"{gpu.count} × {gpu.model} {gpu.memory_gib} GiB ({gpu.capability})" for gpu in node.gpus)
    details = [
        gpus or "no NVIDIA GPU",
        f"driver {node.driver}" if node.driver else "",
        f"{node.cores} cores" if node.cores else "",
        f"{node.memory_gib} GiB" if node.memory_gib else "",
        node.system or "",
        f"kernel {node.kernel}" if node.kernel else "",
    ]
    return f"{site.name}: {', '.join(detail for detail in details if detail)}"
