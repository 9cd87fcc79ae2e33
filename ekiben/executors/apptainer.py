"""Apptainer, rootless or as root, or SingularityCE as root: the layers below are squashfs overlays, read only, and what
the script changes lands in an upper directory of its own. Nothing is unpacked.

The overlay is the kernel's, and mounted here, where the kernel lets this user mount one; else it is fuse-overlayfs, by
--fakeroot.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import getpass
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ekiben.core.errors import EngineError
from ekiben.core.files import remove_tree
from ekiben.core.folder import Folder
from ekiben.core.inner_path import program_files
from ekiben.core.mounts import bind_args
from ekiben.core.owner import is_abandoned
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import Argv, piped, quoted, run, stream, which
from ekiben.executors import (
    DEBUG_SCRIPT,
    FIND_MARKED,
    TAR_OF_UPPER,
    Changes,
    Job,
    JobFailed,
    ShellCommand,
    check_tools,
    marked_folders,
    shared_packages,
)
from ekiben.executors._user_namespace import SUBGIDS, SUBUIDS, as_root, mount_lines, subordinate_ids, unusable
from ekiben.formats.xattrs import CAPABILITY

PREFERENCE = 10
_NO_NETWORK = ("--net", "--network", "none")


def program() -> str | None:
    """Return the path of apptainer or singularity, or None."""
    return which("apptainer", "singularity")


def unavailable() -> str | None:
    """Return why Apptainer cannot run scripts of layers here, or None."""
    runtime = program()
    if runtime is None:
        return "neither apptainer nor singularity is on PATH"
    if os.geteuid() == 0:
        return None
    if Path(runtime).name != "apptainer" and run([runtime, "--version"], check=False).stdout.startswith("singularity"):
        return (
            "SingularityCE is here, which builds as root only (without, 4.1.1 makes no writable overlay on several"
            " layers)"
        )
    if (reason := _no_user_namespaces()) is not None:
        return reason
    if subordinate_ids(SUBUIDS) is None or subordinate_ids(SUBGIDS) is None:
        user = getpass.getuser()
        return (
            f"no subordinate ids for {user} in /etc/subuid and /etc/subgid; ask the administrator for: usermod"
            f" --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
        )
    if which("newuidmap") is None:
        return "newuidmap is missing (package uidmap, or shadow-utils)"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened, and squashfs cannot be mounted without it or root"
    return None


def _no_user_namespaces() -> str | None:
    if run(["unshare", "--user", "true"], check=False).returncode == 0:
        return None
    for knob, expected in (
        ("kernel.apparmor_restrict_unprivileged_userns", "0"),
        ("kernel.unprivileged_userns_clone", "1"),
        ("user.max_user_namespaces", "15000"),
    ):
        path = Path("/proc/sys") / knob.replace(".", "/")
        if path.exists() and (path.read_text(encoding="utf-8").strip() == "0") == (expected != "0"):
            return f"user namespaces are switched off; ask the administrator for: sysctl -w {knob}={expected}"
    return "user namespaces are not allowed here (a container without them, or a hardened kernel)"


@contextlib.contextmanager
def execute(job: Job) -> Iterator[Changes]:
    """Run the job in Apptainer; inside the context its changes can be read, once. Raises JobFailed, EngineError."""
    _remove_abandoned(job)
    is_fuse = overlay_defect(job.scratch) is not None
    if is_fuse:
        check_tools(job.lower[:1], "apptainer without root")
    overlay = job.scratch / "overlay"
    overlay.mkdir()
    try:
        _execute(job, overlay, is_fuse)
        upper = overlay / "upper"
        if os.geteuid() == 0:
            yield Changes(upper)  # the kernel's overlay marks opaque folders by an attribute
        elif not is_fuse:
            with piped(as_root([*TAR_OF_UPPER, "-C", upper, "."])) as archive:
                yield Changes(archive)
        else:
            marked = _find_marks(job, upper)
            with piped(_inside(job, upper, [*TAR_OF_UPPER, "-C", f"/{BUILD_MOUNT}", "."])) as archive:
                yield Changes(archive, opaque=marked, is_fuse=True)
    finally:
        _remove(job, overlay)


def overlay_defect(folder: Path) -> str | None:
    """Return why layers made in ``folder`` may differ from those of the kernel's overlay, or None."""
    if os.geteuid() == 0 or (reason := unusable(folder, _libexec())) is None:
        return None
    return f"it uses fuse-overlayfs, for the kernel's overlay cannot be used: {reason}"


