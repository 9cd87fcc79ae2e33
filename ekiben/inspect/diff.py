"""Compare two images: layers, packages, environment, files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

from ekiben.formats.compare import comparable, hash_chunks
from ekiben.inspect.image_reader import ImageReader, LayerReader, Tree, parents, python_versions
from ekiben.packages.installed import DPKG_STATUS, distribution_at, installed_packages
from ekiben.store import StoredLayer


class ImageSummary(TypedDict):
    """``size`` in bytes, ``layers`` their number."""

    name: str
    size: int
    layers: int


class Changes(TypedDict):
    """Values by name; ``changed`` holds [before, after], ``same`` how many are equal."""

    added: dict[str, str]
    removed: dict[str, str]
    changed: dict[str, list[str]]
    same: int


class LayerChange(TypedDict):
    """A layer's size in bytes in both images, None where it is not there."""

    name: str
    before: int | None
    after: int | None
    same: bool


class FileChanges(TypedDict):
    """The files that differ between two images, with their sizes in bytes; ``changed`` holds [before, after]."""

    added: dict[str, int]
    removed: dict[str, int]
    changed: dict[str, list[int]]


class PackageChanges(TypedDict):
    """Changed packages: Python's and Debian's."""

    python: Changes
    debian: Changes


class ImageDiff(TypedDict):
    """Everything that differs; ``other_files`` are changed files of no changed package, by kind of change."""

    before: ImageSummary
    after: ImageSummary
    layers: list[LayerChange]
    packages: PackageChanges
    environment: Changes
    files: FileChanges
    other_files: dict[str, list[str]]


def compare(before: ImageReader, after: ImageReader) -> ImageDiff:
    """Return everything that differs. Files are compared by kind, mode, owner, size and content; times are not."""
    trees = before.tree, after.tree
    python = [python_versions(tree) for tree in trees]
    debian = [_debian_versions(image) for image in (before, after)]
    files = _compare_files(before, after, trees)
    packages: PackageChanges = {"python": changes(*python), "debian": changes(*debian)}
    return {
        "before": {"name": before.name, "size": before.size, "layers": len(before.layers)},
        "after": {"name": after.name, "size": after.size, "layers": len(after.layers)},
        "layers": compare_layers(before.layers, after.layers),
        "packages": packages,
        "environment": changes(before.environment, after.environment),
        "files": files,
        "other_files": _unexplained(files, packages, (before, after), trees),
    }


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> Changes:
    """Compare two mappings."""
    return {
        "added": {name: after[name] for name in sorted(after.keys() - before.keys())},
        "removed": {name: before[name] for name in sorted(before.keys() - after.keys())},
        "changed": {
            name: [before[name], after[name]]
            for name in sorted(before.keys() & after.keys())
            if before[name] != after[name]
        },
        "same": sum(before[name] == after[name] for name in before.keys() & after.keys()),
    }


def compare_layers(
    before: Sequence[LayerReader | StoredLayer], after: Sequence[LayerReader | StoredLayer]
) -> list[LayerChange]:
    """Compare layers by name and digest."""
    one, other = ({layer.name: layer for layer in pair} for pair in (before, after))
    differences = list[LayerChange]()
    for name in dict.fromkeys([*one, *other]):
        pair = one.get(name), other.get(name)
        differences.append(
            {
                "name": name,
                "before": pair[0].size if pair[0] else None,
                "after": pair[1].size if pair[1] else None,
                "same": bool(pair[0] and pair[1] and pair[0].digest == pair[1].digest),
            }
        )
    return differences


def _debian_versions(image: ImageReader) -> dict[str, str]:
    status = image.read(DPKG_STATUS)
    return installed_packages(status.decode(errors="replace")) if status else {}


def _compare_files(before: ImageReader, after: ImageReader, trees: tuple[Tree, Tree]) -> FileChanges:
    one, other = trees
    changed: dict[str, list[int]] = {}
    unsure: list[str] = []
    for path in one.keys() & other.keys():
        (entry, number), (new, new_number) = one[path], other[path]
        if before.layers[number].digest == after.layers[new_number].digest:
            continue
        if comparable(entry) != comparable(new):
            changed[path] = [entry.size, new.size]
        elif entry.kind == "file" and entry.size:
            unsure.append(path)
    digests = [
        _digests(image, {path: tree[path][1] for path in unsure})
        for image, tree in zip((before, after), trees, strict=True)
    ]
    changed |= {
        path: [one[path][0].size, other[path][0].size] for path in unsure if digests[0][path] != digests[1][path]
    }
    return {
        "added": {
            path: other[path][0].size for path in sorted(other.keys() - one.keys()) if other[path][0].kind != "dir"
        },
        "removed": {
            path: one[path][0].size for path in sorted(one.keys() - other.keys()) if one[path][0].kind != "dir"
        },
        "changed": dict(sorted(changed.items())),
    }


def _digests(image: ImageReader, origins: Mapping[str, int]) -> dict[str, bytes]:
    """Return the hashes of files, each in its layer. Each layer is read once."""
    digests: dict[str, bytes] = {}
    for number, layer in enumerate(image.layers):
        paths = {path for path, origin in origins.items() if origin == number}
        for entry, chunks in layer.reader.contents() if paths else ():
            if entry.path in paths:
                digests[entry.path] = hash_chunks(chunks or ())
    return digests


def _unexplained(
    files: FileChanges,
    packages: PackageChanges,
    images: tuple[ImageReader, ImageReader],
    trees: tuple[Tree, Tree],
) -> dict[str, list[str]]:
    """Return the changed files that belong to no changed package, by kind of change."""
    owned: set[str] = set()
    for image, tree in zip(images, trees, strict=True):
        python, debian = (
            {*differing["added"], *differing["removed"], *differing["changed"]}
            for differing in (packages["python"], packages["debian"])
        )
        for path in tree:
            package = distribution_at(path)
            if package and package[0] in python:
                site = path.rpartition("/")[0]
                record = image.read(path + "/RECORD") or b""
                owned.add(path)
                owned |= {f"{site}/{line.split(',')[0]}" for line in record.decode(errors="replace").splitlines()}
            name = path.removeprefix("var/lib/dpkg/info/").partition(".list")[0].partition(":")[0]
            if path.startswith("var/lib/dpkg/info/") and path.endswith(".list") and name in debian:
                owned |= {line.lstrip("/") for line in (image.read(path) or b"").decode(errors="replace").splitlines()}
    paths: dict[str, Mapping[str, object]] = {
        "added": files["added"],
        "removed": files["removed"],
        "changed": files["changed"],
    }
    return {what: [path for path in group if not _is_owned(path, owned)] for what, group in paths.items()}


def _is_owned(path: str, owned: Collection[str]) -> bool:
    if path.startswith(("var/lib/dpkg/", "var/cache/")):
        return True
    source = re.sub(r"/__pycache__/([^/]+?)\.[^./]+(?:\.opt-\d)?\.pyc$", r"/\1.py", path)
    return (
        source in owned
        or path in owned
        or any(parent.endswith(".dist-info") and parent in owned for parent in parents(path))
    )
