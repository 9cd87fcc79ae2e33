"""The store: an OCI image layout whose layers are kept once, as squashfs, plus the index cache_key → layer.

    blobs/sha256/<hex>   layers (squashfs), image configs, manifests
    index.json           the images, by name (derived from refs/)
    refs/<name>.json     name → manifest
    keys/<key>.json      cache key → layer: diff_id, blob, and the readable inputs of the key
    last/<name>.json     layer name → the key it had last, for saying why a layer is rebuilt
    results/<key>.json   the outputs of a build stage: files, each a blob (compiled wheels above all)
    compile_stats/       measurements of compiling a package, by name: memory, files, time (learnt/ in older stores is
                         still read); by key, the time of attempts that were cut
    checks/              what was verified, by image and runtime; blocks-<hex>: which block is where in a layer
    logs/ staging/ locks/ CACHEDIR.TAG README version

A store may have another one upstream, a cluster's say (ekiben/store/shared.py): what is not here is read there, and
only this one is written. Nothing outside this package opens a file under blobs/ or reads a record. What only a writer
needs is imported when something is written: most invocations find all of it there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ekiben.core.checked import MAX_JSON
from ekiben.core.errors import CorruptBlob, StoreError
from ekiben.core.files import digest_of, open_regular
from ekiben.core.inner_path import AnyPath
from ekiben.core.paths import expand_home
from ekiben.formats.partition import Partition, copy_checked, read_partition
from ekiben.store._blobs import Blobs
from ekiben.store._records import CompileStats, ImageRecord, Records, StageOutput, StoredLayer, StoredResult, dump
from ekiben.store._staging import Access, StagingArea, UserAccess

if TYPE_CHECKING:
    from ekiben.formats.squashfs.reader import SquashfsReader
    from ekiben.formats.squashfs.reuse import BlockReuse

VERSION = "2"  # stores of version 1 hold zstd
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Written by Ekiben; backups may leave this folder out.\n"
_README = "This folder is an Ekiben store. `ekiben list` shows what is in it, `ekiben prune` frees space.\n"
_FOLDERS = ("blobs/sha256", "refs", "keys", "last", "results", "compile_stats", "checks", "logs", "staging", "locks")
_REPLACE = "remove it (its content is built or fetched again), or give another folder with --store or EKIBEN_STORE"


def default_root() -> Path:
    """Return the folder of the user's own store: EKIBEN_STORE, or ekiben/store in the cache folder.

    Raises UsageError for an unknown home.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get("EKIBEN_STORE")
    return expand_home(
        Path(named or f"{cache}/ekiben/store"), "EKIBEN_STORE" if named else "the cache folder"
    ).absolute()