@functools.cache
def _libexec() -> str:
    return run([program() or "apptainer", "buildcfg", "LIBEXECDIR"], check=False).stdout.strip()


def remove_cached_images() -> int:
    """Remove the layers that Apptainer keeps as images for the next build, and return how many these were."""
    return 0  # it reads the store's own blobs


def remove_abandoned(*, dry_run: bool = False) -> list[str]:
    """Remove the containers of killed commands, and return their names."""
    return []  # they are processes, which the store ends that they were started for


def try_run(job: Job) -> None:
    """Run the job in Apptainer and discard its changes. Raises JobFailed, EngineError."""
    overlay = job.scratch / "overlay"
    overlay.mkdir()
    try:
        _execute(job, overlay, overlay_defect(job.scratch) is not None)
    finally:
        _remove(job, overlay)


def _execute(job: Job, overlay: Path, is_fuse: bool) -> None:
    work = job.scratch / "work"
    work.mkdir(exist_ok=True)
    refused: list[str] = []

    def log(line: str) -> None:
        if os.strerror(errno.ENODATA) in line:
            refused.append(line)
        job.log(line)

    with shared_packages(job), contextlib.ExitStack() as stack:
        partitions = [] if is_fuse else [layer.partition() for layer in job.lower]
        paths, handles = program_files((item.path for item in partitions), stack)
        squashfs = [(path, item.offset) for path, item in zip(paths, partitions, strict=True)]

        def argv(name: str) -> Argv:
            script = f"/{BUILD_MOUNT}/{name}"
            if is_fuse:
                return _with_overlays(job, overlay, script)
            return _with_kernel_mounts(job, overlay, squashfs, script)

        code = stream(argv("run.sh"), log, env=_environment(), pass_fds=handles)
        if code and job.on_failure is not None:
            _prepare_again(job, overlay, is_fuse)
            job.on_failure(code, ShellCommand(argv(DEBUG_SCRIPT), _environment(), handles))
    if code and refused and os.geteuid():
        _check_capabilities(job, refused[-1])
    if code:
        raise JobFailed(code)


def _check_capabilities(job: Job, line: str) -> None:
    """Raise OverlayError when a file of a layer below has capabilities: squashfuse (0.6) calls the namespace `security`
    `trusted`, and the overlay then copies no such file up."""
    from ekiben.formats.changeset import OverlayError  # imported here: most invocations build nothing

    for layer in job.lower:
        with layer.reader() as reader:
            entries = reader.entries() if reader.has_xattrs else iter(())
            paths = [f"/{entry.path}" for entry in entries if any(name == CAPABILITY for name, _ in entry.xattrs)]
        if paths:
            raise OverlayError(
                f"{line.strip()}: Apptainer without root cannot change a file of a layer below that has capabilities,"
                f" as of layer {layer.name} {', '.join(paths[:3])}",
                hint="build with --engine buildah or podman, or as root; or set the capabilities in the last layer",
            )


def _prepare_again(job: Job, overlay: Path, is_fuse: bool) -> None:
    """Let the same overlay be mounted once more: the kernel refuses one that was volatile."""
    if is_fuse:
        for link in job.scratch.glob("layer*"):
            link.unlink()
        return
    argv: Argv = ["find", overlay / "work/work/incompat", "-delete"]
    run(argv if os.geteuid() == 0 else as_root(argv), check=False)


def _with_overlays(job: Job, overlay: Path, script: str) -> Argv:
    """Mount overlays, each on the one before.

    Their names are relative: the option ends a path at ',' and ':', without an escape.
    """
    bottom, *upper = [layer.file() for layer in job.lower]
    argv = [*_base_argv(fakeroot=True), *([] if job.has_network else _NO_NETWORK), "--overlay", overlay.name]
    for number, path in enumerate(upper):
        (job.scratch / f"layer{number}").symlink_to(path.absolute())
        argv += ["--overlay", f"layer{number}:ro"]
    # With a second overlay Apptainer 1.4 mounts its own passwd and group, and no package can then add a user.
    enter = f"umount /etc/passwd /etc/group 2>/dev/null; exec /bin/sh {script}"
    argv += [*_binds(job), bottom.absolute(), "/bin/sh", "-c", enter]
    return ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"', job.scratch, *argv]


