"""One verified archive of everything a recipe is built from, for machines without a network.

A bundle is a tar:

    bundle.json     what it is for, and every file below with its size and sha256
    debs/           the Debian packages of every layer, with an index (Packages): an archive for apt
    wheels/         the Python packages of every lock file
    compiled/       what build stages handed over: a record each, and their files by digest
    sources/        what that was compiled of: source distributions, and git repositories with just the pinned commit
    with/           snapshots of models and data, as they were given

It is filled by the finished image itself: its own apt and pip fetch what was locked, with the site's settings. A source is
fetched where it is compiled, on the layers of its build stage. With the compiler in it, too (`--compiler`), other GPUs can be
compiled for where there is no network.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import posixpath
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from builder.chain import BUILD_MOUNT, BuildStage, Chain, File, Layer, Taken, platform, stages_of
from builder.contents import DPKG_STATUS, installed_packages
from builder.errors import FetchError, StoreError, UsageError
from builder.executors import JobFailed, choose
from builder.hostenv import Supply, build_environment, site_supply, write_host_files
from builder.lock import packages_of
from builder.pipeline import Image, Options, obtain_layers, prepare_job
from builder.progress import Progress
from builder.sources import keep_repository, lend_kept, pinned_repositories, write_kept
from builder.store import Handed, Store, StoredLayer, StoredResult, remove_tree

FORMAT = 2
PARTS = ("debs", "wheels", "compiled", "sources", "with")
INDEX = "bundle.json"
_INSIDE = f"/{BUILD_MOUNT}/bundle"

# Run in the finished image. What is downloaded lands in the folder that is lent to it.
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


@dataclass(frozen=True, slots=True)
class Bundle:
    """An unpacked bundle: ``folder`` holds debs/, wheels/, compiled/, sources/ and with/; ``about`` is its bundle.json."""

    folder: Path
    about: Mapping[str, Any]


# -- making one -------------------------------------------------------------------------------------------------------


def write_bundle(
    image: Image,
    store: Store,
    out: Path,
    options: Options,
    progress: Progress,
    *,
    snapshots: Sequence[Path] = (),
    compiler: bool = False,
) -> dict[str, Any]:
    """Fetch what ``image`` was built from, and write it to ``out``, which is there only when it is whole. With ``compiler``
    what its build stages stand on comes along. Returns bundle.json. Errors: UsageError, FetchError, EngineError, StoreError."""
    chain = image.chain
    _refuse_output(out)
    if (base := chain.definitions[0].final).bootstrap != "debootstrap":
        raise UsageError(
            f"{chain.definitions[0].path}: a base of Bootstrap: {base.bootstrap} can't be bundled, only debootstrap's"
        )
    given = {path.resolve().name: path.resolve() for path in snapshots}
    for path in snapshots:
        if not path.exists():
            raise UsageError(f"--with {path}: there is no such file or folder")
    if len(given) < len(snapshots):
        raise UsageError("--with: two of the paths end in the same name, and a bundle keeps them by that")
    store.open_for_writing()
    with store.staging() as staging:
        folder = _fetch(image, store, _made(staging / "packages"), options, progress, compiler=compiler)
        _index_debs(folder / "debs", chain.stack.file.suite)
        files = {
            f"{part}/{path.name}": path for part in ("debs", "wheels") for path in sorted((folder / part).glob("*"))
        }
        files |= _compiled(chain, store, staging)
        sources = _fetch_sources(chain, store, staging, options, progress)
        files |= {
            f"sources/{path.relative_to(sources).as_posix()}": path
            for path in sorted(sources.rglob("*"))
            if path.is_file()
        }
        for name, path in sorted(given.items()):
            inside = (
                sorted(item for item in path.rglob("*") if item.is_file() or item.is_symlink())
                if path.is_dir()
                else [path]
            )
            files |= {posixpath.normpath(f"with/{name}/{item.relative_to(path).as_posix()}"): item for item in inside}
        with progress.step(f"write {out}"):
            about = {
                "format": FORMAT, "recipe": chain.recipe.name, "stack": chain.stack.name, "platform": platform(),
                "locks": _locks(chain), "layers": {layer.name: layer.cache_key for layer in chain.layers},
                "files": {name: _facts(name, path) for name, path in files.items()},
            }  # fmt: skip
            _write(out, about, files, chain.stack.file.epoch)
    return about


def _refuse_output(out: Path) -> None:
    """What can be known before minutes of downloads."""
    folder = out.absolute().parent
    try:
        if not folder.is_dir():
            raise UsageError(f"-o {out}: there is no folder {folder}; make it first")
        if out.is_dir():
            raise UsageError(f"-o {out}: is a folder; name the file in it, as {out / 'recipe.bundle'}")
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}", hint="name a file elsewhere with -o") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(f"{out} cannot be written: no permission in {folder}", hint="name a file elsewhere with -o")


def _facts(name: str, path: Path) -> dict[str, Any]:
    """A link stays one where it points at something that is in the bundle, too: the Hugging Face cache is made of them."""
    if path.is_symlink() and _link_stays_inside(name, target := str(path.readlink())):
        return {"link": target}
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _link_stays_inside(name: str, target: str) -> bool:
    home = "/".join(name.split("/")[:2])
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), target)).startswith(f"{home}/")


def _compiled(chain: Chain, store: Store, staging: Path) -> dict[str, Path]:
    """What the chain's build stages handed over. Errors: StoreError when it is gone from the store."""
    files: dict[str, Path] = {}
    for stage in stages_of(item for layer in chain.layers for item in layer.taken):
        result = store.result(stage.cache_key)
        if result is None:
            raise StoreError(
                f"what {stage.name} compiled is not in {store.root} any more",
                hint=f"build.py image {chain.recipe.name}",
            )
        for file in result.files:
            store.check_blob(file.digest)
            files[f"compiled/{file.digest[7:]}"] = store.blob_path(file.digest)
        record = _made(staging / "compiled") / f"{result.key}.json"
        record.write_text(json.dumps(asdict(result), indent=1, sort_keys=True) + "\n")
        files[f"compiled/{record.name}"] = record
    return files


