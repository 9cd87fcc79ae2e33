"""podman: no daemon; rootless through its own user namespace. It also stores users' images and runs their tasks."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from ekiben.core.checked import is_digest, parse_json
from ekiben.core.errors import EngineError
from ekiben.core.mounts import volume_args
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import stream, which
from ekiben.core.process_name import has_ended, process_name
from ekiben.executors import DEBUG_SCRIPT, OWNER, Job, JobFailed, ShellCommand, is_left_untested, shared_packages
from ekiben.executors._containers_storage import LAYER_IMAGES, ContainersStorage, is_in_use
from ekiben.formats import oci
from ekiben.formats.evaluated import with_start
from ekiben.gpu import container_gpus

PREFERENCE = 30
_INITS = ("/usr/libexec/podman/catatonit", "/usr/lib/podman/catatonit", "/usr/bin/catatonit")
_CAP_SYS_RESOURCE = 24
_AGAIN = f"/{BUILD_MOUNT}/again"
_PROCESSES = 32768  # podman lowers its limit to this, and so the limit of containers


# ------------------------------------------------------------------------------------------------------------ building


def remove_cached_images() -> int:
    """Remove the layers that podman keeps as images for the next build, and return how many these were."""
    listed = _STORAGE.call("images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", f"reference={LAYER_IMAGES}")
    names = [name for name in listed.stdout.split() if name.startswith(LAYER_IMAGES)]
    for name in names:
        _STORAGE.call("rmi", name)
    return len(names)


class _Podman(ContainersStorage):
    program = "podman"
    info_options = ("--format", "json")
    info_fields = ("graphDriverName", "graphStatus")
    driver_hint = "`podman system reset` forgets the driver and all images, then STORAGE_DRIVER=overlay or storage.conf"

    def argv(self, *args: str) -> list[str]:
        """Return a command line. Warnings (of a cgroup, of a mount that is not shared) would be in the script's log."""
        return ["podman", "--log-level", "error", *_oci_runtime(), *args]

    def environment(self, scratch: Path | None = None) -> dict[str, str]:
        """Return the environment of a command, with one TMPDIR for all calls.

        podman keeps the state of a user's containers below TMPDIR where there is no XDG_RUNTIME_DIR, as in many batch
        jobs, and fails when the next call has another TMPDIR. It then gets none, and so /tmp for all of them.
        """
        env = super().environment()
        if os.geteuid() and "XDG_RUNTIME_DIR" not in env:
            env.pop("TMPDIR", None)
        return env

    @contextlib.contextmanager
    def container(self, job: Job) -> Iterator[str]:
        image = self.layer_image(job)
        binds = [*volume_args(job.mount, f"/{BUILD_MOUNT}"), *volume_args(job.cache, f"/{BUILD_MOUNT}/cache")]
        # Docker allows these to a container by default; with them, scripts do the same under both.
        network = ["--network", "host" if job.has_network else "none"]
        extra = [*network, "--cap-add", "AUDIT_WRITE,MKNOD", "--user", "0:0", "--workdir", "/"]
        # stdout and stderr as one stream keep their order.
        # Started again, for a shell, it waits.
        again = f"[ ! -e {_AGAIN} ] || exec sleep infinity; " if job.on_failure else ""
        command = ["/bin/sh", "-c", f"{again}{_without_mtab(job)}exec /bin/sh /{BUILD_MOUNT}/run.sh 2>&1"]
        with (
            shared_packages(job),
            _container(image, [*extra, *binds], command, name=job.name) as container,
        ):
            yield container

    def start(self, job: Job, container: str) -> None:
        try:
            _start(container, job.log)
        except JobFailed as error:
            if job.on_failure is not None:
                with contextlib.suppress(FileExistsError):
                    (job.mount / Path(_AGAIN).name).touch(exist_ok=False)
                self.call("start", container)
                shell = ["exec", "--interactive", "--tty", container, "/bin/sh", f"/{BUILD_MOUNT}/{DEBUG_SCRIPT}"]
                job.on_failure(error.returncode, ShellCommand(self.argv(*shell), self.environment()))
            raise

    def upper_of(self, container: str, mounted: str) -> Path:
        return Path(self.call("inspect", "--format", "{{.GraphDriver.Data.UpperDir}}", container).stdout.strip())

    def pull(
        self, config: bytes, layers: Sequence[oci.LayerSource], name: str, present: Collection[str], scratch: Path
    ) -> None:
        """Pull an image of the store's layers, and remove the tags that podman gives it."""
        super().pull(config, layers, name, present, scratch)
        for tag in ("latest", name.rpartition(":")[2]):
            self.call("untag", oci.digest_of(config)[7:], f"localhost/layers:{tag}", check=False)


def _without_mtab(job: Job) -> str:
    """Return a command that removes /etc/mtab where the image has none: podman creates it in the layer."""
    for layer in job.lower:
        with layer.reader() as reader:
            if reader.lookup("etc/mtab"):
                return ""
    return "rm -f /etc/mtab; "


