"""The store: an OCI image layout whose layers are kept once, as squashfs, plus the index cache_key → layer.

    blobs/sha256/<hex>   layers (squashfs), image configs, manifests
    index.json           the images, by name (derived from refs/)
    refs/<name>.json     name → manifest
    keys/<key>.json      cache key → layer: diff_id, blob, and the readable inputs of the key
    last/<name>.json     layer name → the key it had last, for saying why a layer is rebuilt
    results/<key>.json   what a build stage handed over: files, each a blob (compiled wheels above all)
    learnt/<name>.json   what compiling a package takes: memory, files, time
    checks/              what was verified, by image and runtime
    answers/             what `build.py image` said when all was there, and what that rests on (builder/answers.py)
    logs/ staging/ locks/ CACHEDIR.TAG README version

A store may stand before another one, a cluster's say (builder/shared.py): what is not here is read there. Only this one is
written.

Nothing above this module opens a file under blobs/. Everything is written to staging/ and renamed, so a reader sees
the old or the new, and a killed writer leaves nothing but a staging folder that the next one removes. What only a writer
needs is imported when something is written: most invocations find all of it there.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING, Any

from builder.answers import FOLDER as ANSWERS
from builder.answers import KEPT, default_store
from builder.errors import StoreError, UsageError, nearest
from builder.files import free_bytes
from builder.sif import Partition, copy_checked, read_partition

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from builder.squashfs import SquashfsReader

_ROOM = 20e9  # bytes free, above which what layers leave behind may stay until the last of them is made
_NEEDED = "needed"  # in a staging folder: the cache keys of the layers a running build stands on
MEDIA_LAYER = "application/vnd.ekiben.layer.v2.squashfs"
MEDIA_CONFIG = "application/vnd.oci.image.config.v1+json"
MEDIA_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MEDIA_INDEX = "application/vnd.oci.image.index.v1+json"
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Written by Ekiben; backups may leave this folder out.\n"
_README = "This folder is an Ekiben store. `build.py list` shows what is in it, `build.py prune` makes room.\n"


class CorruptBlob(StoreError):
    def __init__(self, digest: str, path: Path) -> None:
        super().__init__(f"blob {digest} is damaged: {path} has other bytes than its name says")
        self.digest, self.path = digest, path

    def __reduce__(self) -> tuple[type[CorruptBlob], tuple[str, Path]]:
        return CorruptBlob, (self.digest, self.path)  # from one process to another


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A layer in the store. ``digest``/``size`` are of the squashfs blob, ``diff_id``/``tar_size`` of the tar form."""

    name: str
    cache_key: str
    diff_id: str
    tar_size: int
    digest: str
    size: int
    executor: str
    seconds: float
    inputs: Mapping[str, Any]
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Handed:
    """One file of a build stage; ``path`` is where it stands there, ``digest`` the blob."""

    path: str
    mode: int
    digest: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """What a build stage handed over. ``wheel``: the package it compiled, if that is what it does; ``origin`` says
    whether it was compiled here or imported; ``notes``: what was proven of it."""

    name: str
    key: str
    wheel: str | None
    files: tuple[Handed, ...]
    inputs: Mapping[str, Any]
    origin: str
    executor: str
    seconds: float
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def remove_tree(folder: Path) -> None:
    """Remove what can be removed; a folder in which something is mounted is left alone, for what is there is not ours."""
    with contextlib.suppress(OSError):
        mounts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()]
        if any(mount.startswith(f"{folder.resolve()}/") for mount in mounts):
            return
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _remove_all(folders: Iterable[Path]) -> None:
    for folder in folders:
        remove_tree(folder)


def _remove(left: Path) -> None:
    if left.is_dir():
        remove_tree(left)
    else:
        left.unlink(missing_ok=True)


def default_root() -> Path:
    return Path(default_store())


