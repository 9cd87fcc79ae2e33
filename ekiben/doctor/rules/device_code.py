"""Rules about GPUs: does a library have code for them, does their driver run its CUDA.

- device code: NVIDIA's nvcc guide, "GPU compilation" (ekiben.gpu.device_code).
- drivers: NVIDIA's "CUDA compatibility": any minor version of CUDA 11 runs on drivers from 450 on, of 12 from 525, of
  13 from 580; PTX of a newer minor version than the driver's is refused. The toolkits' own drivers: CUDA's release
  notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ekiben.core.command_name import command_name
from ekiben.doctor.findings import CheckedImage, Finding, Rule
from ekiben.doctor.image_requirements import ImageRequirements
from ekiben.gpu.device_code import DeviceCode, runs_on
from ekiben.run.site import Gpu, Node, SiteFile, version_of
from ekiben.spec.stack import StackFile

FLOORS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}  # CUDA's major version → the oldest driver that runs it
TOOLKIT_DRIVERS = {
    "11.8": "520.61.05",
    "12.0": "525.60.13",
    "12.1": "530.30.02",
    "12.4": "550.54.14",
    "12.6": "560.28.03",
    "12.8": "570.26",
    "12.9": "575.51.03",
    "13.0": "580.65.06",
    "13.1": "590.44.01",
    "13.2": "595.45.04",
}
_DATA_CENTRE = re.compile(r"\b(Tesla|[ABHLPTV]\d{1,3}[SX]?|GH200|GB200)\b")  # forward compatibility is for these only
_VARIANT = re.compile(r"\d+(?=\.so)|(?<=cuda)\d+")  # libbitsandbytes_cuda118.so, …_cuda130.so: one of them is loaded


def declared_code(stack: StackFile) -> tuple[str, ...]:
    """Return a stack's compute_capabilities as device code: "9.0" → sm_90, "12.0+PTX" → sm_120 and compute_120."""
    names = []
    for capability in stack.compute_capabilities:
        number = capability.removesuffix("+PTX").replace(".", "")
        names += [f"sm_{number}", *([f"compute_{number}"] if capability.endswith("+PTX") else [])]
    return tuple(names)


def better_stack(node: Node, stacks: Sequence[StackFile]) -> str | None:
    """Return the option that names the newest stack which these GPUs and this driver run."""
    fitting = [stack for stack in stacks if stack.cuda and stack.torch and _fits(node, stack)]
    best = max(fitting, key=lambda stack: (version_of(stack.cuda), version_of(stack.torch)), default=None)
    return f"use --stack {best.name}" if best else None


def _fits(node: Node, stack: StackFile) -> bool:
    floor = _floor(stack.cuda)
    old = node.driver is not None and floor is not None and version_of(node.driver) < version_of(floor)
    return not old and all(runs_on(declared_code(stack), gpu.capability) for gpu in node.gpus)


def device_code(site: SiteFile, checked: CheckedImage) -> list[Finding]:
    """Check that the image's libraries have code for each GPU of the site."""
    node = site.node
    damaged = [
        Finding("warning", "GPU code", f"{_short(path)} could not be read: {reason}")
        for path, reason in checked.image.damaged.items()
    ]
    judged = checked.image.judged
    if not judged:
        return damaged
    if not node.gpus:
        return [*damaged, Finding("warning", "GPU", "no NVIDIA GPU is known there: tasks run on the CPU")]
    findings: list[Finding] = []
    for gpu in node.gpus:
        findings += _device_code_for(gpu, judged, checked.better_stack)
    return [*damaged, *findings]


