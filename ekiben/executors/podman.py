"""podman: no daemon; rootless through its own user namespace. The layers below become an image in its storage, and what
the script changes is the upper directory of the container's overlay. It also keeps images for people and runs their
tasks.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from ekiben.core.checked import Fields, is_digest, parse_json
from ekiben.core.environment import DEFAULT_PATH, platform
from ekiben.core.errors import EngineError
from ekiben.core.mounts import volume_args
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import piped, run, stream, which
from ekiben.core.process_name import has_ended, process_name
from ekiben.executors import (
    FIND_MARKED,
    OWNER,
    TAR_OF_UPPER,
    Changes,
    Job,
    JobFailed,
    marked_folders,
    shared_packages,
)
from ekiben.executors._containers_storage import FUSE, environment, fuse_defect, is_in_use, kind_of_mount, pull
from ekiben.formats import oci
from ekiben.gpu import container_gpus

PREFERENCE = 30
LAYER_IMAGES = "localhost/ekiben/layer"
_INITS = ("/usr/libexec/podman/catatonit", "/usr/lib/podman/catatonit", "/usr/bin/catatonit")
_CAP_SYS_RESOURCE = 24
_PROCESSES = 32768  # to which podman lowers its own limit, and so what a container may have


def unavailable() -> str | None:
    """Return why podman cannot run scripts of layers here, or None."""
    if which("podman") is None:
        return "podman is not on PATH"
    info = _podman("info", "--format", "json", check=False)
    if info.returncode:
        return f"`podman info` fails: {(info.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    try:
        storage = Fields.of(parse_json(info.stdout)).object("store")
        driver, status = storage.text("graphDriverName"), storage.texts("graphStatus", {})
    except ValueError as error:
        return f"what `podman info` says cannot be read: it {error}"
    if driver != "overlay":
        # With vfs each layer is a full copy of all below it.
        return (
            f"podman's storage driver is {driver}; overlay is needed "
            "(`podman system reset` forgets the driver and all images, then STORAGE_DRIVER=overlay or storage.conf)"
        )
    if status.get("Using metacopy") == "true":
        return (
            "podman's storage is mounted with metacopy=on (storage.conf), which leaves the data out of what a script"
            " changes"
        )
    return None


def overlay_defect(folder: Path) -> str | None:
    """Return why layers made here may differ from those of the kernel's overlay, or None."""
    return fuse_defect(_podman("info", "--format", "json", check=False).stdout)


# ------------------------------------------------------------------------------------------------------------ building


@contextlib.contextmanager
def execute(job: Job) -> Iterator[Changes]:
    """Run the job in podman; inside the context its changes can be read, once. Raises JobFailed, EngineError."""
    with _job_container(job) as container:
        _start(container, job.log)
        upper = Path(_podman("inspect", "--format", "{{.GraphDriver.Data.UpperDir}}", container).stdout.strip())
        kind = run(_rootful(kind_of_mount(_argv("mount", container))), env=_environment()).stdout.partition("\n")[0]
        marked, is_fuse = _marks(upper), kind == FUSE
        if os.geteuid() == 0:
            yield Changes(upper, opaque=marked, is_fuse=is_fuse)
            return
        with piped(_rootful([*TAR_OF_UPPER, "-C", str(upper), "."]), env=_environment()) as archive:
            yield Changes(archive, opaque=marked, is_fuse=is_fuse)


def try_run(job: Job) -> None:
    """Run the job in podman and discard its changes. Raises JobFailed, EngineError."""
    with _job_container(job) as container:
        _start(container, job.log)


def remove_cached_images() -> int:
    """Remove the layers that podman keeps as images for the next build, and return how many these were."""
    listed = _podman("images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", f"reference={LAYER_IMAGES}")
    names = [name for name in listed.stdout.split() if name.startswith(LAYER_IMAGES)]
    for name in names:
        _podman("rmi", name)
    return len(names)


