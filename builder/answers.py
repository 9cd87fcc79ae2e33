"""The answer of a `build.py image` that found everything there, given again while all it rests on is as it was.

An answer rests on its question (the words, the environment, the folder), on files (the house's and the recipe's folders, the
settings, the image in the store, the files that were made, the programs on PATH) and on what the Docker daemon has. Files
are compared as git and ninja compare them, by inode, size, mode and the two times, of which nobody can set the one of the last change;
nothing of them is read. Where anything differs, or cannot be told, the question is answered from the start.

This module imports little, not even pathlib: it is all that such an invocation is made of.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

FOLDER = "answers"  # of a store
KEPT = 32  # answers in a store
_MOST = 4000  # files below the folders that are looked at; a recipe beside a data set is resolved each time
_SETTLED = 1.0  # seconds: what changed within them before the question may have changed after it was read
_NOISE = ("_", "OLDPWD", "SHLVL")
_BEGAN = time.time()


def default_store() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _absolute(os.environ.get("EKIBEN_STORE") or os.path.join(cache, "ekiben", "store"))


def answer(words: Sequence[str]) -> bool:
    """Say again what was said to ``words``; False where that has to be found out. It may be for `build.py image` only."""
    if "image" not in words or {"-v", "--verbose"} & set(words):
        return False
    try:
        with open(os.path.join(_store(words), FOLDER, _name(words)), encoding="utf-8") as file:
            record = json.load(file)
        if _look(record["folders"], record["files"]) != record["seen"] or not _daemon_is(record["daemon"]):
            return False
        told, said = str(record["told"]), str(record["said"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    print(told, file=sys.stderr, flush=True)
    print(said, flush=True)
    return True


def record(
    *, folders: Iterable[str], files: Iterable[str], daemon: list[str] | bool | None, told: str, said: str
) -> tuple[str, bytes] | None:
    """What was said, ``told`` on stderr, for when this process's command is given again: a file's name in FOLDER, and its content.

    ``folders`` and ``files`` are all it rests on; a file that is not there may come. ``daemon``: name and id of an image it has,
    or whether it answers, or None where nobody asked it. None where what it rests on is new, or cannot be told.
    """
    trees, single = sorted(set(folders)), sorted(set(files))
    try:
        seen = _look(trees, single)
    except (OSError, ValueError):
        return None
    if max((item[-1] for item in seen.values() if item), default=0) > (_BEGAN - _SETTLED) * 1e9:
        return None
    about = {"folders": trees, "files": single, "seen": seen, "daemon": daemon, "told": told, "said": said}
    return _name(sys.argv[1:]), json.dumps(about).encode()


def _store(words: Sequence[str]) -> str:
    """The store that these words ask for; builder.cli.group has the option."""
    for at, word in enumerate(words[: words.index("image")]):
        if word.startswith("--store="):
            return _absolute(word.removeprefix("--store="))
        if word == "--store":
            return _absolute(words[at + 1])
    return default_store()


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _name(words: Sequence[str]) -> str:
    """The file of a question: named by a hash, for an environment has secrets."""
    import hashlib

    environment = sorted(item for item in os.environ.items() if item[0] not in _NOISE)
    here = os.path.realpath(__file__)  # a link that led to another checkout before is another question
    question = [sys.version, os.uname().machine, os.geteuid(), os.getcwd(), here, list(words), environment]
    return hashlib.sha256(json.dumps(question).encode()).hexdigest() + ".json"


def _look(folders: Sequence[str], files: Sequence[str]) -> dict[str, list[int]]:
    """Each file as it is, its last time last; [] for one that is not there, or not for us. Errors: ValueError for folders whose files cannot be told."""
    seen = {path: _identity(path) for path in files}
    for folder in folders:
        for path in _below(folder):
            seen[path] = _identity(path)
            if len(seen) > _MOST:
                raise ValueError("too many files")
    return seen


def _identity(path: str) -> list[int]:
    try:
        stat = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # on PATH there may be another user's folders
        return []
    return [stat.st_dev, stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _below(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _below(entry.path)
            elif entry.is_symlink() and entry.is_dir():
                raise ValueError("what is behind a link to a folder is not looked at")
            else:
                yield entry.path


def _daemon_is(expected: list[str] | bool | None) -> bool:
    if expected is None:
        return True
    from builder import dockersock

    if isinstance(expected, bool):
        return dockersock.place() is not None and dockersock.answers() is expected
    name, image_id = expected
    return dockersock.image_id(name) == image_id
