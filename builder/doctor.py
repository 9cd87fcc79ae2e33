"""Will it run? Rules that compare what an image is made of with what a machine or a site's compute nodes are.

Each rule says what it saw; a fact nobody stated is said to be unknown and never taken for good. Where the rules are from:

- device code: NVIDIA's nvcc guide, "GPU compilation" (builder.cubins).
- drivers: NVIDIA's "CUDA compatibility": any minor version of CUDA 11 runs on drivers from 450 on, of 12 from 525, of 13
  from 580; PTX of a newer minor version than the driver's is refused. The toolkits' own drivers: CUDA's release notes.
- runtimes: what is stacked how, apptainer/apptainer#446 and #1908, sylabs/singularity#711 and SingularityCE 4.1's notes.
- clone3 and glibc 2.34: moby/moby#42680, in Docker since 20.10.10.
"""

from __future__ import annotations

import grp
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.cubins import DeviceCode, runs_on
from builder.errors import StoreError, UnfitError
from builder.facts import ImageFacts, facts_of_layers, facts_of_sif
from builder.files import read_yaml
from builder.launch import Wish, choose_runtime, launch
from builder.machine import GIB, BuildHost, Place, build_host, node_here, runtime_of, runtimes_here
from builder.process import run
from builder.recipe import HOUSE, find_recipe
from builder.site import Gpu, Node, Runtime, SiteFile, version_of
from builder.stack import StackFile
from builder.store import Store

if TYPE_CHECKING:
    from builder.chain import Chain

LEVELS = ("fine", "note", "but", "fail")

FLOORS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}  # CUDA's major version → the oldest driver that runs it
TOOLKIT_DRIVERS = {
    "11.8": "520.61.05", "12.0": "525.60.13", "12.1": "530.30.02", "12.4": "550.54.14", "12.6": "560.28.03",
    "12.8": "570.26", "12.9": "575.51.03", "13.0": "580.65.06", "13.1": "590.44.01", "13.2": "595.45.04",
}  # fmt: skip
_DATA_CENTRE = re.compile(r"\b(Tesla|[ABHLPTV]\d{1,3}[SX]?|GH200|GB200)\b")  # forward compatibility is for these only
_VARIANT = re.compile(r"\d+(?=\.so)|(?<=cuda)\d+")  # libbitsandbytes_cuda118.so, …_cuda130.so: one of them is loaded

_EXPECTED = re.compile(r"^memory\s+([\d.]+) GiB expected", re.MULTILINE)  # as the tasks announce it

TORCH_BUILD = 8 * GIB  # what the store holds at most while a recipe with torch is built: 2.7 GB kept, 4.8 GB on the way


@dataclass(frozen=True, slots=True)
class Finding:
    """``level``: fine, note, but or fail. ``said`` quotes the facts it rests on; ``do`` is what helps."""

    level: str
    topic: str
    said: str
    do: str | None = None


def worst(findings: Iterable[Finding]) -> str:
    return max((finding.level for finding in findings), key=LEVELS.index, default="fine")


def verdict(findings: Sequence[Finding], does: str = "run") -> str:
    """One line: will run; will run, but …; will fail because …; what to do."""
    level = worst(findings)
    if level in ("fine", "note"):
        return f"will {does}"
    reasons = [finding for finding in findings if finding.level == level]
    said = "; ".join(finding.said for finding in reasons)
    if level == "but":
        return f"will {does}, but {said}"
    return "; ".join([f"will fail because {said}", *dict.fromkeys(finding.do for finding in reasons if finding.do)])


@dataclass(frozen=True, slots=True)
class Section:
    """One question and its findings: does it ``run`` (or a stack, or does one ``build``)?"""

    does: str
    title: str
    findings: list[Finding]

    @property
    def verdict(self) -> str:
        return verdict(self.findings, self.does)


def text(sections: Sequence[Section]) -> str:
    """One screen."""
    width = max((len(finding.topic) for section in sections for finding in section.findings), default=0)
    lines: list[str] = []
    for section in sections:
        lines += [section.title]
        for finding in section.findings:
            lines.append(f"  {finding.level:<4}  {finding.topic:<{width}}  {finding.said}")
            if finding.do and finding.level != "fine":
                lines.append(f"        {'':<{width}}  → {finding.do}")
        lines += [f"→ {section.verdict}", ""]
    return "\n".join(lines[:-1])


