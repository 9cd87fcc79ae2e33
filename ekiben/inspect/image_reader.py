"""An image opened to be read, of the store or a SIF file: its layers, its files, and the packages it holds.

Debian's packages are those of dpkg's own database, Python's those with a .dist-info in a site-packages folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path

from ekiben.core.command_name import command_name
from ekiben.core.errors import StoreError, VerifyError
from ekiben.core.files import digest_of, open_regular
from ekiben.core.inner_path import AnyPath
from ekiben.formats.base_config import BASE
from ekiben.formats.evaluated import EVALUATED, Evaluated
from ekiben.formats.layer import Entry
from ekiben.formats.sif import USERS, SifInfo, read_sif
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.users import users_partition
from ekiben.inspect._records import stored_image
from ekiben.inspect.metadata import IMAGE_METADATA, ImageMetadata
from ekiben.packages.installed import DPKG_STATUS, distribution_at, dpkg_records, plain_name
from ekiben.store import Store, StoredLayer

Tree = dict[str, tuple[Entry, int]]  # path → its entry, and the number of the layer that brought it

_EXPORT = re.compile(r"^export ([A-Za-z_]\w*)=(.*)$", re.MULTILINE)
_STATUS_LINE = re.compile(r"[A-Za-z0-9-]+:|[ \t]")


@dataclass(frozen=True, slots=True)
class LayerReader:
    """One layer of an open image.

    ``digest`` is of its squashfs, ``size`` in bytes; ``stored`` is the store's record of it.
    """

    name: str
    digest: str
    size: int
    reader: SquashfsReader
    stored: StoredLayer | None = None


@dataclass(frozen=True)
class ImageReader:
    """An image to be read: of the store, or a SIF file. Layers are bottom first."""

    name: str
    layers: tuple[LayerReader, ...]
    environment: Mapping[str, str]
    arch: str = ""

    @property
    def size(self) -> int:
        """Return the bytes of all layers."""
        return sum(layer.size for layer in self.layers)

    def read(self, path: str) -> bytes | None:
        """Return a file of the merged image, None where there is none; links are not followed."""
        for layer in reversed(self.layers):
            if (entry := layer.reader.lookup(path)) is not None:
                return layer.reader.read_file(path) if entry.kind == "file" else None
        return None

    @cached_property
    def tree(self) -> Tree:
        """Return every path of the merged image, with its entry and the number of its layer."""
        tree: Tree = {}
        for number, layer in enumerate(self.layers):
            entries = {entry.path: entry for entry in layer.reader.entries()}
            # Files removed by a whiteout, or whose directory is gone.
            gone = {path for path, entry in entries.items() if entry.kind != "dir" and path in tree}
            if folders := {path for path in gone if tree[path][0].kind == "dir"}:
                gone |= {path for path in tree if not folders.isdisjoint(parents(path))}
            tree = {path: item for path, item in tree.items() if path not in gone} if gone else tree
            tree |= {path: (entry, number) for path, entry in entries.items() if entry.kind != "whiteout"}
        return tree

    def read_through_links(self, path: str) -> bytes | None:
        """Return a file as a program in the image would read it, through links; None when there is none."""
        tree = self.tree
        for _ in range(40):  # as many links as Linux follows
            steps = [*reversed([path, *parents(path)])]
            link = next((step for step in steps if step in tree and tree[step][0].kind == "symlink"), None)
            if link is None:
                break
            rest, target = path[len(link) :], tree[link][0].target
            path = posixpath.normpath("/" + posixpath.join(posixpath.dirname(link), target) + rest).lstrip("/")
        if path not in tree or tree[path][0].kind not in ("file", "hardlink"):
            return None
        return self.layers[tree[path][1]].reader.read_file(path)


@contextlib.contextmanager
def open_image(name: str, store: Store) -> Iterator[ImageReader]:
    """Open an image of the store by name, or a SIF by path. Raises UsageError, StoreError."""
    with contextlib.ExitStack() as stack:
        if name.endswith(".sif") or "/" in name:
            yield _open_sif(Path(name), stack)
            return
        image = stored_image(name, store, f"{command_name()} build {name}, or a file: ./{name}.sif")
        build = f"{command_name()} build {image.cli_args(name)}"
        layers = []
        for layer in image.layers:
            reader = _open_blob(name, layer.digest, store, stack, build)
            known = store.layer(layer.cache_key)
            stored = known if known and known.digest == layer.digest else None
            layers.append(LayerReader(layer.name, layer.digest, layer.size, reader, stored))
        environment = dict(item.split("=", 1) for item in image.environment if "=" in item)
        yield ImageReader(name, tuple(layers), environment, image.architecture)


@contextlib.contextmanager
def open_layers(
    name: str, layers: Sequence[StoredLayer], store: Store, environment: Mapping[str, str], arch: str
) -> Iterator[ImageReader]:
    """Open the image of just these layers, even when the store has another of its name by now. Raises StoreError."""
    with contextlib.ExitStack() as stack:
        readers = [
            LayerReader(layer.name, layer.digest, layer.size, _open_blob(name, layer.digest, store, stack), layer)
            for layer in layers
        ]
        yield ImageReader(name, tuple(readers), environment, arch)


def _open_blob(
    name: str, digest: str, store: Store, stack: contextlib.ExitStack, hint: str | None = None
) -> SquashfsReader:
    try:
        return stack.enter_context(store.reader(digest))
    except OSError as error:
        raise StoreError(f"{name}: layer {digest} is not in {store.root}: {error.strerror}", hint=hint) from error


@contextlib.contextmanager
def open_sif(path: AnyPath) -> Iterator[ImageReader]:
    """Open a SIF to be read. Raises StoreError."""
    with contextlib.ExitStack() as stack:
        yield _open_sif(path, stack)


def _open_sif(path: AnyPath, stack: contextlib.ExitStack) -> ImageReader:
    try:
        info = read_sif(path)
    except StoreError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise StoreError(
            str(error),
            hint=(
                f"{command_name()} list names the images of the store; a name with a / or that ends in .sif is a file, "
                f"which {command_name()} build NAME --format sif -o FILE.sif writes"
            ),
        ) from error
    stream = stack.enter_context(open_regular(path))
    layers = []
    for number, item in enumerate(info.layers, 1):
        stream.seek(item.offset)
        digest, left = hashlib.sha256(), item.size
        while chunk := stream.read(min(left, 1 << 20)):
            digest.update(chunk)
            left -= len(chunk)
        layers.append(
            LayerReader(
                f"layer {number}", "sha256:" + digest.hexdigest(), item.size, SquashfsReader(stream, item.offset)
            )
        )
    if _begins_with_users(info, layers):
        del layers[0]
    image = ImageReader(str(path), tuple(layers), {})
    scripts = [
        image.read(entry.path) or b"" for layer in layers for entry in layer.reader.children(".singularity.d/env")
    ]
    environment = {
        match[1]: " ".join(_split_names(match[2]))
        for text in scripts
        for match in _EXPORT.finditer(text.decode(errors="replace"))
    }
    with contextlib.suppress(ValueError):  # Ekiben's images name their layers
        metadata = ImageMetadata.parse(image.read(IMAGE_METADATA) or b"")
        if metadata.is_evaluated:
            fixed = Evaluated.parse(image.read(EVALUATED) or b"").fixed
            environment = {name: value for name, value in environment.items() if name == "EKIBEN_RECIPE"} | fixed
        names = [name for name, _ in metadata.layers] + [metadata.recipe]
        if len(names) == len(layers):
            layers = [
                LayerReader(name, layer.digest, layer.size, layer.reader)
                for name, layer in zip(names, layers, strict=True)
            ]
    return ImageReader(str(path), tuple(layers), environment, info.arch)


def _begins_with_users(info: SifInfo, layers: Sequence[LayerReader]) -> bool:
    """Return whether the first partition is the table of users, by its bytes: its name proves nothing."""
    if len(layers) < 2 or info.layers[0].name != USERS:
        return False
    return layers[0].digest == digest_of(users_partition([layer.reader for layer in layers[1:]], info.created))


def _split_names(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:
        return [value]


def parents(path: str) -> Iterator[str]:
    """Yield the folders above ``path``, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


