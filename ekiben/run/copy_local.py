"""A copy of a SIF on the node's own disk: made once for all of this user's jobs there, and compared."""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ekiben.core.decisions import log_decision
from ekiben.core.errors import StoreError
from ekiben.core.files import open_regular
from ekiben.formats.sif import read_sif
from ekiben.run.contract import is_private_folder
from ekiben.run.schedulers import local_folders


def local_folder(environment: Mapping[str, str]) -> Path:
    """Return this user's folder on the node's own disk, made where it is not there.

    Raises StoreError when it cannot be made, or others can write into it.
    """
    bases = [base for name in local_folders() if (base := environment.get(name)) and os.access(base, os.W_OK)]
    folder, hint = Path(bases[0] if bases else "/tmp") / f"ekiben-{os.getuid()}", "set TMPDIR to a folder of your own"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be made: {error.strerror}", hint=hint) from error
    if not is_private_folder(folder):
        raise StoreError(f"{folder} is not a folder of {getpass.getuser()} alone", hint=hint)
    folder.chmod(0o700)
    return folder


def copy_local(sif: Path, environment: Mapping[str, str], log: Callable[[str], None]) -> Path:
    """Return the copy of ``sif`` on the node's own disk, made where it is not there; ``sif`` itself when it is on that
    disk.

    Raises StoreError when there is no folder of this user's own, no space, or the copy differs.
    """
    # flock is dependable here: the folder is local.
    folder, status = local_folder(environment), sif.stat()
    if status.st_dev == folder.stat().st_dev:
        log_decision("copy of the SIF", "none", f"{sif} is on the disk of {folder}")
        return sif
    target = folder / _copy_name(sif)
    with (folder / f".{target.name}.lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"another job copies {sif} to {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_symlink() or not target.is_file():
            _copy_checked(sif, target, status.st_size, log)
        else:
            log_decision("copy of the SIF", target, "copied before")
    return target


def _copy_checked(source: Path, target: Path, size: int, log: Callable[[str], None]) -> None:
    """Copy under the lock; what a killed job left is removed first."""
    for left in target.parent.glob(f".{target.name}.*.part"):
        left.unlink(missing_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < size:
        raise StoreError(
            f"{target.parent} has {free / 1e9:.1f} GB free, and {source} has {size / 1e9:.1f} GB",
            hint="free some space there, or run it without --copy-local",
        )
    log(f"copying {source} ({size / 1e9:.1f} GB) to {target}")
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with open(handle, "w+b") as copy, open_regular(source) as original:
            read = hashlib.sha256()
            while chunk := original.read(1 << 22):
                read.update(chunk)
                copy.write(chunk)
            copy.flush()
            copy.seek(0)
            if hashlib.file_digest(copy, "sha256").digest() != read.digest():
                raise StoreError(
                    f"{target}: what was written is not what was read from {source}",
                    hint="the node's disk is damaged; run it without --copy-local",
                )
        os.chmod(temporary, 0o500)
        os.rename(temporary, target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}", hint="run it without --copy-local") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _copy_name(sif: Path) -> str:
    """Return what a copy of this very file is called."""
    info = sif.stat()
    key = hashlib.sha256(f"{read_sif(sif).id} {info.st_size} {info.st_mtime_ns}".encode()).hexdigest()[:16]
    return f"{sif.stem}-{key}.sif"