@contextlib.contextmanager
def _container(image: str, options: Sequence[str], command: Sequence[str], *, name: str) -> Iterator[str]:
    """Create a container without starting it; remove it, and stop its processes, at the end."""
    _remove_abandoned_containers()
    # Named by us, to find one whose creation was interrupted.
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
        _STORAGE.call(*argv)
        yield container
    finally:
        _remove(container)


def _start(container: str, log: Callable[[str], None]) -> None:
    if code := stream(_STORAGE.argv("start", "--attach", container), log, env=_STORAGE.environment()):
        raise JobFailed(code)


def _remove(container: str) -> None:
    _STORAGE.call("rm", "--force", "--ignore", "--time", "0", container, check=False)


def remove_abandoned(*, dry_run: bool = False) -> list[str]:
    """Remove the containers and untested images of this user's killed commands, and return their names."""
    if which("podman") is None or not is_in_use():
        return []
    containers = _remove_abandoned_containers(dry_run=dry_run)
    return [f"container {name}" for name in containers] + [
        f"image {name}" for name in _remove_untested(dry_run=dry_run)
    ]


def _remove_abandoned_containers(*, dry_run: bool = False) -> list[str]:
    form = f'{{{{.Names}}}} {{{{index .Labels "{OWNER}"}}}}'
    listed = _STORAGE.call("ps", "--all", "--filter", f"label={OWNER}", "--format", form, check=False).stdout
    owners = dict(line.split(" ", 1) for line in listed.splitlines() if " " in line)
    names = [name for name, owner in owners.items() if has_ended(owner)]
    for name in names if not dry_run else ():
        _remove(name)
    return names


def _remove_untested(*, dry_run: bool) -> list[str]:
    listed = _STORAGE.call("images", "--format", "{{.Repository}}:{{.Tag}}", check=False).stdout
    names = [name for name in listed.splitlines() if is_left_untested(name)]
    for name in names if not dry_run else ():
        _STORAGE.call("rmi", name, check=False)
    return names


# ---------------------------------------------------------------------------------------------------- images for people


def image_id(name: str) -> str:
    """Return the id of the image ``name``, "" where there is none."""
    inspection = _STORAGE.call("image", "inspect", "--format", "{{.Id}}", name, check=False)
    id = inspection.stdout.strip()
    return f"sha256:{id}" if inspection.returncode == 0 and id else ""


def tag(image_id: str, name: str) -> None:
    """Tag the image with this id as ``name``. Raises EngineError."""
    _STORAGE.call("tag", image_id.removeprefix("sha256:"), name)


def untag(name: str) -> None:
    """Remove a name, and with its last one the image. Raises EngineError."""
    _STORAGE.call("rmi", name)


def load(config: bytes, layers: Sequence[oci.LayerSource], name: str, scratch: Path, *, like: str = "") -> None:
    """Load the image into podman's storage under ``name``; ``like``: an image that is likely to have most of its
    layers. Raises EngineError, StoreError.
    """
    known = _STORAGE.call("image", "inspect", "--format", "{{json .RootFS.Layers}}", like or name, check=False)
    layers_known = parse_json(known.stdout) if known.returncode == 0 else None
    present = set(filter(is_digest, layers_known)) if isinstance(layers_known, list) else set()
    _STORAGE.pull(config, layers, name, present, scratch)


def try_image(image_id: str, command: Sequence[str], log: Callable[[str], None], *, hidden: str | None = None) -> int:
    """Run a command in a container of the image, without a network, and return its exit code.

    ``hidden``: a folder that is empty there.
    """
    # by default podman copies the image's files into it.
    hide = ["--tmpfs", f"{hidden}:ro,notmpcopyup"] if hidden else []
    known = _STORAGE.call(
        "image", "inspect", "--format", "{{json .Config.Entrypoint}}", image_id.removeprefix("sha256:")
    )
    program, *arguments = with_start(parse_json(known.stdout), command)
    options = ["--network", "none", "--shm-size", "1g", "--entrypoint", json.dumps([program]), *hide]
    with _container(image_id, options, arguments, name="test") as container:
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
    # The host's network, as under Apptainer: NCCL needs it, and a rootless network is slow.
    argv = [
        *_STORAGE.argv("run", "--rm"),
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
    # For NCCL's pinned memory and its threads; only root may raise these, a user's own limits are passed on.
    raised = ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"] if os.geteuid() == 0 and _may_raise() else []
    return [*argv, "--device", container_gpus.ALL_GPUS, *raised]


# ---------------------------------------------------------------------------------------------------------- the program


def _oci_runtime() -> list[str]:
    """crun, the usual default, does not start with a mix of both cgroup versions; runc does."""
    both = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    return ["--runtime", "runc"] if both.exists() and which("runc") else []


def _may_raise() -> bool:
    line = next(
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("CapEff:")
    )
    return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)


def _limits() -> list[str]:
    """Return options for the current limits where podman, as root, may not raise them, and would fail."""
    if os.geteuid() or _may_raise():
        return []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = min(_PROCESSES, resource.getrlimit(resource.RLIMIT_NPROC)[1] % (1 << 63))
    return ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}"]


_STORAGE = _Podman()
unavailable, overlay_defect = _STORAGE.unavailable, _STORAGE.overlay_defect
execute, try_run = _STORAGE.execute, _STORAGE.try_run