def described(site: SiteFile) -> str:
    """A node in one line."""
    node = site.node
    gpus = ", ".join(f"{gpu.count} × {gpu.model} {gpu.memory_gib} GiB ({gpu.capability})" for gpu in node.gpus)
    facts = [gpus or "no NVIDIA GPU", f"driver {node.driver}" if node.driver else "",
             f"{node.cores} cores" if node.cores else "", f"{node.memory_gib} GiB" if node.memory_gib else "",
             node.system or "", f"kernel {node.kernel}" if node.kernel else ""]  # fmt: skip
    return f"{site.name}: {', '.join(fact for fact in facts if fact)}"


def refuse(findings: Sequence[Finding]) -> None:
    """Errors: UnfitError when it will fail."""
    if worst(findings) == "fail":
        failing = [finding for finding in findings if finding.level == "fail"]
        raise UnfitError(verdict(failing), hint="--force runs it all the same")


# ---------------------------------------------------------------------------------------------- an image on a site's nodes


def check_image(site: SiteFile, facts: ImageFacts, stacks: Sequence[StackFile] = ()) -> list[Finding]:
    """Every rule that concerns running ``facts`` on a node of ``site``; ``stacks`` is what could be used instead."""
    instead = _instead(site.node, stacks)
    return [
        *_architecture(site.node, facts),
        *_device_code(site.node, facts, instead),
        *_driver(site.node, facts, instead),
        *check_runtimes(site.runtimes, site.node, facts),
        *_local_storage(site, facts),
        *_between_nodes(site, facts),
        *_network(site.node),
    ]


def declared_facts(stack: StackFile, arch: str, partitions: int, *, gpu: bool = True) -> ImageFacts:
    """An image that is not built yet, by what its stack.yaml says."""
    libraries = {f"{stack.name}/stack.yaml": DeviceCode({_declared(stack): 1})} if gpu else {}
    return ImageFacts(
        name=f"stack {stack.name}", size=0, partitions=partitions, arch=arch, cuda=stack.cuda if gpu else None,
        torch=stack.torch if gpu else None, glibc=None, compat=None, network=(), libraries=libraries, packages={}, damaged={},
    )  # fmt: skip


def check_stack(site: SiteFile, stack: StackFile) -> list[Finding]:
    """Whether what is built of a stack runs on a site's GPUs."""
    declared = declared_facts(stack, site.node.architecture, 1)
    return [*_device_code(site.node, declared, None), *_driver(site.node, declared, None)]


def _declared(stack: StackFile) -> tuple[str, ...]:
    """compute_capabilities as device code: "9.0" → sm_90, "12.0+PTX" → sm_120 and compute_120."""
    names = []
    for capability in stack.compute_capabilities:
        number = capability.removesuffix("+PTX").replace(".", "")
        names += [f"sm_{number}", *([f"compute_{number}"] if capability.endswith("+PTX") else [])]
    return tuple(names)


def _instead(node: Node, stacks: Sequence[StackFile]) -> str | None:
    """The newest stack that these GPUs and this driver can run, as the words to use it."""
    fitting = [stack for stack in stacks if _fits(node, stack)]
    best = max(fitting, key=lambda stack: (version_of(stack.cuda), version_of(stack.torch)), default=None)
    return f"use --stack {best.name}" if best else None


def _fits(node: Node, stack: StackFile) -> bool:
    floor = _floor(stack.cuda)
    old = node.driver is not None and floor is not None and version_of(node.driver) < version_of(floor)
    return not old and all(runs_on(_declared(stack), gpu.capability) for gpu in node.gpus)


def _architecture(node: Node, facts: ImageFacts) -> list[Finding]:
    if facts.arch == node.architecture:
        return []
    return [Finding("fail", "machine", f"the image is for {facts.arch}, the nodes are {node.architecture}")]


def _device_code(node: Node, facts: ImageFacts, instead: str | None) -> list[Finding]:
    damaged = [
        Finding("but", "GPU code", f"{_short(path)} could not be read: {why}") for path, why in facts.damaged.items()
    ]
    judged = facts.judged
    if not judged:
        return damaged
    if not node.gpus:
        return [*damaged, Finding("but", "GPU", "no NVIDIA GPU is known there: tasks run on the CPU")]
    found: list[Finding] = []
    for gpu in node.gpus:
        found += _device_code_for(gpu, judged, instead)
    return [*damaged, *found]


