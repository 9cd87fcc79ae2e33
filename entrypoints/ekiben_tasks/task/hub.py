"""Resolve the hub's models and data sets, and turn its errors into one sentence with a remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.fetched import check_fetched, fetched_commit
from ekiben_tasks.task.input_files import check_model_folder

_TOKEN = "set HF_TOKEN (singularity: export HF_TOKEN=..., docker: -e HF_TOKEN)"
_TOKEN_PAGE = "https://huggingface.co/settings/tokens"
_UNREACHABLE = {
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "ReadTimeout",
    "Timeout",
    "gaierror",
    "ProxyError",
    "ConnectTimeoutError",
}


def format_hub_error(error: BaseException, name: str, kind: str) -> str:
    """Return one sentence for an exception of the hub's libraries during a download. kind: "model" or "data set"."""
    names = {type(each).__name__ for each in _causes(error)}
    text = " ".join(str(each) for each in _causes(error))
    if "GatedRepoError" in names and _has_token():
        return (
            f"{kind} {name}: the token you gave has no access; accept the owner's terms on its page with the same"
            " account, and let the token read gated repositories (a fine-grained one does not by itself)"
        )
    if "GatedRepoError" in names:
        return f"{kind} {name}: its owner asks you to accept terms on its page; do that, then {_TOKEN}"
    if "RepositoryNotFoundError" in names or "DatasetNotFoundError" in names or re.search(r"\b401\b", text):
        private = "is the token you gave allowed to read it?" if _has_token() else f"for a private one {_TOKEN}"
        return f"{kind} {name}: not on the hub, or private; check the name, and {private}"
    if "RevisionNotFoundError" in names:
        return f"{kind} {name}: is on the hub, but has no such revision; give a branch, a tag or a commit"
    if names & {"EntryNotFoundError", "RemoteEntryNotFoundError"}:
        return f"{kind} {name}: is on the hub, but is not a {kind} these libraries can load (a file is missing)"
    if names & _UNREACHABLE:
        return (
            f"{kind} {name}: not in the cache {os.environ.get('HF_HOME', '')}, and the hub cannot be reached from here;"
            " download it once where there is a network, with the same HF_HOME (hf download"
            f" {name}{' --repo-type dataset' if kind == 'data set' else ''}), or name a local folder"
        )
    if "OSError" in names and "No space left" in text:
        return (
            f"{kind} {name}: the disk of {os.environ.get('HF_HOME', '')} is full; set HF_HOME to a disk with free space"
        )
    if "trust_remote_code" in text:
        return (
            f"{kind} {name}: comes with custom code, which Ekiben's tasks do not run; use a model that transformers"
            " itself has"
        )
    if "UnpicklingError" in names:
        return (
            f"{kind} {name}: its weights are a pickle that holds more than tensors, which could run code; use one with"
            " safetensors"
        )
    if "SafetensorError" in names:
        return f"{kind} {name}: a file of its weights is cut or damaged ({error}); copy or download it again"
    return f"{kind} {name}: cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:400]}"


def format_upload_error(error: BaseException, name: str) -> str:
    """Return one sentence for an exception of the hub's library during an upload of the model ``name``, OWNER/NAME."""
    names = {type(each).__name__ for each in _causes(error)}
    statuses = {getattr(getattr(each, "response", None), "status_code", None) for each in _causes(error)}
    if 401 in statuses:
        return f"model {name}: the hub does not know the token in HF_TOKEN; copy it again from {_TOKEN_PAGE}"
    if 403 in statuses:
        return (
            f"model {name}: the token in HF_TOKEN may not write there; is {name.split('/')[0]} your account or"
            f" organisation? A token that may write is made at {_TOKEN_PAGE}"
        )
    if names & _UNREACHABLE:
        return (
            f"model {name}: the hub cannot be reached from here; upload it again where there is a network, for example"
            " on the login node, with HF_HUB_OFFLINE not set"
        )
    return f"model {name}: cannot be uploaded: {type(error).__name__}: {' '.join(str(error).split())[:400]}"


def split_revision(name: str) -> tuple[str, str | None]:
    """Return (hub id, revision) of ``owner/name@revision``; (folder, None) for a folder, even with an @ in its name."""
    if Path(name).expanduser().is_dir():
        return name, None
    name, _, revision = name.partition("@")
    return name, revision or None


def model_commit(name: str) -> str | None:
    """Return the commit that a model of the hub was loaded from; None for a folder of others, or outside the cache."""
    import huggingface_hub

    repository, revision = split_revision(name)
    if Path(repository).expanduser().is_dir():
        return fetched_commit(Path(repository).expanduser())
    config = huggingface_hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(config).parent.name if isinstance(config, str) else None


def is_hub_model(name: str) -> bool:
    """Return whether ``name`` is on the hub.

    Raises:
        TaskError: it is a folder that does not exist, holds no model or no regular file, or has a revision.
    """
    name, revision = split_revision(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise TaskError(f"model {path}: is a folder, which has no revision {revision}; leave @{revision} out")
        if not (path / "config.json").is_file():
            adapter = " (it is an adapter: chat and merge take it)" if (path / "adapter_config.json").is_file() else ""
            raise TaskError(f"model {path}: this folder holds no config.json, so it is not a model{adapter}")
        check_model_folder(path)
        return False
    if name.startswith(("/", "./", "../", "~")) or name.endswith("/") or name.count("/") > 1 or path.exists():
        raise TaskError(f"model {path.absolute()}: no such folder; is it bound into the container?")
    return True


def locate_model(name: str) -> str:
    """Return ``name`` as load.py takes it: a local folder, or a hub id whose configuration this call caches.

    Raises:
        TaskError: the folder holds no model, the hub cannot provide the configuration, or files that were fetched are
            damaged.
    """
    if not is_hub_model(name):
        check_fetched(Path(name).expanduser())
        return str(Path(name).expanduser())
    import huggingface_hub

    try:
        repository, revision = split_revision(name)
        config = huggingface_hub.hf_hub_download(repository, "config.json", revision=revision)
    except Exception as error:
        raise TaskError(format_hub_error(error, name, "model")) from error
    check_fetched(Path(config).parent)
    return name


def _has_token() -> bool:
    import huggingface_hub

    return bool(huggingface_hub.get_token())


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
