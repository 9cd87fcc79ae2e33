"""Where a task may write: downloads, kernel caches, results. Nothing goes silently into a home directory with a quota."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import urllib.parse
from collections.abc import MutableMapping
from pathlib import Path

from settings import TaskError


def prepare_caches(env: MutableMapping[str, str]) -> list[str]:
    """Point every library's cache at a writable place, before any of them is imported; returns what to say aloud."""
    said = []
    scratch = _scratch(env)
    if "HF_HOME" not in env:
        home, reason = _model_cache(env, scratch)
        env["HF_HOME"] = str(home)
        said.append(f"downloads   {home} ({reason}; set HF_HOME or EKIBEN_CACHE to choose)")
    else:
        said.append(f"downloads   {env['HF_HOME']} (HF_HOME)")
    if not _writable(Path(env["HF_HOME"])):
        # A shared, read-only HF_HOME is fine for models; data sets write index files beside what they read.
        env.setdefault("HF_DATASETS_CACHE", str(scratch / "datasets"))
    # Kernels compiled on the spot: node-local, because many nodes writing one shared folder is slow and goes wrong.
    env.setdefault("TRITON_CACHE_DIR", str(scratch / "triton"))
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(scratch / "inductor"))
    env.setdefault("CUDA_CACHE_PATH", str(scratch / "cuda"))  # the driver's own, else in ~/.nv
    env.setdefault("XDG_CACHE_HOME", str(scratch / "cache"))
    # With --user 12345 there is no passwd entry, and getpass.getuser(), which torch calls, needs a name.
    env.setdefault("USER", f"uid{os.getuid()}")
    env.setdefault("TOKENIZERS_PARALLELISM", "true")
    env.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    return said


def prefer_cache(env: MutableMapping[str, str]) -> list[str]:
    """Where the hub cannot be reached, say so to its libraries: each of them would retry for half a minute per file."""
    if env.get("HF_HUB_OFFLINE") or _answers(env.get("HF_ENDPOINT", "https://huggingface.co"), env):
        return []
    env["HF_HUB_OFFLINE"] = "1"
    return ["network     the hub cannot be reached from here: only what was downloaded before is used"]


def claim_folder(folder: Path, *, empty: bool = False) -> Path:
    """``folder``, made and proven writable. Errors: TaskError (also when ``empty`` is asked and it holds something)."""
    if folder.exists() and not folder.is_dir():
        raise TaskError(f"{folder}: is a file, and a folder is needed; give another --output")
    if empty and folder.is_dir() and any(folder.iterdir()):
        raise TaskError(f"{folder}: is not empty; give another --output, or remove it first")
    if not _writable(folder):
        raise TaskError(
            f"{folder.absolute()}: cannot be written (user {os.getuid()}); give --output a folder you own, and bind it "
            "into the container (singularity exec --bind /scratch/me ..., docker run -v $PWD:$PWD -w $PWD ...)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _scratch(env: MutableMapping[str, str]) -> Path:
    """A folder of this user on this node. Errors: TaskError where there is none at all."""
    candidates = [env.get("TMPDIR"), env.get("SLURM_TMPDIR"), env.get("SGE_LOCALDIR"), env.get("PBS_LOCALDIR")]
    for base in [*candidates, "/tmp", "/var/tmp", "/dev/shm"]:
        if base and _writable(Path(base) / f"ekiben-{os.getuid()}"):
            return Path(base) / f"ekiben-{os.getuid()}"
    raise TaskError("no temporary folder can be written; set TMPDIR to one (docker: --tmpfs /tmp)")


def _model_cache(env: MutableMapping[str, str], scratch: Path) -> tuple[Path, str]:
    if "EKIBEN_CACHE" in env:
        return Path(env["EKIBEN_CACHE"]) / "huggingface", "EKIBEN_CACHE"
    home = Path(env.get("HOME") or "/nonexistent")
    kept = home / ".cache" / "huggingface"
    if home != Path("/") and kept.is_dir() and _writable(kept):
        return kept, "there already"
    here = Path.cwd() / "ekiben-cache"
    if _writable(here):
        return here / "huggingface", "beside the results, since $HOME may have a quota"
    return scratch / "huggingface", "the current folder cannot be written: this is lost with the node's scratch"


def _answers(url: str, env: MutableMapping[str, str], seconds: float = 3.0) -> bool:
    parts = urllib.parse.urlsplit(url)
    proxy = env.get(f"{parts.scheme}_proxy") or env.get(f"{parts.scheme}_proxy".upper())
    if proxy:
        return True  # the proxy decides, and only a real request would tell
    answered = threading.Event()

    def connect() -> None:
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=seconds):
            answered.set()

    # In a thread of its own: looking a name up has no time limit, and on closed networks it takes long.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(seconds)
    return answered.is_set()


def _writable(folder: Path) -> bool:
    """Whether a file can really be made in ``folder``, or in the first parent that exists. access() lies on NFS."""
    while not folder.exists():
        if folder == folder.parent:
            return False
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