def _device_code_for(gpu: Gpu, judged: dict[str, DeviceCode], instead: str | None) -> list[Finding]:
    """torch's own library decides; without torch, all must have nothing for it to be sure to fail."""
    core = [path for path in judged if path.endswith("/libtorch_cuda.so")] or list(judged)
    who = f"{gpu.model} ({gpu.capability})"
    sass, ptx, whole = (sum(judged[path].covered(gpu.capability)[at] for path in core) for at in range(3))
    what = f"{_short(core[0])} has code for {' '.join(judged[core[0]].names)}"
    if not sass and not ptx:
        said = f"{who} is not among what {_short(core[0])} has code for ({' '.join(judged[core[0]].names)})"
        return [Finding("fail", "GPU code", said, instead or "no stack here has code for it")]
    if not sass:
        return [
            Finding(
                "but",
                "GPU code",
                f"{who}: {what}: its PTX is compiled at the first start, which takes minutes",
                instead,
            )
        ]
    found = [Finding("fine", "GPU code", f"{who}: {what}")]
    if sass + ptx < whole and len(core) == 1:
        said = f"{who}: {whole - sass - ptx} of {whole} parts of {_short(core[0])} have no code for it"
        found.append(Finding("but", "GPU code", said, instead))
    for paths in _variants(path for path in judged if path not in core):
        if all(not any(judged[path].covered(gpu.capability)[:2]) for path in paths):
            names = " ".join(judged[paths[0]].names)
            found.append(
                Finding("but", "GPU code", f"{who}: {_short(paths[0])} has code for {names}: what uses it fails")
            )
    return found