def _fetch(image: Image, store: Store, staging: Path, options: Options, progress: Progress, *, compiler: bool) -> Path:
    chain = image.chain
    stages = _all_stages(item for layer in chain.layers for item in layer.taken) if compiler else []
    below: list[Layer | BuildStage] = [*stages, *(layer for stage in stages for layer in stage.layers)]
    asked = packages_of(step.stage for step in below if step.stage)
    mount = _made(staging / "mount")
    (mount / "packages").write_text("\n".join(_packages(image, store)) + "\n")
    (mount / "asked").write_text("\n".join(asked))
    files = [file for step in (*chain.layers, *below) for file in step.files]
    locks = list(dict.fromkeys(file for file in files if _is_lock(file) and not _is_of_sources(file)))
    _lend_locks(locks, mount)
    script = _FETCH_DEBS + (_FETCH_WHEELS if locks else "")
    with progress.step(f"fetch packages in {image.name}"):
        _run_in(image.layers, script, chain.environment, chain, store, staging, options, progress)
    return mount / "bundle"


def _fetch_sources(chain: Chain, store: Store, staging: Path, options: Options, progress: Progress) -> Path:
    """A folder of what the chain's build stages compile: pip takes a source distribution where its build can be asked for
    its name, so in the stage's own layers."""
    folder, kept = _made(staging / "sources"), dict[str, str]()
    for number, stage in enumerate(_all_stages(item for layer in chain.layers for item in layer.taken)):
        with progress.step(f"fetch the source of {stage.name}"):
            for repository, commit in pinned_repositories(stage.stage.arguments):
                kept |= keep_repository(repository, commit, folder)
            locks = [file for file in stage.files if _is_of_sources(file)]
            if not locks:
                continue
            own = _made(staging / f"source-{number}")
            _lend_locks(locks, _made(own / "mount"))
            layers = obtain_layers(chain, store, options, progress, stage.layers)
            _run_in(layers, _FETCH_ARCHIVES, stage.environment, chain, store, own, options, progress)
            for path in (own / "mount/bundle/sources").iterdir():
                path.rename(folder / path.name)
    if kept:
        write_kept(kept, folder)
    return folder


def _all_stages(taken: Iterable[Taken]) -> list[BuildStage]:
    """Those that other build stages take from, too."""
    found: dict[str, BuildStage] = {}
    for stage in stages_of(taken):
        found |= {inner.cache_key: inner for inner in _all_stages(stage.taken)} | {stage.cache_key: stage}
    return list(found.values())


def _is_lock(file: File) -> bool:
    return file.source is not None and file.destination.endswith(".lock")


def _is_of_sources(file: File) -> bool:
    return _is_lock(file) and file.destination.endswith("-source.lock")


def _lend_locks(locks: Sequence[File], mount: Path) -> None:
    for number, file in enumerate(locks):
        assert file.source
        shutil.copyfile(file.source, _made(mount / "locks") / f"{number}-{file.source.name}")


