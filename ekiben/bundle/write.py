"""Write a verified archive of the sources of a recipe, for machines without a network.

A bundle is a tar:

    bundle.json     what it is for, and every file below with its size and sha256
    debs/           the Debian packages of every layer, with an index (Packages): an archive for apt
    wheels/         the Python packages of every lock file
    compiled/       the outputs of build stages: a record each, and their files by digest
    sources/        what that was compiled of: source distributions, and git repositories with just the pinned commit
    include/        models and data, as --include names them

It is filled by the finished image itself: its own apt and pip fetch what was locked, with the site's settings. A source
is fetched where it is compiled, on the layers of its build stage. With the compiler in it, too (`--compiler`), other
GPUs can be compiled for where there is no network.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import posixpath
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ekiben.builder.build import BuildContext
from ekiben.bundle._fetch import fetch_packages, fetch_sources, index_debs, make_folder
from ekiben.bundle._index import INDEX, SECTIONS, BundleFile, BundleIndex, link_stays_inside, lock_digests, sha256_of
from ekiben.core.command_name import command_name
from ekiben.core.errors import StoreError, UsageError
from ekiben.core.files import open_regular, tree_paths
from ekiben.resolve.graph import ResolvedRecipe, stages_of
from ekiben.store import Image, Store

__all__ = ["SECTIONS", "write_bundle"]


def write_bundle(
    context: BuildContext, image: Image, out: Path, *, snapshots: Sequence[Path] = (), compiler: bool = False
) -> BundleIndex:
    """Download the sources of ``image`` and write them to ``out``, which appears when it is complete.

    ``snapshots``: models and data to include. ``compiler``: include the layers below its build stages. Returns
    bundle.json. Raises UsageError, FetchError, EngineError, StoreError.
    """
    resolved, store = context.resolved, context.store
    _refuse_output(out)
    if (base := resolved.definitions[0].final).bootstrap != "debootstrap":
        raise UsageError(
            f"{resolved.definitions[0].path}: a base of Bootstrap: {base.bootstrap} can't be bundled, only"
            " debootstrap's"
        )
    included = {path.resolve().name: path.resolve() for path in snapshots}
    for path in snapshots:
        if not path.exists():
            raise UsageError(f"--include {path}: no such file or folder")
    if len(included) < len(snapshots):
        raise UsageError("--include: two of the paths have the same last name, and a bundle stores them by it")
    included_files = {
        posixpath.normpath(f"include/{name}/{item.relative_to(path).as_posix()}"): item
        for name, path in sorted(included.items())
        for item in (tree_paths(path) if path.is_dir() else [path])
        if item == path or item.is_file() or item.is_symlink()
    }
    store.open_for_writing()
    with store.staging() as staging:
        folder = fetch_packages(context, image, make_folder(staging / "packages"), compiler=compiler)
        index_debs(folder / "debs", resolved.stack.file.suite)
        files = {
            f"{section}/{path.name}": path
            for section in ("debs", "wheels")
            for path in sorted((folder / section).glob("*"))
        }
        files |= _compiled(resolved, store, staging)
        sources = fetch_sources(context, staging)
        files |= {
            f"sources/{path.relative_to(sources).as_posix()}": path
            for path in sorted(sources.rglob("*"))
            if path.is_file()
        }
        files |= included_files
        with context.progress.step(f"write {out}"):
            index = BundleIndex(
                recipe=resolved.recipe.name,
                stack=resolved.stack.name,
                platform=resolved.stack.platform,
                locks=lock_digests(resolved),
                layers={layer.name: layer.cache_key for layer in resolved.layers},
                files={name: _describe(name, path) for name, path in files.items()},
            )
            _write(out, index, files, resolved.stack.file.epoch)
    return index


def _refuse_output(out: Path) -> None:
    """Check the output file before minutes of downloads."""
    folder = out.absolute().parent
    try:
        if not folder.is_dir():
            raise UsageError(f"-o {out}: there is no folder {folder}; create it first")
        if out.is_dir():
            raise UsageError(f"-o {out}: is a folder; name the file in it, as {out / 'recipe.bundle'}")
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}", hint="name a file elsewhere with -o") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(f"{out} cannot be written: no permission in {folder}", hint="name a file elsewhere with -o")


def _describe(name: str, path: Path) -> BundleFile:
    """Return a member's record. A link to another member stays a link: the Hugging Face cache consists of links."""
    if path.is_symlink() and link_stays_inside(name, target := str(path.readlink())):
        return BundleFile(link=target)
    return BundleFile(path.stat().st_size, sha256_of(path))


def _compiled(resolved: ResolvedRecipe, store: Store, staging: Path) -> dict[str, Path]:
    """Return the outputs of the build stages, by their name in the bundle.

    Raises StoreError when one is not in the store.
    """
    files: dict[str, Path] = {}
    for stage in stages_of(item for layer in resolved.layers for item in layer.copies):
        result = store.result(stage.cache_key)
        if result is None:
            raise StoreError(
                f"what {stage.name} compiled is not in {store.root} any more",
                hint=f"{command_name()} build {resolved.cli_args}",
            )
        for file in result.files:
            store.check_blob(file.digest)
            files[f"compiled/{file.digest[7:]}"] = store.blob_path(file.digest)
        record = make_folder(staging / "compiled") / f"{result.key}.json"
        record.write_text(json.dumps(asdict(result), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        files[f"compiled/{record.name}"] = record
    return files


def _write(out: Path, index: BundleIndex, files: Mapping[str, Path], epoch: int) -> None:
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.absolute().parent)
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}") from error
    try:
        with open(handle, "wb") as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
            data = index.to_json()
            tar.addfile(_info(INDEX, len(data), epoch), io.BytesIO(data))
            for name, path in files.items():
                file = index.files[name]
                info = _info(name, file.size, epoch)
                if file.link is not None:
                    info.type, info.linkname = tarfile.SYMTYPE, file.link
                    tar.addfile(info)
                    continue
                with open_regular(path) as content:
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
