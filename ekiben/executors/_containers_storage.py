"""What buildah and podman have in common: the storage that both keep images in, and its user namespace."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ekiben.core.process import ProcessError, run
from ekiben.formats import oci


def environment() -> dict[str, str]:
    """Return the environment with driver overlay for ordinary users: older versions take vfs where overlay would do."""
    return {"STORAGE_DRIVER": "overlay", **os.environ} if os.geteuid() else dict(os.environ)


def is_in_use() -> bool:
    """Return whether this user may have images or containers: without a storage, a question would make one, and leave a
    process.
    """
    home, settings = Path.home(), Path("containers/storage.conf")
    if os.geteuid() == 0:
        folders = [Path("/var/lib/containers/storage"), Path("/etc") / settings]
    else:
        folders = [
            Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share", "containers/storage"),
            Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / settings,
            Path("/etc") / settings,
        ]
    return bool(os.environ.get("CONTAINERS_STORAGE_CONF")) or any(folder.exists() for folder in folders)


def fuse_defect(info: str) -> str | None:
    """Return why layers may differ from those of the kernel's overlay, by the JSON of ``info``, or None.

    For a user the storage remembers that it once had a mount program, and then names none. Root's kernel may have
    options for which it says the same.
    """
    if '"overlay.mount_program' in info or (os.geteuid() != 0 and '"Native Overlay Diff": "false"' in info):
        return (
            "it uses fuse-overlayfs, for storage.conf has a mount_program or had one, or the kernel's overlay cannot be"
            " used"
        )
    return None


def kind_of_mount(mount: Sequence[str]) -> list[str]:
    """Return the arguments that run ``mount``, as `podman mount`, and print the file system's type and then the
    folder.
    """
    return ["/bin/sh", "-c", 'mounted=$("$@") && stat -f -c %T "$mounted" && printf %s "$mounted"', "sh", *mount]


FUSE = "fuseblk"  # what stat calls fuse-overlayfs


def pull(
    argv: Sequence[str],
    config: bytes,
    layers: Sequence[oci.LayerSource],
    name: str,
    *,
    present: Collection[str],
    scratch: Path,
    env: Mapping[str, str],
) -> str:
    """Pull an image of the store's layers with ``argv``, ``podman pull`` say, and return what it prints, the image's
    id.

    Layers whose diff_ids are ``present`` in the storage are not written, unless it lacks one after all. Raises
    ProcessError.
    """
    tag = name.rpartition(":")[2]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        for leave_out in ([present] if present else []) + [set[str]()]:
            oci.write_layout(Path(folder, "layers"), config, layers, name, leave_out=leave_out)
            # It makes a name of the path, and not every path can be one: hence the relative one.
            script = f"cd {shlex.quote(folder)} && exec {shlex.join([*argv, '--quiet', f'oci:layers:{tag}'])}"
            pulled = run(["/bin/sh", "-c", script], check=False, env=dict(env))
            if pulled.returncode == 0:
                return pulled.stdout.strip()
    raise ProcessError([*argv, f"oci:…:{tag}"], pulled.returncode, pulled.stderr)
