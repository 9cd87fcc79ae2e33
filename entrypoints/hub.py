"""What went wrong with a model or data set of the hub, in one sentence that says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from settings import TaskError

_TOKEN = "set HF_TOKEN (singularity: export HF_TOKEN=..., docker: -e HF_TOKEN)"


def explain(error: BaseException, name: str, kind: str) -> str:
    """One sentence for what the hub's libraries raised about the ``kind`` ("model", "data set") ``name``."""
    names = {type(each).__name__ for each in _chain(error)}
    text = " ".join(str(each) for each in _chain(error))
    if "GatedRepoError" in names and _has_token():
        return (
            f"{kind} {name}: the token you gave has no access; accept the owner's terms on its page with the same account, "
            "and let the token read gated repositories (a fine-grained one does not by itself)"
        )
    if "GatedRepoError" in names:
        return f"{kind} {name}: its owner asks you to accept terms on its page; do that, then {_TOKEN}"
    if "RepositoryNotFoundError" in names or "DatasetNotFoundError" in names or re.search(r"\b401\b", text):
        private = "is the token you gave allowed to read it?" if _has_token() else f"for a private one {_TOKEN}"
        return f"{kind} {name}: not on the hub, or private; check the name, and {private}"
    if names & {"EntryNotFoundError", "RemoteEntryNotFoundError"}:
        return f"{kind} {name}: is on the hub, but is no {kind} these libraries can load (a file is missing)"
    offline = names & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError"}
    if offline or names & {"ConnectTimeout", "ReadTimeout", "Timeout", "gaierror", "ProxyError", "ConnectTimeoutError"}:
        return (
            f"{kind} {name}: not in the cache {os.environ.get('HF_HOME', '')}, and the hub cannot be reached from here; "
            f"download it once where there is a network, with the same HF_HOME (hf download {name}"
            f"{' --repo-type dataset' if kind == 'data set' else ''}), or name a local folder"
        )
    if "OSError" in names and "No space left" in text:
        return f"{kind} {name}: the disk of {os.environ.get('HF_HOME', '')} is full; set HF_HOME to a place with room"
    return f"{kind} {name}: cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:400]}"


def check_model_place(name: str) -> bool:
    """Whether ``name`` is of the hub. Errors: TaskError for a folder that is not there, or no model."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            adapter = " (it is an adapter: chat and merge take it)" if (path / "adapter_config.json").is_file() else ""
            raise TaskError(f"model {path}: this folder holds no config.json, so it is no model{adapter}")
        return False
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or path.exists():
        raise TaskError(f"model {path.absolute()}: no such folder; is it bound into the container?")
    return True


def locate_model(name: str) -> str:
    """``name`` as transformers takes it: a local folder, or a hub id whose configuration is here now. Errors: TaskError."""
    if not check_model_place(name):
        return str(Path(name).expanduser())
    import huggingface_hub

    try:
        huggingface_hub.hf_hub_download(name, "config.json")
    except Exception as error:
        raise TaskError(explain(error, name, "model")) from error
    return name


def _has_token() -> bool:
    import huggingface_hub

    return bool(huggingface_hub.get_token())


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
