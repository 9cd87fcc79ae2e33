"""While a %post runs on a terminal: how much it has written and downloaded, where that can be seen from outside."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ekiben.core.files import format_size
from ekiben.core.progress import Progress
from ekiben.executors import Job

_SECONDS = 1.0
_PAUSE = 20  # times as long as a measurement took


@contextlib.contextmanager
def show_written(job: Job, progress: Progress) -> Iterator[None]:
    """Show the bytes of the job's upper directory and of the packages that apt downloads, where the step is live."""
    if not progress.is_live:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(job, progress, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(job: Job, progress: Progress, ended: threading.Event) -> None:
    pause = _SECONDS
    while not ended.wait(pause):
        began = time.monotonic()
        if text := written(job, ended):
            progress.note(text)
        pause = max(_SECONDS, (time.monotonic() - began) * _PAUSE)


def written(job: Job, ended: threading.Event | None = None) -> str:
    """Return what there is so far, "" for nothing: an engine with a storage of its own shows nothing written."""
    # Packages of earlier jobs are links to the shared cache, and were not downloaded now.
    sizes = {
        "written": _size(job.scratch / "overlay/upper", ended),
        "of packages downloaded": _size(job.mount / "apt", ended, only_new=True),
    }
    return ", ".join(f"{format_size(size)} {what}" for what, size in sizes.items() if size)


def _size(folder: Path, ended: threading.Event | None, *, only_new: bool = False) -> int:
    """Return the bytes of the files below a folder that can be read; of new ones, those without another name."""
    size, folders = 0, [folder]
    while folders and not (ended and ended.is_set()):
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:  # another user's, or removed just now
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False) and not (only_new and status.st_nlink > 1):
                        size += status.st_size
    return size
