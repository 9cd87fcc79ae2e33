"""Git sources of build stages, from the site's mirrors: git's own url.<base>.insteadOf.

A definition names a repository and a commit, and the submodules that it needs, in arguments: ``…_repository``,
``…_commit``, ``…_submodules``. The host fetches the commit into a bare repository that is mounted for the stage, where
images/scripts/fetch_source.py takes it from and checks it. So a mirror may be all that the host's git can reach: a
server, a folder (also of a shallow clone), or the file of a `git bundle`.

A bundle (ekiben.bundle) takes the same repositories along.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.checked import Fields, is_basename, parse_json, read_regular
from ekiben.core.errors import FetchError, StoreError
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import run, which
from ekiben.spec.sources import is_subdirectory

COMMIT = re.compile(r"[0-9a-f]{40}")
# A URL, a path, or ssh's HOST:PATH. Git might read anything else as an option, a remote of the current
# folder, or a helper to start.
_REPOSITORY = re.compile(
    r"(https?|ssh|git|file)://(?!-)[^\x00-\x1f]+|/[^\x00-\x1f]+|\w[\w.-]*(@\w[\w.-]*)?:(?!:|//)[^\x00-\x1f]+"
)
_MAX_DEPTH = 8  # of submodules in submodules
_LOCAL = ("/", "file://")
KEPT = "repositories.json"  # in a bundle: maps each repository to its folder


@dataclass(frozen=True, slots=True)
class GitSource:
    """A pinned commit. ``submodules`` are paths; others of the commit's submodules are not fetched."""

    repository: str
    commit: str
    submodules: tuple[str, ...] = ()


def git_sources(arguments: Mapping[str, str]) -> list[GitSource]:
    """Return the git sources among a stage's arguments.

    Raises FetchError where one has a repository alone, or a commit alone.
    """
    names = [name.removesuffix("_repository") for name in sorted(arguments) if name.endswith("_repository")]
    sources = []
    for name in names:
        values = {field: arguments.get(f"{name}_{field}", "") for field in ("repository", "commit", "submodules")}
        missing = [f"{name}_{field}" for field in ("repository", "commit") if not values[field]]
        if len(missing) == 2:  # a source that is not selected
            continue
        if missing:
            raise FetchError(
                f"no value of {missing[0]} is set, so the source of {name} cannot be fetched",
                hint=f"--build-arg {missing[0]}=…",
            )
        sources.append(GitSource(values["repository"], values["commit"], tuple(values["submodules"].split())))
    return sources


def mount_repositories(arguments: Mapping[str, str], mount: Path) -> dict[str, str]:
    """Fetch a stage's git sources into ``mount``; return the environment that has git inside go there.

    Raises FetchError.
    """
    if which("git") is None or not (sources := git_sources(arguments)):
        return {}
    folder = mount / "repositories"
    folder.mkdir()
    kept: dict[str, str] = {}
    for source in sources:
        kept |= keep_repository(source, folder)
    write_kept(kept, folder)
    return mount_kept(folder, f"/{BUILD_MOUNT}/{folder.name}")


