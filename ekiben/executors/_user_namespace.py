"""The kernel's overlay without root: in a user namespace of our own, on squashfs files mounted by squashfuse.

Kernels since 5.11 allow it. Apptainer itself takes fuse-overlayfs wherever a layer below is shown by FUSE, for in some
kernels since 5.15 copying up from FUSE fails; whether it does is tried here.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ekiben.core.process import Argv, name_exit, run, search_path, which
from ekiben.formats.layer import Entry, write_entries

# No index, no metacopy: they change the upper directory. userxattr implies no redirects.
_OPTIONS = "userxattr,index=off,metacopy=off"
SUBUIDS, SUBGIDS = Path("/etc/subuid"), Path("/etc/subgid")


def subordinate_ids(table: Path) -> str | None:
    """Return START:COUNT of this user's first range in the table, or None."""
    if not table.exists():
        return None
    owner = re.compile(rf"^(?:{re.escape(getpass.getuser())}|{os.getuid()}):(\d+:\d+)", re.MULTILINE)
    line = owner.search(table.read_text(encoding="utf-8"))
    return line[1] if line else None


def as_root(command: Argv) -> Argv:
    """Return a command line as root of a user and a mount namespace, with all ids of the user."""
    program = Path(__file__).with_name("_as_root.py")
    return [sys.executable, "-I", program, subordinate_ids(SUBUIDS) or "", subordinate_ids(SUBGIDS) or "", *command]


def mount_lines(lower: Sequence[tuple[Path, int]], libexec: str) -> list[str]:
    """Return shell lines that mount squashfs files, each with its offset, bottom first, and `merged` on them, by the
    kernel's overlay.

    `upper`, `work` and `merged` are in the current folder, as the mounts of the layers will be. What serves those ends
    with the shell.
    """
    program = _squashfuse(libexec) or "squashfuse"
    lines = ["mount --make-rprivate /", "served=", "trap 'kill -KILL $served; wait' EXIT"]
    names = [str(number) for number in range(len(lower))]
    for name, (path, offset) in zip(names, lower, strict=True):
        serve = shlex.join([program, "-f", "-o", f"ro,offset={offset}", str(path), name])
        lines += [
            f"mkdir -p {name}",
            # In the foreground, for a daemon of its own would outlive a build that is killed.
            f"setpriv --pdeathsig KILL {serve} >/dev/null &",
            'served="$served $!"',
            f"until mountpoint -q {name}; do kill -0 $! || exit; sleep 0.01; done",
        ]  # where it hangs, Apptainer would hang, too
    mount = (
        "mount -t overlay overlay merged -o"
        f" lowerdir={':'.join(reversed(names))},upperdir=upper,workdir=work,{_OPTIONS}"
    )
    # volatile: no sync; after a power failure the script's changes are discarded.
    return [*lines, f"{mount},volatile 2>/dev/null || {mount}"]


def _squashfuse(libexec: str) -> str | None:
    """Packages of Apptainer bring their own, which is not on PATH."""
    path = os.pathsep.join([f"{libexec}/apptainer/bin", *search_path()])
    return shutil.which("squashfuse_ll", path=path) or shutil.which("squashfuse", path=path)


def unusable(folder: Path, libexec: str) -> str | None:
    """Return why the kernel's overlay cannot be mounted without root for an upper directory in ``folder``, or None."""
    for program in ("setpriv", "mountpoint"):
        if which(program) is None:
            return f"{program} is not on PATH"
    if _squashfuse(libexec) is None:
        return "squashfuse is not on PATH"
    return _try_out(folder, libexec)


# Each kind of change to a file or folder of a layer below, and the expected result.
_TRIAL = """\
cd merged; printf new >>file; chmod 600 mode; chown 1:1 owner; rm gone; mv before after; rm -r folder; mkdir folder
test "$(cat file)" = oldnew; test "$(stat -c '%a %u' mode owner after)" = "600 0
644 1
644 0"
test "$(ls . folder | tr '\\n' ' ')" = ".: after file folder mode owner  folder: "
test -c ../upper/gone"""
_FILES = ("before", "file", "folder/old", "gone", "mode", "owner")


_tried: dict[int, str | None] = {}  # device → why it did not work, or None


def _try_out(folder: Path, libexec: str) -> str | None:
    device = folder.stat().st_dev
    if device not in _tried:
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as trial:
            _write_trial_layer(Path(trial, "layer"))
            for name in ("upper", "work", "merged"):
                Path(trial, name).mkdir()
            lines = ["set -e", f"cd {shlex.quote(trial)}", *mount_lines([(Path(trial, "layer"), 0)], libexec), _TRIAL]
            done = run(as_root(["/bin/sh", "-c", "\n".join(lines)]), check=False)
            run(as_root(["find", trial, "-mindepth", "1", "-delete"]), check=False)
        messages = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        _tried[device] = (messages or [name_exit(done.returncode)])[0] if done.returncode else None
    return _tried[device]


def _write_trial_layer(path: Path) -> None:
    from ekiben.formats.squashfs.writer import SquashfsWriter  # imported here: most invocations build nothing

    entries = [
        Entry("", "dir", 0o755),
        Entry("folder", "dir", 0o755),
        *(Entry(name, "file", 0o644, size=3) for name in _FILES),
    ]
    with path.open("w+b") as out:
        write_entries(
            (
                (entry, iter([b"old"]) if entry.kind == "file" else None)
                for entry in sorted(entries, key=lambda entry: entry.order)
            ),
            SquashfsWriter(out, epoch=1),
        )
