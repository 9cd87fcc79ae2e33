"""Rules about nodes: machine, memory, disks and networks."""

from __future__ import annotations

from ekiben.doctor.findings import CheckedImage, Finding, Rule
from ekiben.doctor.machine import GIB
from ekiben.run.site import SiteFile


def architecture(site: SiteFile, checked: CheckedImage) -> list[Finding]:
    """Compare the image's architecture with the nodes'."""
    if checked.image.arch == site.node.architecture:
        return []
    return [
        Finding("error", "machine", f"the image is for {checked.image.arch}, the nodes are {site.node.architecture}")
    ]


def local_storage(site: SiteFile, checked: CheckedImage) -> list[Finding]:
    """Compare the image's size with the node's own disk."""
    local = site.storage.get("local")
    if local is None or local.size_gib is None or checked.image.size <= local.size_gib * GIB:
        return []
    return [
        Finding(
            "warning",
            "storage",
            f"the image has {checked.image.size / 1e9:.1f} GB, {local.path} {local.size_gib} GiB",
            "run it without --copy-local",
        )
    ]


def between_nodes(site: SiteFile, checked: CheckedImage) -> list[Finding]:
    """Look for what NCCL needs for the site's network: only its log mentions the fallback to TCP."""
    image = checked.image
    if (
        site.network is None or site.network.kind == "ethernet" or image.torch is None or not image.packages
    ):  # its layers were not read
        return []
    library = "libnccl-net" if site.network.kind == "efa" else "libibverbs"
    if library in image.network:
        return [Finding("ok", "NCCL", f"{library} is there for {site.network.kind}")]
    fix = "a layer with aws-ofi-nccl" if library == "libnccl-net" else "a layer with libibverbs1 and ibverbs-providers"
    return [
        Finding(
            "warning",
            "NCCL",
            f"no {library} in the image: between nodes NCCL takes TCP instead of {site.network.kind}",
            fix,
        )
    ]


def internet(site: SiteFile, checked: CheckedImage) -> list[Finding]:
    """Report that nodes without internet need models and data before a job starts."""
    if site.node.internet is not False:
        return []
    return [Finding("info", "network", "no internet there: models and data must be in HF_HOME before the job starts")]


def check_memory(site: SiteFile, task: str, expected: float) -> list[Finding]:
    """Compare ``expected`` GiB on one GPU, from the task's own --dry-run, with each GPU of the site."""
    findings = []
    for gpu in site.node.gpus:
        message = f"{task} --dry-run expects {expected:.1f} GiB, {gpu.model} has {gpu.memory_gib} GiB"
        if expected <= 0.9 * gpu.memory_gib:  # the limit of the tasks
            findings.append(Finding("ok", "memory", message))
        else:
            findings.append(
                Finding(
                    "warning",
                    "memory",
                    message,
                    f"see what {task} does on a smaller GPU: shorter sequences, smaller batches, a smaller model",
                )
            )
    return findings


RULES: tuple[Rule, ...] = (local_storage, between_nodes, internet)
