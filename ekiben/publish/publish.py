"""Publish an image to a shared folder: one folder on a file system that many machines see, which colleagues run images
from.

    DIR/ README                                    for those who find the folder images/<name>/
        what people run <name>-<version>-<digest12>.sif           the image: a plain file, read-only; digest12 begins
        its sha256 <name>-<version>-<digest12>.sif.sha256    for `sha256sum -c` <name>-<version>-<digest12>.cdx.json
        its SBOM (ekiben/inspect/sbom.py) <name>-<version>-<digest12>.json          its record
        (ekiben/images/published.py) <name>-<version>-<digest12>.pin           when it is there, prune keeps the image
        <name>-<version>-<digest12>.removed       when and by whom (its owner) the version was removed
        <name>-<version>-<digest12>.runs/         records of runs with it, kept by ekiben/publish/catalog/runs.py
        <name>-<version>-<digest12>.module, .bin/ its modulefile, and the commands of that (ekiben/run/modulefile.py)
        current -> <name>-<version>-<digest12>.sif    the newest; other links beside it are tags: they keep an image,
        too modulefiles/ekiben/<name>/                when asked for: <version>-<digest12>, links to modulefiles;
        .modulerc store/                                    which layer is where in these SIFs, by key; what was
        compiled for them (ekiben/store/shared.py) catalog/                                  pages about all this, when
        ekiben/publish/catalog wrote them trash/                                    what prune moved aside, until nobody
        can have it open

Whatever belongs to one version lies beside it, as <name>-<version>-<digest12>.<something>, and goes with it. Links are
replaced by rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from ekiben.builder.verify import verify
from ekiben.core.checked import with_checksum
from ekiben.core.errors import StoreError, UsageError, VerifyError
from ekiben.core.files import digest_of, open_regular
from ekiben.core.inner_path import InnerPath
from ekiben.core.pgp_key import Key
from ekiben.core.progress import Progress
from ekiben.formats.partition import Partition, copy_partition
from ekiben.formats.sif import SifHeader, Signature, new_sif
from ekiben.images.published import REMOVED, SBOM_SUFFIX, VERSION, VersionRecord, read_records
from ekiben.publish.record import PublishedFile, sha256_line, version_record
from ekiben.run.modulefile import (
    check_shared_dir,
    command_files,
    module_folder,
    module_name,
    modulefile,
    rc_file,
)
from ekiben.signing.sif import sign_image
from ekiben.store import Image, Store, StoredLayer, check_sif, keep_sif, known_sif, note_sif, sif_sha256
from ekiben.store.shared import IMAGES, SharedStore

CURRENT = "current"
ATTEMPTS = 5
_ENDINGS = (".sif", ".sha256", ".json", ".pin", REMOVED)
_README = """\
Container images, published with Ekiben. To run one, no Ekiben is needed:

    apptainer exec --nv images/NAME/current TASK            (or singularity exec)
    sha256sum -c NAME-….sif.sha256                          (in images/NAME: whether a file is whole)
    apptainer verify images/NAME/current                    (whose it is, where it was signed)

Where there is modulefiles/: `module use <this folder>/modulefiles`, then `module load ekiben/NAME` for its tasks as
commands. An image's .json says what it is, its .cdx.json what is in it. With Ekiben, EKIBEN_SHARED=<this folder> lets
a build take the layers in store/.
An empty file NAME-….pin beside an image, or a link to it, keeps it from `ekiben prune --in <this folder>`.
"""


@dataclass(frozen=True, slots=True)
class Published:
    """The published version. ``bytes_copied``: of layers that no SIF there had; ``created`` is False when the
    version was there before; ``module``: the argument of `module load`."""

    sif: Path
    record: VersionRecord
    bytes_copied: int
    created: bool
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """The names of a published version, and its files beside the SIF.

    ``version``: default today's date. ``tags``: further links to it; ``current``: link `current` to it. ``pin``: prune
    keeps it. ``check``: test the SIF before anyone sees it; ``key`` signs it. ``module``: with a modulefile; all
    versions get one once one has it, for the default would stay behind `current` otherwise.
    """

    version: str | None = None
    tags: Sequence[str] = ()
    pin: bool = False
    current: bool = True
    check: bool = True
    key: Key | None = None
    module: bool = False

    def refuse_contradictions(self) -> None:
        """Raise UsageError for a name that no version or tag can have."""
        if self.version is not None and not VERSION.fullmatch(self.version):
            raise UsageError(f"--version {self.version}: letters, digits, '.', '_' and '+', at most 64")
        if CURRENT in self.tags and not self.current:
            raise UsageError(f"--tag {CURRENT}: --no-current leaves that link as it is; give one of the two")
        for tag in self.tags:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", tag, re.ASCII) or tag.endswith(_ENDINGS):
                raise UsageError(
                    f"--tag {tag}: letters, digits, '.', '_' and '-', and no ending of a file in that folder"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One call of publish(). ``folder`` is the image's folder."""

    image: Image
    store: Store
    header: SifHeader
    shared: SharedStore
    progress: Progress
    options: PublishOptions

    @property
    def folder(self) -> InnerPath:
        return self.shared.folder / IMAGES / self.image.name


