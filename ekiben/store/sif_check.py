"""Check that a SIF file holds an image. All of it is compared once; the result is valid until the file changes."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from ekiben.core.command_name import command_name
from ekiben.core.errors import StoreError, VerifyError
from ekiben.core.files import digest_of, open_regular
from ekiben.core.inner_path import AnyPath
from ekiben.formats.partition import Partition, read_partition
from ekiben.formats.sif import SifHeader, difference, read_sif
from ekiben.store._blobs import identity
from ekiben.store.image import Image
from ekiben.store.store import Store


def check_sif(image: Image, path: AnyPath, store: Store, *, again: bool = False) -> SifHeader:
    """Compare a SIF with the image, and return the header that it has: of the layers, or of all as one partition.

    A file that has not changed since it was compared is read only if ``again``.
    Raises VerifyError when it is not the image's or is damaged, StoreError when it cannot be read.
    """
    sif_id = read_sif(path).id
    squashed = image.squashed_header()
    header = squashed if squashed.id == sif_id else image.sif_header(store)
    if header.id != sif_id:
        raise VerifyError(
            f"{path} is not {image.name}: it was built of other layers, or by an earlier version", hint=_hint(image)
        )
    if again or _remembered(store, header.id).get(_key(path)) != identity(path):
        before = identity(path)
        reason = difference(path, _partitions(image, path, header, store), header)
        if not reason and header is squashed and _squashed_digest(store, header.id) is None:
            reason = _content_difference(image, path, store)
        if reason:
            raise VerifyError(f"{path} is not {image.name} as it was made: {reason}", hint=_hint(image))
        if identity(path) == before:
            note_sif(header, path, store)
    return header


def sif_sha256(header: SifHeader, path: AnyPath, store: Store) -> str:
    """Return the SHA-256 of a SIF, 64 hex digits: of all of its bytes, its signature among them.

    A file that check_sif() compared and that has not changed since is read once. Raises OSError.
    """
    before = identity(path)
    known = _sums(store, header.id).get(_key(path))
    if isinstance(known, str) and _remembered(store, header.id).get(_key(path)) == before:
        return known
    sha256 = digest_of(path).removeprefix("sha256:")
    if identity(path) == before:
        note_sif(header, path, store, sha256=sha256)
    return sha256


def is_noted(id: str, path: Path, store: Store) -> bool:
    """Return whether note_sif() recorded the SIF at ``path`` with this id, and it has not changed since."""
    with contextlib.suppress(OSError, StoreError):
        return _remembered(store, id).get(_key(path)) == identity(path)
    return False


def known_sif_sha256(path: Path, store: Store) -> str:
    """Return the recorded SHA-256 of a SIF that has not changed since, "" without one.

    Reads the file's header only.
    """
    try:
        id = read_sif(path).id
        known = _sums(store, id).get(_key(path))
        is_unchanged = _remembered(store, id).get(_key(path)) == identity(path)
    except (StoreError, OSError):
        return ""
    return known if isinstance(known, str) and is_unchanged else ""


def note_sif(
    header: SifHeader, path: AnyPath, store: Store, squashed_digest: str | None = None, *, sha256: str | None = None
) -> None:
    """Record that a SIF matches its header, until the file changes.

    ``squashed_digest``: of its one partition; ``sha256``: of the file.
    """
    if not store.is_writable():
        return
    files = {name: seen for name, seen in _remembered(store, header.id).items() if _is_file(name)}
    sums = {name: digest for name, digest in _sums(store, header.id).items() if name in files and name != _key(path)}
    if sha256:
        sums[_key(path)] = sha256
    digest = squashed_digest or _squashed_digest(store, header.id)
    with contextlib.suppress(OSError, StoreError):  # without the record, the file is read again
        files[_key(path)] = identity(path)
        note = {"files": files, "sha256": sums, **({"flat": digest} if digest else {})}
        store.put_check(_name(header.id), note)


def _is_file(name: str) -> bool:
    """Return whether a file has this path; not, where it is in a folder that this user may not enter."""
    with contextlib.suppress(OSError):
        return Path(name).is_file()
    return False


def _partitions(image: Image, path: AnyPath, header: SifHeader, store: Store) -> list[Partition]:
    if header.id != image.squashed_header().id:
        return [Partition(path, 0, layer.size, layer.digest) for layer in image.layers]
    layers = read_sif(path).layers
    if len(layers) != 1:
        raise VerifyError(
            f"{path} is not {image.name} as it was made: it has {len(layers)} partitions", hint=_hint(image)
        )
    partition = Partition(path, layers[0].offset, layers[0].size, "")
    digest = _squashed_digest(store, header.id)
    if digest is None:
        digest = "sha256:" + _partition_digest(partition)
    return [Partition(path, partition.offset, partition.size, digest)]


def _partition_digest(partition: Partition) -> str:
    sha = hashlib.sha256()
    for data in read_partition(partition):
        sha.update(data)
    return sha.hexdigest()


def _content_difference(image: Image, path: AnyPath, store: Store) -> str:
    """Compare the files of a partition that was compressed elsewhere; its bytes may differ."""
    from ekiben.formats.layer import write_entries
    from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
    from ekiben.formats.tar import DigestWriter, tar_digest

    expected = DigestWriter()
    with contextlib.ExitStack() as stack:
        write_entries(
            merged_layer([stack.enter_context(store.reader(layer.digest)) for layer in image.layers]), expected
        )
        try:
            file = stack.enter_context(open_regular(path))
            diff_id, _ = tar_digest(SquashfsReader(file, read_sif(path).layers[0].offset))
        except (StoreError, OSError, ValueError) as error:
            return f"its partition cannot be read: {error}"
    return "" if expected.diff_id == diff_id else "its files differ"


def _squashed_digest(store: Store, id: str) -> str | None:
    known = (store.check(_name(id)) or {}).get("flat")
    return known if isinstance(known, str) else None


def _remembered(store: Store, id: str) -> dict[str, object]:
    files = (store.check(_name(id)) or {}).get("files")
    return files if isinstance(files, dict) else {}


def _sums(store: Store, id: str) -> dict[str, object]:
    sums = (store.check(_name(id)) or {}).get("sha256")
    return sums if isinstance(sums, dict) else {}


def _key(path: AnyPath) -> str:
    return str(path.resolve() if isinstance(path, Path) else path)


def _name(id: str) -> str:
    return f"sif-files-{id}"


def _hint(image: Image) -> str:
    return f"`{command_name()} build {image.cli_args}` writes it again"
