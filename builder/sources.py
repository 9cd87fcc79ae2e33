"""Git sources of build stages, from where this site says: git's own url.<base>.insteadOf.

A definition names a repository and a commit (arguments ``…_repository`` and ``…_commit``); images/source.py fetches that
commit inside the stage, and checks it. Which mirror stands for the repository is the host's git configuration. A mirror
that is a folder here cannot be seen from inside: it is lent as a bundle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from builder.chain import BUILD_MOUNT
from builder.errors import FetchError
from builder.process import ProcessError, run, which


def lend_repositories(arguments: Mapping[str, str], mount: Path) -> dict[str, str]:
    """Puts mirrors into ``mount``; returns the environment that has git inside go there. Errors: FetchError."""
    if which("git") is None:
        return {}
    instead: list[tuple[str, str]] = []
    for name, repository in sorted(arguments.items()):
        if not name.endswith("_repository") or not repository:
            continue
        place = run(["git", "ls-remote", "--get-url", repository]).stdout.strip()
        if (folder := _local(place)) is not None:
            place = _lend(folder, repository, mount)
        if place != repository:
            instead.append((f"url.{place}.insteadOf", repository))
    settings = {"GIT_CONFIG_COUNT": str(len(instead))} if instead else {}
    for number, (key, value) in enumerate(instead):
        settings |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return settings


def _local(place: str) -> Path | None:
    if place.startswith("file://"):
        return Path(unquote(urlsplit(place).path))
    return Path(place) if place.startswith("/") else None


def _lend(folder: Path, repository: str, mount: Path) -> str:
    name = hashlib.sha256(repository.encode()).hexdigest()[:12] + ".bundle"
    try:
        # Whose the mirror is does not matter: its objects are checked where they are used.
        run(["git", "-c", "safe.directory=*", "-C", folder, "bundle", "create", "--quiet", mount / name, "--all"])
    except ProcessError as error:
        raise FetchError(f"the mirror {folder} of {repository} cannot be read: {error.stderr.strip() or error}",
                         hint="git config --get-regexp 'url.*insteadof' says who named it") from error  # fmt: skip
    return f"/{BUILD_MOUNT}/{name}"
