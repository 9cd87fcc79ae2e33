"""Compute the SHA-256 of a local model's files while the run works: they have no commit, as those of the hub have."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

from ekiben_tasks.task.command import print_once

THREADS = 4  # hashing releases the GIL; more threads would slow the run
_PRINTED = 1 << 30  # bytes from which on it is printed
_BLOCK = 1 << 22
# Weights in other formats, which are not loaded if there are safetensors.
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".tflite"}
_Key = tuple[str, int, int]  # path, bytes, time of the last change in ns
_DIGESTS: dict[_Key, str] = {}  # of this process: a benchmark trains the same model ten times


class ModelChecksum:
    """Compute the checksums of a model's folder in the background, the largest files first.

    folder: None: there is none, or none is to be computed. known: ``files`` of an earlier record() of this folder; a
    file with the same size and time is not read again.
    """

    def __init__(self, folder: Path | None, known: dict[str, Any] | None = None) -> None:
        self.keys = {file.name: _key(file) for file in list_files(folder)} if folder else {}
        for name, key in self.keys.items():
            entry = (known or {}).get(name, {})
            if (entry.get("bytes"), entry.get("mtime_ns")) == key[1:]:
                _DIGESTS.setdefault(key, str(entry["sha256"]))
        self.queue = sorted((key for key in self.keys.values() if key not in _DIGESTS), key=lambda key: key[1])
        self.bytes = sum(key[1] for key in self.queue)
        count = min(max(len(os.sched_getaffinity(0)) // 2, 1), THREADS, len(self.queue))
        if self.bytes >= _PRINTED:
            size = f"{len(self.queue)} files, {self.bytes / 2**30:.1f} GiB"
            print_once(f"checksum    SHA-256 of the model's {size}, beside the run, in {count} threads")
        self.stopped = threading.Event()
        # Not an executor: Python would wait for its threads when the run fails.
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def record(self, *, wait: bool) -> dict[str, Any]:
        """Return ``sha256`` of all files, and ``files``: name → ``sha256``, ``bytes``, ``mtime_ns``.

        ``sha256`` is that of the lines which sha256sum prints for the files in the order of their names; None where
        there are no files, or one is missing. wait: for files that are not read yet; else they are left out.
        """
        if wait and self.bytes >= _PRINTED and any(thread.is_alive() for thread in self.threads):
            print_once("checksum    waiting for the SHA-256 of the model's files")
        if not wait:
            self.stopped.set()
        for thread in self.threads:
            thread.join()
        files = {
            name: {"sha256": _DIGESTS[key], "bytes": key[1], "mtime_ns": key[2]}
            for name, key in self.keys.items()
            if key in _DIGESTS
        }
        lines = "".join(f"{entry['sha256']}  {name}\n" for name, entry in files.items())
        complete = 0 < len(files) == len(self.keys)
        return {"sha256": hashlib.sha256(lines.encode()).hexdigest() if complete else None, "files": files}

    def _work(self) -> None:
        while self.queue and not self.stopped.is_set():
            try:
                key = self.queue.pop()
                digest = _sha256(Path(key[0]), self.stopped)
            except (IndexError, OSError):
                continue  # another thread took the last one; or the file became unreadable
            if digest:
                _DIGESTS[key] = digest


def list_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder that may be loaded, in the order of their names."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    if any(file.suffix == ".safetensors" for file in files):
        files = [file for file in files if file.suffix not in _OTHER_WEIGHTS]
    return files


def _key(file: Path) -> _Key:
    status = file.stat()
    return str(file.resolve()), status.st_size, status.st_mtime_ns


def _sha256(file: Path, stopped: threading.Event) -> str | None:
    digest, buffer = hashlib.sha256(), bytearray(_BLOCK)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            if stopped.is_set():
                return None
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
