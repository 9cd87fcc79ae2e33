"""The executor on containers-storage, where buildah and podman keep images: buildah.py and podman.py add what differs.

The layers below become an image in the storage, and what a script changes is the upper directory of the container's
overlay. Without root, its files belong to the ids of the storage's user namespace.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ekiben.core.checked import Fields, parse_json
from ekiben.core.environment import DEFAULT_PATH, platform
from ekiben.core.process import ProcessError, piped, run, which
from ekiben.executors import FIND_MARKED, TAR_OF_UPPER, Changes, Job, marked_folders
from ekiben.formats import oci

LAYER_IMAGES = "localhost/ekiben/layer"
_FUSE = "fuseblk"  # stat's name of fuse-overlayfs
# Print the file system's type and then the folder that the arguments mount.
_MOUNT = ("/bin/sh", "-c", 'mounted=$("$@") && stat -f -c %T "$mounted" && printf %s "$mounted"', "sh")


def is_in_use() -> bool:
    """Return whether this user has a storage: without one, a command would create it, and leave a process."""
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


class ContainersStorage(ABC):
    """Runs jobs by one of the programs that share this storage."""

    program: str
    info_options: tuple[str, ...] = ()  # so that it prints JSON
    info_fields: tuple[str, str]  # fields of the driver's name, and of its status
    driver_hint: str

    def argv(self, *args: str) -> list[str]:
        """Return a command line of the program."""
        return [self.program, *args]

    def environment(self, scratch: Path | None = None) -> dict[str, str]:
        """Return the environment of a command, whose files may go to ``scratch``.

        With driver overlay for ordinary users: older versions take vfs where overlay would do.
        """
        return {"STORAGE_DRIVER": "overlay", **os.environ} if os.geteuid() else dict(os.environ)

    @abstractmethod
    def container(self, job: Job) -> AbstractContextManager[str]:
        """Return a context of a new container for the job, which is removed at its end."""

    @abstractmethod
    def start(self, job: Job, container: str) -> None:
        """Run the job's script in its container. Raises JobFailed."""

    @abstractmethod
    def upper_of(self, container: str, mounted: str) -> Path:
        """Return the upper directory of a container whose overlay is at ``mounted``. Raises EngineError."""

    def call(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the program. Raises ProcessError, with ``check``."""
        return run(self.argv(*args), check=check, env=self.environment())

    def as_root(self, argv: Sequence[str]) -> list[str]:
        """Return a command line as root of the user namespace whose ids the storage was written with."""
        return [*argv] if os.geteuid() == 0 else self.argv("unshare", *argv)

    def unavailable(self) -> str | None:
        """Return why the program cannot run scripts of layers here, or None."""
        if which(self.program) is None:
            return f"{self.program} is not on PATH"
        info = self.call("info", *self.info_options, check=False)
        if info.returncode:
            return f"`{self.program} info` fails: {(info.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        driver_field, status_field = self.info_fields
        try:
            store = Fields.of(parse_json(info.stdout)).object("store")
            driver, status = store.text(driver_field), store.texts(status_field, {})
        except ValueError as error:
            return f"what `{self.program} info` says cannot be read: it {error}"
        if driver != "overlay":  # with vfs each layer is a full copy of all below it
            return f"{self.program}'s storage driver is {driver}; overlay is needed ({self.driver_hint})"
        if status.get("Using metacopy") == "true":
            return (
                f"{self.program}'s storage is mounted with metacopy=on (storage.conf), which leaves the data out of"
                " what a script changes"
            )
        return None

    def overlay_defect(self, folder: Path) -> str | None:
        """Return why layers made here may differ from those of the kernel's overlay, or None.

        For a user the storage remembers that it once had a mount program, and then names none. Root's kernel may have
        options for which it says the same.
        """
        info = self.call("info", *self.info_options, check=False).stdout
        if '"overlay.mount_program' in info or (os.geteuid() != 0 and '"Native Overlay Diff": "false"' in info):
            return (
                "it uses fuse-overlayfs, for storage.conf has a mount_program or had one, or the kernel's overlay"
                " cannot be used"
            )
        return None

    @contextlib.contextmanager
    def execute(self, job: Job) -> Iterator[Changes]:
        """Run the job; inside the context its changes can be read, once. Raises JobFailed, EngineError."""
        with self.container(job) as container:
            self.start(job, container)
            mount = self.as_root([*_MOUNT, *self.argv("mount", container)])
            kind, _, mounted = run(mount, env=self.environment()).stdout.partition("\n")
            upper, is_fuse = self.upper_of(container, mounted), kind == _FUSE
            with piped(self.as_root([*FIND_MARKED, str(upper)]), env=self.environment()) as listing:
                marked = marked_folders(listing.read(), str(upper))
            if os.geteuid() == 0:
                yield Changes(upper, opaque=marked, is_fuse=is_fuse)
                return
            tar = self.as_root([*TAR_OF_UPPER, "-C", str(upper), "."])
            with piped(tar, env=self.environment()) as archive:
                yield Changes(archive, opaque=marked, is_fuse=is_fuse)

    def try_run(self, job: Job) -> None:
        """Run the job and discard its changes. Raises JobFailed, EngineError."""
        with self.container(job) as container:
            self.start(job, container)

    def layer_image(self, job: Job) -> str:
        """Return the name of an image of the layers below in the storage. Layers that it has are not sent again."""
        variables = {"PATH": DEFAULT_PATH}
        config = oci.image_config(job.lower, environment=variables, labels={}, epoch=0, platform=platform())
        name = f"{LAYER_IMAGES}:{oci.digest_of(config)[7:19]}"
        if self.call("inspect", "--type", "image", name, check=False).returncode:
            self.pull(config, job.lower, name, {layer.diff_id for layer in job.lower[:-1]}, job.scratch)
        return name

    def pull(
        self, config: bytes, layers: Sequence[oci.LayerSource], name: str, present: Collection[str], scratch: Path
    ) -> None:
        """Pull an image of the store's layers, and tag it ``name``.

        Layers whose diff_ids are ``present`` in the storage are not written, unless it lacks one after all. Raises
        ProcessError.
        """
        tag, argv = name.rpartition(":")[2], self.argv("pull")
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            for leave_out in ([present] if present else []) + [set[str]()]:
                oci.write_layout(Path(folder, "layers"), config, layers, name, leave_out=leave_out)
                # The image is named after the path, which may not be a valid name: so it is relative.
                script = f"cd {shlex.quote(folder)} && exec {shlex.join([*argv, '--quiet', f'oci:layers:{tag}'])}"
                pulled = run(["/bin/sh", "-c", script], check=False, env=self.environment(scratch))
                if pulled.returncode == 0:
                    self.call("tag", pulled.stdout.strip(), name)
                    return
        raise ProcessError([*argv, f"oci:…:{tag}"], pulled.returncode, pulled.stderr)
