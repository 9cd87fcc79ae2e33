"""Files: YAML read into frozen dataclasses, atomic writes, digests, sizes.

Errors in a YAML file name the file, the key and the nearest known key. A library for this exists, and importing it took
a third of the time of an invocation that has nothing to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from ekiben.core.checked import read_regular, shorten
from ekiben.core.errors import DefinitionError, EkibenError, UsageError, nearest
from ekiben.core.inner_path import AnyPath

Model = TypeVar("Model")

_MAX_DEPTH = 32  # levels of YAML
_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}

_UNFINISHED = ".part"  # suffix of a file that is being written
_LOCKED = f".locked{_UNFINISHED}"  # and was locked before it was named
_YOUNG = 1  # seconds
_FEW_INODES = 64  # a failed process may have removed its files meanwhile

_KINDS = {str: "a string", int: "a whole number", bool: "true or false", dict: "a mapping", tuple: "a list"}


def tree_paths(folder: Path) -> list[Path]:
    """Return all that is below a folder, sorted; links are not followed.

    Raises OSError for a folder that cannot be read.

    Path.rglob() and Path.glob() leave such a folder out.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

    walked = os.walk(folder, onerror=refuse)
    return sorted(Path(top, name) for top, folders, files in walked for name in (*folders, *files))


def make_folders(path: Path) -> None:
    """Make a folder with its parents, which its user alone may write, whatever the umask: code is read from there.

    Idempotent.

    Raises OSError.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(0o755, exist_ok=True)


def free_bytes(folder: AnyPath) -> int:
    """Return how many bytes an ordinary user may still write there. Raises OSError."""
    if not isinstance(folder, Path):
        return folder.free_bytes()
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def lacks_inodes(path: Path) -> bool:
    """Return whether the full file system of ``path`` has room for bytes, but not for more files."""
    folder = next((parent for parent in (path, *path.parents) if parent.is_dir()), Path("/"))
    with contextlib.suppress(OSError):
        stats = os.statvfs(folder)
        return stats.f_files > 0 and stats.f_favail < _FEW_INODES and stats.f_bavail * stats.f_frsize > 1 << 20
    return False


def reason_of(error: OSError, path: Path) -> str | None:
    """Return why ``path`` could not be written. A file system without inodes says that it has no space."""
    if error.errno == errno.ENOSPC and lacks_inodes(path):
        return "no inodes left on its file system (df -i)"
    return error.strerror


IF_NULL = "if_null"  # of a field's metadata: the problem with a key that has no value


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Read a YAML file as ``model``, a dataclass whose ``__post_init__`` may raise ValueError.

    Raises DefinitionError that names every problem.
    """
    try:
        data = parse_yaml(read_regular(path, follow=True))
    except OSError as error:
        raise DefinitionError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DefinitionError(f"{path}: {error}") from error
    problems: list[str] = []
    value = _read({} if data is None else data, model, "", problems)
    if problems:
        raise DefinitionError("\n".join(f"{path}: {problem}" for problem in problems))
    return cast(Model, value)


def read_source(path: Path, *, default: str | None = None, errors: str = "strict") -> str:
    """Return the text of a file that a user works on; ``default`` where there is none.

    Raises DefinitionError when it is missing without a default, no regular file, or not UTF-8.
    """
    try:
        return read_regular(path, follow=True).decode("utf-8", errors)
    except (OSError, ValueError) as error:
        if default is not None and isinstance(error, FileNotFoundError):
            return default
        raise DefinitionError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_yaml(data: bytes) -> Any:
    """Return the values of a YAML document.

    Raises ValueError for deep nesting, for a duplicate key, and for a number to the base of 60.
    """
    import yaml  # imported here: most of this module's users read none

    # CSafeLoader reads the same language some ten times faster, where libyaml is there.
    kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _refuse_depth(yaml.parse(data, Loader=kind))
        loader = kind(data)
        try:
            if (node := loader.get_single_node()) is None:
                return None
            _refuse_misread(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"is not YAML: {error}") from error


def _refuse_depth(events: Iterable[Any]) -> None:
    """Raise ValueError for nesting on which libyaml's composer, which calls itself, would end the process."""
    from yaml import CollectionEndEvent, CollectionStartEvent, MarkedYAMLError

    message, depth = f"is nested more than {_MAX_DEPTH} levels deep", 0
    try:
        for event in events:
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError(f"line {event.start_mark.line + 1}: {message}")
    except MarkedYAMLError as error:
        # Since PyYAML 6.0.4 the scanner, which reads ahead of the events, has a limit of its own.
        if error.problem == "exceeded maximum nesting depth" and error.problem_mark:
            raise ValueError(f"line {error.problem_mark.line + 1}: {message}") from error
        raise