def publish(
    image: Image,
    store: Store,
    shared_dir: Path,
    options: PublishOptions,
    progress: Progress,
) -> Published:
    """Write the image's SIF into ``shared_dir``. Raises StoreError, VerifyError, UsageError."""
    shared = open_destination(shared_dir, options)
    header = image.sif_header(store)
    request = _Request(image=image, store=store, header=header, shared=shared, progress=progress, options=options)
    with shared.translated_errors(), shared.building(layer.cache_key for layer in image.layers):
        write_readme(shared)
        folder = request.folder
        shared.policy.make_folder(folder)
        bytes_copied, created = 0, False
        for _ in range(ATTEMPTS):
            record = _find_intact(request)
            if record is None:
                created = True
                bytes_copied += _put(request)
                if (record := _find_intact(request)) is None:
                    continue  # a prune that began before this announcement removed it
            write(shared, folder / f"{record.file}.sha256", sha256_line(record.sha256, record.file))
            if options.pin:
                write(shared, folder / f"{record.stem}.pin", b"")
            for tag in (*([CURRENT] if options.current else []), *options.tags):
                link(folder / tag, record.file)
            module_loaded = None
            if options.module or (shared.folder / module_folder(image.name)).is_folder():
                module_loaded = put_module(shared, folder, image, record.stem)
            if _find_intact(request) is not None:
                return Published((folder / record.file).path, record, bytes_copied, created, module_loaded)
    raise StoreError(
        f"{image.name} was removed from {folder} again and again while it was published",
        hint="another user prunes the folder: publish it again afterwards",
    )


def open_destination(shared_dir: Path, options: PublishOptions) -> SharedStore:
    """Open the shared folder, before the image is built. Raises StoreError, UsageError."""
    if options.module:
        check_shared_dir(shared_dir)
    options.refuse_contradictions()
    shared = SharedStore(shared_dir)
    shared.open_for_writing()
    return shared


def _find_intact(request: _Request) -> VersionRecord | None:
    """Return the record of this very image, when it is there and its layers are found in it.

    Without a key, a signed one first.
    """
    image, key, version = request.image, request.options.key, request.options.version
    records, _ = read_records(request.folder)
    candidates = [item for item in records if item.sif == request.header.id and version in (None, item.version)]
    if key:
        candidates = [item for item in candidates if item.signature and item.signature.fingerprint == key.fingerprint]
    candidates.sort(key=lambda item: not item.signature)
    record = next((item for item in candidates if _is_intact(request, item)), None)
    missing = record and any(request.shared.layer(layer.cache_key) is None for layer in image.layers)
    return (
        None if record and missing and not _put_layers(request.shared, request.folder / record.file, image) else record
    )


def _is_intact(request: _Request, record: VersionRecord) -> bool:
    """Return whether the SIF is this image's and the record's, and its SBOM the record's, byte for byte.

    The SIF is read once while it is unchanged.
    """
    sif, sbom = request.folder / record.file, request.folder / (record.sbom or "")
    try:
        header = check_sif(request.image, sif, request.store)
        if sif_sha256(header, sif, request.store) != record.sha256:
            raise VerifyError(f"{sif} is damaged: its SHA-256 is not {record.sha256}")
        if record.sbom_sha256 and digest_of(sbom.read()) != f"sha256:{record.sbom_sha256}":
            raise VerifyError(f"{sbom} is damaged: its SHA-256 is not {record.sbom_sha256}")
    except FileNotFoundError as error:  # a prune removed it meanwhile
        request.progress.log(f"{error.filename} is gone; it is written again")
        return False
    except (VerifyError, StoreError, ValueError, OSError) as error:
        request.progress.log(f"{error}; it is written again")
        return False
    return True