def _with_kernel_mounts(job: Job, overlay: Path, squashfs: Sequence[tuple[Path, int]], script: str) -> Argv:
    """Mount the kernel's overlay in a namespace that ends with the script. As root Apptainer's overlay loses setgid
    bits and follows the kernel's default for renamed directories; as a user Apptainer takes fuse-overlayfs. Names are
    relative: mount's options hold one page, and no commas.
    """
    for name in ("upper", "work", "merged"):
        (overlay / name).mkdir(exist_ok=True)
    is_root, merged = os.geteuid() == 0, overlay / "merged"
    argv = [*_base_argv(fakeroot=False), "--writable", *_binds(job), merged, "/bin/sh", script]
    command = quoted(argv if job.has_network else ["unshare", "--net", *argv])
    lines = [
        "set -e",
        f"cd {shlex.quote(str(overlay))}",
        *(_mounts_of_root(squashfs) if is_root else mount_lines(squashfs, _libexec())),
        f"mkdir -p merged/{BUILD_MOUNT}/cache",
        "cd /",
        f"exec {command}" if is_root else command,
    ]
    enter = ["/bin/sh", "-c", "\n".join(lines)]
    return ["unshare", "--mount", "--propagation", "private", *enter] if is_root else as_root(enter)


def _mounts_of_root(layers: Sequence[tuple[Path, int]]) -> list[str]:
    lines = []
    names = [str(number) for number in range(len(layers))]
    for name, (path, offset) in zip(names, layers, strict=True):
        where = f"loop,offset={offset}" if offset else "loop"
        lines += [
            f"mkdir -p {name}",
            f"mount --no-canonicalize -t squashfs -o ro,{where} {shlex.quote(str(path))} {name}",
        ]
    options = (
        f"lowerdir={':'.join(reversed(names))},upperdir=upper,workdir=work,index=off,metacopy=off,redirect_dir=off"
    )
    # volatile, from Linux 5.10 on: no sync; after a power failure the script's changes are not
    # keep.
    mount = f"mount -t overlay overlay merged -o {options}"
    return [*lines, f"{mount},volatile 2>/dev/null || {mount}"]


def _binds(job: Job) -> list[str | Path]:
    return [
        "--workdir",
        job.scratch / "work",
        *bind_args(job.mount, f"/{BUILD_MOUNT}"),
        *bind_args(job.cache, f"/{BUILD_MOUNT}/cache"),
    ]


def _base_argv(*, fakeroot: bool) -> list[str | Path]:
    runtime = program()
    if runtime is None:
        raise EngineError("neither apptainer nor singularity is on PATH")
    return [
        runtime,
        "--silent",
        "exec",
        *(["--fakeroot"] if fakeroot else []),
        "--cleanenv",
        "--contain",
        "--no-home",
        "--pwd",
        "/",
        "--no-mount",
        "/etc/localtime",
    ]  # the machine's file, which a script could not replace


def _environment() -> dict[str, str]:
    """Return the environment without APPTAINER_* settings (binds, overlays, --nv), which are for running images."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("APPTAINER", "SINGULARITY")) or name.endswith(("_TMPDIR", "_CACHEDIR"))
    }


def _inside(job: Job, folder: Path, command: list[str]) -> Argv:
    """Return a command of the bottom layer's tools on ``folder``, with the script's owners; for users without root."""
    bottom = job.lower[0].file()
    return [*_base_argv(fakeroot=True), *bind_args(folder, f"/{BUILD_MOUNT}"), bottom, *command]


def _find_marks(job: Job, upper: Path) -> set[str]:
    with piped(_inside(job, upper, [*FIND_MARKED, f"/{BUILD_MOUNT}"]), env=_environment()) as listing:
        return marked_folders(listing.read(), f"/{BUILD_MOUNT}")


def _remove(job: Job, overlay: Path) -> None:
    """Remove files of subordinate ids from inside the namespace. Root's files go with the staging folder."""
    if os.geteuid() == 0:
        return
    remove_tree(overlay)
    if overlay.exists():
        run(as_root(["find", overlay, "-xdev", "-mindepth", "1", "-delete"]), check=False)
        remove_tree(overlay)
    if overlay.exists():  # where only Apptainer may have a user namespace (AppArmor's profiles)
        run(_inside(job, overlay, ["find", f"/{BUILD_MOUNT}", "-xdev", "-mindepth", "1", "-delete"]), check=False)
        remove_tree(overlay)


def _remove_abandoned(job: Job) -> None:
    """Remove files of killed builds that the store itself could not remove."""
    with Folder.open(job.staging) as staging:
        left = [name for name in staging.names() if is_abandoned(staging, name) and staging.is_folder(name)]
    for name in left:
        _remove(job, job.staging / name)