def _refuse_misread(node: Any) -> None:
    """Raise ValueError for a duplicate key, of which YAML takes the last, and for 2:00:00, which YAML reads as 7200."""
    seen: set[int] = set()
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if node.tag in _NUMBERS and ":" in node.value:
            raise ValueError(
                f"line {node.start_mark.line + 1}: YAML reads {node.value} as a number to the base of 60; "
                f'put it in quotes: "{node.value}"'
            )
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        pairs = node.id == "mapping"
        names: dict[Any, int] = {}
        for item in node.value:
            name = (item[0].tag, item[0].value) if pairs and isinstance(item[0].value, str) else None
            if name and name in names:
                raise ValueError(
                    f"duplicate key '{name[1]}', in lines {names[name]} and {item[0].start_mark.line + 1}; remove one"
                )
            if name:
                names[name] = item[0].start_mark.line + 1
            nodes += item if pairs else [item]


def _read(value: Any, kind: Any, location: str, problems: list[str]) -> Any:
    """``value`` as ``kind``: a dataclass, str, int, bool, dict[str, …], tuple[…, ...] or … | None."""
    if get_origin(kind) is UnionType:
        return None if value is None else _read(value, get_args(kind)[0], location, problems)
    expected = dict if is_dataclass(kind) else get_origin(kind) or kind
    if type(value) is not (list if expected is tuple else expected):
        problems.append(f"{location or 'the file'}: should be {_KINDS[expected]} (found: {shorten(value)})")
        return None
    if expected is tuple:
        return tuple(_read(item, get_args(kind)[0], f"{location}.{at}", problems) for at, item in enumerate(value))
    return _read_mapping(cast(dict[Any, Any], value), kind, location, problems) if expected is dict else value


def _read_mapping(value: dict[Any, Any], kind: Any, location: str, problems: list[str]) -> Any:
    odd = [key for key in value if type(key) is not str]
    problems += [f"{location or 'the file'}: keys should be strings (found: {shorten(key)})" for key in odd]
    inside = {key: item for key, item in value.items() if type(key) is str}
    return (_read_fields if is_dataclass(kind) else _read_items)(inside, kind, location, problems)


def _read_items(value: dict[str, Any], kind: Any, location: str, problems: list[str]) -> dict[str, Any]:
    return {key: _read(item, get_args(kind)[1], _below(location, key), problems) for key, item in value.items()}


def _read_fields(value: dict[str, Any], kind: Any, location: str, problems: list[str]) -> Any:
    before = len(problems)
    types, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
    problems += [f"unknown key '{_below(location, key)}'." + nearest(key, known) for key in value if key not in known]
    problems += [
        f"key '{_below(location, name)}' is missing"
        for name, field in known.items()
        if name not in value and field.default is MISSING and field.default_factory is MISSING
    ]
    problems += [
        f"{_below(location, key)}: {known[key].metadata[IF_NULL]}"
        for key, item in value.items()
        if item is None and key in known and IF_NULL in known[key].metadata
    ]
    values = {
        key: _read(item, types[key], _below(location, key), problems) for key, item in value.items() if key in known
    }
    if len(problems) > before:
        return None
    try:
        return kind(**values)
    except ValueError as error:
        problems.append(f"{location}: {error}" if location else str(error))
        return None


def _below(location: str, key: str) -> str:
    return f"{location}.{key}" if location else key


