"""An image opened to be read, of the store or a SIF file: its layers, its files, and the packages it holds.

Debian's packages are those of dpkg's own database, Python's those with a .dist-info in a site-packages folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from builder.errors import StoreError, UsageError, VerifyError, nearest
from builder.layer import Entry
from builder.sif import read_sif
from builder.squashfs import SquashfsReader
from builder.store import Store, StoredLayer

DPKG_STATUS = "var/lib/dpkg/status"
_DIST_INFO = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+)-([^/-]+)\.dist-info$")
_EXPORT = re.compile(r"^export ([A-Za-z_]\w*)=(.*)$", re.MULTILINE)
_STATUS_LINE = re.compile(r"[A-Za-z0-9-]+:|[ \t]")


@dataclass(frozen=True, slots=True)
class Part:
    """One layer of an open image. ``digest`` is of its squashfs, ``size`` in bytes; ``stored`` is the store's record of it."""

    name: str
    digest: str
    size: int
    reader: SquashfsReader
    stored: StoredLayer | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """An image to be read: of the store, or a SIF file. Layers are bottom first."""

    name: str
    parts: tuple[Part, ...]
    environment: Mapping[str, str]
    arch: str = ""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def read(self, path: str) -> bytes | None:
        """A file as the image shows it; links are not followed."""
        for part in reversed(self.parts):
            if (entry := part.reader.lookup(path)) is not None:
                return part.reader.read_file(path) if entry.kind == "file" else None
        return None


@contextlib.contextmanager
def open_image(name: str, store: Store) -> Iterator[Opened]:
    """An image of the store by name, or a SIF by path. Errors: UsageError, StoreError."""
    with contextlib.ExitStack() as stack:
        if name.endswith(".sif") or "/" in name:
            yield _open_sif(Path(name), stack)
            return
        ref = store.image(name)
        if ref is None:
            raise UsageError(f"no image '{name}' in {store.root}." + nearest(name, store.images()),
                             hint=f"build.py image {name}, or a file: ./{name}.sif")  # fmt: skip
        manifest, config = json.loads(store.get_blob(ref["manifest"])), json.loads(store.get_blob(ref["config"]))
        parts = []
        for key, layer in zip(ref["keys"], manifest["layers"], strict=True):
            try:
                reader = stack.enter_context(store.reader(layer["digest"]))
            except OSError as error:
                raise StoreError(f"{name}: layer {layer['digest']} is not in {store.root}: {error.strerror}",
                                 hint=f"build.py image {ref['recipe']}") from error  # fmt: skip
            known, called = store.layer(key), layer["annotations"]["org.ekiben.layer"]
            stored = known if known and known.digest == layer["digest"] else None
            parts.append(Part(called, layer["digest"], layer["size"], reader, stored))
        yield Opened(
            name, tuple(parts), dict(item.split("=", 1) for item in config["config"]["Env"]), config["architecture"]
        )


@contextlib.contextmanager
def open_layers(
    name: str, layers: Sequence[StoredLayer], store: Store, environment: Mapping[str, str], arch: str
) -> Iterator[Opened]:
    """The image of just these layers, whatever the store calls by its name meanwhile. Errors: StoreError."""
    with contextlib.ExitStack() as stack:
        parts = [Part(layer.name, layer.digest, layer.size, _open_blob(name, layer.digest, store, stack), layer)
                 for layer in layers]  # fmt: skip
        yield Opened(name, tuple(parts), environment, arch)


def _open_blob(
    name: str, digest: str, store: Store, stack: contextlib.ExitStack, hint: str | None = None
) -> SquashfsReader:
    try:
        return stack.enter_context(store.reader(digest))
    except OSError as error:
        raise StoreError(f"{name}: layer {digest} is not in {store.root}: {error.strerror}", hint=hint) from error