@contextlib.contextmanager
def _job_container(job: Job) -> Iterator[str]:
    image = _layer_image(job)
    binds = [*volume_args(job.mount, f"/{BUILD_MOUNT}"), *volume_args(job.cache, f"/{BUILD_MOUNT}/cache")]
    # What Docker lets a container do and podman does not, so that a script does the same under both.
    extra = ["--network", "host", "--cap-add", "AUDIT_WRITE,MKNOD", "--user", "0:0", "--workdir", "/"]
    # As one stream: of two, the last line may come first.
    command = ["/bin/sh", "-c", f"{_without_mtab(job)}exec /bin/sh /{BUILD_MOUNT}/run.sh 2>&1"]
    with (
        shared_packages(job),
        _container(image, [*extra, *binds], command, name=job.name) as container,
    ):
        yield container


def _without_mtab(job: Job) -> str:
    """podman puts /etc/mtab where an image has none, and it would be in the layer."""
    for layer in job.lower:
        with layer.reader() as reader:
            if reader.lookup("etc/mtab"):
                return ""
    return "rm -f /etc/mtab; "


@contextlib.contextmanager
def _container(image: str, options: Sequence[str], command: Sequence[str], *, name: str) -> Iterator[str]:
    """A container, made and not started, that goes away in the end, and with it what runs in it."""
    remove_abandoned()
    # Named by us, so that one whose making was interrupted is found as well.
    container = f"ekiben-podman-{secrets.token_hex(4)}-{name}"
    argv = [
        "create",
        "--name",
        container,
        "--label",
        f"{OWNER}={process_name()}",
        "--pull",
        "never",
        "--log-driver",
        "none",
        "--security-opt",
        "label=disable",
        *_limits(),
        *options,
        image,
        *command,
    ]
    try:
        _podman(*argv)
        yield container
    finally:
        _remove(container)


def _start(container: str, log: Callable[[str], None]) -> None:
    if code := stream(_argv("start", "--attach", container), log, env=_environment()):
        raise JobFailed(code)


def _remove(container: str) -> None:
    _podman("rm", "--force", "--ignore", "--time", "0", container, check=False)


def remove_abandoned(*, dry_run: bool = False) -> list[str]:
    """Remove the containers of this user's killed commands, and return their names."""
    if which("podman") is None or not is_in_use():
        return []
    form = f'{{{{.Names}}}} {{{{index .Labels "{OWNER}"}}}}'
    listed = _podman("ps", "--all", "--filter", f"label={OWNER}", "--format", form, check=False).stdout
    owners = dict(line.split(" ", 1) for line in listed.splitlines() if " " in line)
    names = [name for name, owner in owners.items() if has_ended(owner)]
    for name in names if not dry_run else ():
        _remove(name)
    return names


def _layer_image(job: Job) -> str:
    """The layers below as an image in podman's storage. Layers it has already are not sent again."""
    config = oci.image_config(job.lower, environment={"PATH": DEFAULT_PATH}, labels={}, epoch=0, platform=platform())
    name = f"{LAYER_IMAGES}:{oci.digest_of(config)[7:19]}"
    if image_id(name) != oci.digest_of(config):
        below = {layer.diff_id for layer in job.lower[:-1]}
        _pull(config, job.lower, name, below, job.scratch)
    return name


def _marks(upper: Path) -> set[str]:
    with piped(_rootful([*FIND_MARKED, str(upper)]), env=_environment()) as listing:
        return marked_folders(listing.read(), str(upper))


# ---------------------------------------------------------------------------------------------------- images for people


def image_id(name: str) -> str:
    """Return the id of the image ``name``, "" where there is none."""
    inspection = _podman("image", "inspect", "--format", "{{.Id}}", name, check=False)
    id = inspection.stdout.strip()
    return f"sha256:{id}" if inspection.returncode == 0 and id else ""


def tag(image_id: str, name: str) -> None:
    """Let ``name`` be the image with this id. Raises EngineError."""
    _podman("tag", image_id.removeprefix("sha256:"), name)


def untag(name: str) -> None:
    """Remove a name, and with its last one the image. Raises EngineError."""
    _podman("rmi", name)


