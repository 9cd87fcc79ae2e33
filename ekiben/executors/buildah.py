"""buildah: no daemon; rootless through its own user namespace. The layers below become an image in its storage, and
what the script changes is the upper directory of the container's overlay."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ekiben.core.checked import Fields, parse_json
from ekiben.core.environment import DEFAULT_PATH, platform
from ekiben.core.errors import EngineError
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import piped, run, stream, which
from ekiben.core.process_name import has_ended, process_name
from ekiben.executors import (
    FIND_MARKED,
    TAR_OF_UPPER,
    Changes,
    Job,
    JobFailed,
    marked_folders,
    shared_packages,
)
from ekiben.executors._containers_storage import FUSE, environment, fuse_defect, is_in_use, kind_of_mount, pull
from ekiben.formats import oci

PREFERENCE = 20
LAYER_IMAGES = "localhost/ekiben/layer"
_LINK = "ekiben-buildah-"
_CONTAINER = "ekiben-"  # a working container has no labels of its own: its name says whose it is
PULLED = "localhost/layers:"  # what `buildah pull` calls an image of the folder `layers`


def unavailable() -> str | None:
    """Return why buildah cannot run scripts of layers here, or None."""
    if which("buildah") is None:
        return "buildah is not on PATH"
    info = _buildah("info", check=False)
    if info.returncode:
        return f"`buildah info` fails: {(info.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    try:
        driver = Fields.of(parse_json(info.stdout)).object("store").text("GraphDriverName")
    except ValueError as error:
        return f"what `buildah info` says cannot be read: it {error}"
    if driver != "overlay":
        # With vfs each layer is a full copy of all below it.
        return f"buildah's storage driver is {driver}; overlay is needed (STORAGE_DRIVER=overlay, or storage.conf)"
    return None


def overlay_defect(folder: Path) -> str | None:
    """Return why layers made here may differ from those of the kernel's overlay, or None."""
    return fuse_defect(_buildah("info", check=False).stdout)


def _buildah(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run(["buildah", *args], check=check, env=environment())


@contextlib.contextmanager
def execute(job: Job) -> Iterator[Changes]:
    """Run the job in buildah; inside the context its changes can be read, once. Raises JobFailed, EngineError."""
    with _container(job) as container:
        _run(job, container)
        mount = kind_of_mount(["buildah", "mount", container])
        kind, _, mounted = run(_rootful(mount), env=environment()).stdout.partition("\n")
        upper = Path(mounted).parent / "diff"
        if not mounted or not _is_folder(upper):
            raise EngineError(f"buildah's storage is not laid out as expected: no {upper}")
        marked, is_fuse = _marks(upper), kind == FUSE
        if os.geteuid() == 0:
            yield Changes(upper, opaque=marked, is_fuse=is_fuse)
            return
        with piped(_rootful([*TAR_OF_UPPER, "-C", str(upper), "."]), env=environment()) as archive:
            yield Changes(archive, opaque=marked, is_fuse=is_fuse)


def remove_cached_images() -> int:
    """Remove the layers that buildah keeps as images for the next build, and return how many these were."""
    listed = _buildah("images", "--noheading", "--format", "{{.ID}} {{.Name}}:{{.Tag}}").stdout.splitlines()
    images = [(line.split()[0], line.split()[-1]) for line in listed]
    ours = {image: name for image, name in images if name.startswith(LAYER_IMAGES)}
    for name in [name for image, name in images if image in ours and name.startswith(PULLED)]:
        _buildah("rmi", name)  # just the name; not while building, for the next pull may have it by then
    for name in ours.values():
        _buildah("rmi", name)
    return len(ours)


def try_run(job: Job) -> None:
    """Run the job in buildah and discard its changes. Raises JobFailed, EngineError."""
    with _container(job) as container:
        _run(job, container)


def _rootful(argv: list[str]) -> list[str]:
    """As root inside the user namespace whose ids the storage was written with."""
    return argv if os.geteuid() == 0 else ["buildah", "unshare", *argv]


def _is_folder(path: Path) -> bool:
    return run(_rootful(["test", "-d", str(path)]), check=False, env=environment()).returncode == 0


def _marks(upper: Path) -> set[str]:
    with piped(_rootful([*FIND_MARKED, str(upper)]), env=environment()) as listing:
        return marked_folders(listing.read(), str(upper))


@contextlib.contextmanager
def _container(job: Job) -> Iterator[str]:
    image = _image(job)
    remove_abandoned()
    container = f"{_CONTAINER}{process_name()}-{secrets.token_hex(4)}-{job.name}"
    name = _buildah("from", "--pull-never", "--name", container, image).stdout.strip()
    try:
        yield name
    finally:
        _buildah("rm", name, check=False)


def remove_abandoned(*, dry_run: bool = False) -> list[str]:
    """Remove the working containers of this user's killed commands, and return their names."""
    if which("buildah") is None or not is_in_use():
        return []
    listed = _buildah("containers", "--format", "{{.ContainerName}}", check=False).stdout.split()
    ours = [name for name in listed if name.startswith(_CONTAINER)]
    names = [name for name in ours if has_ended(name.removeprefix(_CONTAINER).partition("-")[0])]
    for name in names if not dry_run else ():
        _buildah("rm", name, check=False)
    return names


def _run(job: Job, container: str) -> None:
    with shared_packages(job), _without_colons(job.mount) as mount, _without_colons(job.cache) as cache:
        code = stream(
            [
                "buildah",
                "run",
                "--isolation",
                "chroot",
                "--user",
                "0:0",
                "--volume",
                f"{mount}:/{BUILD_MOUNT}",
                "--volume",
                f"{cache}:/{BUILD_MOUNT}/cache",
                # As one stream: of two, the last line may come first.
                container,
                "--",
                "/bin/sh",
                "-c",
                f"exec /bin/sh /{BUILD_MOUNT}/run.sh 2>&1",
            ],
            job.log,
            env=_environment(job),
        )
    if code:
        raise JobFailed(code)


def _environment(job: Job) -> dict[str, str]:
    """That of its storage. What a killed buildah leaves in TMPDIR goes with the job's folder."""
    return environment() | ({} if ":" in str(job.scratch) else {"TMPDIR": str(job.scratch)})


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
        ):  # of another user, or in use: a killed build's leads nowhere once its folder is swept
            if left.stat().st_uid == os.getuid() and not (left / "folder").exists():
                (left / "folder").unlink()
                left.rmdir()
    with tempfile.TemporaryDirectory(prefix=_LINK) as links:
        link = Path(links, "folder")
        link.symlink_to(folder.absolute())
        yield link


def _image(job: Job) -> str:
    """The layers below as an image in buildah's storage. Layers it has already are not sent again."""
    config = oci.image_config(job.lower, environment={"PATH": DEFAULT_PATH}, labels={}, epoch=0, platform=platform())
    name = f"{LAYER_IMAGES}:{oci.digest_of(config)[7:19]}"
    if _buildah("inspect", "--type", "image", name, check=False).returncode == 0:
        return name
    below = {layer.diff_id for layer in job.lower[:-1]}
    image = pull(
        ["buildah", "pull"], config, job.lower, name, present=below, scratch=job.scratch, env=_environment(job)
    )
    _buildah("tag", image, name)
    return name
