"""Rules about container runtimes: does one of a site's run the image.

- what is stacked how: apptainer/apptainer#446 and #1908, sylabs/singularity#711 and SingularityCE 4.1's notes.
- clone3 and glibc 2.34: moby/moby#42680, in Docker since 20.10.10.
"""

from __future__ import annotations

from ekiben.core.command_name import command_name
from ekiben.core.paths import ENGINE_SETUP
from ekiben.doctor.findings import LEVELS, CheckedImage, Finding, Rule, worst
from ekiben.doctor.image_requirements import ImageRequirements
from ekiben.run.site import Node, Runtime, SiteFile, version_of


def best_runtime(site: SiteFile, checked: CheckedImage) -> list[Finding]:
    """Report the runtime of the site that suits the image best."""
    if not site.runtimes and checked.is_here:
        message = "no runtime is here that runs it: neither apptainer nor singularity is on PATH"
        return [Finding("error", "runtime", message, ENGINE_SETUP)]
    if not site.runtimes:
        return [
            Finding(
                "warning",
                "runtime",
                "which container runtime is there is not known",
                f"record it in a job there: {command_name()} doctor --record",
            )
        ]
    tried = [
        (_docker if runtime.kind == "docker" else _sif_runtime)(runtime, site.node, checked.image)
        for runtime in site.runtimes
    ]
    return min(tried, key=lambda findings: LEVELS.index(worst(findings)))


def _named(runtime: Runtime) -> str:
    return f"{runtime.kind} {runtime.version or '(version unknown)'}"


def _sif_runtime(runtime: Runtime, node: Node, image: ImageRequirements) -> list[Finding]:
    return [
        *_namespaces(runtime, node),
        *_stacking(runtime, image),
        *_compression(runtime, node, image),
    ] or [Finding("ok", "runtime", f"{_named(runtime)}, {_layers(image)}")]


def _layers(image: ImageRequirements) -> str:
    return f"{image.partitions} layers in the SIF" if image.partitions > 1 else "one layer in the SIF"


def _namespaces(runtime: Runtime, node: Node) -> list[Finding]:
    if runtime.setuid or node.user_namespaces is not False:
        return []
    setuid_state = "is not installed setuid" if runtime.setuid is False else "may not be installed setuid"
    level = "error" if runtime.setuid is False else "warning"
    return [
        Finding(
            level,
            "runtime",
            f"{_named(runtime)} {setuid_state}, and user namespaces are off there",
            "ask the administrator for user.max_user_namespaces=15000, or a setuid installation",
        )
    ]


def _stacking(runtime: Runtime, image: ImageRequirements) -> list[Finding]:
    """Check that the runtime mounts several partitions.

    Tested: Apptainer 1.4, SingularityCE 4.1. Without setuid, that mounts or unpacks the first partition alone, as older
    ones do.
    """
    if image.partitions <= 1:  # no partition: an encrypted SIF, which Ekiben does not make
        return []
    fix = "build it with --squash: one layer"
    what = f"{_named(runtime)} without setuid sees only the first of {image.partitions} layers"
    version = version_of(runtime.version) if runtime.version else None
    if runtime.kind == "apptainer":
        if version and version < (1, 1) and runtime.setuid is False:
            return [Finding("error", "runtime", what, fix)]
        if version is None or version < (1, 3):
            return [Finding("warning", "runtime", f"{_named(runtime)} was not tried with {_layers(image)}", fix)]
        return []
    if runtime.setuid is False:
        return [Finding("error", "runtime", what, fix)]
    tried = runtime.kind == "singularity-ce" and version is not None and version >= (4, 1)
    if tried and runtime.setuid:
        return []
    if tried:
        return [
            Finding("warning", "runtime", f"whether {_named(runtime)} is installed setuid is not known: {what}", fix)
        ]
    tail = "" if runtime.setuid else "; without setuid it sees only the first"
    return [Finding("warning", "runtime", f"{_named(runtime)} was not tried with {_layers(image)}{tail}", fix)]


def _compression(runtime: Runtime, node: Node, image: ImageRequirements) -> list[Finding]:
    """zstd, in a SIF of others (ours are gzip): no Singularity takes it, and where the kernel mounts it (setuid), that
    must know it: since 4.14, when it was configured so."""
    if not image.zstd:
        return []
    if runtime.kind.startswith("singularity"):
        message = (
            f'{_named(runtime)} refuses a SIF compressed with zstd: it says "unknown compression algorithm value 6"'
        )
        return [Finding("error", "runtime", message, "build it with gzip, as Ekiben does, or run it under Apptainer")]
    if runtime.setuid is False or node.squashfs_zstd or (node.kernel is None and node.squashfs_zstd is None):
        return []
    sure = runtime.setuid is True
    if node.squashfs_zstd is False or version_of(node.kernel or "0") < (4, 14):
        message = f"kernel {node.kernel or '(unknown)'} cannot mount squashfs compressed with zstd"
        return [
            Finding("error" if sure else "warning", "kernel", message, "run it without setuid: squashfuse reads zstd")
        ]
    if version_of(node.kernel or "0") < (5,):
        message = f"whether kernel {node.kernel} was configured to mount squashfs compressed with zstd is not known"
        return [Finding("warning", "kernel", message, f"try a small image there: {command_name()} build hello")]
    return []


def _docker(runtime: Runtime, node: Node, image: ImageRequirements) -> list[Finding]:
    findings = []
    if (
        runtime.version
        and image.glibc
        and version_of(image.glibc) >= (2, 34)
        and version_of(runtime.version) < (20, 10, 10)
    ):
        message = f"docker {runtime.version} refuses clone3, with which glibc {image.glibc} starts threads"
        findings.append(Finding("error", "runtime", message, "Docker 20.10.10 or later"))
    if runtime.gpus is False and node.gpus and image.cuda:
        message = f"docker {runtime.version} cannot use the GPUs: NVIDIA's container toolkit is not installed"
        findings.append(
            Finding(
                "error",
                "runtime",
                message,
                "ask for the package nvidia-container-toolkit, or with Docker 25 or later for a CDI file",
            )
        )
    return findings or [Finding("ok", "runtime", _named(runtime))]


RULES: tuple[Rule, ...] = (best_runtime,)