def load(config: bytes, layers: Sequence[oci.LayerSource], name: str, scratch: Path, *, like: str = "") -> None:
    """Load the image into podman's storage under ``name``; ``like``: an image that is likely to have most of its
    layers. Raises EngineError, StoreError.
    """
    known = _podman("image", "inspect", "--format", "{{json .RootFS.Layers}}", like or name, check=False)
    layers_known = parse_json(known.stdout) if known.returncode == 0 else None
    present = set(filter(is_digest, layers_known)) if isinstance(layers_known, list) else set()
    _pull(config, layers, name, present, scratch)


def try_image(image_id: str, command: Sequence[str], log: Callable[[str], None]) -> int:
    """Run a command in a container of the image, without a network, and return its exit code."""
    with _container(image_id, ["--network", "none", "--shm-size", "1g"], command, name="test") as container:
        try:
            _start(container, log)
        except JobFailed as error:
            return error.returncode
    return 0


def machine_options() -> tuple[list[str], list[str]]:
    """Return the options of podman, and of `podman run`, without which this machine starts no container."""
    return _oci_runtime(), _limits()


def run_argv(gpu: bool) -> list[str]:
    """Return the arguments that begin the command for a task. Raises EngineError where podman cannot find the GPUs."""
    # Of the host, as under Apptainer: NCCL needs its network, and a rootless one is slow.
    argv = [
        *_argv("run", "--rm"),
        "--network",
        "host",
        "--security-opt",
        "label=disable",
        "--pull",
        "never",
        *_limits(),
    ]
    argv += ["--user", "0:0"] if os.geteuid() == 0 else ["--userns", "keep-id"]
    if any(os.access(program, os.X_OK) for program in _INITS):
        argv.append("--init")
    if not gpu:
        return argv
    if not container_gpus.has_cdi_file():
        raise EngineError(
            "podman does not know this machine's GPUs: no file in /etc/cdi describes them",
            hint="as root: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    # What NCCL pins, and its threads; only root may raise these, and a user's own are handed on.
    raised = ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"] if os.geteuid() == 0 and _may_raise() else []
    return [*argv, "--device", container_gpus.ALL_GPUS, *raised]


def _pull(config: bytes, layers: Sequence[oci.LayerSource], name: str, present: Collection[str], scratch: Path) -> None:
    """An image from the store's layers.

    Those ``present`` in podman's storage are not written, unless it lacks one after all.
    """
    pull(_argv("pull"), config, layers, name, present=present, scratch=scratch, env=_environment())
    image = oci.digest_of(config).removeprefix("sha256:")
    _podman("tag", image, name)
    for version in ("latest", name.rpartition(":")[2]):
        _podman("untag", image, f"localhost/layers:{version}", check=False)


# ---------------------------------------------------------------------------------------------------------- the program


def _argv(*args: str) -> list[str]:
    """podman's warnings (of a cgroup, of a mount that is not shared) would stand in the script's own log."""
    return ["podman", "--log-level", "error", *_oci_runtime(), *args]


def _oci_runtime() -> list[str]:
    """crun, the default of most, refuses to start anything beside both versions of cgroups; runc does not."""
    both = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    return ["--runtime", "runc"] if both.exists() and which("runc") else []


def _podman(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run(_argv(*args), check=check, env=_environment())


def _environment() -> dict[str, str]:
    """That of its storage; one TMPDIR for all calls.

    podman keeps the state of a user's containers below TMPDIR where there is no XDG_RUNTIME_DIR, as in many batch jobs,
    and fails when the next call has another TMPDIR. It then gets none, and so /tmp for all of them.
    """
    env = environment()
    if os.geteuid() and "XDG_RUNTIME_DIR" not in env:
        env.pop("TMPDIR", None)
    return env


def _rootful(argv: list[str]) -> list[str]:
    """As root inside the user namespace whose ids the storage was written with."""
    return argv if os.geteuid() == 0 else _argv("unshare", *argv)


def _may_raise() -> bool:
    line = next(
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("CapEff:")
    )
    return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)


def _limits() -> list[str]:
    """Return the options that keep a container's limits where podman, as root, may not raise them: else it fails."""
    if os.geteuid() or _may_raise():
        return []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = min(_PROCESSES, resource.getrlimit(resource.RLIMIT_NPROC)[1] % (1 << 63))
    return ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}"]