def _variants(paths: Iterable[str]) -> list[list[str]]:
    """Libraries that differ in a version only, of which one is loaded, together."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_VARIANT.sub("", path), []).append(path)
    return list(groups.values())


def _short(path: str) -> str:
    return Path(path).name


def _driver(node: Node, facts: ImageFacts, instead: str | None) -> list[Finding]:
    if facts.cuda is None or not node.gpus:
        return []
    floor, own = _floor(facts.cuda), TOOLKIT_DRIVERS.get(facts.cuda)
    if floor is None:
        return [Finding("but", "driver", f"which drivers run CUDA {facts.cuda} is not known here")]
    if node.driver is None:
        return [Finding("but", "driver", f"which driver is there is not known; CUDA {facts.cuda} needs {floor} or later",
                        "record it in a job there: build.py doctor --record")]  # fmt: skip
    have = f"driver {node.driver}"
    if version_of(node.driver) < version_of(floor):
        return [
            _too_old(node, facts, f"{have} is too old for CUDA {facts.cuda}, which needs {floor} or later", instead)
        ]
    if own and version_of(node.driver) < version_of(own):
        said = f"{have} runs CUDA {facts.cuda} by minor version compatibility (its own driver is {own}): PTX is refused"
        return [_only_ptx(node, facts, said, instead)]
    return [Finding("fine", "driver", f"{have} for CUDA {facts.cuda} ({floor} or later)")]


def _floor(cuda: str) -> str | None:
    return FLOORS.get(version_of(cuda)[0])


def _too_old(node: Node, facts: ImageFacts, said: str, instead: str | None) -> Finding:
    """Forward compatibility: a newer user-space driver in the image, on data-centre GPUs."""
    if not all(_DATA_CENTRE.search(gpu.model) for gpu in node.gpus):
        return Finding("fail", "driver", said, instead or "ask for a newer driver")
    if facts.compat:
        return Finding("but", "driver", f"{said}; the image brings the compatibility package {facts.compat}",
                       "put its folder first in LD_LIBRARY_PATH")  # fmt: skip
    return Finding(
        "fail", "driver", said, instead or "ask for a newer driver, or for NVIDIA's forward compatibility package"
    )


def _only_ptx(node: Node, facts: ImageFacts, said: str, instead: str | None) -> Finding:
    for gpu in node.gpus:
        for path, code in facts.judged.items():
            sass, ptx, _ = code.covered(gpu.capability)
            if path.endswith("/libtorch_cuda.so") and ptx and not sass:
                return Finding("fail", "driver", f"{said}, and {gpu.model} has nothing else in {_short(path)}", instead)
    return Finding(
        "but", "driver", said, "under Docker set NVIDIA_DISABLE_REQUIRE=1: the image asks for its own CUDA version"
    )


# ------------------------------------------------------------------------------------------------------------- runtimes


def check_runtimes(runtimes: Sequence[Runtime], node: Node, facts: ImageFacts) -> list[Finding]:
    """The runtime of those there that does best."""
    if not runtimes:
        return [Finding("but", "runtime", "which container runtime is there is not known",
                        "record it in a job there: build.py doctor --record")]  # fmt: skip
    tried = [
        _docker(runtime, node, facts) if runtime.kind == "docker" else _sif_runtime(runtime, node, facts)
        for runtime in runtimes
    ]
    return min(tried, key=lambda findings: LEVELS.index(worst(findings)))


def _named(runtime: Runtime) -> str:
    return f"{runtime.kind} {runtime.version or '(version unknown)'}"


def _sif_runtime(runtime: Runtime, node: Node, facts: ImageFacts) -> list[Finding]:
    return [
        *_namespaces(runtime, node),
        *_stacking(runtime, facts),
        *_compression(runtime, node, facts),
    ] or [Finding("fine", "runtime", f"{_named(runtime)}, {_layers(facts)}")]


def _layers(facts: ImageFacts) -> str:
    return f"{facts.partitions} layers in the SIF" if facts.partitions > 1 else "one layer in the SIF"


def _namespaces(runtime: Runtime, node: Node) -> list[Finding]:
    if runtime.setuid or node.user_namespaces is not False:
        return []
    how = "is not installed setuid" if runtime.setuid is False else "may not be installed setuid"
    level = "fail" if runtime.setuid is False else "but"
    return [Finding(level, "runtime", f"{_named(runtime)} {how}, and user namespaces are off there",
                    "ask the administrator for user.max_user_namespaces=15000, or a setuid installation")]  # fmt: skip


def _stacking(runtime: Runtime, facts: ImageFacts) -> list[Finding]:
    """Tried: Apptainer 1.4, SingularityCE 4.1. Without setuid, that mounts or unpacks the first partition alone, as older ones do."""
    if facts.partitions <= 1:  # none: an encrypted one, which is not ours
        return []
    flat = "make it --flat: one layer"
    what = f"{_named(runtime)} without setuid sees only the first of {facts.partitions} layers"
    version = version_of(runtime.version) if runtime.version else None
    if runtime.kind == "apptainer":
        if version and version < (1, 1) and runtime.setuid is False:
            return [Finding("fail", "runtime", what, flat)]
        if version is None or version < (1, 3):
            return [Finding("but", "runtime", f"{_named(runtime)} was not tried with {_layers(facts)}", flat)]
        return []
    if runtime.setuid is False:
        return [Finding("fail", "runtime", what, flat)]
    tried = runtime.kind == "singularity-ce" and version is not None and version >= (4, 1)
    if tried and runtime.setuid:
        return []
    if tried:
        return [Finding("but", "runtime", f"whether {_named(runtime)} is installed setuid is not known: {what}", flat)]
    tail = "" if runtime.setuid else "; without setuid it sees only the first"
    return [Finding("but", "runtime", f"{_named(runtime)} was not tried with {_layers(facts)}{tail}", flat)]


def _compression(runtime: Runtime, node: Node, facts: ImageFacts) -> list[Finding]:
    """zstd, in a SIF of others (ours are gzip): no Singularity takes it, and where the kernel mounts it (setuid), that must
    know it: since 4.14, when it was configured so."""
    if not facts.zstd:
        return []
    if runtime.kind.startswith("singularity"):
        said = f'{_named(runtime)} refuses a SIF compressed with zstd: it says "unknown compression algorithm value 6"'
        return [Finding("fail", "runtime", said, "build it with gzip, as Ekiben does, or run it under Apptainer")]
    if runtime.setuid is False or node.squashfs_zstd or (node.kernel is None and node.squashfs_zstd is None):
        return []
    sure = runtime.setuid is True
    if node.squashfs_zstd is False or version_of(node.kernel or "0") < (4, 14):
        said = f"kernel {node.kernel or '(unknown)'} cannot mount squashfs compressed with zstd"
        return [Finding("fail" if sure else "but", "kernel", said, "run it without setuid: squashfuse reads zstd")]
    if version_of(node.kernel or "0") < (5,):
        said = f"whether kernel {node.kernel} was configured to mount squashfs compressed with zstd is not known"
        return [Finding("but", "kernel", said, "try a small image there: build.py image hello")]
    return []


def _docker(runtime: Runtime, node: Node, facts: ImageFacts) -> list[Finding]:
    found = []
    if (
        runtime.version
        and facts.glibc
        and version_of(facts.glibc) >= (2, 34)
        and version_of(runtime.version) < (20, 10, 10)
    ):
        said = f"docker {runtime.version} refuses clone3, with which glibc {facts.glibc} starts threads"
        found.append(Finding("fail", "runtime", said, "Docker 20.10.10 or later"))
    if runtime.gpus is False and node.gpus and facts.cuda:
        said = f"docker {runtime.version} refuses --gpus: NVIDIA's container toolkit is not installed"
        found.append(Finding("fail", "runtime", said, "ask for the package nvidia-container-toolkit"))
    return found or [Finding("fine", "runtime", _named(runtime))]


def _local_storage(site: SiteFile, facts: ImageFacts) -> list[Finding]:
    local = site.storage.get("local")
    if local is None or local.size_gib is None or facts.size <= local.size_gib * GIB:
        return []
    return [Finding("but", "storage", f"the image has {facts.size / 1e9:.1f} GB, {local.path} {local.size_gib} GiB",
                    "run it without --stage")]  # fmt: skip


def _between_nodes(site: SiteFile, facts: ImageFacts) -> list[Finding]:
    """NCCL says only in its log that it fell back to TCP. An image whose layers were not read is not judged."""
    if site.network is None or site.network.kind == "ethernet" or facts.torch is None or not facts.packages:
        return []
    wanted = "libnccl-net" if site.network.kind == "efa" else "libibverbs"
    if wanted in facts.network:
        return [Finding("fine", "NCCL", f"{wanted} is there for {site.network.kind}")]
    do = "a layer with aws-ofi-nccl" if wanted == "libnccl-net" else "a layer with libibverbs1 and ibverbs-providers"
    return [
        Finding(
            "but", "NCCL", f"no {wanted} in the image: between nodes NCCL takes TCP instead of {site.network.kind}", do
        )
    ]


def _network(node: Node) -> list[Finding]:
    if node.internet is not False:
        return []
    return [Finding("note", "network", "no internet there: models and data must be in HF_HOME before the job starts")]


# --------------------------------------------------------------------------------------------------------------- memory


def check_memory(site: SiteFile, task: str, expected: float) -> list[Finding]:
    """``expected`` GiB on one GPU, as the task's own --dry-run reckons without a limit, against each GPU of the site."""
    found = []
    for gpu in site.node.gpus:
        said = f"{task} --dry-run expects {expected:.1f} GiB, {gpu.model} has {gpu.memory_gib} GiB"
        if expected <= 0.9 * gpu.memory_gib:  # what the tasks themselves allow
            found.append(Finding("fine", "memory", said))
        else:
            found.append(Finding("but", "memory", said, f"see what {task} does on a smaller GPU: shorter rows, smaller batches, "
                                                        "a smaller model"))  # fmt: skip
    return found


