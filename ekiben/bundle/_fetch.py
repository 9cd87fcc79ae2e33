"""Fetch the packages of a bundle with the finished image's own apt and pip."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ekiben.builder.build import BuildContext, ensure_layers, prepare_job
from ekiben.builder.environment import environment_of
from ekiben.bundle._index import sha256_of
from ekiben.core.command_name import command_name
from ekiben.core.environment import build_environment
from ekiben.core.errors import FetchError
from ekiben.core.paths import BUILD_MOUNT
from ekiben.executors import JobFailed, Script, choose
from ekiben.formats.layer import File
from ekiben.packages.git import git_sources, keep_repository, write_kept
from ekiben.packages.host_config import site_sources, write_host_files
from ekiben.packages.installed import DPKG_STATUS, installed_packages
from ekiben.packages.lock import packages_of
from ekiben.resolve.graph import BuildStage, Layer, StageCopy, stages_of
from ekiben.spec.sources import read_sources, sources_file
from ekiben.spec.stack import without_packages
from ekiben.store import Image, StoredLayer

_INSIDE = f"/{BUILD_MOUNT}/bundle"

# Run in the finished image. Downloads go to the folder that is bind-mounted.
_FETCH_DEBS = f"""\
mkdir -p {_INSIDE}/debs
cd {_INSIDE}/debs
apt-get update
# What a build stage asks for comes with what that needs; an image's own packages are all known.
xargs -r apt-get install --simulate --no-install-recommends </{BUILD_MOUNT}/asked >Simulated
sed -n 's/^Inst \\([^ ]*\\) .*(\\([^ ]*\\) .*/\\1=\\2/p' Simulated | cat /{BUILD_MOUNT}/packages - | sort -u >Wanted
xargs -n 64 apt-get download <Wanted
xargs -n 64 apt-cache show <Wanted >Records
rm Simulated Wanted
"""
_FETCH_WHEELS = f"""\
mkdir -p {_INSIDE}/wheels
for lock in /{BUILD_MOUNT}/locks/*; do
    /opt/venv/bin/python -m pip --disable-pip-version-check download --no-deps --require-hashes --only-binary :all: \\
        --no-cache-dir --progress-bar off --dest {_INSIDE}/wheels --requirement "$lock"
done
"""


_FETCH_ARCHIVES = _FETCH_WHEELS.replace("/wheels", "/sources").replace(
    "--only-binary :all:",
    "--no-binary :all: --no-build-isolation",
)


def fetch_packages(context: BuildContext, image: Image, staging: Path, *, compiler: bool) -> Path:
    """Download the Debian and Python packages of every layer, and with ``compiler`` of the build stages.

    Returns their folder. Raises FetchError.
    """
    resolved = context.resolved
    stages = _all_stages(item for layer in resolved.layers for item in layer.copies) if compiler else []
    below: list[Layer | BuildStage] = [*stages, *(layer for stage in stages for layer in stage.layers)]
    asked = packages_of(step.stage for step in below if step.stage)
    mount = make_folder(staging / "mount")
    (mount / "packages").write_text("\n".join(_packages(context, image)) + "\n", encoding="utf-8")
    (mount / "asked").write_text("\n".join(asked), encoding="utf-8")
    files = [file for step in (*resolved.layers, *below) for file in step.files]
    locks = list(dict.fromkeys(file for file in files if _is_lock(file) and not _is_source_lock(file)))
    _copy_locks(locks, mount)
    script = _FETCH_DEBS + (_FETCH_WHEELS if locks else "")
    with context.progress.step(f"fetch packages in {image.name}"):
        _run(context, image.layers, script, image.environment, staging)
    return mount / "bundle"


def fetch_sources(context: BuildContext, staging: Path) -> Path:
    """Download what the build stages compile, and return the folder.

    pip has to run a source distribution's build to learn its name, so each is fetched in the layers of its stage.
    Raises FetchError.
    """
    folder, kept = make_folder(staging / "sources"), dict[str, str]()
    for number, stage in enumerate(_all_stages(item for layer in context.resolved.layers for item in layer.copies)):
        with context.progress.step(f"fetch the source of {stage.name}"):
            for source in git_sources(stage.stage.arguments):
                kept |= keep_repository(source, folder)
            locks = [file for file in stage.files if _is_source_lock(file)]
            if not locks:
                continue
            scratch = make_folder(staging / f"source-{number}")
            _copy_locks(locks, make_folder(scratch / "mount"))
            layers = ensure_layers(context, stage.layers)
            known = environment_of(stage.environment, layers, context.store)
            _run(context, layers, _FETCH_ARCHIVES, known, scratch)
            for path in (scratch / "mount/bundle/sources").iterdir():
                path.rename(folder / path.name)
    if kept:
        write_kept(kept, folder)
    return folder


def _all_stages(copies: Iterable[StageCopy]) -> list[BuildStage]:
    """Return the build stages, and those that they copy from."""
    stages: dict[str, BuildStage] = {}
    for stage in stages_of(copies):
        stages |= {inner.cache_key: inner for inner in _all_stages(stage.copies)} | {stage.cache_key: stage}
    return list(stages.values())


def _is_lock(file: File) -> bool:
    return file.source is not None and file.destination.endswith(".lock")


def _is_source_lock(file: File) -> bool:
    return _is_lock(file) and file.destination.endswith("-source.lock")


def _copy_locks(locks: Sequence[File], mount: Path) -> None:
    for number, file in enumerate(locks):
        assert file.source
        built = {source.name for source in read_sources(sources_file(file.source))}  # the outputs of stages are bundled
        target = make_folder(mount / "locks") / f"{number}-{file.source.name}"
        target.write_text(without_packages(file.text(), built), encoding="utf-8")


def _run(
    context: BuildContext,
    layers: Sequence[StoredLayer],
    script: str,
    environment: Mapping[str, str],
    staging: Path,
) -> None:
    """Run ``script`` on ``layers``, with the network. Raises FetchError."""
    resolved, options = context.resolved, context.options
    _, executor, _ = choose(options.engine)
    host_environment = write_host_files(staging / "mount", site_sources(resolved.stack, options.mirror))
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        context.progress.output(line)

    settings = {**environment, **build_environment(resolved.stack.file.epoch), **host_environment}
    # pip knows no SSL_CERT_FILE, and a site's authority may be in the host's bundle only.
    settings |= {"PIP_CERT": host_environment.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")}
    try:
        job = prepare_job(Script("bundle", script, settings), layers, context.store, staging, log=log)
        executor.try_run(job)
    except JobFailed as error:
        tail = "\n".join(f"  {line}" for line in lines[-12:])
        raise FetchError(
            f"{resolved.recipe.name}: its sources could not be fetched. The last lines:\n{tail}",
            hint=f"a version may be gone from the mirror: run {command_name()} lock, build again, then bundle",
        ) from error


def make_folder(folder: Path) -> Path:
    """Create a folder with its parents, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _packages(context: BuildContext, image: Image) -> list[str]:
    """Return each Debian package of the layers and their locks: name=version, or the name of an unknown version."""
    resolved = context.resolved
    locked = resolved.stack.apt_lock().packages
    stages = [stage for definition in resolved.definitions for stage in definition.stages]
    versions = {name: locked.get(name, "") for name in packages_of(stages)}
    for layer in image.layers:
        with context.store.reader(layer.digest) as reader:
            if (entry := reader.lookup(DPKG_STATUS)) and entry.kind == "file":
                versions |= installed_packages(reader.read_file(DPKG_STATUS).decode())
    return [f"{name}={version}" if version else name for name, version in sorted(versions.items())]


def index_debs(folder: Path, suite: str) -> None:
    """Packages: apt's own records, pointing at the files here; Release, since mmdebstrap asks which suite it is.

    Raises FetchError when a file is not its record's.
    """
    records = (folder / "Records").read_text(encoding="utf-8").strip().split("\n\n")
    (folder / "Records").unlink()
    kept = {}
    for record in records:
        fields = dict(re.findall(r"^(Package|Version|Architecture|SHA256): (.*)$", record, re.MULTILINE))
        if "SHA256" not in fields:
            continue  # dpkg's record of what is installed
        version = fields["Version"].replace(":", "%3a")
        path = folder / f"{fields['Package']}_{version}_{fields['Architecture']}.deb"
        if not path.exists() or sha256_of(path) != fields["SHA256"]:
            raise FetchError(f"{path.name}: was not fetched completely")
        plain = path.rename(folder / path.name.replace("%3a", "."))  # apt would read %3a in a file's name as a colon
        lines = [line for line in record.splitlines() if not line.startswith("Filename:")]
        kept[plain.name] = "\n".join([*lines, f"Filename: ./{plain.name}", ""])
    for path in folder.glob("*.deb"):
        if path.name not in kept:
            path.unlink()
    index = folder / "Packages"
    index.write_text("\n".join(text for _, text in sorted(kept.items())), encoding="utf-8")
    (folder / "Release").write_text(
        f"Suite: {suite}\nCodename: {suite}\nSHA256:\n {sha256_of(index)} {index.stat().st_size} Packages\n",
        encoding="utf-8",
    )
