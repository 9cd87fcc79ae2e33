"""Puts an image where others find it: one folder, its *place*, on a file system that many machines see.

    DIR/
        README                                    for those who find the folder
        images/<name>/                            what people run
            <name>-<version>-<digest12>.sif           the image: a plain file, read-only; digest12 begins its sha256
            <name>-<version>-<digest12>.sif.sha256    for `sha256sum -c`
            <name>-<version>-<digest12>.cdx.json      what is in it: a bill of materials (builder/sbom.py)
            <name>-<version>-<digest12>.json          its record, see below
            <name>-<version>-<digest12>.pin           when it is there, prune keeps the image
            <name>-<version>-<digest12>.runs/         records of runs with it, kept by builder/catalog/runs.py
            <name>-<version>-<digest12>.module, .bin/ its modulefile, and the commands of that (builder/modulefile.py)
            current -> <name>-<version>-<digest12>.sif    the newest; other links beside it are tags: they keep an image, too
        modulefiles/ekiben/<name>/                when asked for: <version>-<digest12>, links to modulefiles; .modulerc
        store/                                    which layer is where in these SIFs, by key; what was compiled for them
                                                  (builder/shared.py)
        catalog/                                  pages about all this, when builder/catalog wrote them
        trash/                                    what prune moved aside, until nobody can have it open

A version of an image is there when its record is: the record is written last, and removed first. Whatever else belongs to
one version lies beside it, as <name>-<version>-<digest12>.<something>, and goes with it. Links are replaced by rename.

The record, one JSON object:

    format       1
    name, recipe, version, stack, description
    file         the SIF's name in this folder
    sha256, size the SIF's (bytes)
    sif          its UUID; equal ones promise equal files, but for their signatures
    signature    fingerprint and user id of the PGP key that signed the SIF; null when nobody did
    image        the digest of its config: the image id in a Docker daemon
    layers       bottom first: name, cache_key, diff_id, digest, size, tar_size, notes (drift, for one)
    tasks        name → what it does
    sbom         the name of its bill of materials in this folder; null where a package database of the image is broken
    labels, environment
    checks       runtime and seconds of every test that passed before it was published
    published    when (UTC, ISO 8601); by: the login name
    previous     the file that `current` named before; null at first
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import hashlib
import json
import os
import re
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.assemble import Product, keep_sif, known_sif
from builder.chain import platform
from builder.errors import StoreError, UsageError, VerifyError, nearest
from builder.files import free_bytes
from builder.gpg import Key
from builder.modulefile import MODULES, check_place, command_files, module_folder, module_name, modulefile, rc_file
from builder.pipeline import Image
from builder.progress import Progress
from builder.shared import IMAGES, SharedStore, open_shared
from builder.sif import Partition, Signature, copy_partition, sif_id, write_sif
from builder.sign import sign_image
from builder.store import Store
from builder.verify import verify

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

RECORD_FORMAT = 1
CURRENT = "current"
BILL = ".cdx.json"  # as CycloneDX has it
_ATTEMPTS = 5
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+]{0,63}")
_ENDINGS = (".sif", ".sha256", ".json", ".pin")
_OF_A_VERSION = re.compile(r"(.+)\.(sif|sif\.sha256|cdx\.json|runs|module|bin)")
_DAY = 86400
_README = """\
Container images, published with Ekiben. To run one, no Ekiben is needed:

    singularity exec --nv images/NAME/current TASK          (or apptainer exec)
    sha256sum -c NAME-….sif.sha256                          (in images/NAME: whether a file is whole)
    apptainer verify images/NAME/current                    (whose it is, where it was signed)