def ask_task(recipe: str, stack: str | None, words: Sequence[str], environment: Mapping[str, str]) -> float | Finding:
    """GiB that ``task --dry-run ARGS`` expects, run in the image here, without a GPU. Errors: EngineError, UsageError."""
    task, *arguments = words
    found = find_recipe(recipe)
    found.task(task)
    name = found.image_name(stack)
    sif = Path(f"{name}.sif")
    program = choose_runtime(name, sif)
    wish = Wish(words=[task, "--dry-run", *arguments], gpu=False)
    ready = launch(program, sif, f"ekiben/{name}:latest", wish, environment)
    done = run(ready.argv, env=ready.environment, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return Finding("but", "memory", f"{task} --dry-run ended with exit code {done.returncode}: {''.join(last)}")
    if not (match := _EXPECTED.search(done.stdout)):
        return Finding("note", "memory", f"{task} --dry-run says nothing of memory")
    return float(match[1])


# ------------------------------------------------------------------------------------------------- building on a machine


def check_build(host: BuildHost, needed: int = TORCH_BUILD, group_name: Callable[[int], str] = str) -> list[Finding]:
    """Whether images can be built here; ``needed`` bytes are on the way in the store at most."""
    usable = [name for name, reason in host.engines.items() if reason is None]
    found = [Finding("fine", "engine", f"{', '.join(usable)} can build here")] if usable else [
        Finding("fail", "engine", f"{name}: {reason}", "sh builder/bootstrap.sh --engine") for name, reason in host.engines.items()
    ]  # fmt: skip
    if host.uid:
        found += _rootless(host, level="note" if usable else "but")
    found += [*_temporary(host), *_store(host, needed), *_output(host, group_name)]
    return found


def _rootless(host: BuildHost, level: str) -> list[Finding]:
    """What a user without root needs; a note where some engine works all the same."""
    found = []
    if not host.user_namespaces:
        do = ("sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for the runtime"
              if host.apparmor_restricts else "sysctl user.max_user_namespaces=15000")  # fmt: skip
        said = "AppArmor keeps user namespaces from users" if host.apparmor_restricts else "user namespaces are off"
        found.append(Finding(level, "namespaces", said, f"ask the administrator for: {do}"))
    if min(host.subuid, host.subgid) < 65536:
        said = f"{host.user} has {host.subuid} subordinate user ids and {host.subgid} group ids; 65536 are wanted"
        found.append(Finding(level, "ids", said, "ask the administrator for: usermod --add-subuids 100000-165535 "
                                                 f"--add-subgids 100000-165535 {host.user}"))  # fmt: skip
    if not host.newuidmap:
        found.append(
            Finding(level, "ids", "newuidmap and newgidmap are missing", "the package uidmap, or shadow-utils")
        )
    if not host.fuse:
        found.append(Finding(level, "fuse", "/dev/fuse cannot be opened: squashfs cannot be mounted without root"))
    return found


def _temporary(host: BuildHost) -> list[Finding]:
    """Ekiben builds in its store; plain `apptainer build` and `singularity pull` use this."""
    place = host.temporary
    why = (
        "is a file system of other machines, where `apptainer build --fakeroot` fails" if place.shared and host.uid
        else "is mounted noexec, and programs there do not start" if place.noexec
        else f"has {_free(place)}, and images of gigabytes are unpacked there" if place.free < TORCH_BUILD
        else ""
    )  # fmt: skip
    if not why:
        return [Finding("fine", "TMPDIR", f"{_where(place)}, {_free(place)}")]
    said = f"{_where(place)} {why}: Ekiben builds in its store, plain `apptainer build` would not"
    return [Finding("note", "TMPDIR", said, "for those set APPTAINER_TMPDIR to a folder on the node's own disk")]


def _store(host: BuildHost, needed: int) -> list[Finding]:
    place, do = host.store, "give another place with --store or EKIBEN_STORE"
    if not place.writable:
        return [Finding("fail", "store", f"{place.path} cannot be written", do)]
    if place.shared and host.uid:
        said = f"{_where(place)}: layers are built in it, and on file systems of other machines builds without root may fail"
        return [Finding("but", "store", said, do)]
    if place.free < needed:
        quota = " left of the quota" if place.quota is not None else ""
        said = f"{_where(place)}, {_free(place)}{quota}; up to {needed / GIB:.0f} GiB are on the way while it is built"
        return [Finding("fail", "store", said, f"{do}, or make room: build.py prune")]
    if place.path.is_relative_to(host.home.path) and host.home.quota is not None:
        said = f"{place.path} is in $HOME, whose quota has {host.home.quota / GIB:.0f} GiB left"
        return [Finding("note", "store", said, do)]
    return [Finding("fine", "store", f"{_where(place)}, {_free(place)}")]


def _output(host: BuildHost, group_name: Callable[[int], str]) -> list[Finding]:
    """On some clusters a file gets the user's own group in a group's folder, which counts against a quota of nothing."""
    place = host.output
    if not place.writable:
        return [
            Finding(
                "fail", "output", f"{place.path} cannot be written", "name another with -o, or go to another folder"
            )
        ]
    if place.group != host.group and not place.setgid and place.group in host.groups and place.shared:
        group = group_name(place.group)
        said = f"{place.path} belongs to group {group}, and what you write there to {group_name(host.group)}"
        return [Finding("but", "output", said, f"newgrp {group}")]
    return [Finding("fine", "output", f"{_where(place)}, {_free(place)}")]


def _where(place: Place) -> str:
    return f"{place.path} ({place.type or 'file system unknown'})"


def _free(place: Place) -> str:
    return f"{place.free / GIB:.0f} GiB free"


# ------------------------------------------------------------------------------------------------------- consultations


def check_here(
    store: Store, program: str, sif: Path, name: str, *, gpu: bool, tell: Callable[[str], None]
) -> list[Finding]:
    """Whether ``program`` will run the image here, before it does; quick once its facts are known."""
    runtime = runtime_of(Path(program).name)
    if runtime is None:
        return []  # its own message is the better one
    try:
        facts = _facts_in_store(name, store, tell) if runtime.kind == "docker" else facts_of_sif(sif, store, tell)
    except StoreError as error:  # a SIF of another make, compressed by xz, say: the runtime may know it
        return [Finding("but", "image", f"what is in it could not be read: {error}")]
    if facts is None:
        return []
    node = node_here()
    site = SiteFile(name="this machine", description="", node=node, runtimes=(runtime,))
    without = [*_architecture(node, facts), *check_runtimes(site.runtimes, node, facts)]
    findings = check_image(site, facts, known_stacks()) if gpu else without
    return [finding for finding in findings if finding.level != "fine"]


def consult(
    store: Store, image: str | None, site: SiteFile | None, output: Path, *,
    words: Sequence[str], stack: str | None, resolved: Callable[[str], Chain], tell: Callable[[str], None],
) -> list[Section]:  # fmt: skip
    """Everything that can be said about an image, on a site's nodes or here, and about building here.

    ``words``: a task and its arguments, whose memory is asked for, too; ``resolved`` finds a recipe's chain. Errors: UsageError, DefinitionError, StoreError.
    """
    node = site or SiteFile(name="this machine", description="", node=node_here(), runtimes=runtimes_here())
    sections = []
    needed = TORCH_BUILD
    if image is not None:
        facts, missing = _facts_of(image, store, node.node.architecture, resolved, tell)
        title = f"{image} on {described(node)}"
        notes = [Finding("note", "image", f"not built yet: by what {facts.name} declares")] if missing else []
        findings = [*notes, *check_image(node, facts, known_stacks())]
        if words:
            tell(f"asking {words[0]} --dry-run for the memory it expects")
            asked = ask_task(image, stack, words, os.environ)
            findings += [asked] if isinstance(asked, Finding) else check_memory(node, words[0], asked)
        sections.append(Section("run", title, findings))
        needed = TORCH_BUILD if missing else facts.size
    else:
        for found in known_stacks() if node.node.gpus else ():
            title = f"stack {found.name} ({found.description}) on {described(node)}"
            sections.append(Section("suit", title, check_stack(node, found)))
    if site is None:
        title = f"building on {described(node)}"
        sections.append(Section("build", title, check_build(build_host(store.root, output), needed, _group_name)))
    return sections or [Section("run", described(node), check_runtimes(node.runtimes, node.node, _NOTHING))]


_NOTHING = ImageFacts(name="", size=0, partitions=1, arch="", cuda=None, torch=None, glibc=None, compat=None, network=(), libraries={},
                      packages={}, damaged={})  # fmt: skip


def _facts_of(
    image: str, store: Store, arch: str, resolved: Callable[[str], Chain], tell: Callable[[str], None]
) -> tuple[ImageFacts, bool]:
    """An image's facts, and whether they are only declared because it is not built."""
    if image.endswith(".sif") or (Path(image).is_file() and Path(image).suffix != ".yaml"):
        return facts_of_sif(Path(image), store, tell), False
    from builder.chain import platform  # late: `run` asks about files, and has no need of it

    chain = resolved(image)
    stored = [layer for step in chain.layers if (layer := store.layer(step.cache_key))]
    if len(stored) == len(chain.layers):
        return facts_of_layers(image, stored, store, platform().split("/")[1], tell), False
    # Only the layer of this name brings the stack's torch and CUDA.
    gpu = any(step.name == "pytorch" for step in chain.layers)
    return declared_facts(chain.stack.file, arch, len(chain.layers), gpu=gpu), True


def _facts_in_store(name: str, store: Store, tell: Callable[[str], None]) -> ImageFacts | None:
    ref = store.image(name)
    layers = [layer for key in ref["keys"] if (layer := store.layer(key))] if ref else []
    if not ref or len(layers) < len(ref["keys"]):
        return None
    from builder.chain import platform

    return facts_of_layers(name, layers, store, platform().split("/")[1], tell)


def known_stacks() -> list[StackFile]:
    return [read_yaml(path, StackFile) for path in sorted((HOUSE / "images" / "stacks").glob("*/stack.yaml"))]


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def report(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """For --json."""
    return [
        {"does": section.does, "title": section.title, "level": worst(section.findings), "verdict": section.verdict,
         "findings": [asdict(finding) for finding in section.findings]}
        for section in sections
    ]  # fmt: skip
