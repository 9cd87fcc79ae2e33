"""The `docker run` line that is printed: what a task writes stays in the caller's folder, and is the caller's."""

from __future__ import annotations

_HERE = '-v "$PWD:$PWD" -w "$PWD" --user "$(id -u):$(id -g)"'


def docker_line(tag: str, task: str, *, gpu: bool = True) -> str:
    """Return the line to paste into a shell; ``tag`` and ``task`` are quoted for one already."""
    return f"docker run --rm{' --gpus all' if gpu else ''} {_HERE} {tag.removesuffix(':latest')} {task}".rstrip()
