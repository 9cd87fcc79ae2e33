"""What is different between two images: layers, packages, environment, files. On one screen, or all of it as JSON."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from builder.contents import (
    DPKG_STATUS,
    Opened,
    Part,
    Tree,
    distribution_at,
    installed_packages,
    parents,
    python_versions,
    tree_of,
)
from builder.layer import Entry, Member, sort_key
from builder.squashfs import SquashfsReader
from builder.store import StoredLayer

_SHOWN = 12  # lines of one kind on the screen


# -- comparing --------------------------------------------------------------------------------------------------------


def compare(before: Opened, after: Opened) -> dict[str, Any]:
    """Everything that differs. Files are compared by kind, mode, owner, size and content; times are not."""
    trees = tree_of(before), tree_of(after)
    python = [python_versions(tree) for tree in trees]
    debian = [_debian_versions(image) for image in (before, after)]
    files = _compare_files(before, after, trees)
    packages = {"python": changes(*python), "debian": changes(*debian)}
    return {
        "before": {"name": before.name, "size": before.size, "layers": len(before.parts)},
        "after": {"name": after.name, "size": after.size, "layers": len(after.parts)},
        "layers": compare_layers(before.parts, after.parts),
        "packages": packages,
        "environment": changes(before.environment, after.environment),
        "files": files,
        "other_files": _unexplained(files, packages, (before, after), trees),
    }


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
    return {
        "added": {name: after[name] for name in sorted(after.keys() - before.keys())},
        "removed": {name: before[name] for name in sorted(before.keys() - after.keys())},
        "changed": {name: [before[name], after[name]] for name in sorted(before.keys() & after.keys()) if before[name] != after[name]},
        "same": sum(before[name] == after[name] for name in before.keys() & after.keys()),
    }  # fmt: skip


def compare_layers(before: Sequence[Part | StoredLayer], after: Sequence[Part | StoredLayer]) -> list[dict[str, Any]]:
    one, other = ({part.name: part for part in parts} for parts in (before, after))
    rows = []
    for name in dict.fromkeys([*one, *other]):
        parts = one.get(name), other.get(name)
        rows.append({"name": name, "before": parts[0] and parts[0].size, "after": parts[1] and parts[1].size,
                     "same": bool(parts[0] and parts[1] and parts[0].digest == parts[1].digest)})  # fmt: skip
    return rows


def _debian_versions(image: Opened) -> dict[str, str]:
    status = image.read(DPKG_STATUS)
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
            found = distribution_at(path)
            if found and found[0] in touched["python"]:
                site = path.rpartition("/")[0]
                record = image.read(path + "/RECORD") or b""
                owned.add(path)
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
        or any(parent.endswith(".dist-info") and parent in owned for parent in parents(path))
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