class Store:
    """A store in ``root``; making the object touches nothing, folders are made by open_for_writing().

    ``upstream`` is read for layers and results that are not here, and never written. The other arguments are what a
    store of another kind does differently: see ekiben.store.shared. All methods raise StoreError.
    """

    def __init__(
        self,
        root: Path,
        upstream: Store | None = None,
        *,
        access: Access | None = None,
        locate: Callable[[str], Partition | None] = lambda digest: None,
        version: str = VERSION,
        replace_hint: str = _REPLACE,
    ) -> None:
        self.root, self.upstream, self.version = root, upstream, version
        self.staging_area = StagingArea(access or UserAccess(root))
        self.blobs, self.records = Blobs(self.staging_area, locate), Records(self.staging_area)
        self._refused: set[str] = set()  # damaged blobs of ``upstream``, replaced in this store
        try:
            stored_version = (self.staging_area.root / "version").read().decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"its file 'version' {error}"
            raise StoreError(
                f"the store {root} cannot be read: {reason}",
                hint="give a folder of your own with --store or EKIBEN_STORE",
            ) from error
        if stored_version != version:
            raise StoreError(
                f"{root} is a store of version {stored_version}; this Ekiben reads version {version}", hint=replace_hint
            )

    @property
    def cache(self) -> Path:
        """Downloads, and unfinished work of compilers, beside the store.

        Root's, which belong to a daemon, are apart.
        """
        return self.root.parent / ("cache" if os.geteuid() else "cache-root")

    @property
    def downloads(self) -> Path:
        """Sources of packages by their hash, and images by their digest: no script that builds a layer sees them."""
        return self.root.parent / ("downloads" if os.geteuid() else "downloads-root")

    @property
    def wheels(self) -> Path:
        """Caches of unpacked wheels and of compiled files: no script that builds a layer sees them."""
        return self.root.parent / ("wheels" if os.geteuid() else "wheels-root")

    @property
    def staging_root(self) -> Path:
        """Return the folder of all temporary folders."""
        return self.staging_area.folder.path

    def log_path(self, name: str) -> Path:
        """Return where a log is to be written. prune() removes it after a month."""
        return self.root / "logs" / f"{name}.log"

    def is_writable(self) -> bool:
        """Return whether the store exists and this user may write to it."""
        return self.staging_area.root.is_writable()

    # -- blobs

    def blob_path(self, digest: str) -> Path:
        """Return the file of a blob that is not a layer, for programs that want a path: copied here from upstream.

        Raises StoreError.
        """
        local = self.blobs.path(digest)
        if not local.lexists() and (partition := self.find(digest)):
            self._copy_here(partition)
        return local.path

    def _copy_here(self, partition: Partition) -> None:
        if not self.staging_area.folder.is_folder():
            self.open_for_writing()
        with self.staging() as staging:
            copy_checked(partition, staging / "blob")
            self.put_file(staging / "blob", partition.digest)

    def find(self, digest: str) -> Partition | None:
        """Return where a blob's bytes are: a file here or upstream, or a part of one."""
        if partition := self.blobs.find(digest):
            return partition
        return self.upstream.find(digest) if self.upstream and digest not in self._refused else None

    def partition(self, blob: StoredLayer | StageOutput, *, is_checked: bool = False) -> Partition:
        """Return where the bytes of ``blob`` are. Reading them raises StoreError when it was removed meanwhile."""
        located = self.find(blob.digest) or Partition(self.blobs.path(blob.digest), 0, 0, blob.digest)
        # Other users may write a file after it was checked: it is compared again while it is
        # copied.
        return Partition(
            located.path, located.offset, blob.size, blob.digest, is_checked and isinstance(located.path, Path)
        )

    @contextlib.contextmanager
    def reader(self, digest: str) -> Iterator[SquashfsReader]:
        """Open the files of a layer. Raises StoreError, OSError."""
        from ekiben.formats.squashfs.reader import SquashfsReader

        located = self.find(digest)
        with open_regular(located.path if located else self.blobs.path(digest)) as file:
            yield SquashfsReader(file, located.offset if located else 0)

    def layer_file(self, layer: StoredLayer) -> Path:
        """Return a file that is this layer alone, for programs that cannot mount part of a file; copy it if needed."""
        local = self.blobs.path(layer.digest)
        with contextlib.suppress(OSError):
            if local.status().st_size == layer.size:
                return local.path
        self._copy_here(self.partition(layer))
        return local.path

    @contextlib.contextmanager
    def reused_blocks(self, layer_name: str) -> Iterator[BlockReuse]:
        """Yield the compressed blocks that the layer had when it was last built in this store; see keep_index()."""
        from ekiben.formats.squashfs.reuse import MAX_INDEX, BlockReuse

        last = self.records.last_layer(layer_name)
        located = self.blobs.find(last.digest) if last else None
        index = self.blobs.index(last.digest, MAX_INDEX) if last and located else b""
        try:
            is_private = located is not None and isinstance(located.path, Path)
            blob = open_regular(located.path, 0) if located and is_private and index else None
        except OSError:
            blob = None
        with blob or contextlib.nullcontext():
            yield BlockReuse(blob, index)

    def keep_index(self, digest: str, reuse: BlockReuse) -> None:
        """Keep the index of the blocks of a blob that was written with ``reuse``."""
        if index := reuse.index():
            self.blobs.put_index(digest, index)

    def has_blob(self, digest: str, size: int) -> bool:
        """Return whether a blob of this size is stored. Its bytes are checked when they are used."""
        partition = self.find(digest)
        return partition is not None and partition.size == size

    def get_blob(self, digest: str) -> bytes:
        """Return a small blob, checked. Raises CorruptBlob."""
        located = self.find(digest)
        path = located.path if located else self.blobs.path(digest)
        try:
            with open_regular(path) as file:
                data = file.read(MAX_JSON + 1)
        except OSError as error:
            raise StoreError(f"blob {digest} is not in {self.root}: {error.strerror}") from error
        if digest_of(data) != digest:
            raise CorruptBlob(digest, path)
        return data

    def read_blob(self, digest: str) -> Iterator[bytes]:
        """Yield a blob's bytes, unchecked. Raises StoreError when it is not there."""
        return read_partition(self.find(digest) or Partition(self.blobs.path(digest), 0, 1, digest))

    def check_blob(self, digest: str, *, again: bool = False) -> None:
        """Read all of a blob and compare; one unchanged on disk since its last check is read only if ``again``.

        Raises CorruptBlob.
        """
        self.blobs.check(digest, self.find(digest), again=again)

    def put_blob(self, data: bytes) -> str:
        """Store small data and return its digest. Idempotent."""
        return self.blobs.put(data)

    def put_file(self, path: AnyPath, digest: str) -> None:
        """Take a finished file from staging() as a blob, its digest just computed. Idempotent."""
        self.blobs.put_file(self.staging_area.inner(path) if isinstance(path, Path) else path, digest)

    def drop_blob(self, digest: str) -> None:
        """Remove a damaged blob, so that it is made again. One that is upstream is left there and no longer used."""
        if self.blobs.find(digest) is None and self.upstream and self.upstream.find(digest):
            self._refused.add(digest)
        else:
            self.blobs.drop(digest)

    # -- records

    def layer(self, cache_key: str) -> StoredLayer | None:
        """Return the layer of this key, where its blob is here or upstream too."""
        layer = self.records.layer(cache_key)
        if layer is not None and self.has_blob(layer.digest, layer.size):
            return layer
        upstream_layer = self.upstream.layer(cache_key) if self.upstream else None
        if upstream_layer is None or upstream_layer.digest in self._refused:
            return None
        return (
            upstream_layer if self.has_blob(upstream_layer.digest, upstream_layer.size) else None
        )  # a truncated blob of this store hides that of upstream

    def layers(self) -> Iterator[StoredLayer]:
        """Yield the layers of this store, upstream apart."""
        for key in sorted(self.records.names("keys")):
            if layer := self.layer(key):
                yield layer

    def has(self, cache_key: str) -> bool:
        """Return whether layer() returns it."""
        return self.layer(cache_key) is not None

    def fetch(self, cache_key: str, into: Store) -> StoredLayer | None:
        """Return the layer of this key, its bytes readable through ``into``, which is this store or has it upstream."""
        return self.layer(cache_key)

    def put_layer(self, layer: StoredLayer) -> None:
        """Record the layer under its key; its blob is stored already."""
        self.records.put_layer(layer)

    def result(self, key: str) -> StoredResult | None:
        """Return the result of this key, where all its blobs are here or upstream too."""
        result = self.records.result(key)
        if result is None and self.upstream:
            result = self.upstream.result(key)
        return result if result and all(self.has_blob(file.digest, file.size) for file in result.files) else None

    def results(self) -> list[StoredResult]:
        """Return all results, by name."""
        results = (self.result(key) for key in self.records.names("results"))
        return sorted((item for item in results if item), key=lambda item: (item.name, item.key))

    def put_result(self, result: StoredResult) -> None:
        """Record the result under its key; its blobs are stored already."""
        self.records.put_result(result)

    def last_inputs(self, name: str) -> Mapping[str, Any] | None:
        """Return the inputs that a layer had when it was last built, if it ever was."""
        return self.records.last_inputs(name)

    def note_last(self, name: str, cache_key: str) -> None:
        """Remember the key that a layer has now."""
        self.records.note_last(name, cache_key)

    def compile_stats(self, name: str) -> CompileStats:
        """Return the measurements of compiling a package; empty when it was never compiled here."""
        return self.records.compile_stats(name)

    def put_compile_stats(self, name: str, stats: CompileStats) -> None:
        """Remember what compiling a package took."""
        self.records.write("compile_stats", name, stats)

    def drop_compile_stats(self, name: str) -> None:
        """Remove the measurements of compilations. Idempotent."""
        self.records.drop("compile_stats", name)

    def image(self, name: str) -> ImageRecord | None:
        """Return the record of an image: its manifest's digest and size, and what put_image() was given."""
        return self.records.image(name)

    def images(self) -> dict[str, ImageRecord]:
        """Return the records of all images, by name."""
        return self.records.images()

    def put_image(self, name: str, manifest: Mapping[str, Any], metadata: Mapping[str, Any]) -> ImageRecord:
        """Store the manifest under ``name``; the image that had this name stays until pruned."""
        data = dump(manifest)
        record = cast(ImageRecord, {**metadata, "manifest": self.put_blob(data), "size": len(data)})
        if self.image(name) != record:
            self.records.write("refs", name, record)
            self.records.write_index()
        return record

    def check(self, name: str) -> dict[str, Any] | None:
        """Return the note of this name."""
        return self.records.read("checks", name)

    def put_check(self, name: str, result: Mapping[str, Any]) -> None:
        """Note a result, for check() to find."""
        self.records.write("checks", name, result)

    def drop_check(self, name: str) -> None:
        """Drop the note. Idempotent."""
        self.records.drop("checks", name)

    # -- writing

    def open_for_writing(self) -> None:
        """Make the folders, and remove what dead processes left. Idempotent."""
        access = self.staging_area.access
        access.prepare()
        with access.translated_errors():
            for folder in _FOLDERS:
                access.make_folder(self.staging_area.root / folder)
            for name, text in (
                ("CACHEDIR.TAG", _TAG),
                ("README", _README),
                ("version", self.version + "\n"),
                ("oci-layout", '{"imageLayoutVersion":"1.0.0"}'),
            ):
                if not (path := self.staging_area.root / name).lexists():
                    self.staging_area.write(path, text.encode())
            self.staging_area.probe()
            self.staging_area.sweep()
        atexit.register(
            self.staging_area.sweep_process
        )  # ^C may arrive between creating a folder and the block that removes it

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a temporary folder inside the store, removed afterwards."""
        with self.staging_area.temporary_folder() as folder:
            yield folder.path

    @contextlib.contextmanager
    def building(self, cache_keys: Iterable[str], *, background: bool = False) -> Iterator[None]:
        """Make prune() keep these layers, and all that is stored meanwhile, until the block ends.

        ``background``: in the block, gigabytes are synced during the next layer's work, and the end of the block
        waits for it; temporary trees are removed last. Not for a store with other readers, who see a blob only when it
        is on the disk.
        """
        with self.staging_area.announce(cache_keys):
            if not background:
                yield
                return
            with self.staging_area.background(), self.blobs.trust_written():
                yield

    def lock(self, name: str, on_wait: Callable[[], None]) -> AbstractContextManager[None]:
        """Save two processes the same work. Correctness does not rest on it."""
        return self.staging_area.lock(name, on_wait)

    def remove_finished(self) -> None:
        """Begin to remove the temporary folders of the layers made so far, where building() kept them until now."""
        self.staging_area.remove_finished()