def _run_in(
    layers: Sequence[StoredLayer], script: str, environment: Mapping[str, str], chain: Chain, store: Store, staging: Path,
    options: Options, progress: Progress,
) -> None:  # fmt: skip
    """Errors: FetchError."""
    _, executor, _ = choose(options.engine)
    lent = write_host_files(staging / "mount", site_supply(chain.stack, options.mirror))
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        progress.note(line)

    settings = {**environment, **build_environment(chain.stack.file.epoch), **lent}
    # pip knows no SSL_CERT_FILE, and a site's authority may be in the host's bundle only.
    settings |= {"PIP_CERT": lent.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")}
    try:
        executor.try_run(prepare_job("bundle", script, settings, layers, store, staging, log=log))
    except JobFailed as error:
        tail = "\n".join(f"  {line}" for line in lines[-12:])
        raise FetchError(f"{chain.recipe.name}: what it was built from could not be fetched. The last lines:\n{tail}",
                         hint="a version that is gone from the mirror: build.py lock, build again, then bundle") from error  # fmt: skip


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _packages(image: Image, store: Store) -> list[str]:
    """Every Debian package a layer has, had, or asks for: name=version, or the name alone where no version is known."""
    locked = image.chain.stack.apt_lock().packages
    stages = [stage for definition in image.chain.definitions for stage in definition.stages]
    wanted = {name: locked.get(name, "") for name in packages_of(stages)}
    for layer in image.layers:
        with store.reader(layer.digest) as reader:
            if (entry := reader.lookup(DPKG_STATUS)) and entry.kind == "file":
                wanted |= installed_packages(reader.read_file(DPKG_STATUS).decode())
    return [f"{name}={version}" if version else name for name, version in sorted(wanted.items())]


def _index_debs(folder: Path, suite: str) -> None:
    """Packages: apt's own records, pointing at the files here; Release, since mmdebstrap asks which suite it is. Errors: FetchError when a file is not its record's."""
    records = (folder / "Records").read_text().strip().split("\n\n")
    (folder / "Records").unlink()
    kept = {}
    for record in records:
        fields = dict(re.findall(r"^(Package|Version|Architecture|SHA256): (.*)$", record, re.MULTILINE))
        if "SHA256" not in fields:
            continue  # dpkg's record of what is installed
        version = fields["Version"].replace(":", "%3a")
        path = folder / f"{fields['Package']}_{version}_{fields['Architecture']}.deb"
        if not path.exists() or _sha256(path) != fields["SHA256"]:
            raise FetchError(f"{path.name}: was not fetched whole")
        plain = path.rename(folder / path.name.replace("%3a", "."))  # apt would read %3a in a file's name as a colon
        lines = [line for line in record.splitlines() if not line.startswith("Filename:")]
        kept[plain.name] = "\n".join([*lines, f"Filename: ./{plain.name}", ""])
    for path in folder.glob("*.deb"):
        if path.name not in kept:
            path.unlink()
    index = folder / "Packages"
    index.write_text("\n".join(text for _, text in sorted(kept.items())))
    (folder / "Release").write_text(
        f"Suite: {suite}\nCodename: {suite}\nSHA256:\n {_sha256(index)} {index.stat().st_size} Packages\n"
    )


def _locks(chain: Chain) -> dict[str, str]:
    """What a chain asks a bundle for: its lock files by destination, and the Debian packages of each layer."""
    found = {file.destination: file.sha256() for layer in chain.layers for file in layer.files
             if file.source and file.destination.endswith(".lock")}  # fmt: skip
    for layer in chain.layers:
        if packages := layer.inputs.get("packages"):
            found[f"apt.lock [{layer.name}]"] = hashlib.sha256(
                json.dumps(packages, sort_keys=True).encode()
            ).hexdigest()
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(out: Path, about: Mapping[str, Any], files: Mapping[str, Path], epoch: int) -> None:
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.absolute().parent)
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}") from error
    try:
        with open(handle, "wb") as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
            index = json.dumps(about, indent=1).encode() + b"\n"
            tar.addfile(_info(INDEX, len(index), epoch), io.BytesIO(index))
            for name, path in files.items():
                facts = about["files"][name]
                info = _info(name, facts.get("size", 0), epoch)
                if "link" in facts:
                    info.type, info.linkname = tarfile.SYMTYPE, facts["link"]
                    tar.addfile(info)
                    continue
                with path.open("rb") as content:
                    tar.addfile(info, content)
        os.chmod(temporary, 0o644)
        os.rename(temporary, out)
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _info(name: str, size: int, epoch: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, epoch, 0o644
    return info


# -- using one --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_bundle(path: Path, store: Store, progress: Progress) -> Iterator[Bundle]:
    """Unpack and check a bundle, where scripts of a build can see it; gone afterwards. Errors: StoreError, UsageError."""
    store.open_for_writing()
    folder = Path(tempfile.mkdtemp(prefix="bundle-", dir=_made(store.cache)))
    folder.chmod(0o755)
    try:
        with progress.step(f"check {path}"):
            bundle = Bundle(folder, _unpack(path, folder))
        yield bundle
    finally:
        remove_tree(folder)


def _unpack(path: Path, folder: Path) -> dict[str, Any]:
    try:
        with tarfile.open(path, "r:") as tar:
            first = tar.next()
            about = json.loads(_content(tar, first).read()) if first and first.name == INDEX else None
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                raise StoreError(
                    f"{path} is no bundle, or one of another version of Ekiben", hint="build.py bundle RECIPE -o FILE"
                )
            left = dict(about["files"])
            while member := tar.next():
                said = left.pop(member.name, None)
                if (
                    said is None
                    or not _is_plain(member.name)
                    or (member.linkname if member.issym() else None) != said.get("link")
                ):
                    raise StoreError(f"{path}: {member.name} is not what its {INDEX} says")
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                if member.issym():
                    if not _link_stays_inside(member.name, member.linkname):
                        raise StoreError(f"{path}: {member.name} points out of the bundle")
                    target.symlink_to(member.linkname)
                    continue
                digest = hashlib.sha256()
                with target.open("wb") as out, _content(tar, member) as content:
                    while chunk := content.read(1 << 20):
                        digest.update(chunk)
                        out.write(chunk)
                if digest.hexdigest() != said["sha256"]:
                    raise StoreError(f"{path}: {member.name} is damaged: other bytes than its {INDEX} says")
    except (tarfile.TarError, ValueError, KeyError, EOFError) as error:
        raise StoreError(f"{path} is no whole bundle: {error}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be unpacked: {error.strerror}: {error.filename or path}") from error
    if left:
        raise StoreError(
            f"{path} is no whole bundle: {next(iter(left))} is missing"
            + (f", and {len(left) - 1} more" if len(left) > 1 else "")
        )
    return about


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(member)
    if content is None:
        raise tarfile.TarError(f"{member.name} is no file")
    return content


def _is_plain(name: str) -> bool:
    return posixpath.normpath(name) == name and name.split("/")[0] in PARTS


def check_bundle(bundle: Bundle, chain: Chain) -> None:
    """Whether it has what this chain, as the files here say it, asks for. Errors: FetchError."""
    if bundle.about["platform"] != platform():
        raise FetchError(f"the bundle is for {bundle.about['platform']}; this machine is {platform()}")
    ours, theirs = _locks(chain), bundle.about["locks"]
    if other := [name for name in ours if theirs.get(name) != ours[name]]:
        raise FetchError(f"the bundle of {bundle.about['recipe']} ({bundle.about['stack']}) has not what is asked for here: other "
                         f"{', '.join(other)}", hint=f"make it again where there is a network: build.py bundle {chain.recipe.name}")  # fmt: skip


def take_compiled(bundle: Bundle, store: Store) -> None:
    """What build stages handed over becomes the store's own, as if it had been compiled here. Errors: StoreError."""
    for place in sorted((bundle.folder / "compiled").glob("*.json")):
        try:
            data = json.loads(place.read_text())
            result = StoredResult(**{**data, "files": tuple(Handed(**item) for item in data["files"])})
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{place.name} in the bundle is no record of a build stage: {error}") from error
        if store.result(result.key):
            continue
        with store.staging() as staging:
            for file in result.files:
                source = bundle.folder / "compiled" / file.digest[7:]
                if not source.is_file() or f"sha256:{_sha256(source)}" != file.digest:
                    raise StoreError(f"the bundle has not the file {file.path} of {result.name}")
                shutil.copyfile(source, staging / "file")
                store.put_file(staging / "file", file.digest)
        store.put_result(result)


def bundle_supply(bundle: Bundle, chain: Chain) -> Supply:
    """Packages from the bundle, and from nowhere else."""
    inside = f"/{BUILD_MOUNT}/cache/{bundle.folder.name}"
    wheels, sources = f"{inside}/wheels", f"{inside}/sources"
    environment = {
        "UV_OFFLINE": "1",
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": wheels,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": f"{wheels} {sources}",
        **lend_kept(bundle.folder / "sources", sources),
    }
    return Supply("", f"deb [trusted=yes] file:{inside}/debs ./\n", chain.stack.apt_lock().packages, environment,
                  debs=bundle.folder / "debs")  # fmt: skip


def unpack_snapshots(bundle: Bundle, folder: Path) -> list[Path]:
    """What was given with --with, put below ``folder``; what is there already stays. Returns their paths."""
    made = []
    for source in sorted((bundle.folder / "with").glob("*")):
        target = folder / source.name
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{source.name}.", dir=folder))
            try:
                if source.is_dir():
                    shutil.copytree(source, staging / source.name, symlinks=True)
                else:
                    shutil.copyfile(source, staging / source.name)
                (staging / source.name).rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        made.append(target)
    return made
