"""Create output folders, and write files and folders atomically."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ekiben_tasks.task.errors import TaskError


def ensure_output_dir(folder: Path, *, empty: bool = False) -> Path:
    """Create ``folder``, check that it can be written, and return it.

    Raises:
        TaskError: it is a file, cannot be written, or has to be ``empty`` and is not.
    """
    if folder.exists() and not folder.is_dir():
        raise TaskError(f"{folder}: is a file, and a folder is needed; give another --output")
    if empty and folder.is_dir() and any(folder.iterdir()):
        raise TaskError(f"{folder}: is not empty; give another --output, or remove it first")
    if not is_writable(folder):
        raise TaskError(
            f"{folder.absolute()}: cannot be written (user {os.getuid()}); give --output a folder you own, and bind it "
            "into the container (apptainer or singularity: --bind /scratch/me; docker run -v $PWD:$PWD -w $PWD ...)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_writable(folder: Path) -> bool:
    """Return whether a file can be created in ``folder`` or its first existing parent. access() is wrong on NFS."""
    while not folder.exists():
        if folder == folder.parent:
            return False
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def write_json(file: Path, content: Any) -> None:
    """Write ``content`` as indented JSON, atomically."""
    replace_text(file, json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def replace_text(file: Path, text: str) -> None:
    """Write ``text`` into ``file``, atomically. Where that fails, nothing is left of it.

    Raises:
        OSError: the disk is full, or fails in another way.
    """
    staged = file.with_name(f".{file.name}.staged-{os.getpid()}")
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(file)
    except OSError:
        staged.unlink(missing_ok=True)
        raise


def make_readable(folder: Path) -> None:
    """Set the modes of the files in ``folder`` by the umask: safetensors creates them readable by their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def replace_folder(staged: Path, folder: Path) -> None:
    """Replace ``folder`` by ``staged``. Both are renamed, so other processes never see a part of either.

    A README.md of the old folder stays, where the new one has none: users write them.
    """
    readme = folder / "README.md"
    if readme.is_file() and not readme.is_symlink() and not (staged / readme.name).exists():
        shutil.copyfile(readme, staged / readme.name)
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    staged.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
