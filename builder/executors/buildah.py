"""buildah: no daemon; rootless through its own user namespace. The layers below become an image in its storage, and
what the script changes is the upper directory of the container's overlay."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from builder import oci
from builder.chain import BUILD_MOUNT, DEFAULT_PATH, platform
from builder.errors import EngineError
from builder.executors import TAR_OF_UPPER, Changes, Job, JobFailed, is_gone, shared_packages
from builder.process import ProcessError, piped, run, stream, which

LAYER_IMAGES = "localhost/ekiben/layer"


def unavailable() -> str | None:
    if which("buildah") is None:
        return "buildah is not on PATH"
    told = _buildah("info", check=False)
    if told.returncode:
        return f"`buildah info` fails: {(told.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    driver = json.loads(told.stdout)["store"]["GraphDriverName"]
    if driver != "overlay":
        # With vfs each layer is a full copy of all below it.
        return f"buildah's storage driver is {driver}; overlay is needed (STORAGE_DRIVER=overlay, or storage.conf)"
    return None


def _environment() -> dict[str, str]:
    """An ordinary user who has chosen no driver gets vfs from older versions, where the kernel could do overlay."""
    return {"STORAGE_DRIVER": "overlay", **os.environ} if os.geteuid() else dict(os.environ)


def _buildah(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run(["buildah", *words], check=check, env=_environment())


@contextlib.contextmanager
def execute(job: Job) -> Iterator[Changes]:
    with _container(job) as container:
        _run(job, container)
        mounted = run(_rootful(["buildah", "mount", container]), env=_environment()).stdout.strip()
        upper = Path(mounted).parent / "diff"
        if not mounted or not _is_folder(upper):
            raise EngineError(f"buildah's storage is not laid out as expected: no {upper}")
        marked = _marks(upper)
        if os.geteuid() == 0:
            yield Changes(upper, opaque=marked)
            return
        with piped(_rootful([*TAR_OF_UPPER, "-C", str(upper), "."]), env=_environment()) as archive:
            yield Changes(archive, opaque=marked)


def forget_images() -> int:
    listed = _buildah(
        "images", "--noheading", "--format", "{{.Name}}:{{.Tag}}", "--filter", f"reference={LAYER_IMAGES}"
    )
    names = [name for name in listed.stdout.split() if name.startswith(LAYER_IMAGES)]
    for name in names:
        _buildah("rmi", name)
    return len(names)


def try_run(job: Job) -> None:
    with _container(job) as container:
        _run(job, container)


def _rootful(argv: list[str]) -> list[str]:
    """As root inside the user namespace whose ids the storage was written with."""
    return argv if os.geteuid() == 0 else ["buildah", "unshare", *argv]


def _is_folder(path: Path) -> bool:
    return run(_rootful(["test", "-d", str(path)]), check=False, env=_environment()).returncode == 0


def _marks(upper: Path) -> set[str]:
    found = run(
        _rootful(["find", str(upper), "-name", ".wh..opq", "-o", "-name", ".wh..wh..opq"]), env=_environment()
    ).stdout
    return {os.path.dirname(line)[len(str(upper)) :].strip("/") for line in found.splitlines()}


@contextlib.contextmanager
def _container(job: Job) -> Iterator[str]:
    image = _image(job)
    _remove_left_behind()
    name = _buildah("from", "--pull-never", "--name", f"ekiben-{os.getpid()}-{job.name}", image).stdout.strip()
    try:
        yield name
    finally:
        _buildah("rm", name, check=False)


def _remove_left_behind() -> None:
    """Containers of builds that were killed."""
    for name in _buildah("containers", "--format", "{{.ContainerName}}").stdout.split():
        found = re.match(r"ekiben-(\d+)-", name)
        if found and is_gone(found[1]):
            _buildah("rm", name, check=False)


def _run(job: Job, container: str) -> None:
    with shared_packages(job):
        code = stream(
            ["buildah", "run", "--isolation", "chroot", "--user", "0:0",
             "--volume", f"{job.mount}:/{BUILD_MOUNT}", "--volume", f"{job.cache}:/{BUILD_MOUNT}/cache",
             # As one stream: of two, what was said last may come first.
             container, "--", "/bin/sh", "-c", f"exec /bin/sh /{BUILD_MOUNT}/run.sh 2>&1"],
            job.log, env=_environment(),
        )  # fmt: skip
    if code:
        raise JobFailed(code)


def _image(job: Job) -> str:
    """The layers below as an image in buildah's storage. Layers it has already are not sent again."""
    config = oci.image_config(job.lower, environment={"PATH": DEFAULT_PATH}, labels={}, epoch=0, platform=platform())
    tag = oci.digest_of(config)[7:19]
    name = f"{LAYER_IMAGES}:{tag}"
    if _buildah("inspect", "--type", "image", name, check=False).returncode == 0:
        return name
    below = {layer.diff_id for layer in job.lower[:-1]}
    with tempfile.TemporaryDirectory(dir=job.scratch) as folder:
        for leave_out in (below, set[str]()):
            oci.write_layout(job.store, Path(folder, "layers"), config, job.lower, name, leave_out=leave_out)
            # It makes a name of the path, and not every path can be one: hence the relative one.
            script = f"cd {shlex.quote(folder)} && exec buildah pull --quiet oci:layers:{tag}"
            pulled = run(["/bin/sh", "-c", script], check=False, env=_environment())
            if pulled.returncode == 0:
                _buildah("tag", pulled.stdout.strip(), name)
                return name
    raise ProcessError(["buildah", "pull", f"oci:…:{tag}"], pulled.returncode, pulled.stderr)
