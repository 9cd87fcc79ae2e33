"""Read a bundle: unpack and check it, and provide its packages to a build without a network."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ekiben.bundle._fetch import make_folder
from ekiben.bundle._index import (
    INDEX,
    MAX_INDEX,
    SECTIONS,
    BundleFile,
    BundleIndex,
    link_stays_inside,
    lock_digests,
    sha256_of,
    snapshot_folder,
)
from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.command_name import command_name
from ekiben.core.errors import FetchError, StoreError
from ekiben.core.files import open_regular, remove_tree
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.progress import Progress
from ekiben.packages.git import mount_kept
from ekiben.packages.host_config import PackageSources
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.store import Store, StoredResult


@dataclass(frozen=True, slots=True)
class Bundle:
    """An unpacked bundle: ``folder`` holds debs/, wheels/, compiled/, sources/ and include/."""

    folder: Path
    index: BundleIndex


@contextlib.contextmanager
def open_bundle(path: Path, store: Store, progress: Progress) -> Iterator[Bundle]:
    """Unpack and check a bundle, where scripts of a build can see it; gone afterwards.

    Raises StoreError, UsageError.
    """
    store.open_for_writing()
    folder = Path(tempfile.mkdtemp(prefix="bundle-", dir=make_folder(store.cache)))
    folder.chmod(0o755)
    try:
        with progress.step(f"check {path}"):
            bundle = Bundle(folder, _unpack(path, folder))
        yield bundle
    finally:
        remove_tree(folder)


def _unpack(path: Path, folder: Path) -> BundleIndex:
    try:
        with open_regular(path) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            first = tar.next()
            index = (
                BundleIndex.parse(_content(tar, first).read(min(first.size, MAX_INDEX + 1)))
                if first and first.name == INDEX
                else None
            )
            if index is None:
                raise StoreError(
                    f"{path} is not a bundle, or one of another version of Ekiben",
                    hint=f"{command_name()} bundle RECIPE -o FILE",
                )
            left = dict(index.files)
            while member := tar.next():
                file = left.pop(member.name, None)
                if (
                    file is None
                    or not _is_plain(member.name)
                    or not (member.isreg() or member.issym())  # a hard link names another member, or none
                    or member.issparse()  # not written by Ekiben: a sparse file could fill the disk
                    or (member.linkname if member.issym() else None) != file.link
                ):
                    raise StoreError(f"{path}: {member.name} differs from its {INDEX}")
                _unpack_member(path, folder, tar, member, file)
        _refuse_links_out(path, folder, index)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise StoreError(f"{path} is an incomplete bundle: {error}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be unpacked: {error.strerror}: {error.filename or path}") from error
    if left:
        raise StoreError(
            f"{path} is an incomplete bundle: {next(iter(left))} is missing"
            + (f", and {len(left) - 1} more" if len(left) > 1 else "")
        )
    return index


def _unpack_member(path: Path, folder: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, file: BundleFile) -> None:
    target = folder / member.name
    if any((folder / parent).is_symlink() for parent in Path(member.name).parents):
        raise StoreError(f"{path}: {member.name} is below a link")
    target.parent.mkdir(parents=True, exist_ok=True)
    if member.issym():
        if not link_stays_inside(member.name, member.linkname):
            raise StoreError(f"{path}: {member.name} points out of the bundle")
        target.symlink_to(member.linkname)
        return
    digest = hashlib.sha256()
    with target.open("xb") as out, _content(tar, member) as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != file.sha256:
        raise StoreError(f"{path}: {member.name} is damaged: other bytes than its {INDEX} says")


def _refuse_links_out(path: Path, folder: Path, index: BundleIndex) -> None:
    """Follow links in the file system: a link through another may point further up than its text does."""
    for name, file in index.files.items():
        target = folder / name
        if file.link is None or not target.is_symlink():
            continue
        try:
            inside = target.resolve().is_relative_to((folder / snapshot_folder(name)).resolve())
        except (OSError, RuntimeError):  # a circle of links
            inside = False
        if not inside:
            raise StoreError(f"{path}: {name} points out of the bundle")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(member)
    if content is None:
        raise tarfile.TarError(f"{member.name} is not a file")
    return content


def _is_plain(name: str) -> bool:
    return posixpath.normpath(name) == name and name.split("/")[0] in SECTIONS


def check_bundle(bundle: Bundle, resolved: ResolvedRecipe) -> None:
    """Raise FetchError unless the bundle is for this platform and the recipe's locks."""
    if bundle.index.platform != resolved.stack.platform:
        raise FetchError(f"the bundle is for {bundle.index.platform}, the image for {resolved.stack.platform}")
    ours, theirs = lock_digests(resolved), bundle.index.locks
    if other := [name for name in ours if theirs.get(name) != ours[name]]:
        raise FetchError(
            f"the bundle of {bundle.index.recipe} ({bundle.index.stack}) is for another request: other "
            f"{', '.join(other)}",
            hint=f"create it again where there is a network: {command_name()} bundle {resolved.cli_args}",
        )


def import_compiled(bundle: Bundle, store: Store) -> None:
    """Import the outputs of build stages into the store, as if they had been compiled here. Raises StoreError."""
    for path in sorted((bundle.folder / "compiled").glob("*.json")):
        try:
            result = StoredResult.parse(Fields.of(parse_json(read_regular(path))))
        except ValueError as error:
            raise StoreError(f"{path.name} in the bundle is not a record of a build stage: it {error}") from error
        if result.key != path.stem:
            raise StoreError(f"{path.name} in the bundle is the record of another build stage: {result.key}")
        if store.result(result.key):
            continue
        with store.staging() as staging:
            for file in result.files:
                source = bundle.folder / "compiled" / file.digest[7:]
                if not source.is_file() or f"sha256:{sha256_of(source)}" != file.digest:
                    raise StoreError(f"the bundle has not the file {file.path} of {result.name}")
                shutil.copyfile(source, staging / "file")
                store.put_file(staging / "file", file.digest)
        store.put_result(result)


def bundle_sources(bundle: Bundle, resolved: ResolvedRecipe) -> PackageSources:
    """Return package sources that use the bundle alone."""
    inside = f"/{BUILD_MOUNT}/cache/{bundle.folder.name}"
    wheels, sources = f"{inside}/wheels", f"{inside}/sources"
    environment = {
        "UV_OFFLINE": "1",
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": wheels,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": f"{wheels} {sources}",
        **mount_kept(bundle.folder / "sources", sources),
    }
    return PackageSources(
        "",
        f"deb [trusted=yes] file:{inside}/debs ./\n",
        resolved.stack.apt_lock().packages,
        environment,
        debs=bundle.folder / "debs",
    )


def unpack_snapshots(bundle: Bundle, folder: Path) -> list[Path]:
    """Copy what --include added below ``folder``, and return the paths; existing ones are kept. Raises OSError."""
    paths = []
    for source in sorted((bundle.folder / "include").glob("*")):
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
        paths.append(target)
    return paths
