"""What is different between two images: layers, packages, environment, files. On one screen, or all of it as JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.errors import StoreError, UsageError, nearest
from builder.layer import Entry, Member, sort_key
from builder.pipeline import installed_packages
from builder.sif import read_sif
from builder.squashfs import SquashfsReader
from builder.store import Store

_DISTRIBUTION = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+)-([^/-]+)\.dist-info/METADATA$")
_EXPORT = re.compile(r"^export ([A-Za-z_]\w*)=(.*)$", re.MULTILINE)
_SHOWN = 12  # lines of one kind on the screen


@dataclass(frozen=True, slots=True)
class Part:
    """One layer of an open image. ``digest`` is of its squashfs, ``size`` in bytes."""

    name: str
    digest: str
    size: int
    reader: SquashfsReader


@dataclass(frozen=True, slots=True)
class Opened:
    """An image to be compared: of the store, or a SIF file. Layers are bottom first."""

    name: str
    parts: tuple[Part, ...]
    environment: Mapping[str, str]

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
        for layer in manifest["layers"]:
            try:
                stream = stack.enter_context(store.blob_path(layer["digest"]).open("rb"))
            except OSError as error:
                raise StoreError(f"{name}: layer {layer['digest']} is not in {store.root}: {error.strerror}",
                                 hint=f"build.py image {ref['recipe']}") from error  # fmt: skip
            parts.append(
                Part(layer["annotations"]["org.ekiben.layer"], layer["digest"], layer["size"], SquashfsReader(stream))
            )
        yield Opened(name, tuple(parts), dict(item.split("=", 1) for item in config["config"]["Env"]))


def _open_sif(path: Path, stack: contextlib.ExitStack) -> Opened:
    info = read_sif(path)
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
    return Opened(str(path), tuple(parts), environment)


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:
        return [value]


# -- comparing --------------------------------------------------------------------------------------------------------


def compare(before: Opened, after: Opened) -> dict[str, Any]:
    """Everything that differs. Files are compared by kind, mode, owner, size and content; times are not."""
    trees = _tree(before), _tree(after)
    python, debian = ([kind(image, tree) for image, tree in zip((before, after), trees, strict=True)]
                      for kind in (_python_packages, _debian_packages))  # fmt: skip
    files = _compare_files(before, after, trees)
    packages = {"python": _changes(*python), "debian": _changes(*debian)}
    return {
        "before": {"name": before.name, "size": before.size, "layers": len(before.parts)},
        "after": {"name": after.name, "size": after.size, "layers": len(after.parts)},
        "layers": _compare_layers(before.parts, after.parts),
        "packages": packages,
        "environment": _changes(before.environment, after.environment),
        "files": files,
        "other_files": _unexplained(files, packages, (before, after), trees),
    }


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
    return {
        "added": {name: after[name] for name in sorted(after.keys() - before.keys())},
        "removed": {name: before[name] for name in sorted(before.keys() - after.keys())},
        "changed": {name: [before[name], after[name]] for name in sorted(before.keys() & after.keys()) if before[name] != after[name]},
        "same": sum(before[name] == after[name] for name in before.keys() & after.keys()),
    }  # fmt: skip


def _compare_layers(before: Sequence[Part], after: Sequence[Part]) -> list[dict[str, Any]]:
    one, other = ({part.name: part for part in parts} for parts in (before, after))
    rows = []
    for name in dict.fromkeys([*one, *other]):
        parts = one.get(name), other.get(name)
        rows.append({"name": name, "before": parts[0] and parts[0].size, "after": parts[1] and parts[1].size,
                     "same": bool(parts[0] and parts[1] and parts[0].digest == parts[1].digest)})  # fmt: skip
    return rows


Tree = dict[str, tuple[Entry, int]]  # path → what is there, and the number of the layer that brought it


def _tree(image: Opened) -> Tree:
    tree: Tree = {}
    for number, part in enumerate(image.parts):
        entries = {entry.path: entry for entry in part.reader.entries()}
        # What a whiteout removes, or what no directory holds any more.
        gone = {path for path, entry in entries.items() if entry.kind != "dir"} & {
            parent for path in tree for parent in (path, *_parents(path))}  # fmt: skip
        if gone:
            tree = {path: item for path, item in tree.items() if path not in gone and gone.isdisjoint(_parents(path))}
        tree |= {path: (entry, number) for path, entry in entries.items() if entry.kind != "whiteout"}
    return tree


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _python_packages(image: Opened, tree: Tree) -> dict[str, str]:
    found = (match for path in tree if (match := _DISTRIBUTION.search(path)))
    return {match[1].lower().replace("_", "-"): match[2] for match in found}


def _debian_packages(image: Opened, tree: Tree) -> dict[str, str]:
    status = image.read("var/lib/dpkg/status")
    return installed_packages(status.decode(errors="replace")) if status else {}


def _compare_files(before: Opened, after: Opened, trees: tuple[Tree, Tree]) -> dict[str, Any]:
    one, other = trees
    changed: dict[str, list[int]] = {}
    unsure: list[str] = []
    for path in one.keys() & other.keys():
        (entry, number), (new, new_number) = one[path], other[path]
        if before.parts[number].digest == after.parts[new_number].digest:
            continue
        if _facts(entry) != _facts(new):
            changed[path] = [entry.size, new.size]
        elif entry.kind == "file" and entry.size:
            unsure.append(path)
    digests = [_digests(image, {path: tree[path][1] for path in unsure})
               for image, tree in zip((before, after), trees, strict=True)]  # fmt: skip
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


def _facts(entry: Entry) -> tuple[object, ...]:
    return entry.kind, entry.mode, entry.uid, entry.gid, entry.size, entry.target


def _digests(image: Opened, wanted: Mapping[str, int]) -> dict[str, bytes]:
    """The content's hash of some files, each in the layer it is from; every layer is read once."""
    found: dict[str, bytes] = {}
    for number, part in enumerate(image.parts):
        paths = {path for path, place in wanted.items() if place == number}
        for entry, chunks in part.reader.members() if paths else ():
            if entry.path in paths:
                found[entry.path] = _hash(chunks or ())
    return found