def _git_settings(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    settings = {"GIT_CONFIG_COUNT": str(len(pairs))} if pairs else {}
    for number, (key, value) in enumerate(pairs):
        settings |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return settings


def keep_repository(source: GitSource, folder: Path) -> dict[str, str]:
    """Fetch the commit, and those of the named submodules, into bare repositories in ``folder``; return repository →
    folder name.

    git names every object by its content: nothing but what the commit says can be kept. Raises FetchError when it
    cannot be fetched.
    """
    if which("git") is None:
        raise FetchError(f"git is not installed here, and {source.repository} is needed", hint="install git")
    if not _REPOSITORY.fullmatch(source.repository):
        raise FetchError(
            f"{source.repository!r:.200} is not a git repository's URL: https://…, ssh://…, git://…, file://…, a path "
            "that begins with /, or HOST:PATH"
        )
    if not COMMIT.fullmatch(source.commit):
        raise FetchError(
            f"{source.repository}: '{source.commit}' is not a commit's full name (40 hexadecimal digits); a tag or "
            "branch can move"
        )
    name = hashlib.sha256(source.repository.encode()).hexdigest()[:12] + ".git"
    git = ["git", "-C", str(folder / name)]
    if not (folder / name).exists():
        run(["git", "init", "--quiet", "--bare", "--template=", folder / name])
        run([*git, "config", "uploadpack.allowAnySHA1InWant", "true"])  # fetch_source asks for a commit by name
    _fetch(git, source)
    run([*git, "update-ref", f"refs/heads/of-{source.commit}", source.commit])
    run([*git, "symbolic-ref", "HEAD", f"refs/heads/of-{source.commit}"])
    (folder / name / "FETCH_HEAD").unlink(missing_ok=True)
    kept = {source.repository: name}
    submodules = {path: GitSource(url, commit) for path, url, commit in _submodules(git, source.commit)}
    for path in source.submodules:
        if path not in submodules:
            raise FetchError(
                f"{source.repository}: the commit {source.commit} has no submodule {path}; it has: "
                + (", ".join(submodules) or "none")
            )
        inner = submodules[path]
        _refuse_local(inner, path, source)
        kept |= keep_repository(inner, folder)
    return kept


def find_commit(repository: str, reference: str) -> str:
    """Return the commit that a branch, a tag or HEAD of a repository means now; a commit's full name as it is.

    Raises FetchError.
    """
    if COMMIT.fullmatch(reference):
        return reference
    if which("git") is None:
        raise FetchError(f"git is not installed here, and {repository} is needed", hint="install git")
    if not _REPOSITORY.fullmatch(repository):
        raise FetchError(f"{repository!r:.200} is not a git repository's URL")
    with tempfile.TemporaryDirectory(prefix="ekiben-git-") as folder:  # not the settings of a repository around
        asked = [f"refs/heads/{reference}", f"refs/tags/{reference}^{{}}", f"refs/tags/{reference}", reference]
        command = ["git", "-C", folder, "ls-remote", "--quiet", "--", repository, *asked]
        done = run(command, check=False, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})
    if done.returncode:
        raise FetchError(
            f"{repository} cannot be read: {done.stderr.strip()}",
            hint="git gets credentials from its credential helper or ~/.netrc: check it with `git ls-remote`",
        )
    commits = {name: value for value, _, name in (line.partition("\t") for line in done.stdout.splitlines())}
    commit = next((commits[name] for name in asked if name in commits), "")
    if not COMMIT.fullmatch(commit):
        raise FetchError(f"{repository} has no branch and no tag '{reference}'; name a commit by all its 40 digits")
    return commit


def export_commit(source: GitSource, target: Path) -> None:
    """Write the files of a commit, and of its submodules, as a tar with one folder. Raises FetchError."""
    with tempfile.TemporaryDirectory(prefix="ekiben-git-", dir=target.parent) as folder:
        out = Path(folder) / "source.tar"
        tars = list(_export(source, Path(folder), "source/"))
        if len(tars) == 1:
            tars[0].rename(out)
        else:
            _join_tars(tars, out)
        out.rename(target)


def _export(source: GitSource, folder: Path, prefix: str, depth: int = 0) -> Iterator[Path]:
    """Yield a tar of the commit's files below ``prefix``, and of its submodules' in turn. Raises FetchError."""
    if depth > _MAX_DEPTH:
        raise FetchError(f"{source.repository}: has submodules in submodules, more than {_MAX_DEPTH} deep")
    kept = keep_repository(GitSource(source.repository, source.commit), folder)
    repository = folder / kept[source.repository]
    out = folder / f"{hashlib.sha256(prefix.encode()).hexdigest()[:12]}.tar"
    options = ["--format=tar", f"--prefix={prefix}", f"--output={out}"]
    run(["git", "-C", repository, "-c", "tar.umask=0022", "archive", *options, source.commit])
    yield out
    for path, url, commit in _submodules(["git", "-C", str(repository)], source.commit):
        if not is_subdirectory(path):
            raise FetchError(f"{source.repository}: its submodule {path!r:.200} lies outside the repository's folder")
        inner = GitSource(_submodule_url(url, source.repository), commit)
        _refuse_local(inner, path, source)
        yield from _export(inner, folder, f"{prefix}{path}/", depth + 1)