def new_stem(folder: InnerPath, name: str, version: str | None, sha256: str) -> str:
    """Return the name that a SIF of this digest has there already, of which something is damaged, or a new one."""
    end = sha256[:12]
    if version is None:
        start, end_of_record = f"{name}-", f"-{end}.json"
        names = [path.name.replace(".sif", ".json") for path in folder.entries()]  # its record may have been removed
        records = [file for file in names if file.startswith(start) and file.endswith(end_of_record)]
        versions = (file.removeprefix(start).removesuffix(end_of_record) for file in records)
        version = next((item for item in versions if VERSION.fullmatch(item)), None)
    return f"{name}-{version or f'{datetime.now(UTC):%Y.%m.%d}'}-{end}"


def _put_layers(shared: SharedStore, sif: InnerPath, image: Image) -> bool:
    """Record the layers of the SIF; return False when a prune removed the file."""
    try:
        shared.put_layers(sif, image.layers)
    except (StoreError, OSError):
        if sif.lexists():
            raise
        return False
    return True


def _put(request: _Request) -> int:
    """Write whole files only: files stay in staging/ until they are tested, and are renamed then.

    Returns the bytes of layers that were copied from the store.
    """
    image, store, shared, progress = request.image, request.store, request.shared, request.progress
    if shared.folder.free_bytes() < image.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    signature = (
        sign_image(image, store, request.options.key) if request.options.key else None
    )  # before the work: it may ask for a passphrase
    with shared.new_folder() as staging:
        sif, sbom_work = staging / "image.sif", Future[str | None]()
        with progress.step(f"write the SIF and its SBOM in {request.folder}", total=image.size):
            sha256, bytes_copied = _write_sif(sif, request, signature, lambda: _make_sbom(image, store, sbom_work))
            note_sif(request.header, sif, store, sha256=sha256)
        sbom = _sbom_of(sbom_work, progress)
        checks = verify(image, store, progress, sifs=[sif]) if request.options.check else []
        _put_wheels(image, store, shared, staging, progress)
        stem = new_stem(request.folder, image.name, request.options.version, sha256)
        published = request.folder / f"{stem}.sif"
        size = put_sif(shared, sif, published, sha256)
        note_sif(request.header, published, store, sha256=sha256)
        if not _put_layers(shared, published, image):
            return bytes_copied
        write(shared, request.folder / f"{stem}.sif.sha256", sha256_line(sha256, published.name))
        if sbom is not None:
            write(shared, request.folder / f"{stem}{SBOM_SUFFIX}", sbom.encode())
    file = PublishedFile(stem=stem, sha256=sha256, size=size, id=request.header.id, key=request.options.key)
    record = version_record(image, file, checks, sbom)
    (request.folder / f"{stem}{REMOVED}").remove(missing_ok=True)  # it is there again
    record = with_checksum({**record, "previous": (request.folder / CURRENT).link_target()})
    write(shared, request.folder / f"{stem}.json", json.dumps(record, indent=1).encode() + b"\n")
    return bytes_copied


def _make_sbom(image: Image, store: Store, work: Future[str | None]) -> None:
    """Make the SBOM in this process, once: a forked process outlived a killed publish."""
    from ekiben.inspect.sbom import sbom_of_image  # imported here: not needed for an image that is published already

    if work.done():
        return
    try:
        work.set_result(sbom_of_image(image, store))
    except Exception as error:  # raised by _sbom_of(): here it would be taken for a failure to write the SIF
        work.set_exception(error)


def _sbom_of(work: Future[str | None], progress: Progress) -> str | None:
    """Return the SBOM; None where a package database is broken."""
    try:
        return work.result()
    except VerifyError as error:  # people can run it all the same
        progress.log(f"no SBOM: {error}")
        return None