Where there is modulefiles/: `module use <this folder>/modulefiles`, then `module load ekiben/NAME` for its tasks as commands.
An image's .json says what it is, its .cdx.json what is in it. With Ekiben, EKIBEN_SHARED=<this folder> lets a build take the layers in store/.
An empty file NAME-….pin beside an image, or a link to it, keeps it from `build.py prune --in <this folder>`.
"""


@dataclass(frozen=True, slots=True)
class Published:
    """What publish() did. ``moved``: bytes of layers that no SIF there had; ``made`` is False when all was there; ``module``:
    what `module load` takes."""

    sif: Path
    record: dict[str, Any]
    moved: int
    made: bool
    module: str | None = None


def publish(
    image: Image, store: Store, place: Path, progress: Progress, *,
    version: str | None = None, tags: Sequence[str] = (), pin: bool = False, current: bool = True, check: bool = True,
    key: Key | None = None, module: bool = False,
) -> Published:  # fmt: skip
    """The SIF into ``place``, tested before anyone sees it, signed with ``key``. Errors: StoreError, VerifyError, UsageError.

    ``module``: with a modulefile, as all versions have once one has it: the default would stay behind `current` otherwise.
    """
    shared = open_place(place, version=version, tags=tags, module=module)
    with shared.translated_errors(), shared.building(layer.cache_key for layer in image.layers):
        _write_readme(shared)
        folder = place / IMAGES / image.name
        shared.policy.make_folder(folder)
        moved, made = 0, False
        for _ in range(_ATTEMPTS):
            found = _whole(shared, folder, image, version, key)
            if found is None:
                made = True
                moved += _put(image, store, shared, folder, progress, version, check, key)
                if (found := _whole(shared, folder, image, version, key)) is None:
                    continue  # a prune that had begun before it was announced here took it away
            if pin:
                _write(shared, (folder / found["file"]).with_suffix(".pin"), b"")
            for tag in (*([CURRENT] if current else []), *tags):
                _link(folder, tag, found["file"])
            loads = None
            if module or (place / module_folder(image.name)).is_dir():
                loads = _put_module(shared, folder, image, found["file"].removesuffix(".sif"))
            if _whole(shared, folder, image, version, key) is not None:
                return Published(folder / found["file"], found, moved, made, loads)
    raise StoreError(f"{image.name} was removed from {folder} again and again while it was published",
                     hint="somebody prunes it: publish it again afterwards")  # fmt: skip


def open_place(
    place: Path, *, version: str | None = None, tags: Sequence[str] = (), module: bool = False
) -> SharedStore:
    """What can be refused before anything is built. Errors: StoreError, UsageError."""
    if module:
        check_place(place)
    if version is not None and not _VERSION.fullmatch(version):
        raise UsageError(f"--version {version}: letters, digits, '.', '_' and '+', at most 64")
    for tag in tags:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", tag, re.ASCII) or tag.endswith(_ENDINGS):
            raise UsageError(f"--tag {tag}: letters, digits, '.', '_' and '-', and no ending of a file of the place")
    shared = SharedStore(place)
    shared.open_for_writing()
    return shared


def _whole(
    shared: SharedStore, folder: Path, image: Image, version: str | None, key: Key | None
) -> dict[str, Any] | None:
    """The record of this very image, when it is there and its layers are found in it. Without ``key``, a signed one before others."""
    wanted = _sif_id(image)
    found = [item for item in records(folder) if item["sif"] == wanted and version in (None, item["version"])]
    if key:
        found = [item for item in found if (item.get("signature") or {}).get("fingerprint") == key.fingerprint]
    record = min(found, key=lambda item: not item.get("signature"), default=None)
    missing = record and any(shared.layer(layer.cache_key) is None for layer in image.layers)
    return None if record and missing and not _put_layers(shared, folder / record["file"], image) else record


def _put_layers(shared: SharedStore, sif: Path, image: Image) -> bool:
    """False when a prune took the file meanwhile."""
    try:
        shared.put_layers(sif, image.layers)
    except (StoreError, OSError):
        if sif.exists():
            raise
        return False
    return True


def _sif_id(image: Image) -> str:
    return sif_id([layer.digest for layer in image.layers], image.chain.deffile)


def _put(
    image: Image, store: Store, shared: SharedStore, folder: Path, progress: Progress, version: str | None, check: bool,
    key: Key | None,
) -> int:  # fmt: skip
    """Whole files only: everything lies in staging/ until it is proven, and takes its name then. Returns bytes of layers moved."""
    if free_bytes(shared.place) < image.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    signature = sign_image(image, store, key) if key else None  # before the work: it may ask for a passphrase
    with shared.staging() as staging, _billing(image, store) as billed:
        made = staging / "image.sif"
        with progress.step(f"write the SIF in {folder}", total=image.size):
            sha256, moved = _write_sif(made, image, store, shared, progress, signature)
        checks = verify(image, store, [Product("sif", str(made), 0, True)], progress) if check else []
        _put_wheels(image, store, shared, staging, progress)
        bill = None
        try:
            with progress.step("bill of materials"):
                bill = billed()
        except VerifyError as error:  # people can run it all the same
            progress.tell(f"no bill of materials: {error}")
        version = version or datetime.now(UTC).strftime("%Y.%m.%d")
        stem = f"{image.name}-{version}-{sha256[:12]}"
        size = _put_sif(shared, made, folder / f"{stem}.sif")
        if not _put_layers(shared, folder / f"{stem}.sif", image):
            return moved
        _write(shared, folder / f"{stem}.sif.sha256", f"{sha256}  {stem}.sif\n".encode())
        if bill is not None:
            _write(shared, folder / f"{stem}{BILL}", bill.encode())
    record = {
        "format": RECORD_FORMAT, "name": image.name, "recipe": image.chain.recipe.name, "version": version,
        "stack": image.chain.stack.name, "description": image.chain.recipe.file.description,
        "file": f"{stem}.sif", "sha256": sha256, "size": size,
        "sif": _sif_id(image), "signature": {"fingerprint": key.fingerprint, "user": key.user} if key else None,
        "image": image.image_id,
        "layers": [{"name": layer.name, "cache_key": layer.cache_key, "diff_id": layer.diff_id, "digest": layer.digest,
                    "size": layer.size, "tar_size": layer.tar_size, "notes": dict(layer.notes)} for layer in image.layers],
        "tasks": {name: task.help for name, task in image.chain.recipe.file.tasks.items()},
        "sbom": bill and f"{stem}{BILL}", "labels": dict(image.chain.labels), "environment": dict(image.chain.environment),
        "checks": [{"runtime": item.runtime, "seconds": item.seconds} for item in checks],
        "published": datetime.now(UTC).isoformat(timespec="milliseconds"), "by": getpass.getuser(), "previous": _target(folder, CURRENT),
    }  # fmt: skip
    _write(shared, folder / f"{stem}.json", json.dumps(record, indent=1).encode() + b"\n")
    return moved


def _write_sif(
    made: Path, image: Image, store: Store, shared: SharedStore, progress: Progress, signature: Signature | None
) -> tuple[str, int]:
    """Returns its SHA-256 in hex, and how many bytes came from outside the place: what it has, its own server may copy.

    What is there is compared with its digest while it is copied, and left where it is damaged; what comes from the store
    was compared when it was written, or is now. Errors: StoreError.
    """
    id, signed = _sif_id(image), signature.data if signature else b""
    known = known_sif(store, id, signed)
    for trusted in (True, False):
        parts, moved, whole = [], 0, None if known else hashlib.sha256()
        for layer in image.layers:
            if trusted and shared.layer(layer.cache_key) is not None:
                parts.append(shared.partition(layer))
            else:
                store.check_blob(layer.digest)
                parts.append(store.partition(layer, is_checked=True))
                moved += layer.size
        try:
            write_sif(made, parts, id=id, deffile=image.chain.deffile, arch=platform().split("/")[1],
                      epoch=image.chain.stack.file.epoch, on_bytes=progress.count, whole=whole, signature=signature)  # fmt: skip
            break
        except StoreError as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else None
            if all(part.is_checked for part in parts) or (cause and cause.errno not in (errno.ENOENT, errno.ESTALE)):
                raise cause or error from None
            if not cause:  # it was not a prune that took it since it was found
                progress.tell(f"{error}; every layer is taken from {store.root}")
    return (keep_sif(store, id, whole, signed) if whole else str(known)), moved


@contextlib.contextmanager
def _billing(image: Image, store: Store) -> Iterator[Callable[[], str]]:
    """A function that gives the image's bill of materials, which another process makes beside what follows: in a thread of
    this one it would hold up the copying. Errors: VerifyError where the image does not say what is in it, StoreError."""
    import multiprocessing

    mine, its = (context := multiprocessing.get_context("fork")).Pipe(duplex=False)
    child = context.Process(target=_send_bill, args=(image, store, its), name="bill", daemon=True)
    child.start()
    its.close()

    def bill() -> str:
        try:
            made = mine.recv()
        except EOFError as error:
            raise StoreError("the process that makes the bill of materials was killed") from error
        if isinstance(made, Exception):
            raise made
        return str(made)

    try:
        yield bill
    finally:
        child.terminate()
        child.join()


def _send_bill(image: Image, store: Store, to: Connection) -> None:
    from builder.sbom import bill_of_image  # late: for one who publishes what is there already, it is not made

    try:
        to.send(bill_of_image(image, store))
    except Exception as error:
        error.add_note(traceback.format_exc())
        to.send(error)


def _put_wheels(image: Image, store: Store, shared: SharedStore, staging: Path, progress: Progress) -> None:
    """What was compiled for the image, for whoever builds another one with it."""
    for stage in {item.stage.cache_key: item.stage for layer in image.chain.layers for item in layer.taken}.values():
        result = store.result(stage.cache_key)
        if result is None or shared.result(stage.cache_key) is not None:
            continue
        for file in result.files:
            part = Partition(store.blob_path(file.digest), 0, file.size, file.digest)
            _copy_blob(part, shared, staging / file.digest[7:], progress)
            shared.put_file(staging / file.digest[7:], file.digest)
        shared.put_result(result)


def _copy_blob(source: Partition, shared: SharedStore, to: Path, progress: Progress) -> None:
    with to.open("xb", buffering=0) as out:
        shared.settle(to, 0o600)  # before there is anything in it: a quota may be the group's
        copy_partition(source, out, progress.count)


def _put_sif(shared: SharedStore, made: Path, to: Path) -> int:
    """Never over a file that is whole: a job may have it open, which NFS does not forgive. Returns its size."""
    size = made.stat().st_size
    shared.settle(made, 0o555)
    with made.open("rb") as stream:
        os.fsync(stream.fileno())
    with contextlib.suppress(FileNotFoundError):
        if to.stat().st_size == size:
            return size
        shared.discard(to)
    made.rename(to)
    return size


def _put_module(shared: SharedStore, folder: Path, image: Image, stem: str) -> str:
    """The link by which it is found comes last. Returns the module's name."""
    about, name = image.chain.recipe.file, module_name(image.name, stem)
    tasks = {task: what.help for task, what in about.tasks.items()}
    modules = shared.place / module_folder(image.name)
    for needed in (shared.place / MODULES, modules.parent, modules, folder / f"{stem}.bin"):
        shared.policy.make_folder(needed)
    for command, script in command_files(image.name, stem, tasks).items():
        _write(shared, folder / f"{stem}.bin" / command, script.encode(), 0o555)
    _write(shared, folder / f"{stem}.module", modulefile(image.name, stem, about.description, tasks).encode())
    _write(shared, modules / ".modulerc", rc_file(image.name).encode())
    _link(modules, Path(name).name, f"../../../{IMAGES}/{image.name}/{stem}.module")
    return name