def _submodule_url(url: str, repository: str) -> str:
    """Return a submodule's URL; one that begins with ./ or ../ is relative to the repository's, as git has it."""
    if not url.startswith(("./", "../")):
        return url
    base = repository.rstrip("/")
    for name in url.split("/"):
        if name == "..":
            base = re.sub(r"[/:][^/:]*$", "", base)
        elif name not in ("", "."):
            base += f"/{name}"
    return base


def _refuse_local(inner: GitSource, path: str, source: GitSource) -> None:
    if inner.repository.startswith(_LOCAL) and not source.repository.startswith(_LOCAL):
        raise FetchError(
            f"{source.repository}: its submodule {path} is {inner.repository}, on this machine: not fetched"
        )


def _join_tars(tars: Sequence[Path], target: Path) -> None:
    """Write the members of several tars as one; none of them is unpacked."""
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as joined:
        for path in tars:
            with tarfile.open(path, "r:") as tar:
                for entry in tar:
                    joined.addfile(entry, tar.extractfile(entry) if entry.isreg() else None)


def _fetch(git: Sequence[str], source: GitSource) -> None:
    """Fetch one commit, from the mirror that git's configuration names. Raises FetchError."""
    url = run(
        [*git, "ls-remote", "--get-url", "--", source.repository]
    ).stdout.strip()  # not by the working folder's .git
    where = source.repository if url == source.repository else f"{source.repository} (from {url})"
    # The owner of a mirror on this machine does not matter: git checks objects by their names.
    local = ["--upload-pack", "git -c safe.directory=* upload-pack"] if url.startswith(_LOCAL) else []
    done = run([*git, "fetch", "--quiet", *local, "--depth", "1", "--", source.repository, source.commit], check=False)
    if done.returncode:  # a server may refuse to send a commit by its name, a file has no depth: then fetch all
        everything = [*local, "--update-shallow", "--", source.repository, "+refs/*:refs/source/*"]
        done = run([*git, "fetch", "--quiet", *everything], check=False)
        if done.returncode:
            raise FetchError(
                f"{where} cannot be read: {done.stderr.strip()}",
                hint="a mirror is named with git's own url.<base>.insteadOf",
            )
    if run([*git, "cat-file", "-e", source.commit + "^{commit}"], check=False).returncode:
        raise FetchError(
            f"{where} does not have the commit {source.commit}",
            hint="is the mirror older, or of another repository? `git config --get-regexp insteadof` says who named it",
        )


def _submodules(git: Sequence[str], commit: str) -> list[tuple[str, str, str]]:
    """Return the path, repository and commit of each git source."""
    settings = run(
        [*git, "config", "--blob", f"{commit}:.gitmodules", "--get-regexp", r"^submodule\..*\.(path|url)$"], check=False
    )
    values = dict(line.split(" ", 1) for line in settings.stdout.splitlines())
    submodules = []
    for key, path in values.items():
        if key.endswith(".path") and (url := values.get(key.removesuffix(".path") + ".url")):
            entry = run([*git, "ls-tree", commit, "--", path]).stdout.split()
            submodules += [(path, url, entry[2])] if entry[1:2] == ["commit"] else []
    return submodules


def write_kept(kept: Mapping[str, str], folder: Path) -> None:
    """Write which repositories are kept in ``folder``, for mount_kept()."""
    (folder / KEPT).write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def mount_kept(folder: Path, inside: str) -> dict[str, str]:
    """Return the environment with which git uses the repositories in ``folder``, which is mounted at ``inside``."""
    if not (folder / KEPT).is_file():
        return {}
    try:
        kept = Fields.of({"": parse_json(read_regular(folder / KEPT))}).texts("")
    except (OSError, ValueError) as error:
        raise StoreError(f"{KEPT} in the bundle does not name its repositories: it {error}") from error
    if wrong := next((name for name in kept.values() if not is_basename(name)), None):
        raise StoreError(f"{KEPT} in the bundle names a repository {wrong!r:.80}, which is not a folder beside it")
    pairs = [(f"url.file://{inside}/{name}.insteadOf", repository) for repository, name in sorted(kept.items())]
    # Without these settings git refuses submodules from folders, and repositories of other users.
    return _git_settings([*pairs, ("protocol.file.allow", "always"), ("safe.directory", "*")])