def _open_sif(path: Path, stack: contextlib.ExitStack) -> Opened:
    try:
        info = read_sif(path)
    except StoreError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise StoreError(str(error), hint="build.py list names the images of the store; what has a / in it or ends in .sif is a file, "
                                          "which build.py image NAME --format sif -o FILE.sif makes") from error  # fmt: skip
    stream = stack.enter_context(path.open("rb"))
    parts = []
    for number, item in enumerate(info.layers, 1):
        stream.seek(item.offset)
        digest, left = hashlib.sha256(), item.size
        while chunk := stream.read(min(left, 1 << 20)):
            digest.update(chunk)
            left -= len(chunk)
        parts.append(
            Part(f"layer {number}", "sha256:" + digest.hexdigest(), item.size, SquashfsReader(stream, item.offset))
        )
    image = Opened(str(path), tuple(parts), {})
    scripts = [image.read(entry.path) or b"" for part in parts for entry in part.reader.children(".singularity.d/env")]
    environment = {
        match[1]: " ".join(_words(match[2])) for text in scripts for match in _EXPORT.finditer(text.decode())
    }
    with contextlib.suppress(ValueError, KeyError):  # one of ours says what its layers are called
        about = json.loads(image.read("opt/ekiben/image.json") or b"")
        names = [layer["name"] for layer in about["layers"]] + [about["recipe"]]
        if len(names) == len(parts):
            parts = [Part(name, part.digest, part.size, part.reader) for name, part in zip(names, parts, strict=True)]
    return Opened(str(path), tuple(parts), environment, info.arch)


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:
        return [value]


# -- files ------------------------------------------------------------------------------------------------------------

Tree = dict[str, tuple[Entry, int]]  # path → what is there, and the number of the layer that brought it


def tree_of(image: Opened) -> Tree:
    tree: Tree = {}
    for number, part in enumerate(image.parts):
        entries = {entry.path: entry for entry in part.reader.entries()}
        # What a whiteout removes, or what no directory holds any more.
        gone = {path for path, entry in entries.items() if entry.kind != "dir" and path in tree}
        if folders := {path for path in gone if tree[path][0].kind == "dir"}:
            gone |= {path for path in tree if not folders.isdisjoint(parents(path))}
        tree = {path: item for path, item in tree.items() if path not in gone} if gone else tree
        tree |= {path: (entry, number) for path, entry in entries.items() if entry.kind != "whiteout"}
    return tree


def parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def read_file(image: Opened, tree: Tree, path: str) -> bytes | None:
    """A file as a program in the image would read it, through links; None when there is none."""
    for _ in range(40):  # as many links as Linux follows
        steps = [*reversed([path, *parents(path)])]
        link = next((step for step in steps if step in tree and tree[step][0].kind == "symlink"), None)
        if link is None:
            break
        rest, target = path[len(link) :], tree[link][0].target
        path = posixpath.normpath("/" + posixpath.join(posixpath.dirname(link), target) + rest).lstrip("/")
    if path not in tree or tree[path][0].kind not in ("file", "hardlink"):
        return None
    return image.parts[tree[path][1]].reader.read_file(path)


# -- packages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """``source`` is the source package with its version; ``needs`` what it depends on, each a choice of names;
    ``layer`` the number of the layer that brought this version."""

    name: str
    version: str
    architecture: str
    source: tuple[str, str]
    maintainer: str
    needs: tuple[tuple[str, ...], ...]
    provides: tuple[str, ...]
    layer: int


@dataclass(frozen=True, slots=True)
class PythonPackage:
    """``metadata`` is the METADATA of its .dist-info, whose folder is ``place``."""

    name: str
    version: str
    place: str
    metadata: Message
    layer: int


def plain_name(name: str) -> str:
    """A Python package's name, however it is written: https://packaging.python.org/specifications/name-normalization/"""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution_at(path: str) -> tuple[str, str] | None:
    """Name and version of the Python package whose .dist-info folder this is."""
    match = _DIST_INFO.search(path)
    return (plain_name(match[1]), match[2]) if match else None


def python_versions(tree: Tree) -> dict[str, str]:
    return dict(found for path in tree if (found := distribution_at(path)))


def installed_packages(status: str) -> dict[str, str]:
    """Package → version out of dpkg's status file."""
    return {record["Package"]: record["Version"] for record in _records(status)
            if "Package" in record and "Version" in record}  # fmt: skip


def _records(status: str) -> list[dict[str, str]]:
    blocks = (block.splitlines() for block in re.split(r"\n{2,}", status.strip("\n")))
    return [{name: value.strip() for line in lines if line[:1].strip() for name, colon, value in [line.partition(":")] if colon}
            for lines in blocks]  # fmt: skip