def _write_sif(
    sif: InnerPath, request: _Request, signature: Signature | None, meanwhile: Callable[[], None]
) -> tuple[str, int]:
    """Return its SHA-256 in hex, and the bytes of the layers that no SIF there had.

    ``meanwhile`` is called while threads hash the file and the disk writes it.

    What comes from the store was compared when it was written, or is now. Where the store is on another file system, a
    layer that the folder has is copied there, by its server where that can, compared with its digest, and not used
    where it is damaged. Raises StoreError.
    """
    image, store, shared = request.image, request.store, request.shared
    header, progress, signed = request.header, request.progress, signature.data if signature else b""
    known = known_sif(store, header.id, signed)
    for trusted in (True, False):
        partitions, bytes_copied, file_digest = [], 0, None if known else hashlib.sha256()
        for layer in image.layers:
            is_published = trusted and shared.layer(layer.cache_key) is not None
            bytes_copied += 0 if is_published else layer.size
            if is_published and not is_on_file_system_of(shared.folder, store, layer):
                partitions.append(shared.partition(layer))
            else:
                store.check_blob(layer.digest)
                partitions.append(store.partition(layer, is_checked=True))
        try:
            with new_sif(sif, partitions, header, on_bytes=progress.count, file_hash=file_digest, signature=signature):
                meanwhile()
            break
        except StoreError as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else None
            if all(partition.is_checked for partition in partitions) or (
                cause and cause.errno not in (errno.ENOENT, errno.ESTALE)
            ):
                raise cause or error from None
            if not cause:  # not removed by a prune in the meantime
                progress.log(f"{error}; every layer is taken from {store.root}")
    return (keep_sif(store, header.id, file_digest, signed) if file_digest else str(known)), bytes_copied


def is_on_file_system_of(folder: InnerPath, store: Store, layer: StoredLayer) -> bool:
    """Return whether the store has the layer in a file of its user, on the file system of ``folder``."""
    path = store.partition(layer).path
    try:
        with open_regular(path) as blob:
            return isinstance(path, Path) and os.fstat(blob.fileno()).st_dev == folder.status().st_dev
    except OSError:
        return False


def _put_wheels(image: Image, store: Store, shared: SharedStore, staging: InnerPath, progress: Progress) -> None:
    """Copy the compiled wheels of the image, for builds of other images."""
    for key in image.result_keys:
        result = store.result(key)
        if result is None or shared.result(key) is not None:
            continue
        for file in result.files:
            partition = store.partition(file)
            _copy_blob(partition, shared, staging / file.digest[7:], progress)
            shared.put_file(staging / file.digest[7:], file.digest)
        shared.put_result(result)


def _copy_blob(source: Partition, shared: SharedStore, target: InnerPath, progress: Progress) -> None:
    with target.create() as out:
        shared.apply_permissions(out.fileno(), 0o600)  # before there is anything in it: a quota may be the group's
        copy_partition(source, out, progress.count)


def put_sif(shared: SharedStore, sif: InnerPath, target: InnerPath, sha256: str) -> int:
    """Never over a file that is whole: a job may have it open, which NFS does not forgive. Returns its size."""
    size = sif.status().st_size
    shared.policy.apply_to(sif, 0o555)
    sif.change(os.fsync)
    with contextlib.suppress(FileNotFoundError):
        if target.status().st_size == size and has_digest(target, sha256):
            return size
        shared.discard(target)
    sif.move(target)
    return size


def has_digest(path: InnerPath, sha256: str) -> bool:
    """Return whether the file has this digest; False where it is none."""
    with contextlib.suppress(OSError):
        return digest_of(path) == f"sha256:{sha256}"
    return False


def put_module(shared: SharedStore, folder: InnerPath, image: Image, stem: str) -> str:
    """Write the modulefile, and last the link by which it is found. Return the module's name."""
    name, tasks = module_name(image.name, stem), image.tasks
    modules = shared.folder / module_folder(image.name)
    for needed in (*modules.way(), folder / f"{stem}.bin"):
        shared.policy.make_folder(needed)
    for command, script in command_files(image.name, stem, tasks).items():
        write(shared, folder / f"{stem}.bin" / command, script.encode(), 0o555)
    write(shared, folder / f"{stem}.module", modulefile(image.name, stem, image.description, tasks).encode())
    write(shared, modules / ".modulerc", rc_file(image.name).encode())
    link(modules / PurePosixPath(name).name, f"../../../{IMAGES}/{image.name}/{stem}.module")
    return name


def write_readme(shared: SharedStore) -> None:
    if not (shared.folder / "README").lexists():
        write(shared, shared.folder / "README", _README.encode())


def write(shared: SharedStore, path: InnerPath, data: bytes, mode: int = 0o444) -> None:
    with contextlib.suppress(OSError, ValueError):
        if path.read(max_size=len(data)) == data:
            return
    shared.write_file(path, data, mode)


def link(path: InnerPath, target: str) -> None:
    """Point ``path`` to ``target``, atomically."""
    if path.link_target() != target:
        path.link(target)
