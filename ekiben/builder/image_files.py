"""Images in files: an OCI layout as a folder or a tar, and what `docker save` writes.

Somebody else made them. What names an image (index.json, manifest.json) chooses blobs; each blob is compared with the
digest that names it before it is used. Nothing is unpacked by the names that an archive has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from ekiben.core.checked import MAX_JSON, Fields, parse_json, shorten
from ekiben.core.files import format_size, open_regular
from ekiben.core.folder import Folder
from ekiben.registry.layers import unpacked
from ekiben.registry.manifest import Descriptor, ImageConfig, Manifest, parse_index
from ekiben.registry.reference import digest_of

_CHUNK = 1 << 20
_MAX_MEMBERS = 100_000  # of an archive that holds images: a layer is one
_MAX_LINKS = 8
_NAME = "org.opencontainers.image.ref.name"

Layers = Iterator[tuple[IO[bytes], int]]


class _Files(Protocol):
    """Where the files of an image are: names and streams."""

    def stream(self, name: str) -> tuple[IO[bytes], int]:
        """Open a file; also return its size. Raises ValueError where there is none."""


@dataclass(frozen=True, slots=True)
class ImageInFile:
    """An image: ``digest`` names all of it, ``config`` says how it starts.

    ``layers`` takes a folder for its own use, and yields the tars, bottom first, with the bytes that each has packed;
    each stream is gone when the next is asked for.
    """

    digest: str
    config: ImageConfig
    layers: Callable[[Path], Layers]


@contextlib.contextmanager
def open_oci_folder(path: Path, name: str, platform: str) -> Iterator[ImageInFile]:
    """Open the image ``name`` of an OCI layout; "" names the only one. Raises ValueError, OSError."""
    with Folder.open(path) as folder:
        yield _oci_image(_InFolder(folder), name, platform)


@contextlib.contextmanager
def open_oci_archive(path: Path, name: str, platform: str) -> Iterator[ImageInFile]:
    """Open the image ``name`` of an OCI layout in a tar. Raises ValueError, OSError."""
    with _seekable(path) as stream, _tar(stream) as tar:
        yield _oci_image(_InTar(tar, _size(stream)), name, platform)


@contextlib.contextmanager
def open_docker_archive(path: Path, name: str, platform: str) -> Iterator[ImageInFile]:
    """Open an image of `docker save`: NAME:TAG, @NUMBER, or "" for the only one. Raises ValueError, OSError."""
    with _seekable(path) as stream, _tar(stream) as tar:
        yield _docker_image(_InTar(tar, _size(stream)), name)


@contextlib.contextmanager
def _seekable(path: Path) -> Iterator[IO[bytes]]:
    """Open a tar; one that is compressed as a whole is decompressed first."""
    from ekiben.formats.foreign_tar import unpacked_limit

    with open_regular(path) as raw:
        if raw.read(2) not in (b"\x1f\x8b", b"\x28\xb5"):
            raw.seek(0)
            yield raw
            return
        limit = unpacked_limit(os.fstat(raw.fileno()).st_size)
    with tempfile.TemporaryFile() as plain, unpacked(path) as stream:
        while chunk := stream.read(_CHUNK):
            if plain.tell() + len(chunk) > limit:
                raise ValueError(f"unpacks to more than {format_size(limit)}")
            plain.write(chunk)
        plain.seek(0)
        yield plain


class _InFolder:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def stream(self, name: str) -> tuple[IO[bytes], int]:
        *folders, file = name.split("/")
        try:
            with self._folder.folder(*folders) if folders else contextlib.nullcontext(self._folder) as folder:
                stream = folder.open_file(file)
        except FileNotFoundError as error:
            raise ValueError(f"has no file {name}") from error
        return stream, os.fstat(stream.fileno()).st_size


def _tar(stream: IO[bytes]) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape")
    except (tarfile.TarError, OverflowError, OSError) as error:
        raise ValueError(f"is not a tar, or damaged: {error}") from error


def _size(stream: IO[bytes]) -> int:
    return os.fstat(stream.fileno()).st_size


class _InTar:
    def __init__(self, tar: tarfile.TarFile, size: int) -> None:
        self._tar = tar
        self._members: dict[str, tarfile.TarInfo] = {}
        try:
            self._read_names(size)
        except (tarfile.TarError, OverflowError, OSError) as error:
            raise ValueError(f"is not a tar, or damaged: {error}") from error

    def _read_names(self, size: int) -> None:
        for number, info in enumerate(self._tar):
            if number == _MAX_MEMBERS:
                raise ValueError(f"has more than {_MAX_MEMBERS} files")
            if info.isreg() and (info.issparse() or not 0 <= info.size <= size - info.offset_data):
                raise ValueError(f"is cut off, or damaged: {shorten(info.name)} does not fit into it")
            name = posixpath.normpath(info.name)
            if name in self._members and not info.isdir():
                raise ValueError(f"has {shorten(name)} twice")
            self._members[name] = info

    def stream(self, name: str) -> tuple[IO[bytes], int]:
        info = self._members.get(posixpath.normpath(name))
        for _ in range(_MAX_LINKS):
            if info is None or not (info.issym() or info.islnk()):
                break
            folder = posixpath.dirname(info.name) if info.issym() else ""
            info = self._members.get(posixpath.normpath(posixpath.join(folder, info.linkname)))
        stream = self._tar.extractfile(info) if info is not None and info.isreg() else None
        if stream is None or info is None:
            raise ValueError(f"has no file {shorten(name)}")
        return stream, info.size


def _read(files: _Files, name: str, size: int = MAX_JSON) -> bytes:
    stream, actual = files.stream(name)
    with stream:
        if actual > size:
            raise ValueError(f"has a file {shorten(name)} of {format_size(actual)}, more than {format_size(size)}")
        return stream.read(size)


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _read_blob(files: _Files, item: Descriptor) -> bytes:
    data = _read(files, _blob(item.digest), min(item.size, MAX_JSON))
    if digest_of(data) != item.digest:
        raise ValueError(f"is damaged: the blob {item.digest} has other bytes than its digest promises")
    return data


# ---------------------------------------------------------------------------------------------------------- OCI layouts


def _oci_image(files: _Files, name: str, platform: str) -> ImageInFile:
    items = _parsed("index.json", parse_index, _read(files, "index.json"))
    if items is None:
        raise ValueError("has an index.json that is not an index")
    item = _chosen(items, name)
    data = _read_blob(files, item)
    if (listed := _parsed("an index of it", parse_index, data)) is not None:
        known = {entry.platform: entry for entry in listed}
        if platform not in known:
            raise ValueError(f"has no image for {platform}; it has {', '.join(sorted(known)) or 'none'}")
        item = known[platform]
        data = _read_blob(files, item)
    manifest = _parsed("its manifest", Manifest.parse, data)
    config = _parsed("its config", ImageConfig.parse, _read_blob(files, manifest.config))
    return ImageInFile(item.digest, config, lambda folder: _oci_layers(files, manifest, folder))


def _chosen(items: Sequence[Descriptor], name: str) -> Descriptor:
    names = [str(item.data.get("annotations", {}).get(_NAME, "")) for item in items if _has_annotations(item)]
    if name:
        items = [item for item in items if _has_annotations(item) and item.data["annotations"].get(_NAME) == name]
    if len(items) != 1:
        have = ", ".join(sorted(filter(None, names)))
        what = f"no image {shorten(name)}" if name else f"{len(items)} images"
        raise ValueError(f"has {what}{f'; named there: {have:.300}' if have else ''}: write From: PATH:NAME")
    return items[0]


def _has_annotations(item: Descriptor) -> bool:
    return isinstance(item.data.get("annotations"), dict)


def _oci_layers(files: _Files, manifest: Manifest, folder: Path) -> Layers:
    for number, layer in enumerate(manifest.layers):
        path = folder / f"layer-{number}"
        digest, size = _copy(files, _blob(layer.digest), path)
        if (digest, size) != (layer.digest, layer.size):
            raise ValueError(f"is damaged: the blob {layer.digest} has other bytes than its digest promises")
        with unpacked(path) as stream:
            yield stream, size
        path.unlink()


# ---------------------------------------------------------------------------------------------------------- docker save


@dataclass(frozen=True, slots=True)
class _Saved:
    """An entry of manifest.json."""

    config: str
    names: tuple[str, ...]
    layers: tuple[str, ...]

    @classmethod
    def parse(cls, fields: Fields) -> _Saved:
        names = fields.strings("RepoTags") if "RepoTags" in fields else []
        return cls(fields.text("Config"), tuple(names), tuple(fields.strings("Layers")))


def _docker_image(files: _Files, name: str) -> ImageInFile:
    saved = _parsed("manifest.json", _parse_saved, _read(files, "manifest.json"))
    item = _chosen_saved(saved, name)
    data = _read(files, item.config)
    config = _parsed("its config", ImageConfig.parse, data)
    if len(config.diff_ids) != len(item.layers):
        raise ValueError(
            f"is damaged: its config names {len(config.diff_ids)} layers, and {len(item.layers)} are there"
        )
    return ImageInFile(digest_of(data), config, lambda folder: _docker_layers(files, item, config.diff_ids, folder))


def _parse_saved(data: bytes) -> list[_Saved]:
    return [_Saved.parse(item) for item in Fields({"images": parse_json(data)}).objects("images")]


def _chosen_saved(saved: Sequence[_Saved], name: str) -> _Saved:
    if name.startswith("@"):
        number = int(name[1:]) if name[1:].isascii() and name[1:].isdigit() and len(name) < 8 else len(saved)
        chosen = list(saved[number : number + 1])
    else:
        chosen = [item for item in saved if not name or _full_name(name) in map(_full_name, item.names)]
    if len(chosen) != 1:
        have = ", ".join(sorted(tag for item in saved for tag in item.names))
        what = f"no image {shorten(name)}" if name else f"{len(chosen)} images"
        raise ValueError(f"has {what}{f'; it has {have:.300}' if have else ''}: write From: PATH:NAME:TAG or PATH:@0")
    return chosen[0]


def _full_name(name: str) -> str:
    """Return NAME:TAG without the host and the tag that Docker adds."""
    name = name.removeprefix("docker.io/").removeprefix("library/")
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _docker_layers(files: _Files, item: _Saved, diff_ids: Sequence[str], folder: Path) -> Layers:
    for number, (name, diff_id) in enumerate(zip(item.layers, diff_ids, strict=True)):
        path = folder / f"layer-{number}"
        _, size = _copy(files, name, path)
        with unpacked(path) as stream:
            hashed = _Hashed(stream)
            yield cast(IO[bytes], hashed), size
        if hashed.digest != diff_id:
            raise ValueError(f"is damaged: layer {number + 1} has other bytes than its digest {diff_id} promises")
        path.unlink()


class _Hashed:
    """A stream that is read to its end, and the digest of what was read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._sha = stream, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._sha.update(data)
        return data

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha.hexdigest()}"


def _copy(files: _Files, name: str, out: Path) -> tuple[str, int]:
    """Copy a file, and return its digest and size."""
    stream, _ = files.stream(name)
    sha, size = hashlib.sha256(), 0
    with stream, out.open("wb") as copy:
        while chunk := stream.read(_CHUNK):
            sha.update(chunk)
            copy.write(chunk)
            size += len(chunk)
    return f"sha256:{sha.hexdigest()}", size


def _parsed(what: str, parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except ValueError as error:
        raise ValueError(f"is damaged: {what} {error}") from error
