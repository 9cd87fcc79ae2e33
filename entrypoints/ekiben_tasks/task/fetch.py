"""Fetch a model of the hub once, with the SHA-256 of its files, for nodes without a network.

Only configurations, tokenizers and weights as safetensors are fetched: no code, and no pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ekiben_tasks.task import input_files
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.fetched import find_record, hash_file
from ekiben_tasks.task.files import ensure_output_dir, write_json
from ekiben_tasks.task.hub import format_hub_error, split_revision

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_GIB = 1 << 30


def fetch_model(name: str, folder: Path | None = None) -> Path:
    """Fetch the model ``name``, NAME or NAME@REVISION, write the record of its files, and return its folder.

    Files that are there already are not fetched again, and a download that breaks off is continued. folder: where
    they are written; None: the hub's cache.

    Raises:
        TaskError: the name is a folder, the hub refuses it, or it has no safetensors; or a file is damaged.
    """
    import huggingface_hub

    repository, revision = split_revision(name)
    if Path(repository).expanduser().is_dir():
        raise TaskError(f"model {name}: is a folder here, so there is nothing to fetch")
    if folder:
        ensure_output_dir(folder)
    try:
        commit = str(huggingface_hub.HfApi().model_info(repository, revision=revision).sha)
        files = _choose_files(name, repository, commit)
        print_once(f"fetching    {repository} at {commit}: {len(files)} files, {_size(files):.1f} GiB")
        options: dict[str, Any] = {"allow_patterns": list(files), "revision": commit if folder else revision}
        path = Path(huggingface_hub.snapshot_download(repository, local_dir=folder, **options))
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(format_hub_error(error, name, "model")) from error
    if not folder and path.name != commit:
        raise TaskError(f"model {name}: has changed on the hub meanwhile; give the same command again")
    record = find_record(path)
    content = {"model": repository, "commit": commit, "files": _hash_files(path, files)}
    record.parent.mkdir(exist_ok=True)
    write_json(record, content)
    print_once(f"done        {path}   SHA-256 of its files in {record}")
    return path


def _choose_files(name: str, repository: str, commit: str) -> dict[str, tuple[int, str | None]]:
    """Return file → (bytes, SHA-256 where the hub has it) of all that transformers loads.

    Raises:
        TaskError: there are no safetensors.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    listed = [file for file in api.list_repo_files(repository, revision=commit) if "/" not in file]
    if _INDEX in listed:
        index = huggingface_hub.hf_hub_download(repository, _INDEX, revision=commit)
        weights = set(_read_index(Path(index)))
    elif _SINGLE in listed:
        weights = {_SINGLE}
    else:
        present = [file for file in listed if file.endswith((".safetensors", *_PICKLES))]
        has = f"; it has {', '.join(present[:3])}" if present else ""
        raise TaskError(
            f"model {name}: has no {_SINGLE}, and Ekiben loads no weights as pickles{has}; choose a model or a revision"
            " with safetensors"
        )
    if missing := sorted(weights - set(listed)):
        raise TaskError(f"model {name}: its index names {missing[0]}, which is not on the hub")
    indexes = {file for file in listed if file.endswith(".index.json")} - {_INDEX}
    names = [file for file in listed if file in weights or (file.endswith(_SUFFIXES) and file not in indexes)]
    described = api.get_paths_info(repository, names, revision=commit)
    return {each.path: (each.size, each.lfs.sha256 if each.lfs else None) for each in described}


def _read_index(file: Path) -> Sequence[str]:
    names = input_files.read_object(file, "choose another model").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(each, str) and "/" not in each for each in names.values()):
        raise TaskError(f"{file}: its weight_map does not name files")
    return list(names.values())


def _hash_files(folder: Path, files: Mapping[str, tuple[int, str | None]]) -> dict[str, dict[str, Any]]:
    """Return file → SHA-256, bytes and time. Raises TaskError where it is not the hub's."""
    entries = {}
    for name, (size, expected) in sorted(files.items()):
        file = folder / name
        digest, status = hash_file(file), file.stat()
        if status.st_size != size or expected not in (None, digest):
            raise TaskError(f"{file}: is not what the hub has; remove it, and give the same command again")
        entries[name] = {"sha256": digest, "bytes": size, "mtime_ns": status.st_mtime_ns}
    return entries


def _size(files: Mapping[str, tuple[int, str | None]]) -> float:
    return sum(size for size, _ in files.values()) / _GIB
