"""Choose where downloads and compiled kernels are cached, never silently in a home directory with a quota."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import threading
import urllib.parse
from collections.abc import MutableMapping
from pathlib import Path

from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.files import is_writable

_ANSWER_SECONDS = 3.0  # connection timeout of the hub


def prepare_caches(env: MutableMapping[str, str]) -> list[str]:
    """Point every library's cache at a writable folder before any of them is imported, and return the lines to print.

    Other variables that libraries read are set in ``env`` here, too, where the user has not set them.

    Raises:
        TaskError: no temporary folder can be written.
    """
    messages = []
    scratch = _scratch(env)
    if "HF_HOME" not in env:
        home, reason = _model_cache(env, scratch)
        env["HF_HOME"] = str(home)
        messages.append(f"downloads   {home} ({reason}; set HF_HOME or EKIBEN_CACHE to choose)")
    else:
        messages.append(f"downloads   {env['HF_HOME']} (HF_HOME)")
    if not is_writable(Path(env["HF_HOME"])):
        # A shared, read-only HF_HOME is fine for models; data sets write index files beside what they read.
        env.setdefault("HF_DATASETS_CACHE", str(scratch / "datasets"))
    # Compiled kernels: node-local, because many nodes writing one shared folder is slow and fails.
    env.setdefault("TRITON_CACHE_DIR", str(scratch / "triton"))
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(scratch / "inductor"))
    env.setdefault("CUDA_CACHE_PATH", str(scratch / "cuda"))  # the driver's own, else in ~/.nv
    # By default flash-attn 4 keeps no cache, and its compiler uses a folder in /tmp that anybody can create.
    env.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    env.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(scratch / "flash-attn-4"))
    env.setdefault("CUTE_DSL_CACHE_DIR", str(scratch / "cute-dsl"))
    env.setdefault("XDG_CACHE_HOME", str(scratch / "cache"))
    env.setdefault("EKIBEN_TOKENS", str(scratch / "tokens"))
    # With --user 12345 there is no passwd entry, and getpass.getuser(), which torch calls, needs a name.
    env.setdefault("USER", f"uid{os.getuid()}")
    env.setdefault("TOKENIZERS_PARALLELISM", "true")
    env.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if "PYTORCH_ALLOC_CONF" not in env:  # the same under its newer name
        # Micro-batches have different sizes: blocks that cannot grow are left over from each.
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return messages


def prefer_cache(env: MutableMapping[str, str]) -> list[str]:
    """Set offline mode in ``env`` if the hub cannot be reached, and return the lines to print.

    Without it, the hub's libraries retry for half a minute per file.
    """
    if env.get("HF_HUB_OFFLINE") or _answers(env.get("HF_ENDPOINT", "https://huggingface.co"), env):
        return []
    env["HF_HUB_OFFLINE"] = "1"
    return ["network     the hub cannot be reached from here: only what was downloaded before is used"]


def _scratch(env: MutableMapping[str, str]) -> Path:
    """Return a folder of this user on this node that nobody else can write to: compiled code is read from it.

    Raises:
        TaskError: no temporary folder can be written.
    """
    candidates = [env.get("TMPDIR"), env.get("SLURM_TMPDIR"), env.get("SGE_LOCALDIR"), env.get("PBS_LOCALDIR")]
    for base in [*candidates, "/tmp", "/var/tmp", "/dev/shm"]:
        if not base or not is_writable(Path(base)):
            continue
        folder = Path(base) / f"ekiben-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return folder
        return Path(tempfile.mkdtemp(prefix=f"ekiben-{os.getuid()}-", dir=base))
    raise TaskError("no temporary folder can be written; set TMPDIR to one (docker: --tmpfs /tmp)")


def _model_cache(env: MutableMapping[str, str], scratch: Path) -> tuple[Path, str]:
    if "EKIBEN_CACHE" in env:
        return Path(env["EKIBEN_CACHE"]) / "huggingface", "EKIBEN_CACHE"
    home = Path(env.get("HOME") or "/nonexistent")
    kept = home / ".cache" / "huggingface"
    if home != Path("/") and kept.is_dir() and is_writable(kept):
        return kept, "there already"
    here = Path.cwd() / "ekiben-cache"
    if is_writable(here):
        return here / "huggingface", "beside the results, since $HOME may have a quota"
    return scratch / "huggingface", "the current folder cannot be written: this is lost with the node's scratch"


def _answers(url: str, env: MutableMapping[str, str]) -> bool:
    parts = urllib.parse.urlsplit(url)
    proxy = env.get(f"{parts.scheme}_proxy") or env.get(f"{parts.scheme}_proxy".upper())
    if proxy:
        return True  # the proxy decides, so only a real request could show it
    answered = threading.Event()

    def connect() -> None:
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=_ANSWER_SECONDS):
            answered.set()

    # In a thread: a DNS lookup has no timeout, and on closed networks it takes long.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(_ANSWER_SECONDS)
    return answered.is_set()
