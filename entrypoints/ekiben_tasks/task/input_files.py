"""Read files that this process did not write: regular ones only, with limits of size, depth and digits.

A pipe would block, a link to /dev/zero would never end, and a sparse file would fill the memory.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ekiben_tasks.task.errors import TaskError

MAX_SMALL = 16 << 20  # bytes of a record or a configuration
MAX_JSON = 4 << 30  # bytes of a JSON file of data, which is parsed as a whole
MAX_LINE = 256 << 20  # bytes of one line of a JSONL file, which may be of any size
MAX_MODEL_JSON = 1 << 30  # bytes of a JSON file of a model, which its libraries parse as a whole
COMPRESSED = (".gz", ".zst")  # texts that are decompressed while they are read
MAX_DEPTH = 100  # maximum nesting of values
MAX_DIGITS = 300  # maximum digits of an integer: it still fits a float
_END = object()


def read_text(file: Path, advice: str, *, max_size: int = MAX_SMALL, pipe: bool = False) -> str:
    """Return the text of ``file``, without a byte order mark.

    advice: ends the error's sentence: what the user can do. pipe: a pipe is read, too, if a process writes to it.

    Raises:
        TaskError: it is missing, no regular file, too large, or not UTF-8.
    """
    with _name_problem(file, advice), _open(file, max_size, pipe=pipe) as raw, _decompress(file, raw) as stream:
        return decode(_read_all(stream, max_size))


def read_json(file: Path, advice: str, *, max_size: int = MAX_SMALL) -> Any:
    """Return the JSON value in ``file``.

    Raises:
        TaskError: as read_text(), or it is not JSON, nested too deep, or has an integer with too many digits.
    """
    text = read_text(file, advice, max_size=max_size)
    with _name_problem(file, advice):
        return parse_json(text)


def read_object(file: Path, advice: str) -> dict[str, Any]:
    """Return the JSON object in ``file``.

    Raises:
        TaskError: as read_json(), or it holds another value.
    """
    value = read_json(file, advice)
    with _name_problem(file, advice):
        return as_object(value)


def read_lines(file: Path, advice: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, content with its end) of each line of ``file``, however large the file is.

    Raises:
        TaskError: it is missing, no regular file, or has a line above MAX_LINE.
    """
    with _name_problem(file, advice), _open(file) as raw, _decompress(file, raw) as stream:
        for number in itertools.count(1):
            line = stream.readline(MAX_LINE + 1)
            if len(line) > MAX_LINE:
                raise ValueError(f"line {number} has more than {_format_size(MAX_LINE)}")
            if not line:
                return
            yield number, line


def check_regular(file: Path, advice: str, *, max_size: int | None = None) -> None:
    """Check that ``file`` is a regular file, or a link to one, before a library opens it.

    Raises:
        TaskError: it is not, or has more than ``max_size`` bytes.
    """
    with _name_problem(file, advice), _open(file, max_size):
        pass


def check_model_folder(folder: Path) -> None:
    """Check the files of a model or adapter before its libraries open them.

    Raises:
        TaskError: one is a pipe or a device, or a JSON file is too large.
    """
    files: list[tuple[Path, os.stat_result]] = []
    with contextlib.suppress(OSError):  # a folder that cannot be listed may still be a model
        for file in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):  # a dangling link
                files.append((file, file.stat()))
    for file, status in files:
        if not stat.S_ISDIR(status.st_mode):
            with _name_problem(file, "copy or download the model again"):
                _check(status, MAX_MODEL_JSON if file.suffix == ".json" else None)


