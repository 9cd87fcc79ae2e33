"""buildah: no daemon; rootless through its own user namespace."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ekiben.core.errors import EngineError
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import run, stream, which
from ekiben.core.process_name import has_ended, process_name
from ekiben.executors import DEBUG_SCRIPT, Job, JobFailed, ShellCommand, shared_packages
from ekiben.executors._containers_storage import LAYER_IMAGES, ContainersStorage, is_in_use

PREFERENCE = 20
_LINK = "ekiben-buildah-"
_CONTAINER = "ekiben-"  # a working container has no labels: its name identifies its owner
PULLED = "localhost/layers:"  # prefix of the names that `buildah pull` gives to images of the folder `layers`


def remove_cached_images() -> int:
    """Remove the layers that buildah keeps as images for the next build, and return how many these were."""
    listed = _STORAGE.call("images", "--noheading", "--format", "{{.ID}} {{.Name}}:{{.Tag}}").stdout.splitlines()
    images = [(line.split()[0], line.split()[-1]) for line in listed]
    ours = {image: name for image, name in images if name.startswith(LAYER_IMAGES)}
    for name in [name for image, name in images if image in ours and name.startswith(PULLED)]:
        _STORAGE.call("rmi", name)  # just the name; not while building, for the next pull may have it by then
    for name in ours.values():
        _STORAGE.call("rmi", name)
    return len(ours)


def remove_abandoned(*, dry_run: bool = False) -> list[str]:
    """Remove the working containers of this user's killed commands, and return their names."""
    if which("buildah") is None or not is_in_use():
        return []
    listed = _STORAGE.call("containers", "--format", "{{.ContainerName}}", check=False).stdout.split()
    ours = [name for name in listed if name.startswith(_CONTAINER)]
    names = [name for name in ours if has_ended(name.removeprefix(_CONTAINER).partition("-")[0])]
    for name in names if not dry_run else ():
        _STORAGE.call("rm", name, check=False)
    return [f"container {name}" for name in names]


class _Buildah(ContainersStorage):
    program = "buildah"
    info_fields = ("GraphDriverName", "GraphStatus")
    driver_hint = "STORAGE_DRIVER=overlay, or storage.conf"

    def environment(self, scratch: Path | None = None) -> dict[str, str]:
        """Return the environment of a command. TMPDIR is in the job's folder, which is removed even after a kill."""
        has_folder = scratch is not None and ":" not in str(scratch)
        return super().environment() | ({"TMPDIR": str(scratch)} if has_folder else {})

    @contextlib.contextmanager
    def container(self, job: Job) -> Iterator[str]:
        image = self.layer_image(job)
        remove_abandoned()
        container = f"{_CONTAINER}{process_name()}-{secrets.token_hex(4)}-{job.name}"
        name = self.call("from", "--pull-never", "--name", container, image).stdout.strip()
        try:
            yield name
        finally:
            self.call("rm", name, check=False)

    def start(self, job: Job, container: str) -> None:
        with shared_packages(job), _without_colons(job.mount) as mount, _without_colons(job.cache) as cache:
            volumes = ["--volume", f"{mount}:/{BUILD_MOUNT}", "--volume", f"{cache}:/{BUILD_MOUNT}/cache"]
            # stdout and stderr as one stream keep their order.

            def argv(*command: str, options: Sequence[str] = ()) -> list[str]:
                options = ["--isolation", "chroot", "--user", "0:0", *options, *volumes]
                argv = self.argv("run", *options, container, "--", "/bin/sh", *command)
                # Isolation by chroot has the network of the caller.
                return argv if job.has_network else self.as_root(["unshare", "--net", *argv])

            script, env = f"exec /bin/sh /{BUILD_MOUNT}/run.sh 2>&1", self.environment(job.scratch)
            code = stream(argv("-c", script), job.log, env=env)
            if code and job.on_failure is not None:
                shell = argv(f"/{BUILD_MOUNT}/{DEBUG_SCRIPT}", options=["--terminal"])
                job.on_failure(code, ShellCommand(shell, env))
        if code:
            raise JobFailed(code)

    def upper_of(self, container: str, mounted: str) -> Path:
        upper = Path(mounted).parent / "diff"
        test = self.as_root(["test", "-d", str(upper)])
        if not mounted or run(test, check=False, env=self.environment()).returncode:
            raise EngineError(f"buildah's storage is not laid out as expected: no {upper}")
        return upper


@contextlib.contextmanager
def _without_colons(folder: Path) -> Iterator[Path]:
    """Yield a path of ``folder`` that --volume takes. buildah 1.28 has no escape for ':', and its --mount reads no CSV.

    Raises EngineError when TMPDIR has a ':', too.
    """
    if ":" not in str(folder):
        yield folder
        return
    if ":" in (parent := tempfile.gettempdir()):
        raise EngineError(
            f"buildah cannot mount {folder}: there is a ':' in it, and in {parent}, where a link to it would be",
            hint="give a store without ':' with --store or EKIBEN_STORE, or set TMPDIR to a folder without",
        )
    for left in Path(parent).glob(f"{_LINK}*"):
        with contextlib.suppress(
            OSError
        ):  # another user's, or in use. A killed build's link is broken when its folder is removed
            if left.stat().st_uid == os.getuid() and not (left / "folder").exists():
                (left / "folder").unlink()
                left.rmdir()
    with tempfile.TemporaryDirectory(prefix=_LINK) as links:
        link = Path(links, "folder")
        link.symlink_to(folder.absolute())
        yield link


_STORAGE = _Buildah()
unavailable, overlay_defect = _STORAGE.unavailable, _STORAGE.overlay_defect
execute, try_run = _STORAGE.execute, _STORAGE.try_run