def debian_packages(image: Opened, tree: Tree) -> list[DebianPackage]:
    """Errors: VerifyError when dpkg's database is not whole."""
    found: list[DebianPackage] = []
    brought: dict[tuple[str, str], tuple[str, int]] = {}
    layers = [number for number, part in enumerate(image.parts) if _is_file(part, DPKG_STATUS)]
    if DPKG_STATUS not in tree:
        return []
    for number in layers:
        part = image.parts[number]
        records = _checked_status(part, part.reader.read_file(DPKG_STATUS).decode(errors="replace"))
        for record in records:
            name = record["Package"], record["Architecture"]
            if brought.get(name, ("", 0))[0] != record["Version"]:
                brought[name] = record["Version"], number
        if number == layers[-1]:
            found = [
                _debian_package(record, brought[record["Package"], record["Architecture"]][1]) for record in records
            ]
    _check_file_lists(image, tree, {package.name for package in found})
    return sorted(found, key=lambda package: (package.name, package.architecture))


def _is_file(part: Part, path: str) -> bool:
    entry = part.reader.lookup(path)
    return entry is not None and entry.kind == "file"


def _checked_status(part: Part, text: str) -> list[dict[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line and not _STATUS_LINE.match(line):
            raise _broken(part, f"line {number} is no field: {line[:60]!r}")
    records = [record for record in _records(text) if record]
    for record in records:
        if missing := [field for field in ("Package", "Status") if not record.get(field)]:
            raise _broken(part, f"a record has no {missing[0]}: {next(iter(record.items()))}")
    installed = [record for record in records if record["Status"].endswith(" installed")]
    for record in installed:
        if missing := [field for field in ("Version", "Architecture") if not record.get(field)]:
            raise _broken(part, f"{record['Package']} has no {missing[0]}")
    return installed


def _broken(part: Part, why: str) -> VerifyError:
    return VerifyError(f"layer {part.name}: dpkg's database is broken: {DPKG_STATUS}: {why}",
                       hint="what that layer holds cannot be said; see what its definition's %post does to dpkg, and build it again")  # fmt: skip


def _check_file_lists(image: Opened, tree: Tree, known: set[str]) -> None:
    """A status file that was cut short reads well; dpkg's lists of files tell. (What was removed and not purged keeps its list,
    but no checksums.)"""
    part = image.parts[tree[DPKG_STATUS][1]]
    for path in tree:
        if path.startswith("var/lib/dpkg/info/") and path.endswith(".list"):
            name = path.removeprefix("var/lib/dpkg/info/").removesuffix(".list").partition(":")[0]
            if name not in known and f"{path.removesuffix('.list')}.md5sums" in tree:
                raise _broken(part, f"there is no record of {name}, whose files are listed in {path}")


def _debian_package(record: Mapping[str, str], layer: int) -> DebianPackage:
    source = re.match(r"(\S+)(?:\s+\((\S+)\))?", record.get("Source", record["Package"]))
    assert source is not None
    depends = ", ".join(filter(None, (record.get("Pre-Depends"), record.get("Depends"))))
    return DebianPackage(
        name=record["Package"], version=record["Version"], architecture=record["Architecture"],
        source=(source[1], source[2] or record["Version"]), maintainer=re.sub(r"\s*<[^>]*>", "", record.get("Maintainer", "")),
        needs=tuple(tuple(_package_names(choice, "|")) for choice in depends.split(",") if choice.strip()),
        provides=tuple(_package_names(record.get("Provides", ""), ",")), layer=layer,
    )  # fmt: skip


def _package_names(text: str, separator: str) -> Iterator[str]:
    for item in text.split(separator):
        if match := re.match(r"\s*([a-z0-9][a-z0-9.+-]+)", item):
            yield match[1]


def python_packages(image: Opened, tree: Tree) -> list[PythonPackage]:
    """Errors: VerifyError for a .dist-info that does not say whose it is."""
    found = []
    for path, (entry, number) in tree.items():
        if entry.kind != "dir" or distribution_at(path) is None:
            continue
        data = read_file(image, tree, f"{path}/METADATA")
        about = HeaderParser().parsestr((data or b"").decode(errors="replace"))
        if not about["Name"] or not about["Version"]:
            said = f"{path}/METADATA " + ("is not there" if data is None else "has no Name and Version")
            raise VerifyError(f"layer {image.parts[number].name}: a Python package is broken: {said}",
                              hint="the layer's %post left it half installed or half removed; build the layer again")  # fmt: skip
        found.append(PythonPackage(str(about["Name"]), str(about["Version"]), path, about, tree[f"{path}/METADATA"][1]))
    return sorted(found, key=lambda package: (plain_name(package.name), package.place))
