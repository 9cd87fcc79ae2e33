"""Apptainer, rootless with --fakeroot or as root, or SingularityCE as root: the layers below are squashfs overlays, read
only, and what the script changes lands in an upper directory of its own. Nothing is unpacked."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from ekiben.core.errors import EngineError
from ekiben.core.files import remove_tree
from ekiben.core.mounts import bind_args
from ekiben.core.owner import is_abandoned
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import Argv, piped, quoted, run, stream, which
from ekiben.executors import (
    FIND_MARKED,
    TAR_OF_UPPER,
    Changes,
    Job,
    JobFailed,
    check_tools,
    marked_folders,
    shared_packages,
)
from ekiben.formats.xattrs import CAPABILITY

PREFERENCE = 10


def program() -> str | None:
    """Return the path of apptainer or singularity, or None."""
    return which("apptainer", "singularity")


def unavailable() -> str | None:
    """Return why Apptainer cannot run scripts of layers here, or None."""
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
    for knob, expected in (("kernel.apparmor_restrict_unprivileged_userns", "0"), ("kernel.unprivileged_userns_clone", "1"),
                         ("user.max_user_namespaces", "15000")):  # fmt: skip
        path = Path("/proc/sys") / knob.replace(".", "/")
        if path.exists() and (path.read_text(encoding="utf-8").strip() == "0") == (expected != "0"):
            return f"user namespaces are switched off; ask the administrator for: sysctl -w {knob}={expected}"
    return "user namespaces are not allowed here (a container without them, or a hardened kernel)"


def _has_range(table: Path, user: str) -> bool:
    if not table.exists():
        return False
    owner = re.compile(rf"^({re.escape(user)}|{os.getuid()}):\d+:\d+", re.MULTILINE)
    return owner.search(table.read_text(encoding="utf-8")) is not None


@contextlib.contextmanager
def execute(job: Job) -> Iterator[Changes]:
    """Run the job in Apptainer; inside the context its changes can be read, once. Raises JobFailed, EngineError."""
    _remove_left_behind(job)
    if os.geteuid() != 0:
        check_tools(job.lower[:1], "apptainer without root")
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
            yield Changes(archive, opaque=marked, is_fuse=True)
    finally:
        _remove(job, overlay)


def remove_cached_images() -> int:
    """Remove the layers that Apptainer keeps as images for the next build, and return how many these were."""
    return 0  # it reads the store's own blobs


def try_run(job: Job) -> None:
    """Run the job in Apptainer and discard its changes. Raises JobFailed, EngineError."""
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
    refused: list[str] = []

    def log(line: str) -> None:
        if os.strerror(errno.ENODATA) in line:
            refused.append(line)
        job.log(line)

    with shared_packages(job):
        code = stream(argv, log, env=_environment())
    if code and refused and os.geteuid():
        _check_capabilities(job, refused[-1])
    if code:
        raise JobFailed(code)


def _check_capabilities(job: Job, line: str) -> None:
    """Raise OverlayError when a file of a layer below has capabilities: squashfuse (0.6) calls the namespace `security` `trusted`,
    and fuse-overlayfs then copies no such file up."""
    from ekiben.formats.changeset import OverlayError  # late: most invocations build nothing

    for layer in job.lower:
        with layer.reader() as reader:
            entries = reader.entries() if reader.has_xattrs else iter(())
            paths = [f"/{entry.path}" for entry in entries if any(name == CAPABILITY for name, _ in entry.xattrs)]
        if paths:
            raise OverlayError(
                f"{line.strip()}: Apptainer without root cannot change a file of a layer below that has capabilities, as of layer "
                f"{layer.name} {', '.join(paths[:3])}",
                hint="build with --engine buildah or podman, or as root; or set the capabilities in the last layer",
            )


def _with_overlays(job: Job, overlay: Path) -> Argv:
    """Each overlay lies on those before. Their names are relative: the option ends a path at ',' and ':', without an escape."""
    bottom, *upper = [layer.file() for layer in job.lower]
    argv = [*_base_argv(), "--overlay", overlay.name]
    for number, path in enumerate(upper):
        (job.scratch / f"layer{number}").symlink_to(path.absolute())
        argv += ["--overlay", f"layer{number}:ro"]
    # With a second overlay Apptainer 1.4 mounts its own passwd and group, and no package can then add a user.
    enter = f"umount /etc/passwd /etc/group 2>/dev/null; exec /bin/sh /{BUILD_MOUNT}/run.sh"
    argv += [*_binds(job), bottom.absolute(), "/bin/sh", "-c", enter]
    return ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"', job.scratch, *argv]


def _with_kernel_mounts(job: Job, overlay: Path) -> Argv:
    """As root Apptainer mounts an overlay with so few capabilities that a setgid bit is lost without a word, and with
    whatever the kernel does about renamed directories by default. So the mounts are ours, in a namespace that ends
    with the script. Names are relative: mount's options hold a page, and no commas."""
    for name in ("upper", "work", "merged"):
        (overlay / name).mkdir()
    lines = ["set -e", f"cd {shlex.quote(str(overlay))}"]
    names = [str(number) for number in range(len(job.lower))]
    for name, layer in zip(names, job.lower, strict=True):
        part = layer.partition()
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
    return ["--workdir", job.scratch / "work", *bind_args(job.mount, f"/{BUILD_MOUNT}"),
            *bind_args(job.cache, f"/{BUILD_MOUNT}/cache")]  # fmt: skip


def _base_argv() -> list[str | Path]:
    found = program()
    if found is None:
        raise EngineError("neither apptainer nor singularity is on PATH")
    fakeroot = [] if os.geteuid() == 0 else ["--fakeroot"]
    return [found, "--silent", "exec", *fakeroot, "--cleanenv", "--contain", "--no-home", "--pwd", "/",
            "--no-mount", "/etc/localtime"]  # the machine's, which a script could not replace  # fmt: skip


def _environment() -> dict[str, str]:
    """A user's own APPTAINER_* settings (binds, overlays, --nv) are for running images, not for building them."""
    return {name: value for name, value in os.environ.items()
            if not name.startswith(("APPTAINER", "SINGULARITY")) or name.endswith(("_TMPDIR", "_CACHEDIR"))}  # fmt: skip


def _inside(job: Job, folder: Path, command: list[str]) -> Argv:
    """The bottom layer's own tools on ``folder``, with the owners seen as the script saw them, for who is not root."""
    bottom = job.lower[0].file()
    return [*_base_argv(), *bind_args(folder, f"/{BUILD_MOUNT}"), bottom, *command]


def _find_marks(job: Job, upper: Path) -> set[str]:
    with piped(_inside(job, upper, [*FIND_MARKED, f"/{BUILD_MOUNT}"]), env=_environment()) as listing:
        return marked_folders(listing.read(), f"/{BUILD_MOUNT}")


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
    for left in job.staging.iterdir():
        if is_abandoned(left) and left.is_dir():
            _remove(job, left)
