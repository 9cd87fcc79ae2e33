"""Apptainer, rootless with --fakeroot or as root, or SingularityCE as root: the layers below are squashfs overlays, read
only, and what the script changes lands in an upper directory of its own. Nothing is unpacked."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

from builder.chain import BUILD_MOUNT
from builder.errors import EngineError
from builder.executors import TAR_OF_UPPER, Changes, Job, JobFailed, is_gone, shared_packages
from builder.process import Argv, piped, quoted, run, stream, which
from builder.store import remove_tree

_OVERLAY_MARKS = (".wh..opq", ".wh..wh..opq")  # fuse-overlayfs's way to say opaque


def program() -> str | None:
    return which("apptainer", "singularity")


def unavailable() -> str | None:
    found = program()
    if found is None:
        return "neither apptainer nor singularity is on PATH"
    if os.geteuid() == 0:
        return None
    if Path(found).name != "apptainer" and run([found, "--version"], check=False).stdout.startswith("singularity"):
        return "SingularityCE is here, which builds as root only (without, 4.1.1 makes no writable overlay on several layers)"
    if (reason := _no_user_namespaces()) is not None:
        return reason
    user = getpass.getuser()
    if not any(_has_range(Path(table), user) for table in ("/etc/subuid",)) or not _has_range(
        Path("/etc/subgid"), user
    ):
        return f"no subordinate ids for {user} in /etc/subuid and /etc/subgid; ask the administrator for: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
    if which("newuidmap") is None:
        return "newuidmap is missing (package uidmap, or shadow-utils)"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened, and squashfs cannot be mounted without it or root"
    return None


def _no_user_namespaces() -> str | None:
    if run(["unshare", "--user", "true"], check=False).returncode == 0:
        return None
    for knob, wanted in (("kernel.apparmor_restrict_unprivileged_userns", "0"), ("kernel.unprivileged_userns_clone", "1"),
                         ("user.max_user_namespaces", "15000")):  # fmt: skip
        place = Path("/proc/sys") / knob.replace(".", "/")
        if place.exists() and (place.read_text().strip() == "0") == (wanted != "0"):
            return f"user namespaces are switched off; ask the administrator for: sysctl -w {knob}={wanted}"
    return "user namespaces are not allowed here (a container without them, or a hardened kernel)"


def _has_range(table: Path, user: str) -> bool:
    if not table.exists():
        return False
    owner = re.compile(rf"^({re.escape(user)}|{os.getuid()}):\d+:\d+", re.MULTILINE)
    return owner.search(table.read_text()) is not None


@contextlib.contextmanager
def execute(job: Job) -> Iterator[Changes]:
    _remove_left_behind(job)
    overlay = job.scratch / "overlay"
    overlay.mkdir()
    try:
        _execute(job, overlay)
        upper = overlay / "upper"
        if os.geteuid() == 0:
            yield Changes(upper)  # the kernel's overlay marks what is opaque in the folder itself
            return
        marked = _find_marks(job, upper)
        with piped(_inside(job, upper, [*TAR_OF_UPPER, "-C", f"/{BUILD_MOUNT}", "."])) as archive:
            yield Changes(archive, opaque=marked)
    finally:
        _remove(job, overlay)


def forget_images() -> int:
    return 0  # it reads the store's own blobs


def try_run(job: Job) -> None:
    overlay = job.scratch / "overlay"
    overlay.mkdir()
    try:
        _execute(job, overlay)
    finally:
        _remove(job, overlay)


def _execute(job: Job, overlay: Path) -> None:
    work = job.scratch / "work"
    work.mkdir(exist_ok=True)
    argv = _with_kernel_mounts(job, overlay) if os.geteuid() == 0 else _with_overlays(job, overlay)
    with shared_packages(job):
        code = stream(argv, job.log, env=_environment())
    if code:
        raise JobFailed(code)


def _with_overlays(job: Job, overlay: Path) -> Argv:
    bottom, *others = [job.store.layer_file(layer) for layer in job.lower]
    argv = [*_base_argv(), "--overlay", overlay]
    for path in others:  # each one named lies on those before
        argv += ["--overlay", f"{path}:ro"]
    # With a second overlay Apptainer 1.4 mounts its own passwd and group, and no package can then add a user.
    enter = f"umount /etc/passwd /etc/group 2>/dev/null; exec /bin/sh /{BUILD_MOUNT}/run.sh"
    return [*argv, *_binds(job), bottom, "/bin/sh", "-c", enter]


def _with_kernel_mounts(job: Job, overlay: Path) -> Argv:
    """As root Apptainer mounts an overlay with so few capabilities that a setgid bit is lost without a word, and with
    whatever the kernel does about renamed directories by default. So the mounts are ours, in a namespace that ends
    with the script. Names are relative: mount's options hold a page, and no commas."""
    for name in ("upper", "work", "merged"):
        (overlay / name).mkdir()
    lines = ["set -e", f"cd {shlex.quote(str(overlay))}"]
    names = [str(number) for number in range(len(job.lower))]
    for name, layer in zip(names, job.lower, strict=True):
        part = job.store.partition(layer)
        where = f"loop,offset={part.offset}" if part.offset else "loop"
        lines += [f"mkdir {name}", f"mount -t squashfs -o ro,{where} {shlex.quote(str(part.path))} {name}"]
    options = (
        f"lowerdir={':'.join(reversed(names))},upperdir=upper,workdir=work,index=off,metacopy=off,redirect_dir=off"
    )
    merged = overlay / "merged"
    # Without waiting for the disk where the kernel can (5.10): a script that a power failure ends leaves nothing to keep.
    mount = f"mount -t overlay overlay merged -o {options}"
    lines += [f"{mount},volatile 2>/dev/null || {mount}", f"mkdir -p merged/{BUILD_MOUNT}/cache"]
    lines += [
        "cd /",
        f"exec {quoted([*_base_argv(), '--writable', *_binds(job), merged, '/bin/sh', f'/{BUILD_MOUNT}/run.sh'])}",
    ]
    return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", "\n".join(lines)]


