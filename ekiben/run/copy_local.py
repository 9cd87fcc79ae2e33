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

from ekiben.core.checked import read_regular
from ekiben.core.decisions import log_decision
from ekiben.core.errors import StoreError
from ekiben.core.files import open_regular
from ekiben.run.contract import is_private_folder
from ekiben.run.image import NamedImage, sif_state
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
        raise StoreError(f"{folder} can be written by others than {getpass.getuser()}", hint=hint)
    folder.chmod(0o700)
    return folder


def copy_local(image: NamedImage, environment: Mapping[str, str], log: Callable[[str], None]) -> Path:
    """Return the copy of an image's SIF on the node's own disk, made where it is not there; the SIF itself when it is
    on that disk.

    Raises StoreError when there is no folder of this user's own, no space, or the copy differs.
    """
    # flock works: the folder is local.
    folder, sif, status = local_folder(environment), image.sif, image.sif.stat()
    if status.st_dev == folder.stat().st_dev:
        log_decision("copy of the SIF", "none", f"{sif} is on the disk of {folder}")
        return sif
    target = folder / copy_name(sif)
    with (folder / f".{target.name}.lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"another job copies {sif} to {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        state = folder / f".{target.name}.state"
        if _is_as_copied(target, state):
            log_decision("copy of the SIF", target, "copied before")
        else:
            target.unlink(missing_ok=True)
            _copy_checked(sif, target, image.sha256, log)
            state.write_text(f"{sif_state(target).stat}\n", encoding="utf-8")
    return target


def _is_as_copied(copy: Path, state: Path) -> bool:
    """Return whether a copy exists and was not written since."""
    try:
        return not copy.is_symlink() and read_regular(state).decode().strip() == sif_state(copy).stat
    except (OSError, ValueError):
        return False


def _copy_checked(source: Path, target: Path, sha256: str, log: Callable[[str], None]) -> None:
    """Copy under the lock; a killed job's part is removed first. ``sha256``: expected, "" if unknown."""
    for left in target.parent.glob(f".{target.name}.*.part"):
        left.unlink(missing_ok=True)
    size, free = source.stat().st_size, shutil.disk_usage(target.parent).free
    if free < size:
        raise StoreError(
            f"{target.parent} has {free / 1e9:.1f} GB free, and {source} has {size / 1e9:.1f} GB",
            hint="free some space there, or run it without --copy-local",
        )
    log(f"copying {source} ({size / 1e9:.1f} GB) to {target}")
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with open(handle, "wb") as copy, open_regular(source) as original:
            read = hashlib.sha256()
            while chunk := original.read(1 << 22):
                read.update(chunk)
                copy.write(chunk)
        if Path(temporary).stat().st_size != size or (sha256 and read.hexdigest() != sha256):
            raise StoreError(
                f"{source} changed while it was copied, or does not match its record",
                hint="run it without --copy-local, or with an image that is whole",
            )
        os.chmod(temporary, 0o500)
        os.rename(temporary, target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}", hint="run it without --copy-local") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def copy_name(sif: Path, sha256: str = "") -> str:
    """Return the name of a copy of this very file, the same for jobs and `run`. Raises OSError.

    ``sha256``: with what a copy has to be compared; one that was made without it has another name.
    """
    state = sif_state(sif)
    size, mtime, _, _ = state.stat.split()
    key = hashlib.sha256(" ".join(filter(None, (state.header, size, mtime, sha256))).encode()).hexdigest()[:16]
    return f"{sif.stem}-{key}.sif"
