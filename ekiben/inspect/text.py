"""Format descriptions and diffs of images for a terminal."""

from __future__ import annotations

from ekiben.inspect.describe import ImageDescription, SifDescription
from ekiben.inspect.diff import Changes, FileChanges, ImageDiff

_SHOWN = 12  # lines of one kind on the screen


def format_description(description: ImageDescription | SifDescription) -> str:
    """Return a few lines for a person."""
    lines = [f"{key:<12}{value}" for key, value in description.items() if isinstance(value, str | int)]
    if "objects" in description:
        lines += [
            f"object      {item['name']:<16}{item['size'] / 1e6:10.1f} MB at {item['offset']}"
            for item in description["objects"]
        ]
        return "\n".join(lines)
    for layer in description["layers"]:
        lines.append(
            f"layer       {layer['name']:<16}{layer['size'] / 1e6:10.1f} MB  {layer['digest'][7:19]}  "
            f"{layer.get('executor', 'gone from the store')}"
        )
        lines += [f"  drift     {line}" for line in layer.get("drift", ())]
    for task, help in description["tasks"].items():
        lines.append(f"task        {task:<16}{help}")
    return "\n".join(lines)


def format_diff(diff: ImageDiff) -> str:
    """Return one screen for a person."""
    before, after = diff["before"], diff["after"]
    width = max(len(before["name"]), len(after["name"]))
    lines = [
        f"- {before['name']:<{width}}  {_size(before['size']):>9} in {before['layers']} layers",
        (
            f"+ {after['name']:<{width}}  {_size(after['size']):>9} in {after['layers']} layers "
            f" ({_more(after['size'] - before['size'])})"
        ),
    ]
    lines += ["", "layers"]
    width = max(len(layer["name"]) for layer in diff["layers"])
    for layer in diff["layers"]:
        sizes = ["-" if count is None else _size(count) for count in (layer["before"], layer["after"])]
        change = "the same" if layer["same"] else _more((layer["after"] or 0) - (layer["before"] or 0))
        lines.append(f"  {layer['name']:<{width}}  {sizes[0]:>9} → {sizes[1]:>9}  {change}")
    for kind, changes in (("python", diff["packages"]["python"]), ("debian", diff["packages"]["debian"])):
        lines += ["", f"{kind} packages: {_counts(changes)}, {changes['same']} the same", *_listed(changes)]
    lines += ["", f"environment: {_counts(diff['environment'])}", *_listed(diff["environment"])]
    other, all_files = diff["other_files"], diff["files"]
    lines += [
        "",
        (
            f"files: {_counts(all_files)}; of these not in the packages above: "
            f"{_count_text(len(other['added']), len(other['removed']), len(other['changed']))}"
        ),
    ]
    rest = [
        f"  {sign} {path}"
        for what, sign in (("added", "+"), ("removed", "-"), ("changed", "~"))
        for path in other[what]
    ]
    return "\n".join([*lines, *_cut(rest)])


def _counts(changes: Changes | FileChanges) -> str:
    return _count_text(len(changes["added"]), len(changes["removed"]), len(changes["changed"]))


def _count_text(added: int, removed: int, changed: int) -> str:
    counts = ((added, "added"), (removed, "removed"), (changed, "changed"))
    return ", ".join(f"{count} {what}" for count, what in counts if count) or "nothing changed"


def _listed(changes: Changes) -> list[str]:
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