def _hash(chunks: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def _unexplained(
    files: Mapping[str, Any], packages: Mapping[str, Any], images: tuple[Opened, Opened], trees: tuple[Tree, Tree]
) -> dict[str, list[str]]:
    """The files that no package's change accounts for: paths by what happened to them."""
    owned: set[str] = set()
    for image, tree in zip(images, trees, strict=True):
        touched = {kind: {name for what in ("added", "removed", "changed") for name in about[what]}
                   for kind, about in packages.items()}  # fmt: skip
        for path in tree:
            match = _DISTRIBUTION.search(path)
            if match and match[1].lower().replace("_", "-") in touched["python"]:
                site = path.rpartition("/")[0].rpartition("/")[0]
                record = image.read(path.rpartition("/")[0] + "/RECORD") or b""
                owned.add(path.rpartition("/")[0])
                owned |= {f"{site}/{line.split(',')[0]}" for line in record.decode(errors="replace").splitlines()}
            name = path.removeprefix("var/lib/dpkg/info/").partition(".list")[0].partition(":")[0]
            if path.startswith("var/lib/dpkg/info/") and path.endswith(".list") and name in touched["debian"]:
                owned |= {line.lstrip("/") for line in (image.read(path) or b"").decode(errors="replace").splitlines()}
    return {what: [path for path in paths if not _is_owned(path, owned)] for what, paths in files.items()}


def _is_owned(path: str, owned: Collection[str]) -> bool:
    if path.startswith(("var/lib/dpkg/", "var/cache/")):
        return True
    source = re.sub(r"/__pycache__/([^/]+?)\.[^./]+(?:\.opt-\d)?\.pyc$", r"/\1.py", path)
    return (
        source in owned
        or path in owned
        or any(parent.endswith(".dist-info") and parent in owned for parent in _parents(path))
    )


def layer_differences(before: SquashfsReader, after: SquashfsReader) -> Iterator[str]:
    """The entries in which two layers differ, a line each: path and what is not the same. Nothing is left out."""
    one, other = _hashed(before.members()), _hashed(after.members())
    left, right = next(one, None), next(other, None)
    while left or right:
        if right is None or (left and sort_key(left[0].path) < sort_key(right[0].path)):
            assert left
            yield f"{left[0].path}: only the first has it"
            left = next(one, None)
        elif left is None or sort_key(right[0].path) < sort_key(left[0].path):
            yield f"{right[0].path}: only the second has it"
            right = next(other, None)
        else:
            if said := [*_entry_differences(left[0], right[0]), *(["content"] if left[1] != right[1] else [])]:
                yield f"{left[0].path or '/'}: {', '.join(said)}"
            left, right = next(one, None), next(other, None)


def _hashed(members: Iterator[Member]) -> Iterator[tuple[Entry, bytes]]:
    return ((entry, _hash(chunks or ())) for entry, chunks in members)


def _entry_differences(one: Entry, other: Entry) -> Iterator[str]:
    for field in ("kind", "mode", "uid", "gid", "mtime", "size", "target"):
        first, second = getattr(one, field), getattr(other, field)
        if first != second:
            yield f"{field} {first:o} → {second:o}" if field == "mode" else f"{field} {first} → {second}"


# -- saying it --------------------------------------------------------------------------------------------------------


def text(about: Mapping[str, Any]) -> str:
    """One screen for a person."""
    before, after = about["before"], about["after"]
    width = max(len(before["name"]), len(after["name"]))
    lines = [f"- {before['name']:<{width}}  {_size(before['size']):>9} in {before['layers']} layers",
             f"+ {after['name']:<{width}}  {_size(after['size']):>9} in {after['layers']} layers  ({_more(after['size'] - before['size'])})"]  # fmt: skip
    lines += ["", "layers"]
    width = max(len(row["name"]) for row in about["layers"])
    for row in about["layers"]:
        sizes = ["-" if row[side] is None else _size(row[side]) for side in ("before", "after")]
        change = "the same" if row["same"] else _more((row["after"] or 0) - (row["before"] or 0))
        lines.append(f"  {row['name']:<{width}}  {sizes[0]:>9} → {sizes[1]:>9}  {change}")
    for kind, changes in about["packages"].items():
        lines += ["", f"{kind} packages: {_counts(changes)}, {changes['same']} the same", *_listed(changes)]
    lines += ["", f"environment: {_counts(about['environment'])}", *_listed(about["environment"])]
    other, all_files = about["other_files"], about["files"]
    lines += ["", f"files: {_counts(all_files)}; of these not in the packages above: {_counts(other)}"]
    rest = [
        f"  {sign} {path}"
        for what, sign in (("added", "+"), ("removed", "-"), ("changed", "~"))
        for path in other[what]
    ]
    return "\n".join([*lines, *_cut(rest)])


def _counts(changes: Mapping[str, Any]) -> str:
    said = [f"{len(changes[what])} {what}" for what in ("added", "removed", "changed") if changes[what]]
    return ", ".join(said) or "nothing changed"


def _listed(changes: Mapping[str, Any]) -> list[str]:
    lines = [f"  ~ {name} {old} → {new}" for name, (old, new) in changes["changed"].items()]
    lines += [f"  + {name} {value}" for name, value in changes["added"].items()]
    return _cut(lines + [f"  - {name} {value}" for name, value in changes["removed"].items()])


def _cut(lines: list[str]) -> list[str]:
    return (
        lines
        if len(lines) <= _SHOWN
        else [*lines[: _SHOWN - 1], f"  … and {len(lines) - _SHOWN + 1} more (--json has all)"]
    )


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _more(count: int) -> str:
    return f"{'+' if count >= 0 else '-'}{_size(abs(count))}"