@contextlib.contextmanager
def new_file(
    path: Path, *, mode: int = 0o644, obey_umask: bool = False, buffering: int = -1, temporary: Path | None = None
) -> Iterator[BinaryIO]:
    """Yield a file, open for writing and reading, that replaces ``path`` when the block ends without an
    exception.

    Readers of ``path`` see the old file or the new one, never a part. ``temporary``: its path until then, on the same
    file system; by default one next to ``path``.

    Raises OSError, also when ``path`` is there and is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    handle = lock = -1
    if temporary is None:
        _remove_abandoned(path)
        temporary, handle = _open_locked(path, mode)
    try:
        if handle < 0:
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        lock = os.dup(
            handle
        )  # keeps the lock when the file is closed: before the rename, others may think it abandoned
        with open(
            temporary, "w+b", buffering, opener=lambda *_: handle
        ) as stream:  # so that it has the path for its name
            if temporary.name.endswith(_UNFINISHED):
                with contextlib.suppress(OSError):  # a file system without locks: it is not removed
                    fcntl.flock(stream, fcntl.LOCK_EX)
            if not obey_umask:
                os.fchmod(stream.fileno(), mode)
            yield stream
        os.rename(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if lock >= 0:
            os.close(lock)


def _open_locked(path: Path, mode: int) -> tuple[Path, int]:
    """Return a name beside ``path``, and the handle of a new file of this name that was locked before it had one.

    The handle is -1, and no file is there, where the file system makes none without a name (NFS, for one).
    """
    name, handle = f".{path.name}.{secrets.token_hex(4)}", -1
    locked = path.with_name(f"{name}{_LOCKED}")
    try:
        handle = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, mode)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.link(
            f"/proc/self/fd/{handle}", locked, src_dir_fd=handle
        )  # with one, Python follows the link (AT_SYMLINK_FOLLOW)
    except OSError:
        if handle >= 0:
            os.close(handle)
        return path.with_name(f"{name}{_UNFINISHED}"), -1
    return locked, handle


def temporary_name(path: Path, word: str) -> Path:
    """Return a name beside ``path`` for a file that this process has locked: the next writer of ``path`` removes it
    when this one was killed."""
    return path.with_name(f".{path.name}.{word}{_LOCKED}")


def abandoned_files(path: Path) -> list[Path]:
    """Return what killed processes left of ``path``: its writer holds a lock on each such file.

    One just made may have none yet, unless its name says that it had one from the beginning.
    """
    abandoned = []
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{_UNFINISHED}"):
        with contextlib.suppress(OSError), open(left, "rb", opener=_open_unfollowed) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if left.name.endswith(_LOCKED) or time.time() - os.fstat(stream.fileno()).st_ctime > _YOUNG:
                abandoned.append(left)
    return abandoned


def _remove_abandoned(path: Path) -> None:
    for left in abandoned_files(path):
        with contextlib.suppress(OSError):
            left.unlink()


def open_existing(path: Path) -> BinaryIO:
    """Open an existing file for reading and writing, links not followed. Raises OSError, also where it is no file."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return open(handle, "r+b")
    os.close(handle)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _open_unfollowed(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def atomic_write(path: Path, content: str | bytes | Iterable[bytes], *, error: type[EkibenError] = UsageError) -> None:
    """Write a file that is there only when it is complete; text becomes UTF-8.

    Raises ``error`` when it cannot be written.
    """
    if isinstance(content, str | bytes):
        content = [content.encode() if isinstance(content, str) else content]
    try:
        with new_file(path) as stream:
            stream.writelines(content)
    except OSError as failure:
        raise error(f"{path} cannot be written: {reason_of(failure, path)}") from failure


def open_regular(path: AnyPath, buffering: int = -1) -> BinaryIO:
    """Open a file for reading: one that a user names, links followed, or one below a folder of other users, which is
    none.

    Raises OSError, also for a pipe, which would block, a device, and a file of the kernel, which may do so, too:
    /proc/kmsg.
    """
    if not isinstance(path, Path):
        return path.open_file(buffering)
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(open(path, "rb", buffering, opener=_open_unblocked))
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or (status.st_size == 0 and _has_content(stream.fileno())):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        stack.pop_all()
        return stream


def _has_content(handle: int) -> bool:
    """Return whether a file of no size has bytes, now or later, as the kernel's have."""
    try:
        return os.pread(handle, 1, 0) != b""
    except OSError:
        return True


def _open_unblocked(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


def digest_of(content: bytes | AnyPath | BinaryIO) -> str:
    """Return the SHA-256 of bytes, of a file, or of the rest of an open file: ``sha256:`` and 64 hex digits.

    Raises OSError.
    """
    if isinstance(content, bytes):
        return f"sha256:{hashlib.sha256(content).hexdigest()}"
    with open_regular(content) if isinstance(content, AnyPath) else contextlib.nullcontext(content) as stream:
        return f"sha256:{hashlib.file_digest(cast(Any, stream), 'sha256').hexdigest()}"


def format_size(count: float) -> str:
    """Return a number of bytes as text: ``"999 B"``, ``"1.5 kB"``, ``"2.25 GB"``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def remove_tree(folder: Path) -> None:
    """Remove a folder as far as possible, but not if a file system is mounted in it: its content is not ours."""
    with contextlib.suppress(OSError):
        mounts = [
            line.split(" ")[4]
            for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ]
        if any(mount.startswith(f"{folder.resolve()}/") for mount in mounts):
            return
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