class Store:
    """``Store(root)`` touches nothing; folders are made by the first write. Errors: StoreError everywhere.

    ``behind`` is looked into for layers that are not here, and never written.
    """

    version = "2"  # those of 1 hold zstd
    elsewhere = "remove it (what it has is made or fetched again), or give another folder with --store or EKIBEN_STORE"

    def __init__(self, root: Path, behind: Store | None = None) -> None:
        self.root, self.behind = root, behind
        self._refused: set[str] = set()  # damaged blobs of ``behind``: made again here
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []
        self._left: list[Path] = []
        self._written: set[str] = set()  # by the build at hand
        try:
            found = (root / "version").read_text(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StoreError(f"the store {root} cannot be read: {error.strerror}",
                             hint="give a place of your own with --store or EKIBEN_STORE") from error  # fmt: skip
        if found != self.version:
            raise StoreError(f"{root} is a store of version {found}; this Ekiben reads version {self.version}",
                             hint=self.elsewhere)  # fmt: skip

    @property
    def cache(self) -> Path:
        """Downloads, and what compilers left unfinished, beside the store. A daemon's root and a user don't mix."""
        return self.root.parent / ("cache" if os.geteuid() else "cache-root")

    # -- reading ------------------------------------------------------------------------------------------------

    def blob_path(self, digest: str) -> Path:
        """The file of a blob that is no layer: here, or behind."""
        own = self.own_path(digest)
        if self.behind is None or own.exists():
            return own
        there = self.behind.blob_path(digest)
        return there if there.exists() and digest not in self._refused else own

    def find(self, digest: str) -> Partition | None:
        """Where a layer's bytes are: a file here or behind, or a part of one."""
        if found := self._own(digest):
            return found
        return self.behind.find(digest) if self.behind and digest not in self._refused else None

    def _own(self, digest: str) -> Partition | None:
        path = self.own_path(digest)
        return Partition(path, 0, stat.st_size, digest) if (stat := _stat(path)) else None

    def partition(self, layer: StoredLayer, *, is_checked: bool = False) -> Partition:
        """The bytes of ``layer``. Where they are gone since it was looked up, reading them says so."""
        found = self.find(layer.digest) or Partition(self.own_path(layer.digest), 0, 0, layer.digest)
        return Partition(found.path, found.offset, layer.size, layer.digest, is_checked)

    @contextlib.contextmanager
    def reader(self, digest: str) -> Iterator[SquashfsReader]:
        """The files of a layer. Errors: StoreError, OSError."""
        from builder.squashfs import SquashfsReader

        found = self.find(digest)
        with (found.path if found else self.own_path(digest)).open("rb") as file:
            yield SquashfsReader(file, found.offset if found else 0)

    def layer_file(self, layer: StoredLayer) -> Path:
        """A file that is this layer alone, for who can mount no part of one: copied here where it is in none. Errors: StoreError."""
        part = self.partition(layer)
        if part.offset == 0 and _has_size(part.path, layer.size):
            return part.path
        with self.staging() as staging:
            copy_checked(part, staging / "layer")
            self.put_file(staging / "layer", layer.digest)
        return self.own_path(layer.digest)

    def own_path(self, digest: str) -> Path:
        algorithm, _, value = digest.partition(":")
        return self.root / "blobs" / algorithm / value

    def has_blob(self, digest: str, size: int) -> bool:
        """Whether a whole blob lies there: a cheap look. The bytes are checked when they are used."""
        found = self.find(digest)
        return found is not None and found.size == size

    def get_blob(self, digest: str) -> bytes:
        """A small blob, checked."""
        path = self.blob_path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(f"blob {digest} is not in {self.root}: {error.strerror}") from error
        if "sha256:" + hashlib.sha256(data).hexdigest() != digest:
            raise CorruptBlob(digest, path)
        return data

    def check_blob(self, digest: str, *, again: bool = False) -> None:
        """Read the whole blob and compare. A blob unchanged on disk since the last check is read only if ``again``."""
        if digest in self._written and not again:
            return
        found, memo = self.find(digest), self.root / "checks" / digest[7:]
        path = found.path if found else self.own_path(digest)
        try:
            seen = _identity(path)
            if not again and memo.exists() and memo.read_text() == seen:
                return
            digest_of = hashlib.sha256()
            for data in read_partition(found or Partition(path, 0, path.stat().st_size, digest)):
                digest_of.update(data)
        except OSError as error:
            raise StoreError(f"blob {digest} cannot be read: {path}: {error.strerror}") from error
        if "sha256:" + digest_of.hexdigest() != digest:
            raise CorruptBlob(digest, path)
        if os.access(self.root, os.W_OK):
            self._write(f"checks/{digest[7:]}", seen.encode())

    def layer(self, cache_key: str) -> StoredLayer | None:
        record = self._read(f"keys/{cache_key}.json")
        if record is not None:
            layer = StoredLayer(**record)
            if self.has_blob(layer.digest, layer.size):
                return layer
        found = self.behind.layer(cache_key) if self.behind else None
        if found is None or found.digest in self._refused:
            return None
        return found if self.has_blob(found.digest, found.size) else None  # an own blob that is short comes first

    def last_inputs(self, name: str) -> Mapping[str, Any] | None:
        """The inputs this layer had when it was last built, if it ever was."""
        last = self._read(f"last/{name}.json")
        records = (self._read(f"{folder}/{last['cache_key']}.json") for folder in ("keys", "results")) if last else ()
        return next((record["inputs"] for record in records if record), None)

    def result(self, key: str) -> StoredResult | None:
        record = self._read(f"results/{key}.json")
        if record is None:
            found = self.behind.result(key) if self.behind else None
        else:
            found = StoredResult(**{**record, "files": tuple(Handed(**item) for item in record["files"])})
        return found if found and all(self.has_blob(file.digest, file.size) for file in found.files) else None

    def results(self) -> list[StoredResult]:
        found = (self.result(path.name.removesuffix(".json")) for path in self._list("results"))
        return sorted((item for item in found if item), key=lambda item: (item.name, item.key))

    def learnt(self, name: str) -> dict[str, Any]:
        """What was seen of a package's compiling before; empty when nothing was."""
        return self._read(f"learnt/{name}.json") or {}

    def image(self, name: str) -> dict[str, Any] | None:
        return self._read(f"refs/{name}.json")

    def images(self) -> dict[str, dict[str, Any]]:
        found = {path.name.removesuffix(".json"): self._read(f"refs/{path.name}") for path in self._list("refs")}
        return {name: image for name, image in sorted(found.items()) if image}

    def check(self, name: str) -> dict[str, Any] | None:
        return self._read(f"checks/{name}.json")

    def records(self, name: str, layers: Iterable[StoredLayer], checks: Iterable[str]) -> list[Path]:
        """The files, here or behind, that say that the image ``name`` is there, of these layers, and was checked."""
        files = ["version", f"refs/{name}.json", *(f"checks/{check}.json" for check in checks)]
        for layer in layers:
            files += [f"keys/{layer.cache_key}.json"]
        return [*(self.root / file for file in files), *(self.partition(layer).path for layer in layers)]

    def _list(self, folder: str) -> list[Path]:
        return sorted((self.root / folder).glob("*.json"))

    def _read(self, relative: str) -> dict[str, Any] | None:
        try:
            data = json.loads((self.root / relative).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return None  # an unreadable record is no record: what it stood for is made again
        return data if isinstance(data, dict) else None

    # -- writing ------------------------------------------------------------------------------------------------

    def open_for_writing(self) -> None:
        """Make the folders, and remove what dead processes left in staging/."""
        with self.translated_errors():
            for folder in (
                "blobs/sha256",
                "refs",
                "keys",
                "last",
                "results",
                "learnt",
                "checks",
                ANSWERS,
                "logs",
                "staging",
                "locks",
            ):
                self._make_folder(self.root / folder)
            for name, text in (("CACHEDIR.TAG", _TAG), ("README", _README), ("version", self.version + "\n"),
                               ("oci-layout", '{"imageLayoutVersion":"1.0.0"}')):  # fmt: skip
                if not (self.root / name).exists():
                    self._write(name, text.encode())
            probe, where = _temporary(self.root / "staging")
            os.close(probe)
            os.unlink(where)
        self._sweep()
        atexit.register(self._sweep_own)  # ^C may come between making a folder and the block that removes it

    def _sweep(self) -> None:
        """Remove what dead processes of this host left in staging/."""
        for left in (self.root / "staging").iterdir():
            if self._is_dead(left.name):
                from builder.process import end_orphans

                end_orphans(left.name)
                _remove(left)

    def _sweep_own(self) -> None:
        """Remove what this process, at its end, has left in staging/."""
        with contextlib.suppress(OSError):
            for left in (self.root / "staging").iterdir():
                if left.name.startswith(_own_prefix()):
                    _remove(left)

    @staticmethod
    def _is_dead(name: str) -> bool:
        """Whether the process that made this name in staging/ was one of this host and is gone."""
        host, process, *_ = [*name.split("__"), ""]
        return host == os.uname().nodename and process.isdigit() and not Path(f"/proc/{process}").exists()

    def _make_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # below /proc, say
            raise StoreError(f"the store {self.root} cannot be written: {error.strerror}: {error.filename}",
                             hint="give another place with --store or EKIBEN_STORE") from error  # fmt: skip

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = free_bytes(self.root if self.root.exists() else Path(self.root.anchor))
                raise StoreError(f"no room in {self.root}: {free / 1e9:.1f} GB free ({error.strerror})",
                                 hint="make room with `build.py prune`, or give another place with --store or EKIBEN_STORE") from error  # fmt: skip
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
                raise StoreError(f"the store {self.root} cannot be written: {error.strerror}: {error.filename}",
                                 hint="give a place of your own with --store or EKIBEN_STORE") from error  # fmt: skip
            raise

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A folder of this process's own inside the store; gone afterwards, whatever happened."""
        with self.translated_errors():
            import tempfile

            folder = Path(tempfile.mkdtemp(prefix=_own_prefix(), dir=self.root / "staging"))
            self.settle(folder, 0o700)
        try:
            with self.translated_errors():
                yield folder
        finally:
            self._leave(folder)

    @contextlib.contextmanager
    def building(self, cache_keys: Iterable[str], *, beside: bool = False) -> Iterator[None]:
        """Until the block ends, prune() keeps these layers and all that is made meanwhile.

        ``beside``: in the block, syncing gigabytes goes on beside the next layer's work, for which its end waits; and what
        the layers leave behind is removed last. Not for a store with other readers, who see a blob only when it is on
        the disk.
        """
        with self.staging() as folder, contextlib.ExitStack() as stack:
            new = folder / f"{_NEEDED}.new"
            new.write_text("\n".join(cache_keys))
            self.settle(new, 0o644)
            new.rename(folder / _NEEDED)  # seen only when all may read it
            if beside:
                stack.enter_context(self._work_beside())
            yield

    @contextlib.contextmanager
    def _work_beside(self) -> Iterator[None]:
        from concurrent.futures import ThreadPoolExecutor  # late: it brings logging with it

        with ThreadPoolExecutor(2, thread_name_prefix="beside") as self._pool:
            try:
                yield
            finally:
                waiting, self._pool = self._waiting, None
                self._waiting, self._written = [], set()
                self.remove_left()
        for work in waiting:
            work.result()

    def remove_left(self) -> None:
        """Begin to remove what the layers made so far have left behind: no script will make files by the thousand any more."""
        left, self._left = self._left, []
        if left:
            threading.Thread(target=_remove_all, args=(left,), name="removal").start()

    def _leave(self, folder: Path) -> None:
        """Nobody needs it any more. In a build it goes when the last script has ended, where the disk has room: a file
        system that has forgotten thousands of files a moment ago is slow to make new ones, ext4 above all."""
        if self._pool is None:
            remove_tree(folder)
        elif free_bytes(self.root) < _ROOM:
            self._beside(remove_tree, folder)
        else:
            self._left.append(folder)

    def _beside(self, work: Callable[..., None], *arguments: Any) -> None:
        """Beside what follows in a build, at once elsewhere."""
        if self._pool is None:
            work(*arguments)
        else:
            self._waiting.append(self._pool.submit(work, *arguments))

    def put_file(self, path: Path, digest: str) -> None:
        """Take a finished file from staging as a blob, its digest just computed. Idempotent."""
        self.settle(path, 0o444)
        with self.translated_errors():
            if self._pool is None:
                _sync(path)
            path.rename(self.own_path(digest))
        if self._pool is not None:
            self._written.add(digest)
            self._beside(self._sync_blob, digest)

    def _sync_blob(self, digest: str) -> None:
        """Onto the disk, and only then noted as checked: what a power failure cuts short is read again, and found."""
        path = self.own_path(digest)
        with self.translated_errors():
            _sync(path)
            self._write(f"checks/{path.name}", _identity(path).encode())

    def put_blob(self, data: bytes) -> str:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        if not _has_size(self.own_path(digest), len(data)):
            self._write(f"blobs/sha256/{digest[7:]}", data)
        return digest

    def put_layer(self, layer: StoredLayer) -> None:
        self._write(f"keys/{layer.cache_key}.json", _dump(asdict(layer)))
        self.note_last(layer.name, layer.cache_key)

    def put_result(self, result: StoredResult) -> None:
        self._write(f"results/{result.key}.json", _dump(asdict(result)))
        self.note_last(result.name, result.key)

    def put_learnt(self, name: str, seen: Mapping[str, Any]) -> None:
        self._write(f"learnt/{name}.json", _dump(dict(seen)))

    def note_last(self, name: str, cache_key: str) -> None:
        if (self._read(f"last/{name}.json") or {}).get("cache_key") != cache_key:
            self._write(f"last/{name}.json", _dump({"cache_key": cache_key}))

    def put_image(self, name: str, manifest: dict[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
        """Store the manifest and let ``name`` stand for it; what ``name`` stood for before stays until pruned."""
        data = _dump(manifest)
        digest = self.put_blob(data)
        ref = {**about, "manifest": digest, "size": len(data)}
        if self.image(name) != ref:
            self._write(f"refs/{name}.json", _dump(ref))
            self._write_index()
        return ref

    def put_check(self, name: str, result: Mapping[str, Any]) -> None:
        self._write(f"checks/{name}.json", _dump(dict(result)))

    def put_answer(self, name: str, data: bytes) -> None:
        """For builder.answers; the oldest go."""
        if not (self.root / ANSWERS).is_dir():
            self.open_for_writing()
        self._write(f"{ANSWERS}/{name}", data)
        with contextlib.suppress(FileNotFoundError):  # another process removes them, too
            for path in sorted(self._list(ANSWERS), key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
                path.unlink()

    def drop_check(self, name: str) -> None:
        with self.translated_errors():
            (self.root / "checks" / f"{name}.json").unlink(missing_ok=True)

    def _write_index(self) -> None:
        """What it shows is what refs/ holds when it is done: another process may name an image meanwhile."""
        images, seen = self.images(), None
        while images != seen:
            manifests = [
                {"mediaType": MEDIA_MANIFEST, "digest": image["manifest"], "size": image["size"],
                 "annotations": {"org.opencontainers.image.ref.name": name}}
                for name, image in images.items()
            ]  # fmt: skip
            self._write("index.json", _dump({"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": manifests}))
            images, seen = self.images(), images

    def _write(self, relative: str, data: bytes) -> None:
        with self.translated_errors():
            handle, temporary = _temporary(self.root / "staging")
            try:
                with open(handle, "wb") as stream:
                    stream.write(data)  # no fsync: a record that a power failure leaves empty is no record
                self.settle(Path(temporary), 0o644)
                os.rename(temporary, self.root / relative)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise

    def settle(self, path: Path, mode: int) -> None:
        """Give a new file or folder the mode it is to have, whatever the umask."""
        path.chmod(mode)

    @contextlib.contextmanager
    def lock(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Saves two processes the same work. Correctness does not rest on it: flock may be absent on NFS or Lustre."""
        try:
            stream = (self.root / "locks" / name).open("w")
        except OSError:
            yield
            return
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(stream, fcntl.LOCK_EX)
            except OSError:
                pass
            yield

    # -- removing -----------------------------------------------------------------------------------------------

    def drop_blob(self, digest: str) -> None:
        """Forget a damaged blob, so that what needs it is made again."""
        with self.translated_errors():
            if self._own(digest) is None and self.behind and self.behind.find(digest):
                self._refused.add(digest)
                return
            self.own_path(digest).unlink(missing_ok=True)
            (self.root / "checks" / digest[7:]).unlink(missing_ok=True)
            (self.root / "checks" / f"facts-{digest[7:]}.json").unlink(missing_ok=True)

    def reachable(self) -> set[str]:
        """Digests of every blob an image needs."""
        keep: set[str] = set()
        for image in self.images().values():
            keep |= {image["manifest"], image["config"]}  # by its keys, too: a damaged manifest costs no layer
            keep |= {layer.digest for key in image["keys"] if (layer := self.layer(key))}
            with contextlib.suppress(StoreError, ValueError, KeyError):
                manifest = json.loads(self.get_blob(image["manifest"]))
                keep |= {manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
        return keep

    def _handed_over(self, *, all: bool) -> set[str]:
        """Blobs of build stages: what took an hour to compile stays until it is asked for (not ``all``). Then stays what
        an image here was made with, and what was imported, for that may not be had again here."""
        layers = [layer for image in self.images().values() for key in image["keys"] if (layer := self.layer(key))]
        used = {key for layer in layers for key, *_ in layer.inputs.get("from", ())}
        kept = [result for result in self.results() if all or result.key in used or result.origin == "imported"]
        return {file.digest for result in kept for file in result.files}

    def prune(
        self, *, forget: Iterable[str] = (), wheels: bool = False, dry_run: bool = False
    ) -> list[tuple[str, int]]:
        """Remove every blob no image reaches, after forgetting the named images; compiled wheels only with ``wheels``.
        Returns (digest, bytes) removed.

        Errors: StoreError when the folder is not a store: nothing is ever removed from a folder without our tag;
        UsageError for a name no image has.
        """
        tag = self.root / "CACHEDIR.TAG"
        if not tag.exists() or "Ekiben" not in tag.read_text():
            raise StoreError(f"{self.root} is not an Ekiben store (no CACHEDIR.TAG of ours); nothing was removed",
                             hint="name the store's folder with --store or EKIBEN_STORE")  # fmt: skip
        forget = tuple(forget)
        for name in forget:
            if self.image(name) is None:
                raise UsageError(
                    f"no image '{name}' in {self.root}; nothing was removed." + nearest(name, self.images())
                )
        with self.translated_errors():
            if not dry_run:
                self._sweep()
            for name in forget if not dry_run else ():
                (self.root / "refs" / f"{name}.json").unlink(missing_ok=True)
            view = self if not dry_run else _Without(self, set(forget))
            keep = view.reachable() | view._handed_over(all=not wheels) | self._being_built()
            since = self._oldest_live_staging()
            blobs = [(path, _stat(path)) for path in sorted((self.root / "blobs/sha256").iterdir())]
            gone = [("sha256:" + path.name, stat.st_size) for path, stat in blobs
                    if "sha256:" + path.name not in keep and stat and stat.st_mtime < since]  # fmt: skip
            if not dry_run:
                for digest, _ in gone:
                    self.drop_blob(digest)
                self._drop_dangling()
                self._write_index()
                if wheels:
                    self._drop_unfinished(since)
        return gone

    def _oldest_live_staging(self) -> float:
        """Blobs younger than a running build may be about to be named by its image."""
        found = [_stat(left) for left in (self.root / "staging").iterdir()]
        return min((stat.st_mtime for stat in found if stat and S_ISDIR(stat.st_mode)), default=time.time())

    def _being_built(self) -> set[str]:
        """Digests of the layers that running builds stand on, though no image names them yet."""
        return {record["digest"] for key in self.announced_keys() if (record := self._read(f"keys/{key}.json"))}

    def announced_keys(self) -> set[str]:
        """Cache keys of the layers that running builds, and publishers, stand on."""
        keys: set[str] = set()
        for needed in (self.root / "staging").glob(f"*/{_NEEDED}"):
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                keys |= set(needed.read_text().split())
        return keys

    def _drop_unfinished(self, since: float) -> None:
        """What compilers left when their stage failed, to go on from; not of a stage that is at it now."""
        for left in (self.cache / "work").glob("*"):
            if left.stat().st_mtime < since:
                remove_tree(left)

    def _drop_dangling(self) -> None:
        for path in self._list("keys"):
            record = self._read(f"keys/{path.name}")
            if record and self.find(record["digest"]) is None:
                path.unlink(missing_ok=True)
        for path in self._list("results"):
            if self.result(path.name.removesuffix(".json")) is None:
                path.unlink(missing_ok=True)
        month_ago = time.time() - 30 * 86400
        for log in (self.root / "logs").glob("*.log"):
            if log.stat().st_mtime < month_ago:
                log.unlink(missing_ok=True)


class _Without(Store):
    """A view of a store in which some images are already forgotten."""

    def __init__(self, store: Store, names: set[str]) -> None:
        super().__init__(store.root, store.behind)
        self._names = names

    def images(self) -> dict[str, dict[str, Any]]:
        return {name: image for name, image in super().images().items() if name not in self._names}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _has_size(path: Path, size: int) -> bool:
    stat = _stat(path)
    return stat is not None and stat.st_size == size


def _own_prefix() -> str:
    """Says whose a name in staging/ is, for telling what dead processes left."""
    return f"{os.uname().nodename}__{os.getpid()}__"


def _temporary(folder: Path) -> tuple[int, str]:
    """An open file of this process's own."""
    import tempfile

    return tempfile.mkstemp(prefix=_own_prefix(), dir=folder)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _identity(path: Path) -> str:
    """Changes when the file does: whoever sets its mtime back cannot set its ctime."""
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _dump(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=1, sort_keys=True).encode() + b"\n"