def _device_code_for(gpu: Gpu, judged: dict[str, DeviceCode], instead: str | None) -> list[Finding]:
    """torch's own library decides; without torch, all must have nothing for it to be sure to fail."""
    core = [path for path in judged if path.endswith("/libtorch_cuda.so")] or list(judged)
    who = f"{gpu.model} ({gpu.capability})"
    sass, ptx, total = (sum(judged[path].covered(gpu.capability)[at] for path in core) for at in range(3))
    what = f"{_short(core[0])} has code for {' '.join(judged[core[0]].names)}"
    if not sass and not ptx:
        message = f"{who} is not among what {_short(core[0])} has code for ({' '.join(judged[core[0]].names)})"
        return [Finding("error", "GPU code", message, instead or "no stack here has code for it")]
    if not sass:
        return [
            Finding(
                "warning",
                "GPU code",
                f"{who}: {what}: its PTX is compiled at the first start, which takes minutes",
                instead,
            )
        ]
    findings = [Finding("ok", "GPU code", f"{who}: {what}")]
    if sass + ptx < total and len(core) == 1:
        message = f"{who}: {total - sass - ptx} of {total} parts of {_short(core[0])} have no code for it"
        findings.append(Finding("warning", "GPU code", message, instead))
    for paths in _variants(path for path in judged if path not in core):
        if all(not any(judged[path].covered(gpu.capability)[:2]) for path in paths):
            names = " ".join(judged[paths[0]].names)
            findings.append(
                Finding("warning", "GPU code", f"{who}: {_short(paths[0])} has code for {names}: what uses it fails")
            )
    return findings


def _variants(paths: Iterable[str]) -> list[list[str]]:
    """Libraries that differ in a version only, of which one is loaded, together."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_VARIANT.sub("", path), []).append(path)
    return list(groups.values())


def _short(path: str) -> str:
    return Path(path).name


def driver(site: SiteFile, checked: CheckedImage) -> list[Finding]:
    """Check that the site's driver runs the image's CUDA."""
    node, image, instead = site.node, checked.image, checked.better_stack
    if image.cuda is None or not node.gpus:
        return []
    floor, toolkit_driver = _floor(image.cuda), TOOLKIT_DRIVERS.get(image.cuda)
    if floor is None:
        return [Finding("warning", "driver", f"which drivers run CUDA {image.cuda} is not known here")]
    if node.driver is None:
        return [
            Finding(
                "warning",
                "driver",
                f"which driver is there is not known; CUDA {image.cuda} needs {floor} or later",
                f"record it in a job there: {command_name()} doctor --record",
            )
        ]
    have = f"driver {node.driver}"
    if version_of(node.driver) < version_of(floor):
        return [
            _too_old(node, image, f"{have} is too old for CUDA {image.cuda}, which needs {floor} or later", instead)
        ]
    if toolkit_driver and version_of(node.driver) < version_of(toolkit_driver):
        message = (
            f"{have} runs CUDA {image.cuda} by minor version compatibility (its own driver is {toolkit_driver}): PTX is"
            " refused"
        )
        return [_only_ptx(node, image, message, instead)]
    return [Finding("ok", "driver", f"{have} for CUDA {image.cuda} ({floor} or later)")]


def _floor(cuda: str) -> str | None:
    return FLOORS.get(version_of(cuda)[0])


def _too_old(node: Node, image: ImageRequirements, message: str, instead: str | None) -> Finding:
    """Forward compatibility: a newer user-space driver in the image, on data-centre GPUs."""
    if not all(_DATA_CENTRE.search(gpu.model) for gpu in node.gpus):
        return Finding("error", "driver", message, instead or "ask for a newer driver")
    if image.compat:
        return Finding(
            "warning",
            "driver",
            f"{message}; the image brings the compatibility package {image.compat}",
            "put its folder first in LD_LIBRARY_PATH",
        )
    return Finding(
        "error", "driver", message, instead or "ask for a newer driver, or for NVIDIA's forward compatibility package"
    )


def _only_ptx(node: Node, image: ImageRequirements, message: str, instead: str | None) -> Finding:
    for gpu in node.gpus:
        for path, code in image.judged.items():
            sass, ptx, _ = code.covered(gpu.capability)
            if path.endswith("/libtorch_cuda.so") and ptx and not sass:
                return Finding(
                    "error", "driver", f"{message}, and {gpu.model} has nothing else in {_short(path)}", instead
                )
    return Finding(
        "warning",
        "driver",
        message,
        "under Docker set NVIDIA_DISABLE_REQUIRE=1: the image asks for its own CUDA version",
    )


RULES: tuple[Rule, ...] = (device_code, driver)
