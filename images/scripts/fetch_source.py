"""Unpack a pinned source: source.py LOCK FOLDER, or source.py REPOSITORY COMMIT FOLDER

LOCK holds one name==version with its hash, for a source distribution of the package index; COMMIT is a git commit's
full name. A source that is there already is left alone, with all that was compiled of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")


class Refused(Exception):
    """What is there is not what is pinned."""


def fetch_archive(lock: Path, folder: Path) -> None:
    """The index's source distribution with the locked hash; pip checks it."""
    exactly = ["--no-deps", "--require-hashes", "--no-binary", ":all:", "--no-build-isolation", "--progress-bar", "off"]
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", *exactly, "--dest", place, "--requirement", str(lock)], check=True
        )
        (archive,) = Path(place).iterdir()
        shutil.unpack_archive(archive, Path(place, "unpacked"))
        (unpacked,) = Path(place, "unpacked").iterdir()
        unpacked.rename(folder)


def fetch_commit(repository: str, commit: str, folder: Path) -> None:
    """The tree of one commit, with its submodules. A mirror is git's own matter: url.<base>.insteadOf."""
    if not COMMIT.fullmatch(commit):
        raise Refused(
            f"{repository}: '{commit}' is no commit's full name (40 hexadecimal digits): a tag or branch can move"
        )
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        work = Path(place, "work")
        git = ["git", "-C", str(work), "-c", "advice.detachedHead=false"]
        subprocess.run(["git", "init", "--quiet", str(work)], check=True)
        fetched = subprocess.run([*git, "fetch", "--quiet", "--depth", "1", repository, commit], check=False)
        if fetched.returncode:  # a server may not hand out a commit by its name: then all it has
            subprocess.run([*git, "fetch", "--quiet", repository, "+refs/*:refs/remotes/source/*"], check=True)
        if subprocess.run([*git, "cat-file", "-e", commit + "^{commit}"], check=False).returncode:
            raise Refused(
                f"{repository} does not have the commit {commit}; is the mirror older, or another repository?"
            )
        subprocess.run([*git, "checkout", "--quiet", commit], check=True)
        subprocess.run([*git, "submodule", "update", "--quiet", "--init", "--recursive", "--depth", "1"], check=True)
        check_commit(work, commit)
        shutil.rmtree(work / ".git")
        work.rename(folder)


def check_commit(work: Path, commit: str) -> None:
    """Every object's name is its content's hash: what was checked out is compared with what the commit names."""
    git = ["git", "-C", str(work)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([*git, "fsck", "--no-dangling", "--no-progress"], check=True, capture_output=True)
    changed = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True).stdout
    if head != commit or changed:
        raise Refused(
            f"checked out is {head}, not {commit}"
            if head != commit
            else f"{commit} is not what was checked out:\n{changed}"
        )


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3) or (len(arguments) == 2 and not Path(arguments[0]).is_file()):
        print("usage: source.py LOCK FOLDER, or source.py REPOSITORY COMMIT FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[-1])
    if folder.exists():
        return 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)
    try:
        if len(arguments) == 2:
            fetch_archive(Path(arguments[0]), folder)
        else:
            fetch_commit(arguments[0], arguments[1], folder)
    except Refused as error:
        print(f"source.py: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"source.py: {' '.join(map(str, error.cmd[:4]))} … ended with {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
