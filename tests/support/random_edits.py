"""Random scripts that change a tree: what layers are made of, in every order."""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence

from hypothesis import strategies as st

# What, on which path, on which other one, with which number.
Edit = tuple[str, str, str, int]

_COMMANDS = {
    "write": "[ -p {a} ] || printf '%{n}s' x >{a}",  # nobody reads the pipe
    "append": "[ -p {a} ] || printf '%{n}s' y >>{a}",
    "folder": "mkdir -p {a}",
    "remove": "rm -rf {a}",
    "again": "rm -rf {a}; mkdir {a}; printf x >{a}/new",
    "move": "mv -T {a} {b}",
    "link": "ln -T {a} {b}",
    "symlink": "ln -sfT {b} {a}",
    # Not of a folder: into itself cp copies what its listing has by then. Into a pipe it would write.
    "copy": "[ -d {a} ] && [ ! -h {a} ] || cp -aT --remove-destination {a} {b}",
    # Not setgid: fuse-overlayfs gives folders that are made in such a folder another group, which is refused.
    "mode": "chmod {mode:o} {a}",
    "owner": "chown -h {n}:{n} {a}",
    "fifo": "mkfifo {a}",
    "cut": "[ -p {a} ] || truncate -s {n} {a}",
    "time": "touch -h -d @{n} {a}",
}
_NAMES = ("a", "b", "c d", "e\n", "\u65e5", ".f")
PATHS = (*_NAMES, *(f"{folder}/{name}" for folder in _NAMES[:3] for name in _NAMES), "a/b/c d", "b/a/\u65e5")

edit = st.tuples(st.sampled_from(sorted(_COMMANDS)), st.sampled_from(PATHS), st.sampled_from(PATHS), st.integers(1, 99))
edits = st.lists(edit, min_size=12, max_size=30)


def random_edits(seed: int, count: int, without: Sequence[str] = ()) -> list[Edit]:
    """Return the same edits for the same seed."""
    choose = random.Random(seed)
    kinds = sorted(_COMMANDS.keys() - set(without))
    return [
        (choose.choice(kinds), choose.choice(PATHS), choose.choice(PATHS), choose.randrange(1, 99))
        for _ in range(count)
    ]


def script(steps: Sequence[Edit]) -> str:
    """Return shell lines; one that cannot be done (a folder over a file, say) changes nothing that others would not,
    too.
    """
    return "\n".join(["umask 022", *(_line(step) for step in steps), "true"])


def _line(step: Edit) -> str:
    kind, path, other, number = step
    command = _COMMANDS[kind].format(
        a=shlex.quote(f"./{path}"), b=shlex.quote(f"./{other}"), n=number, mode=number * 41 % 0o10000 & ~0o2000
    )
    # In a shell of its own: where a redirection fails, dash ends.
    return f"({command}) </dev/null 2>/dev/null || :"