# -- packages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """``source`` is the source package with its version; ``depends`` what it depends on, each a choice of names;
    ``layer`` the number of the layer that brought this version."""

    name: str
    version: str
    architecture: str
    source: tuple[str, str]
    maintainer: str
    depends: tuple[tuple[str, ...], ...]
    provides: tuple[str, ...]
    layer: int


@dataclass(frozen=True, slots=True)
class PythonPackage:
    """``metadata`` is the METADATA of its .dist-info, whose folder is ``dist_info``."""

    name: str
    version: str
    dist_info: str
    metadata: Message
    layer: int


def python_versions(tree: Tree) -> dict[str, str]:
    """Return Python package → version."""
    return dict(distribution for path in tree if (distribution := distribution_at(path)))


def debian_packages(image: ImageReader) -> list[DebianPackage]:
    """Return the Debian packages, sorted by name. Raises VerifyError when dpkg's database is incomplete."""
    packages: list[DebianPackage] = []
    brought: dict[tuple[str, str], tuple[str, int]] = {}
    holding = [number for number, layer in enumerate(image.layers) if _is_file(layer, DPKG_STATUS)]
    if DPKG_STATUS not in image.tree:
        return []
    for number in holding:
        layer = image.layers[number]
        records = _checked_status(layer, layer.reader.read_file(DPKG_STATUS).decode(errors="replace"))
        for record in records:
            name = record["Package"], record["Architecture"]
            if brought.get(name, ("", 0))[0] != record["Version"]:
                brought[name] = record["Version"], number
        if number == holding[-1]:
            packages = [
                _debian_package(record, brought[record["Package"], record["Architecture"]][1]) for record in records
            ]
    _check_file_lists(image, {package.name for package in packages})
    return sorted(packages, key=lambda package: (package.name, package.architecture))


