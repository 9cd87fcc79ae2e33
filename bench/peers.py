"""The other ways to build the same image, each with its best settings: caches kept, zstd beside the default gzip.

Every peer starts from what `build.py render` writes, from the same base (one tar made by mmdebstrap) and from the same
downloads (a copy of Ekiben's own cache of wheels and Debian packages, in each peer's own kind of cache).
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.clock import Command

CA = "/etc/ssl/certs/ca-certificates.crt"
ZSTD = ("--mksquashfs-args", "-comp zstd -Xcompression-level 3")
TAG = "ekiben-bench-peer"
USER = "builder"  # Apptainer builds as an ordinary user
_APT = (
    'APT::Sandbox::User "root";\nDir::Cache::archives "{cache}/apt";\nAcquire::Languages "none";\nDpkg::Use-Pty'
    ' "false";\n'
)
_CACHED = "env UV_CACHE_DIR={cache}/uv UV_LINK_MODE=copy APT_CONFIG={conf} HOME="


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``name`` in the benchmark's copy of the checkout; ``top`` and ``middle`` are names of layers."""

    name: str
    middle: str
    entrypoint: str


def has(*programs: str) -> bool:
    return all(shutil.which(program) for program in programs)


def docker_client() -> str:
    """Return a client with BuildKit: the distribution's own, even where another client comes earlier on PATH."""
    return "/usr/bin/docker" if Path("/usr/bin/docker").exists() else "docker"


