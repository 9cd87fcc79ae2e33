"""What fuse-overlayfs does otherwise than the kernel's overlay: the documents say so, and engines with the latter come
first.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from workspaces import need

pytestmark = pytest.mark.covers("ekiben/executors")

MOUNTS = {
    "kernel": (
        "mount -t overlay overlay merged -o"
        " lowerdir=lower,upperdir=upper,workdir=work,index=off,metacopy=off,redirect_dir=off"
    ),
    "fuse": "fuse-overlayfs -o lowerdir=lower,upperdir=upper,workdir=work merged",
}
NEW = "printf new >d/new; "


def left(kind: str, script: str, folder: Path) -> set[str]:
    """What is in the merged folder after the script: names, and of folders the mode, too."""
    for name in ("lower/d", "lower/bits", "upper", "work", "merged"):
        (folder / name).mkdir(parents=True)
    (folder / "lower/d/file").write_text("old")
    (folder / "lower/bits").chmod(0o6755)
    os.mkfifo(folder / "lower/pipe")
    show = "find . -mindepth 1 -type d -printf '%P %m\\0' -o -type p -printf '%P fifo\\0' -o -printf '%P\\0'"
    steps = f"set -e; cd {folder}; {MOUNTS[kind]}; trap 'cd {folder}; umount merged' EXIT; cd merged; {script}; {show}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", steps], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rstrip("\0").split("\0"))


@pytest.mark.parametrize(
    ("script", "is_equal"),
    [
        (f"{NEW}mv d/new d/file; rm d/file", False),
        ("sed -i s/old/new/ d/file; rm d/file", False),
        ("ln -sf nowhere t; mv -T t d/file; rm d/file", False),
        (f"{NEW}rm d/file; mv d/new d/file; rm d/file", False),
        (f"{NEW}mv d/new d/file; mv d/file moved", False),
        ("rm -r d; mkdir d; ls . d >/dev/null; mv -T d e", False),
        ("rm -r d; mkdir d; rmdir d", True),
        (f"{NEW}mv d/new d/file; ls d >/dev/null; rm d/file", True),  # which makes it look below again
        ("printf new >d/file; rm d/file", True),
        ("rm d/file; printf new >d/file; rm d/file", True),
        ("chown 5 pipe || true", False),  # an empty file; the layer is refused
        ("mv pipe renamed", False),
        ("touch bits/x", False),  # the folder's setgid and setuid bits go; the layer gets them back
    ],
)
def test_known_differences_from_the_kernels_overlay(script: str, is_equal: bool, tmp_path: Path) -> None:
    """One that is gone can leave docs/explanation/reproducibility.md and docs/support-matrix.md."""
    need("fuse-overlayfs")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    kernel, fuse = (left(kind, script, tmp_path / kind) for kind in ("kernel", "fuse"))
    assert (kernel == fuse) == is_equal, (kernel, fuse)
    assert is_equal or {"d/file", "bits 755", "pipe", "renamed"} & (fuse - kernel)