def _binds(job: Job) -> list[str | Path]:
    return ["--workdir", job.scratch / "work", "--bind", f"{job.mount}:/{BUILD_MOUNT}",
            "--bind", f"{job.cache}:/{BUILD_MOUNT}/cache"]  # fmt: skip


def _base_argv() -> list[str | Path]:
    found = program()
    if found is None:
        raise EngineError("neither apptainer nor singularity is on PATH")
    fakeroot = [] if os.geteuid() == 0 else ["--fakeroot"]
    return [found, "--silent", "exec", *fakeroot, "--cleanenv", "--contain", "--no-home", "--pwd", "/"]


def _environment() -> dict[str, str]:
    """A user's own APPTAINER_* settings (binds, overlays, --nv) are for running images, not for building them."""
    return {name: value for name, value in os.environ.items()
            if not name.startswith(("APPTAINER", "SINGULARITY")) or name.endswith(("_TMPDIR", "_CACHEDIR"))}  # fmt: skip


def _inside(job: Job, folder: Path, command: list[str]) -> Argv:
    """The bottom layer's own tools on ``folder``, with the owners seen as the script saw them, for who is not root."""
    bottom = job.store.layer_file(job.lower[0])
    return [*_base_argv(), "--bind", f"{folder}:/{BUILD_MOUNT}", bottom, *command]


def _find_marks(job: Job, upper: Path) -> set[str]:
    names = [word for mark in _OVERLAY_MARKS for word in ("-o", "-name", mark)][1:]
    found = run(_inside(job, upper, ["find", f"/{BUILD_MOUNT}", *names]), env=_environment()).stdout
    return {os.path.dirname(line)[len(f"/{BUILD_MOUNT}") :].strip("/") for line in found.splitlines()}


def _remove(job: Job, overlay: Path) -> None:
    """Files of subordinate ids can only be removed from inside; root's go with the staging folder."""
    if os.geteuid() == 0:
        return
    remove_tree(overlay)
    if overlay.exists():
        run(_inside(job, overlay, ["find", f"/{BUILD_MOUNT}", "-xdev", "-mindepth", "1", "-delete"]), check=False)
        remove_tree(overlay)


def _remove_left_behind(job: Job) -> None:
    """What killed builds left in staging, and the store itself could not remove."""
    for left in (job.store.root / "staging").iterdir():
        owner = re.match(rf"{re.escape(socket.gethostname())}__(\d+)__", left.name)
        if owner and is_gone(owner[1]):
            _remove(job, left)
