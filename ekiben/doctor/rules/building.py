"""Rules about building images on this machine."""

from __future__ import annotations

from collections.abc import Callable

from ekiben.core.command_name import command_name
from ekiben.core.paths import ENGINE_SETUP
from ekiben.doctor.findings import Finding
from ekiben.doctor.machine import GIB, BuildHost, Filesystem

TORCH_BUILD = 8 * GIB  # bytes of a store while a recipe with torch is built: 2.7 GB kept, 4.8 GB temporary


def check_build(host: BuildHost, needed: int = TORCH_BUILD, group_name: Callable[[int], str] = str) -> list[Finding]:
    """Check whether images can be built here; ``needed``: bytes that the store holds at most meanwhile."""
    usable = [name for name, reason in host.engines.items() if reason is None]
    findings = (
        [Finding("ok", "engine", f"{', '.join(usable)} can build here")]
        if usable
        else [Finding("error", "engine", f"{name}: {reason}", ENGINE_SETUP) for name, reason in host.engines.items()]
    )
    if host.uid:
        findings += _rootless(host, level="info" if usable else "warning")
    findings += [*_temporary(host), *_store(host, needed), *_output(host, group_name)]
    return findings


def _rootless(host: BuildHost, level: str) -> list[Finding]:
    """Check what a user without root needs; a note where another engine can build."""
    findings = []
    if not host.user_namespaces:
        fix = (
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for the runtime"
            if host.apparmor_restricts
            else "sysctl user.max_user_namespaces=15000"
        )
        message = "AppArmor keeps user namespaces from users" if host.apparmor_restricts else "user namespaces are off"
        findings.append(Finding(level, "namespaces", message, f"ask the administrator for: {fix}"))
    if min(host.subuid, host.subgid) < 65536:
        message = f"{host.user} has {host.subuid} subordinate user ids and {host.subgid} group ids; 65536 are needed"
        findings.append(
            Finding(
                level,
                "ids",
                message,
                "ask the administrator for: usermod --add-subuids 100000-165535 "
                f"--add-subgids 100000-165535 {host.user}",
            )
        )
    if not host.newuidmap:
        findings.append(
            Finding(level, "ids", "newuidmap and newgidmap are missing", "the package uidmap, or shadow-utils")
        )
    if not host.fuse:
        findings.append(Finding(level, "fuse", "/dev/fuse cannot be opened: squashfs cannot be mounted without root"))
    return findings


def _temporary(host: BuildHost) -> list[Finding]:
    """Ekiben builds in its store; plain `apptainer build` and `singularity pull` use this."""
    filesystem = host.temporary
    drawback = (
        "is a file system of other machines, where `apptainer build --fakeroot` fails"
        if filesystem.shared and host.uid
        else (
            "is mounted noexec, and programs there do not start"
            if filesystem.noexec
            else (
                f"has {_free(filesystem)}, and images of gigabytes are unpacked there"
                if filesystem.free < TORCH_BUILD
                else ""
            )
        )
    )
    if not drawback:
        return [Finding("ok", "TMPDIR", f"{_where(filesystem)}, {_free(filesystem)}")]
    message = f"{_where(filesystem)} {drawback}: Ekiben builds in its store, plain `apptainer build` would not"
    return [Finding("info", "TMPDIR", message, "for those set APPTAINER_TMPDIR to a folder on the node's own disk")]


def _store(host: BuildHost, needed: int) -> list[Finding]:
    filesystem, fix = host.store, "give another folder with --store or EKIBEN_STORE"
    if not filesystem.writable:
        return [Finding("error", "store", f"{filesystem.path} cannot be written", fix)]
    if filesystem.shared and host.uid:
        message = (
            f"{_where(filesystem)}: layers are built in it, and on file systems of other machines builds without root"
            " may fail"
        )
        return [Finding("warning", "store", message, fix)]
    if filesystem.free < needed:
        quota = " left of the quota" if filesystem.quota is not None else ""
        message = (
            f"{_where(filesystem)}, {_free(filesystem)}{quota}; up to {needed / GIB:.0f} GiB are on the way while it is"
            " built"
        )
        return [Finding("error", "store", message, f"{fix}, or make room: {command_name()} prune")]
    if filesystem.path.is_relative_to(host.home.path) and host.home.quota is not None:
        message = f"{filesystem.path} is in $HOME, whose quota has {host.home.quota / GIB:.0f} GiB left"
        return [Finding("info", "store", message, fix)]
    return [Finding("ok", "store", f"{_where(filesystem)}, {_free(filesystem)}")]


def _output(host: BuildHost, group_name: Callable[[int], str]) -> list[Finding]:
    """Warn of group folders in which new files get the user's own group, whose quota may be 0."""
    filesystem = host.output
    if not filesystem.writable:
        return [
            Finding(
                "error",
                "output",
                f"{filesystem.path} cannot be written",
                "name another with -o, or go to another folder",
            )
        ]
    if (
        filesystem.group != host.group
        and not filesystem.setgid
        and filesystem.group in host.groups
        and filesystem.shared
    ):
        group = group_name(filesystem.group)
        message = f"{filesystem.path} belongs to group {group}, and what you write there to {group_name(host.group)}"
        return [Finding("warning", "output", message, f"newgrp {group}")]
    return [Finding("ok", "output", f"{_where(filesystem)}, {_free(filesystem)}")]


def _where(filesystem: Filesystem) -> str:
    return f"{filesystem.path} ({filesystem.type or 'file system unknown'})"


def _free(filesystem: Filesystem) -> str:
    return f"{filesystem.free / GIB:.0f} GiB free"