def _write_readme(shared: SharedStore) -> None:
    if not (shared.place / "README").exists():
        _write(shared, shared.place / "README", _README.encode())


def _write(shared: SharedStore, path: Path, data: bytes, mode: int = 0o444) -> None:
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return
    shared.write_file(path, data, mode)


def _link(folder: Path, name: str, target: str) -> None:
    """``name`` leads to ``target`` afterwards; to what it did before until then, whoever looks."""
    if _target(folder, name) == target:
        return
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    temporary.symlink_to(target)
    try:
        temporary.rename(folder / name)
    finally:
        temporary.unlink(missing_ok=True)


def _target(folder: Path, name: str) -> str | None:
    try:
        return str((folder / name).readlink())
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------------------- reading


def records(folder: Path) -> list[dict[str, Any]]:
    """The versions of the image in ``folder``, oldest first: those whose record can be read and whose file is whole."""
    found = []
    for path in _records(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            if record["format"] == RECORD_FORMAT and (folder / record["file"]).stat().st_size == record["size"]:
                found.append(record)
    return sorted(found, key=lambda record: (record["published"], record["file"]))


def _records(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.json") if not path.name.endswith(BILL)]


def published(place: Path) -> dict[str, list[dict[str, Any]]]:
    """Every image of the place: name → its versions, oldest first. Errors: StoreError."""
    open_shared(place)
    return {folder.name: records(folder) for folder in sorted((place / IMAGES).iterdir()) if folder.is_dir()}


def tags(folder: Path) -> dict[str, str]:
    """The links in an image's folder: name → the file it names."""
    return {path.name: target for path in folder.iterdir() if not path.name.startswith(".") and (target := _target(folder, path.name))}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ removing


@dataclass(frozen=True, slots=True)
class Fate:
    """What prune does with one version, and why. ``size`` in bytes."""

    file: str
    size: int
    kept: bool
    why: str


def prune(
    place: Path, *, names: Sequence[str] = (), unused_for: float = 30, grace: float = 7, dry_run: bool = False
) -> tuple[list[Fate], int, int]:
    """Remove versions that nobody used for ``unused_for`` days, and with them layers that no other version has.

    What is pinned or tagged stays. ``names`` are files, or images whose every other version goes at once. What goes is
    moved to trash/ and removed ``grace`` days later: until then, a job that began with it goes on.
    Returns the fates, and the bytes moved aside and removed for good. Errors: StoreError, UsageError.
    """
    shared = open_shared(place)
    known = published(place)
    _refuse_unknown(names, known)
    fates = []
    for record in (record for versions in known.values() for record in versions):
        with contextlib.suppress(FileNotFoundError):  # another prune is at work
            fates.append(_fate(shared, record, names, unused_for))
    going = [fate.file.removesuffix(".sif") for fate in fates if not fate.kept]
    with shared.translated_errors():
        if not dry_run:
            shared.open_for_writing()
            for name, versions in known.items():
                for record in versions:
                    stem = record["file"].removesuffix(".sif")
                    if stem in going and _is_kept_by_now(shared, record, names, unused_for):
                        going.remove(stem)
                    elif stem in going:
                        _discard_version(shared, place / IMAGES / name, stem)
                _discard_strays(shared, place / IMAGES / name)
            _discard_dangling(shared)
            shared.drop_dangling()
        removed = shared.empty_trash(grace * _DAY, dry_run=dry_run)
    return fates, sum(fate.size for fate in fates if not fate.kept), removed


def _refuse_unknown(names: Sequence[str], known: dict[str, list[dict[str, Any]]]) -> None:
    files = [record["file"] for versions in known.values() for record in versions]
    for name in names:
        if name not in known and name not in files:
            raise UsageError(f"nothing named '{name}' was published there." + nearest(name, [*known, *files]))


def _fate(shared: SharedStore, record: dict[str, Any], names: Sequence[str], unused_for: float) -> Fate:
    folder = shared.place / IMAGES / record["name"]
    path = folder / record["file"]
    named = [tag for tag, target in sorted(tags(folder).items()) if target == record["file"]]
    days = (time.time() - shared.last_use(path.stat())) / _DAY
    if path.with_suffix(".pin").exists():
        kept, why = True, "pinned"
    elif named:
        kept, why = True, f"tagged {', '.join(named)}"
    elif record["layers"][-1]["cache_key"] in shared.announced_keys():
        kept, why = True, "being published"
    elif record["name"] in names or record["file"] in names:
        kept, why = False, "asked for"
    elif not shared.knows_last_use():
        kept, why = True, "its last use is not known here (noatime): name it to remove it"
    else:
        kept, why = days < unused_for, f"last used {days:.0f} days ago"
    return Fate(record["file"], record["size"], kept, why)


def _is_kept_by_now(shared: SharedStore, record: dict[str, Any], names: Sequence[str], unused_for: float) -> bool:
    """A publisher announces an image before it looks whether it is there: so one looks again before it goes."""
    try:
        return _fate(shared, record, names, unused_for).kept
    except FileNotFoundError:  # another prune was here
        return False


def _discard_version(shared: SharedStore, folder: Path, stem: str) -> None:
    """The record first: without it the version is not there."""
    beside = sorted(folder.glob(f"{stem}.*"), key=lambda path: path.name != f"{stem}.json")
    for path in beside:
        with contextlib.suppress(FileNotFoundError):
            shared.discard(path)
    if f"{stem}.sif" in tags(folder).values():  # a publisher links, then looks whether the file is there
        for path in beside[::-1]:
            shared.restore(path)


def _discard_strays(shared: SharedStore, folder: Path) -> None:
    """What a killed publisher left: files without a record, and names that were not taken, both a day old."""
    kept = {path.stem for path in _records(folder)}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = None if path.is_symlink() else _OF_A_VERSION.fullmatch(path.name)
            stray = path.name.startswith(".") or (found is not None and found[1] not in kept)
            if stray and path.lstat().st_mtime < time.time() - _DAY:
                shared.discard(path)


def _discard_dangling(shared: SharedStore) -> None:
    """Modules of versions that are gone: nothing finds them any more, but there they are."""
    for path in (shared.place / MODULES).glob("*/*/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_symlink() and not path.exists():
                shared.discard(path)