def _is_file(layer: LayerReader, path: str) -> bool:
    entry = layer.reader.lookup(path)
    return entry is not None and entry.kind == "file"


def _checked_status(layer: LayerReader, text: str) -> list[dict[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line and not _STATUS_LINE.match(line):
            raise _broken(layer, f"line {number} is not a field: {line[:60]!r}")
    records = [record for record in dpkg_records(text) if record]
    for record in records:
        if missing := [field for field in ("Package", "Status") if not record.get(field)]:
            raise _broken(layer, f"a record has no {missing[0]}: {next(iter(record.items()))}")
    installed = [record for record in records if record["Status"].endswith(" installed")]
    for record in installed:
        if missing := [field for field in ("Version", "Architecture") if not record.get(field)]:
            raise _broken(layer, f"{record['Package']} has no {missing[0]}")
    return installed


def _broken(layer: LayerReader, reason: str) -> VerifyError:
    return VerifyError(
        f"layer {layer.name}: dpkg's database is broken: {DPKG_STATUS}: {reason}",
        hint="the content of that layer is unknown; check what its definition's %post does to dpkg, and build it again",
    )


def _check_file_lists(image: ImageReader, known: set[str]) -> None:
    """Check dpkg's file lists against its status: a truncated status file is still readable. (A package removed and not
    purged keeps its list, but no checksums.)
    """
    tree = image.tree
    layer = image.layers[tree[DPKG_STATUS][1]]
    for path in tree:
        if path.startswith("var/lib/dpkg/info/") and path.endswith(".list"):
            name = path.removeprefix("var/lib/dpkg/info/").removesuffix(".list").partition(":")[0]
            if name not in known and f"{path.removesuffix('.list')}.md5sums" in tree:
                raise _broken(layer, f"there is no record of {name}, whose files are listed in {path}")


def _debian_package(record: Mapping[str, str], layer: int) -> DebianPackage:
    source = re.match(r"(\S+)(?:\s+\((\S+)\))?", record.get("Source", record["Package"]))
    assert source is not None
    depends = ", ".join(filter(None, (record.get("Pre-Depends"), record.get("Depends"))))
    return DebianPackage(
        name=record["Package"],
        version=record["Version"],
        architecture=record["Architecture"],
        source=(source[1], source[2] or record["Version"]),
        maintainer=re.sub(r"\s*<[^>]*>", "", record.get("Maintainer", "")),
        depends=tuple(tuple(_package_names(choice, "|")) for choice in depends.split(",") if choice.strip()),
        provides=tuple(_package_names(record.get("Provides", ""), ",")),
        layer=layer,
    )


def _package_names(text: str, separator: str) -> Iterator[str]:
    for item in text.split(separator):
        if match := re.match(r"\s*([a-z0-9][a-z0-9.+-]+)", item):
            yield match[1]


def python_packages(image: ImageReader) -> list[PythonPackage]:
    """Return the Python packages, sorted by name.

    Raises VerifyError for a .dist-info without name or version, but for one that a base of others brought.
    """
    packages, tree = [], image.tree
    for path, number in _dist_infos(image):
        metadata, problem = _metadata(image, path)
        if not problem:
            name, version = str(metadata["Name"]), str(metadata["Version"])
            packages.append(PythonPackage(name, version, path, metadata, tree[f"{path}/METADATA"][1]))
        elif not _is_foreign(image.layers[number]):
            raise VerifyError(
                f"layer {image.layers[number].name}: a Python package is broken: {problem}",
                hint="the layer's %post left it half installed or half removed; build the layer again",
            )
    return sorted(packages, key=lambda package: (plain_name(package.name), package.dist_info))


def broken_packages(image: ImageReader) -> list[str]:
    """Return what is wrong with each .dist-info that a base of others brought without name or version."""
    problems = (_metadata(image, path)[1] for path, _ in _dist_infos(image))
    return sorted(filter(None, problems))


def _dist_infos(image: ImageReader) -> Iterator[tuple[str, int]]:
    """Yield each .dist-info folder, with the number of its layer."""
    for path, (entry, number) in image.tree.items():
        if entry.kind == "dir" and distribution_at(path) is not None:
            yield path, number


def _metadata(image: ImageReader, path: str) -> tuple[Message, str]:
    """Return the METADATA of a .dist-info, and what is wrong with it."""
    data = image.read_through_links(f"{path}/METADATA")
    metadata = HeaderParser().parsestr((data or b"").decode(errors="replace"))
    if metadata["Name"] and metadata["Version"]:
        return metadata, ""
    return metadata, f"{path}/METADATA " + ("is not there" if data is None else "has no Name and Version")


def _is_foreign(layer: LayerReader) -> bool:
    """Return whether a layer is a base of others, which no build here can mend."""
    return layer.reader.lookup(BASE) is not None
