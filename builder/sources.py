"""Git sources of build stages, from where this site says: git's own url.<base>.insteadOf.

A definition names a repository and a commit (arguments ``…_repository`` and ``…_commit``); images/source.py fetches that
commit inside the stage, and checks it. Which mirror stands for the repository is the host's git configuration. A mirror
that is a folder here cannot be seen from inside: it is lent as a bundle.

A bundle (builder.bundle) takes the commit along in a bare repository, its submodules in others, and git inside goes there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from builder.chain import BUILD_MOUNT
from builder.errors import FetchError
from builder.process import ProcessError, run, which

KEPT = "repositories.json"  # beside the repositories of a bundle: which is which


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
    return _git_settings(instead)


def _git_settings(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    settings = {"GIT_CONFIG_COUNT": str(len(pairs))} if pairs else {}
    for number, (key, value) in enumerate(pairs):
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


def pinned_repositories(arguments: Mapping[str, str]) -> list[tuple[str, str]]:
    """The git sources among a stage's arguments: repository and commit."""
    names = [name.removesuffix("_repository") for name in sorted(arguments) if name.endswith("_repository")]
    pairs = [(arguments[f"{name}_repository"], arguments.get(f"{name}_commit", "")) for name in names]
    return [pair for pair in pairs if all(pair)]


def keep_repository(repository: str, commit: str, folder: Path) -> dict[str, str]:
    """The commit, and those of its submodules, as bare repositories in ``folder``; which is which comes back.

    git names every object by its content: nothing but what the commit says can be kept. Errors: FetchError.
    """
    if which("git") is None:
        raise FetchError(f"git is not installed here, and {repository} is wanted", hint="install git")
    name = hashlib.sha256(repository.encode()).hexdigest()[:12] + ".git"
    git = ["git", "-c", "safe.directory=*", "-C", str(folder / name)]
    try:
        if not (folder / name).exists():
            run(["git", "init", "--quiet", "--bare", "--template=", folder / name])
            run([*git, "config", "uploadpack.allowAnySHA1InWant", "true"])  # source.py asks for the commit by its name
        if run([*git, "fetch", "--quiet", "--depth", "1", repository, commit], check=False).returncode:
            run([*git, "fetch", "--quiet", repository, "+refs/*:refs/source/*"])  # as images/source.py does
        run([*git, "cat-file", "-e", commit + "^{commit}"])
        run([*git, "update-ref", f"refs/heads/of-{commit}", commit])
        run([*git, "symbolic-ref", "HEAD", f"refs/heads/of-{commit}"])
        (folder / name / "FETCH_HEAD").unlink(missing_ok=True)
        kept = {repository: name}
        for place, inner in _submodules(git, commit):
            kept |= keep_repository(place, inner, folder)
    except ProcessError as error:
        raise FetchError(f"{repository}: the commit {commit} could not be fetched: {error.stderr.strip() or error}",
                         hint="a mirror is named with git's own url.<base>.insteadOf") from error  # fmt: skip
    return kept


def _submodules(git: Sequence[str], commit: str) -> list[tuple[str, str]]:
    """Repository and commit of each."""
    said = run(
        [*git, "config", "--blob", f"{commit}:.gitmodules", "--get-regexp", r"^submodule\..*\.(path|url)$"], check=False
    )
    values = dict(line.split(" ", 1) for line in said.stdout.splitlines())
    found = []
    for key, path in values.items():
        if key.endswith(".path") and (place := values.get(key.removesuffix(".path") + ".url")):
            entry = run([*git, "ls-tree", commit, "--", path]).stdout.split()
            found += [(place, entry[2])] if entry[1:2] == ["commit"] else []
    return found


def write_kept(kept: Mapping[str, str], folder: Path) -> None:
    (folder / KEPT).write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def lend_kept(folder: Path, inside: str) -> dict[str, str]:
    """The environment that has git inside use what is kept in ``folder``, which is ``inside`` there."""
    if not (folder / KEPT).is_file():
        return {}
    kept = json.loads((folder / KEPT).read_text())
    pairs = [(f"url.file://{inside}/{name}.insteadOf", repository) for repository, name in sorted(kept.items())]
    # git takes submodules from no folder, and nothing from another user's, unless it is told to.
    return _git_settings([*pairs, ("protocol.file.allow", "always"), ("safe.directory", "*")])