class Rendered:
    """A folder that `build.py render` wrote, and the edits of the cases in it."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe, self._count = folder, recipe, 0

    def edit_entrypoint(self) -> None:
        path = self.folder / f"files/{self.recipe.name}/opt/ekiben/recipe/entrypoints/{self.recipe.entrypoint}"
        self._append(path, "#")

    def edit_middle(self) -> None:
        self._append(self.folder / f"post/{self.recipe.middle}.sh", "true")

    def _append(self, path: Path, prefix: str) -> None:
        self._count += 1
        with path.open("a") as stream:
            stream.write(f"\n{prefix} edit {self._count}-{os.getpid()}\n")


class Docker(Rendered):
    """BuildKit, its layer cache and its cache mounts; a SIF through the daemon."""

    def __init__(self, folder: Path, recipe: Recipe, base: Path) -> None:
        super().__init__(folder, recipe)
        shutil.copyfile(base, folder / "root.tar")
        (folder / "apt.conf").write_text(_APT.format(cache="/cache"))
        text = (folder / "Dockerfile").read_text()
        mounts = (
            "RUN --mount=type=cache,id=ekiben-bench,target=/cache"
            " --mount=type=bind,source=apt.conf,target=/run/apt.conf --mount=type=bind,"
        )
        cached = "mkdir -p /cache/apt/partial; " + _CACHED.format(cache="/cache", conf="/run/apt.conf")
        text = text.replace("RUN --mount=type=bind,", mounts).replace("env HOME=", cached)
        (folder / "Dockerfile").write_text(text)

    def build(self, *options: str) -> Command:
        argv = [docker_client(), "build", "--quiet", "--secret", f"id=ca,src={CA}", *options, "--tag", TAG, "."]
        return Command(argv=argv, cwd=self.folder, env={"DOCKER_BUILDKIT": "1"})

    def remove(self) -> None:
        """Remove the image; what BuildKit has cached of it stays."""
        subprocess.run([docker_client(), "rmi", "--force", TAG], capture_output=True, check=False)


class Buildah(Rendered):
    """`bud --layers` with a storage of its own; a SIF from the mounted container."""

    def __init__(self, folder: Path, recipe: Recipe, base: Path, downloads: Path) -> None:
        super().__init__(folder, recipe)
        self.state, self.downloads = folder.parent / "buildah-state", downloads
        os.link(base, folder / "root.tar")
        (folder / "apt.conf").write_text(_APT.format(cache="/cache"))
        text = (folder / "Dockerfile").read_text()
        conf = "RUN --mount=type=bind,source=apt.conf,target=/run/apt.conf --mount=type=bind,"
        text = text.replace("RUN --mount=type=bind,", conf)
        (folder / "Dockerfile").write_text(
            text.replace("env HOME=", _CACHED.format(cache="/cache", conf="/run/apt.conf"))
        )

    def _buildah(self, *arguments: str) -> Command:
        (self.state / "tmp").mkdir(parents=True, exist_ok=True)
        argv = [
            "buildah",
            "--root",
            str(self.state / "root"),
            "--runroot",
            str(self.state / "run"),
            "--storage-driver",
            "overlay",
            *arguments,
        ]
        return Command(
            argv=argv, cwd=self.folder, env={"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self.state / "tmp")}
        )

    def build(self, *options: str) -> Command:
        return self._buildah(
            "bud",
            "--quiet",
            "--layers",
            *options,
            "--volume",
            f"{self.downloads}:/cache",
            "--secret",
            f"id=ca,src={CA}",
            "--tag",
            TAG,
            ".",
        )

    def container(self) -> Command:
        return self._buildah("from", "--name", TAG, TAG)

    def to_sif(self, out: Path) -> Command:
        """Pack the mounted container: nothing is exported."""
        pack = (
            'exec apptainer build --force "$@" "$(buildah --root "$ROOT" --runroot "$RUN" --storage-driver overlay'
            ' mount "$NAME")"'
        )
        state = {"ROOT": str(self.state / "root"), "RUN": str(self.state / "run"), "NAME": TAG}
        return Command(
            argv=["sh", "-c", pack, "sh", *ZSTD, str(out)], cwd=self.folder, env=state | temporary(self.folder)
        )


class Apptainer(Rendered):
    """One definition file with every %post, which knows no layers and no cache; as an ordinary user with --fakeroot."""

    def __init__(self, folder: Path, recipe: Recipe, base: Path) -> None:
        super().__init__(folder, recipe)
        self.downloads, self.deffile = folder.parent / "apptainer-downloads", folder / f"{recipe.name}.def"
        (folder / "apt.conf").write_text(_APT.format(cache="/mnt"))
        shutil.copyfile(CA, folder / "ca.pem")
        (folder / "rootfs").mkdir()
        subprocess.run(["tar", "-xf", base, "-C", folder / "rootfs", "--exclude=./dev/*"], check=True)
        self.base, self.out = folder / "base.sif", folder / "out"
        self.out.mkdir()
        lines = self.deffile.read_text().splitlines()
        kept = [line for line in lines if not line.startswith(("OSVersion:", "Include:", "MirrorURL:", "Bootstrap:"))]
        text = "\n".join(["Bootstrap: localimage", f"From: {self.base}", *kept])
        settings = (
            "%post\nexport UV_CACHE_DIR=/mnt/uv UV_LINK_MODE=copy APT_CONFIG=/media/apt.conf"
            " SSL_CERT_FILE=/media/ca.pem\n"
        )
        self.deffile.write_text(text.replace("%arguments\n    mirror=\n", "").replace("%post\n", settings) + "\n")

    def prepare(self) -> list[Command]:
        base = Command(
            argv=["apptainer", "build", "--force", *ZSTD, str(self.base), "rootfs"],
            cwd=self.folder,
            env=temporary(self.folder),
        )
        return [base, Command(argv=["chown", "-R", f"{USER}:", str(self.folder), str(self.downloads)], cwd=self.folder)]

    def build(self, name: str, options: Sequence[str]) -> Command:
        argv = [
            "apptainer",
            "build",
            "--force",
            "--notest",
            "--fakeroot",
            *options,
            "--bind",
            f"{self.downloads}:/mnt",
            "--bind",
            f"{self.folder}:/media",
            str(self.out / name),
            str(self.deffile),
        ]
        cache = {"APPTAINER_CACHEDIR": str(self.folder / "cache")}
        return as_user(Command(argv=argv, cwd=self.folder, env=temporary(self.folder) | cache))

    def on_parent(self, parent: Path, out: Path, options: Sequence[str]) -> Command:
        """Build a child definition on the finished SIF: it copies the entrypoint in; the rest is unpacked and packed
        again.
        """
        inside = f"/opt/ekiben/recipe/entrypoints/{self.recipe.entrypoint}"
        child = self.folder / "child.def"
        child.write_text(
            f"Bootstrap: localimage\nFrom: {parent}\n\n%files\n    files/{self.recipe.name}{inside} {inside}\n"
        )
        argv = ["apptainer", "build", "--force", "--notest", *options, str(out), str(child)]
        return Command(argv=argv, cwd=self.folder, env=temporary(self.folder))


def temporary(folder: Path) -> dict[str, str]:
    """Return where Apptainer unpacks; its cache of OCI blobs is kept, as it is by default."""
    tmp_dir = folder.parent / "apptainer-tmp"
    tmp_dir.mkdir(exist_ok=True)
    tmp_dir.chmod(0o1777)
    return {"APPTAINER_TMPDIR": str(tmp_dir), "APPTAINER_CACHEDIR": str(folder.parent / "apptainer-cache")}


def as_user(command: Command) -> Command:
    home = pwd.getpwnam(USER).pw_dir
    argv = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", *command.argv]
    return Command(argv=argv, cwd=command.cwd, env={**command.env, "HOME": home, "USER": USER})


def to_sif(source: str, out: Path, options: Sequence[str], folder: Path) -> Command:
    argv = ["apptainer", "build", "--force", *options, str(out), source]
    return Command(argv=argv, cwd=folder, env=temporary(folder))


def versions() -> dict[str, str]:
    commands = {
        "docker": [docker_client(), "version", "--format", "client {{.Client.Version}}, daemon {{.Server.Version}}"],
        "apptainer": ["apptainer", "--version"],
        "buildah": ["buildah", "--version"],
        "mksquashfs": ["mksquashfs", "-version"],
        "mmdebstrap": ["mmdebstrap", "--version"],
        "cp": ["cp", "--version"],
    }
    by_name = {}
    for name, argv in commands.items():
        if has(argv[0]):
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            by_name[name] = ((done.stdout or done.stderr).splitlines() or ["?"])[0]
    return by_name