def decode(content: bytes) -> str:
    """Return UTF-8 as text, without a byte order mark. Raises ValueError with the reason if it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError with the reason if it is not JSON, or above the limits."""
    if not text.strip():
        raise ValueError("is empty")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if "\n" in text.strip() else ""
        hint = "; one object per line is JSONL: name the file .jsonl" if error.msg == "Extra data" and line else ""
        raise ValueError(f"is not JSON: {error.msg} at {line}column {error.colno}{hint}") from None
    except RecursionError:
        raise ValueError(f"is nested too deep (more than {MAX_DEPTH} levels)") from None
    except ValueError:  # Python converts no integer above 4,300 digits
        raise ValueError(f"has an integer of more than {MAX_DIGITS} digits") from None
    check_limits(value)
    if "\\ud" in text or "\\uD" in text:  # half of a surrogate pair, unless the other half follows
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise ValueError(f"has half a character ({half}): its text was cut, or written wrongly") from None
    return value


def as_object(value: Any) -> dict[str, Any]:
    """Return ``value``. Raises ValueError if it is not a JSON object."""
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def check_limits(value: Any, max_values: int | None = None) -> None:
    """Raise ValueError if ``value`` is nested too deep, or has an integer with too many digits.

    max_values: in all, each counted as often as an alias of YAML repeats it; None: any number.
    """
    open_values, count = [iter([value])], 0
    while open_values:
        item = next(open_values[-1], _END)
        count += 1
        if item is _END:
            open_values.pop()
        elif max_values is not None and count > max_values:
            raise ValueError(f"has more than {max_values:,} values")
        elif isinstance(item, (dict, list)):
            if len(open_values) > MAX_DEPTH:
                raise ValueError(f"is nested too deep (more than {MAX_DEPTH} levels)")
            open_values.append(itertools.chain(item, item.values()) if isinstance(item, dict) else iter(item))
        elif isinstance(item, int) and abs(item) >= 10**MAX_DIGITS:
            raise ValueError(f"has an integer of more than {MAX_DIGITS} digits")


def _open(file: Path, max_size: int | None = None, *, pipe: bool = False) -> BinaryIO:
    """Open ``file`` for reading. Raises OSError, or ValueError with the reason."""
    # Without O_NONBLOCK, opening a pipe waits until a process writes to it.
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not (pipe and stat.S_ISFIFO(status.st_mode)):
            _check(status, max_size)
        os.set_blocking(handle, True)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


@contextlib.contextmanager
def _decompress(file: Path, stream: BinaryIO) -> Iterator[BinaryIO]:
    """Yield the content of ``stream``, decompressed if the name of ``file`` says so. Raises ValueError if it is cut."""
    if file.suffix not in COMPRESSED:
        yield stream
        return
    try:
        if file.suffix == ".gz":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream))
        else:
            import pyarrow  # imported here: half a second of import that most runs do not need

            yield cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(stream, "zstd")))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"is not a complete {file.suffix} file: {error}") from None


def _read_all(stream: BinaryIO, max_size: int) -> bytes:
    """Return the rest of ``stream``, which may have grown since the file was opened."""
    blocks, size = [], 0
    while block := stream.read(1 << 20):  # read(max_size) would allocate all of it in advance
        size += len(block)
        if size > max_size:
            raise ValueError(f"has more than {_format_size(max_size)}")
        blocks.append(block)
    return b"".join(blocks)


def _check(status: os.stat_result, max_size: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise ValueError(f"is {kinds.get(stat.S_IFMT(status.st_mode), 'a device')}, not a regular file")
    if max_size is not None and status.st_size > max_size:
        raise ValueError(f"has {_format_size(status.st_size)}, more than {_format_size(max_size)}")


def _format_size(size: int) -> str:
    return f"{size >> 30:,} GiB" if size >= 1 << 30 else f"{size >> 20:,} MiB"


@contextlib.contextmanager
def _name_problem(file: Path, advice: str) -> Iterator[None]:
    """Raise TaskError with one sentence: the file, the reason, and what to do."""
    try:
        yield
    except FileNotFoundError:
        reason = "no such file"
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        reason = str(error)
    else:
        return
    raise TaskError(f"{file}: {reason}; {advice}")
